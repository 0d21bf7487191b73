"""Tables as tensor trains: drop-ins for ``nn.EmbeddingBag`` and ``nn.Embedding`` (EL-Rec paper, section III)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn import functional

from flexshard._internal import HostCopy
from flexshard.embeddings.tensor_train.pinned_table import PinnableTable
from flexshard.errors import DataError, TableError

__all__ = ["TTEmbedding", "TTEmbeddingBag"]

F = TypeVar("F", bound=Callable[..., Any])


# torch.compile breaks its graph once around a table, where it would trace into compiled kernels and, since sizes depend
# on what ids there are, break it at every one of them.
_not_traced: Callable[[F], F] = torch.compiler.disable(reason="a tensor train has kernels of its own")


class _Dense(torch.autograd.Function):
    """What it is given; a sparse gradient of it, which torch's own embeddings do not take, becomes a dense one."""

    @staticmethod
    def forward(_: Any, values: torch.Tensor) -> Any:
        return values.view_as(values)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> Any:
        return gradient.to_dense() if gradient.is_sparse else gradient


class TTEmbedding(PinnableTable):
    """A table as a tensor train, for sequences: ``nn.Embedding`` in a fraction of its memory.

    Attributes:
        shape: factors and TT ranks.
        cores: parameters of shape (p_k, r_{k-1}, q_k, r_k).
    """

    @_not_traced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of ids of any shape; shape (*input.shape, D).

        Raises:
            DataError: an id outside the table.
        """
        rows, inverse, padding = self._lookup(input)
        return _Dense.apply(functional.embedding(inverse, rows, padding_idx=padding))


class TTEmbeddingBag(PinnableTable):
    """A table as a tensor train, pooled: ``nn.EmbeddingBag`` in a fraction of its memory.

    Attributes:
        shape: factors and TT ranks.
        cores: parameters of shape (p_k, r_{k-1}, q_k, r_k).
    """

    _reads_padding = False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        **how: Any,
    ) -> None:
        """Make a table of E rows and dimension D.

        Args:
            num_embeddings, embedding_dim: E and D.
            mode: "sum" or "mean".
            include_last_offset: whether offsets have the end of the last bag too.
            how: as for :class:`TTEmbedding`; ``padding_idx`` is the row that is left out of bags.

        Raises:
            TableError: as :class:`TTEmbedding`, another mode, or what a tensor train cannot do.
        """
        if mode not in ("sum", "mean"):
            raise TableError(f"mode is 'sum' or 'mean', found {mode!r}")
        super().__init__(num_embeddings, embedding_dim, **how)
        self.mode, self.include_last_offset = mode, include_last_offset

    @_not_traced
    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Pooled rows of each bag; shape (bags, D).

        Args:
            input: ids; of shape (N,) with ``offsets``, or (bags, length).
            offsets: where each bag starts; shape (bags,), or (bags + 1,) with ``include_last_offset``.
            per_sample_weights: of each id, of the input's shape; with mode "sum".

        Raises:
            DataError: an id outside the table, offsets that decrease or lie outside, or weights of another shape.
        """
        _check_bags(input, offsets, per_sample_weights, self.mode, self.include_last_offset, numbers=self.validate)
        rows, inverse, padding = self._lookup(input)
        if not rows.shape[0]:
            rows = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)])  # torch wants a row to look up nothing in
        pooled = functional.embedding_bag(
            inverse,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=None if per_sample_weights is None else per_sample_weights.to(rows.dtype),
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
        return _Dense.apply(pooled)


def _check_offsets(offsets: torch.Tensor, number: int, include_last_offset: bool) -> None:
    """Whether bags of so many ids begin there; one wait."""
    steps = torch.diff(offsets, append=offsets[-1:])
    first, last, least = HostCopy(torch.stack([offsets[0], offsets[-1], steps.min()])).numbers().tolist()
    if first != 0:
        raise DataError(f"offsets start at 0, found {offsets[:3].tolist()}")
    if least < 0:
        bag = int((steps < 0).nonzero()[0])
        raise DataError(f"offsets decrease from {int(offsets[bag])} to {int(offsets[bag + 1])} after bag {bag}")
    if last > number or (include_last_offset and last != number):
        raise DataError(f"the last offset is {last}, but there are {number} ids")


def _check_bags(
    input: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    mode: str,
    include_last_offset: bool,
    *,
    numbers: bool,
) -> None:
    if not isinstance(input, torch.Tensor):
        raise DataError(f"ids are a tensor, found {type(input).__name__}")
    if input.dim() == 2:
        if offsets is not None:
            raise DataError("ids of two dimensions are bags of equal length and take no offsets")
    elif input.dim() != 1:
        raise DataError(f"ids have one dimension, with offsets, or two; found shape {tuple(input.shape)}")
    elif offsets is None:
        raise DataError("ids of one dimension need offsets, where each bag starts")
    else:
        if not isinstance(offsets, torch.Tensor):
            raise DataError(f"offsets are a tensor, found {type(offsets).__name__}")
        if offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool:
            raise DataError(f"offsets are whole numbers, found {offsets.dtype}")
        if offsets.dim() == 1 and not offsets.numel() and not input.numel() and not include_last_offset:
            return  # no bags
        if offsets.dim() != 1 or not offsets.numel():
            raise DataError(f"offsets start at 0, found {offsets[:3].tolist()}")
        if numbers:
            _check_offsets(offsets, input.numel(), include_last_offset)
    if weights is not None:
        if not isinstance(weights, torch.Tensor):
            raise DataError(f"per_sample_weights are a tensor, found {type(weights).__name__}")
        if mode != "sum":
            raise DataError(f"per_sample_weights go with mode 'sum', found {mode!r}")
        if weights.shape != input.shape:
            raise DataError(f"per_sample_weights have shape {tuple(weights.shape)}, ids {tuple(input.shape)}")
