"""Rows in a plain tensor: what the fused store does, in torch alone, for tests and for machines on which FBGEMM has no
kernels. Slower; the same numbers up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from flexshard._internal import sum_by_slot
from flexshard.executors.stores.base import LookedUp, RowStore
from flexshard.executors.stores.updates import OptimizerSpec, new_state

__all__ = ["MemoryStore"]


class MemoryStore(RowStore):
    """A drop-in for :class:`FusedStore`; see :class:`FlexShardEmbeddingCollectionSharder`'s ``sharded_store``.

    Attributes:
        new_zeros: makes its memory, called as ``torch.zeros`` is.
    """

    new_zeros: Callable[..., torch.Tensor] = staticmethod(torch.zeros)

    def __init__(self, spec: OptimizerSpec, slots: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dim)
        self._flat = nn.Parameter(self.new_zeros(slots * dim, dtype=dtype, device=device))
        self._state = new_state(spec, slots, dim, device, zeros=self.new_zeros)

    @property
    def flat(self) -> torch.Tensor:
        return self._flat

    def states(self) -> dict[str, torch.Tensor]:
        return self._state

    def look_up(self, slots: torch.Tensor) -> LookedUp:
        def update(gradient: torch.Tensor) -> None:
            rows, sums, here = sum_by_slot(slots, gradient.float())
            self.update_rows(rows, sums, read=here)

        return LookedUp(self.values.index_select(0, slots), update)
