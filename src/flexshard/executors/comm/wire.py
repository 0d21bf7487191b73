"""In what form rows of each class travel in one direction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrec.distributed.types import QuantizedCommCodec

from flexshard.costmodels import Frame
from flexshard.errors import PlanError

__all__ = ["Wire"]


@dataclass(frozen=True)
class Wire:
    """As they are, or as TorchRec's codec wants them.

    Attributes:
        dims: D of each class; shape (K,).
        dtypes: of its rows.
        codec: of float32 rows; None to send rows as they are.
    """

    dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    codec: QuantizedCommCodec[Any] | None = None

    @cached_property
    def plain(self) -> Wire:
        """The same rows without a codec."""
        return self if self.codec is None else Wire(self.dims, self.dtypes)

    @cached_property
    def _contexts(self) -> list[Any]:
        """Of each class; an encoder leaves word there of what its decoder needs."""
        assert self.codec is not None
        return [self.codec.create_context() for _ in self.dims]

    @cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """On the wire, of each class."""
        return tuple(self._width(index) * self.sent_dtype(index).itemsize for index in range(len(self.dims)))

    def frame(self, counts: npt.NDArray[np.int64], classes: tuple[int, ...]) -> Frame:
        """Where rows of some classes lie in a buffer; ``counts`` of each segment and of these, shape (S, classes)."""
        numbers = np.ascontiguousarray(counts, np.int64)
        return _frame(numbers.tobytes(), numbers.shape, tuple(self.row_bytes[index] for index in classes))

    def sent_dtype(self, index: int) -> torch.dtype:
        """Of a class's numbers on the wire."""
        return self.dtypes[index] if self.codec is None else self.codec.quantized_dtype

    def _width(self, index: int) -> int:
        dim = self.dims[index]
        if self.codec is None:
            return dim
        try:
            width: int = self.codec.calc_quantized_size(dim, self._contexts[index])
        except RuntimeError as error:
            raise PlanError(
                f"rows of dimension {dim} cannot be sent in the precision that qcomm_codecs_registry asks for"
                f" ({str(error).splitlines()[0]}); ask for another, or give tables dimensions that fit"
            ) from error
        return width

    def encode(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        """Rows of a class, shape (n, D), as the codec has them, shape (n, width)."""
        assert self.codec is not None
        encoded: torch.Tensor = self.codec.encode(rows.float().contiguous().view(-1), self._contexts[index])
        return encoded.view(rows.shape[0], self._width(index))

    def decode(self, sent: torch.Tensor, index: int) -> torch.Tensor:
        """The way back."""
        assert self.codec is not None
        rows: torch.Tensor = self.codec.decode(sent.contiguous().view(-1), self._contexts[index])
        return rows.view(sent.shape[0], self.dims[index]).to(self.dtypes[index])


@lru_cache(maxsize=16)
def _frame(counts: bytes, shape: tuple[int, ...], row_bytes: tuple[int, ...]) -> Frame:
    """Of a step's rows and of their gradients, of both ends of a message: mostly the same."""
    return Frame(np.frombuffer(counts, np.int64).reshape(shape), row_bytes)
