"""Tables as tensor trains: drop-ins for ``nn.EmbeddingBag`` and ``nn.Embedding`` (EL-Rec paper, section III)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from flexshard._tt_shape import TTShape
from flexshard._values import finite, has_numba, has_triton
from flexshard.embeddings._tt_decompose import decompose
from flexshard.embeddings._tt_rows import Levels, backward_rows, forward_rows, levels_of, product_sizes
from flexshard.errors import DataError, TableError

__all__ = ["TTEmbedding", "TTEmbeddingBag"]

_CHUNK = 1 << 16
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")


class _TTTable(nn.Module):
    """Cores, and rows of distinct ids."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        ranks: int | Sequence[int] = 32,
        cores: int = 3,
        rows: Sequence[int] | None = None,
        dims: Sequence[int] | None = None,
        std: float | None = None,
        optimizer: str | None = None,
        learning_rate: float = 0.01,
        eps: float = 1e-8,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Make a table of E rows and dimension D.

        Args:
            num_embeddings, embedding_dim: E and D.
            ranks: one for all (cut to what is possible), or r_1 to r_{d-1}.
            cores: d, 2 to 4.
            rows, dims: factors of E and D; chosen where not given. The product of ``rows`` may exceed E.
            std: standard deviation of the table to begin with; see :meth:`reset_parameters`.
            optimizer: None for ``.grad`` and any torch optimizer; "sgd", "adagrad" or "rowwise_adagrad" (a state per
                slice of a core) to be updated within the backward pass.
            learning_rate, eps: of that.
            padding_idx: row that no gradient flows to.
            device, dtype: of the cores; float32 or bfloat16.

        Raises:
            TableError: factors that do not cover the table, ranks above the possible, or other arguments out of range.
        """
        super().__init__()
        self.shape = TTShape.choose(num_embeddings, embedding_dim, ranks, cores=cores, rows=rows, dims=dims)
        self.num_embeddings, self.embedding_dim = self.shape.num_embeddings, self.shape.embedding_dim
        if optimizer is not None and optimizer not in OPTIMIZERS:
            raise TableError(f"optimizer is one of {', '.join(OPTIMIZERS)} or None, found {optimizer!r}")
        if dtype not in (torch.float32, torch.bfloat16):
            raise TableError(f"cores are float32 or bfloat16, found {dtype}")
        self.optimizer = optimizer
        self.learning_rate = finite(learning_rate, "learning_rate", TableError)
        self.eps = finite(eps, "eps", TableError)
        if padding_idx is not None:
            within = isinstance(padding_idx, int) and -num_embeddings <= padding_idx < num_embeddings
            if not within or isinstance(padding_idx, bool):
                raise TableError(f"padding_idx must be within the {num_embeddings:,} rows, found {padding_idx}")
            padding_idx %= num_embeddings
        self.padding_idx = padding_idx
        bounds = self.shape.bounds
        self.cores = nn.ParameterList(
            nn.Parameter(torch.empty(p, bounds[k], q, bounds[k + 1], device=device, dtype=dtype))
            for k, (p, q) in enumerate(zip(self.shape.rows, self.shape.dims, strict=True))
        )
        if optimizer in ("adagrad", "rowwise_adagrad"):
            for k, core in enumerate(self.cores):
                size = core.shape if optimizer == "adagrad" else core.shape[:1]
                self.register_buffer(f"sum_{k}", torch.zeros(size, device=device))
        self._updates = 0  # fused ones, so far
        self.reset_parameters(std)

    def reset_parameters(self, std: float | None = None) -> None:
        """Gaussian cores whose product has the standard deviation ``std``: ``(std² / ΠR)^(1/2d)`` each.

        By default 1/sqrt(3E), as DLRM's uniform initialisation has it; with fused SGD 0.1, since with less the
        gradients of a product of near-zero cores vanish.
        """
        if std is None:
            std = 0.1 if self.optimizer == "sgd" else (3.0 * self.num_embeddings) ** -0.5
        std = finite(std, "std", TableError)
        ranks = 1.0
        for rank in self.shape.ranks:
            ranks *= rank
        each = (std**2 / ranks) ** (1 / (2 * self.shape.cores))
        with torch.no_grad():
            for core in self.cores:
                core.normal_(0.0, each)
        self._forget()

    def _forget(self) -> None:
        """Start the optimizer's state anew."""
        for state in self.buffers():
            state.zero_()

    def decompose_(self, weight: torch.Tensor) -> float:
        """Take over a dense table by TT-SVD; the relative error of its rows then (Frobenius).

        Raises:
            TableError: a table of another shape, or with numbers that are not finite.
        """
        found, _ = decompose(weight, self.shape)
        wrong = total = 0.0
        with torch.no_grad():
            for core, own in zip(self.cores, found, strict=True):
                core.copy_(own)
            for start in range(0, self.num_embeddings, _CHUNK):
                part = weight[start : start + _CHUNK].detach().double()
                own = self._rows(torch.arange(start, start + part.shape[0], device=self.cores[0].device))
                wrong += float(((own.double() - part.to(own.device)) ** 2).sum())
                total += float((part**2).sum())
        self._forget()
        return (wrong / total) ** 0.5 if total else 0.0

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of any ids; shape (*ids.shape, D).

        Raises:
            DataError: an id outside the table.
        """
        distinct, inverse = self._distinct(ids)
        return self._rows(distinct)[inverse]

    @torch.no_grad()
    def to_dense(self) -> torch.Tensor:
        """The whole table; shape (E, D)."""
        return self._rows(torch.arange(self.num_embeddings, device=self.cores[0].device))

    def _distinct(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise DataError(f"ids are whole numbers, found {ids.dtype}")
        distinct, inverse = torch.unique(ids.long(), return_inverse=True)
        if distinct.numel():
            least, most = int(distinct[0]), int(distinct[-1])
            if least < 0 or most >= self.num_embeddings:
                wrong = least if least < 0 else most
                raise DataError(f"id {wrong} is outside the table's rows, 0 to {self.num_embeddings - 1}")
        return distinct, inverse

    def _padding(self, distinct: torch.Tensor) -> int | None:
        """Place of the padding row among distinct ids, if it is there."""
        if self.padding_idx is None:
            return None
        place = int(torch.searchsorted(distinct, self.padding_idx))
        return place if place < distinct.numel() and int(distinct[place]) == self.padding_idx else None

    def _rows(self, distinct: torch.Tensor) -> torch.Tensor:
        trained = torch.is_grad_enabled() and any(core.requires_grad for core in self.cores)
        return _Rows.apply(distinct, self, trained, *self.cores)

    def _check_alone(self) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise TableError(
                f"optimizer {self.optimizer!r} updates the cores within backward, where ranks have their own gradients;"
                " in a job of several ranks use optimizer=None and an optimizer after them"
            )

    def _sums(self) -> list[torch.Tensor]:
        """The optimizer's state of each core, in float32 whatever the model was cast to."""
        if self.optimizer in (None, "sgd"):
            return []
        for k in range(self.shape.cores):
            setattr(self, f"sum_{k}", getattr(self, f"sum_{k}").float())
        return [getattr(self, f"sum_{k}") for k in range(self.shape.cores)]

    def _update(self, gradients: Sequence[torch.Tensor]) -> None:
        """The optimizer's step; slices that were not touched have no gradient and do not change."""
        sums = self._sums()
        with torch.no_grad():
            for k, (core, gradient) in enumerate(zip(self.cores, gradients, strict=True)):
                if self.optimizer == "sgd":
                    core.add_(gradient.to(core.dtype), alpha=-self.learning_rate)
                    continue
                state = sums[k]
                state += gradient**2 if self.optimizer == "adagrad" else (gradient**2).flatten(1).mean(1)
                total = state if self.optimizer == "adagrad" else state.view(-1, 1, 1, 1)
                core.sub_((self.learning_rate * gradient / (total.sqrt() + self.eps)).to(core.dtype))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        found: list[tuple[int, ...]] = []
        while f"{prefix}cores.{len(found)}" in state_dict:
            found.append(tuple(state_dict[f"{prefix}cores.{len(found)}"].shape))
        own = [tuple(core.shape) for core in self.cores]
        if found and found != own:
            raise TableError(
                f"{prefix or 'the table'}: a checkpoint with cores of shape {found} does not load into cores of shape"
                f" {own}; make the table with the same factors and ranks"
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        fused = "" if self.optimizer is None else f", fused {self.optimizer}"
        smaller = f"{self.shape.compression:.0f} times smaller"
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.shape}, {smaller}{fused}"


