"""Rows without copies in a plain tensor: what the sharded store does, in torch alone, for tests and for machines on
which FBGEMM has no kernels. Slower; the same numbers up to the order of sums.
"""

from __future__ import annotations

import torch

from flexshard.executors.stores.tensor_rows import TensorRows
from flexshard.executors.stores.touched_rows import sum_by_slot
from flexshard.executors.stores.updates import OptimizerSpec

__all__ = ["MemoryStore"]


class MemoryStore(TensorRows):
    """A drop-in for :class:`ShardedStore`; see :class:`TableGroup`'s ``sharded_store``."""

    def __init__(
        self, group_size: int, spec: OptimizerSpec, slots: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(group_size, spec, torch.zeros(slots, dim, dtype=dtype, device=device, requires_grad=True))

    @torch.no_grad()
    def reduce(self, slots: torch.Tensor, gradient: torch.Tensor, scale: float) -> None:
        """Update the rows at slots, each by the sum of its gradients."""
        self.update_rows(*sum_by_slot(slots, gradient * scale))