class _Rows(torch.autograd.Function):
    """Rows of distinct ids, with the gradients summed per prefix."""

    @staticmethod
    def forward(ctx: Any, distinct: torch.Tensor, table: _TTTable, trained: bool, *cores: torch.Tensor) -> Any:
        shape, backend = table.shape, _backend(cores[0], table.shape)
        levels = levels_of(distinct, shape)
        with torch.autocast(distinct.device.type, enabled=False):
            laid = _laid(cores)
            if backend == "triton":
                from flexshard.embeddings import _tt_triton

                products = [laid[0].new_empty(size) for size in product_sizes(levels, shape)]
                rows = _tt_triton.forward_rows(levels, shape, laid, products=products)
            else:
                products = _kept(table, levels, laid[0]) if trained else []
                kept = products if trained else None
                rows = forward_rows(levels, shape, laid, products=kept, compiled=backend == "numba")
        # Saved as autograd saves tensors, so that it notices where cores were changed in between.
        ctx.save_for_backward(*cores, *products)
        ctx.table, ctx.levels, ctx.backend, ctx.updates = table, levels, backend, table._updates
        return rows.to(cores[0].dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        table, levels, shape = ctx.table, ctx.levels, ctx.table.shape
        if table.optimizer is not None:
            table._check_alone()
            if ctx.updates != table._updates:
                raise TableError(
                    f"the table was updated by its {table.optimizer} optimizer between a lookup and its backward pass;"
                    " look up all ids of a step at once, or use optimizer=None"
                )
            table._updates += 1
        cores, products = ctx.saved_tensors[: shape.cores], ctx.saved_tensors[shape.cores :]
        with torch.autocast(gradient.device.type, enabled=False):
            laid = _laid(cores)
            if ctx.backend == "triton":
                shaped = _backward_triton(table, gradient.float(), levels, laid, products)
            else:
                compiled = ctx.backend == "numba"
                found = backward_rows(gradient.float(), levels, shape, laid, products, compiled=compiled)
                found[-1] = found[-1].transpose(1, 2)
                shaped = [own.reshape(core.shape) for own, core in zip(found, table.cores, strict=True)]
                if products:
                    _SPARE[table] = products[0]._base if products[0]._base is not None else products[0]
        if table.optimizer is not None:
            if shaped:
                table._update(shaped)
            return (None, None, None, *[None] * shape.cores)
        return (None, None, None, *(own.to(core.dtype) for own, core in zip(shaped, table.cores, strict=True)))


def _backward_triton(
    table: _TTTable,
    gradient: torch.Tensor,
    levels: Levels,
    laid: Sequence[torch.Tensor],
    products: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Gradients of the cores; none where the kernels update cores of float32 by themselves."""
    from flexshard.embeddings import _tt_triton

    cores, update = [core.detach() for core in table.cores], None
    within = all(core.dtype == torch.float32 and core.is_contiguous() for core in cores)
    if table.optimizer is not None and within:
        update = _tt_triton.Update(table.optimizer, cores, table._sums(), table.learning_rate, table.eps)
    found = _tt_triton.backward_rows(gradient, levels, table.shape, laid, products, update=update)
    if update is not None:
        for core in table.cores:
            torch.autograd.graph.increment_version(core)
    return found


# Memory of products that were used last, by table: fresh pages for a hundred megabytes take as long as the products.
_SPARE: WeakKeyDictionary[_TTTable, torch.Tensor] = WeakKeyDictionary()


def _kept(table: _TTTable, levels: Levels, like: torch.Tensor) -> list[torch.Tensor]:
    """Where to keep the products of a lookup."""
    sizes = product_sizes(levels, table.shape)
    needed = sum(prod(size) for size in sizes)
    flat = _SPARE.pop(table, None)
    if flat is None or flat.numel() < needed or flat.device != like.device:
        flat = like.new_empty(needed + needed // 8)  # batches differ
    parts = flat[:needed].split([prod(size) for size in sizes])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


def _laid(cores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cores as the products take them: slices as matrices, the last transposed; in float32."""
    laid = [core.detach().float().flatten(2) for core in cores[:-1]]
    return [*laid, cores[-1].detach().float().squeeze(3).transpose(1, 2).contiguous()]


def _backend(core: torch.Tensor, shape: TTShape) -> str:
    """What computes: "numba" or "torch" on the CPU, "triton" on CUDA where it can, else "torch"."""
    if core.device.type == "cpu":
        return "numba" if has_numba() else "torch"
    if core.device.type == "cuda" and has_triton():
        from flexshard.embeddings import _tt_triton

        return "triton" if _tt_triton.supports(shape) else "torch"
    return "torch"


class TTEmbedding(_TTTable):
    """A table as a tensor train, for sequences: ``nn.Embedding`` in a fraction of its memory.

    Attributes:
        shape: factors and ranks.
        cores: parameters of shape (p_k, r_{k-1}, q_k, r_k).
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of ids of any shape; shape (*input.shape, D).

        Raises:
            DataError: an id outside the table.
        """
        distinct, inverse = self._distinct(input)
        return functional.embedding(inverse, self._rows(distinct), padding_idx=self._padding(distinct))


class TTEmbeddingBag(_TTTable):
    """A table as a tensor train, pooled: ``nn.EmbeddingBag`` in a fraction of its memory.

    Attributes:
        shape: factors and ranks.
        cores: parameters of shape (p_k, r_{k-1}, q_k, r_k).
    """

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
            how: ranks, cores, rows, dims, std, optimizer, learning_rate, eps, device and dtype as for
                :class:`TTEmbedding`; ``padding_idx`` is the row that is left out of bags.

        Raises:
            TableError: as :class:`TTEmbedding`, or another mode.
        """
        if mode not in ("sum", "mean"):
            raise TableError(f"mode is 'sum' or 'mean', found {mode!r}")
        super().__init__(num_embeddings, embedding_dim, **how)
        self.mode, self.include_last_offset = mode, include_last_offset

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
        _check_bags(input, offsets, per_sample_weights, self.mode, self.include_last_offset)
        distinct, inverse = self._distinct(input)
        rows = self._rows(distinct)
        if not distinct.numel():
            rows = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)])  # torch wants a row to look up nothing in
        return functional.embedding_bag(
            inverse,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=None if per_sample_weights is None else per_sample_weights.to(rows.dtype),
            include_last_offset=self.include_last_offset,
            padding_idx=self._padding(distinct),
        )


def _check_bags(
    input: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    mode: str,
    include_last_offset: bool,
) -> None:
    if input.dim() == 2:
        if offsets is not None:
            raise DataError("ids of two dimensions are bags of equal length and take no offsets")
    elif input.dim() != 1:
        raise DataError(f"ids have one dimension, with offsets, or two; found shape {tuple(input.shape)}")
    elif offsets is None:
        raise DataError("ids of one dimension need offsets, where each bag starts")
    else:
        if offsets.is_floating_point():
            raise DataError(f"offsets are whole numbers, found {offsets.dtype}")
        if offsets.dim() == 1 and not offsets.numel() and not input.numel() and not include_last_offset:
            return  # no bags
        if offsets.dim() != 1 or not offsets.numel() or int(offsets[0]) != 0:
            raise DataError(f"offsets start at 0, found {offsets[:3].tolist()}")
        back = (offsets[1:] < offsets[:-1]).nonzero()
        if back.numel():
            bag = int(back[0])
            raise DataError(f"offsets decrease from {int(offsets[bag])} to {int(offsets[bag + 1])} after bag {bag}")
        if int(offsets[-1]) > input.numel() or (include_last_offset and int(offsets[-1]) != input.numel()):
            raise DataError(f"the last offset is {int(offsets[-1])}, but there are {input.numel()} ids")
    if weights is not None:
        if mode != "sum":
            raise DataError(f"per_sample_weights go with mode 'sum', found {mode!r}")
        if weights.shape != input.shape:
            raise DataError(f"per_sample_weights have shape {tuple(weights.shape)}, ids {tuple(input.shape)}")
