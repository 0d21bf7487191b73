"""Rows that U/g ranks hold copies of."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from flexshard.executors.comm.collectives import Collectives, Label, PendingCollective
from flexshard.executors.stores.tensor_rows import TensorRows
from flexshard.executors.stores.touched_rows import TouchedRows, sum_by_slot
from flexshard.executors.stores.updates import OptimizerSpec

__all__ = ["ReplicatedStore"]


class ReplicatedStore(TensorRows):
    """Rows that U/g ranks hold copies of. Gradients are summed over the copies during backward, and every copy is then
    updated alike, before backward ends: as a fused optimizer does it.

    Tiers marked dense reduce all their rows (one all-reduce); tiers marked sparse gather those that were touched (one
    all-gather of slots with gradients, after one of how many).
    """

    def __init__(
        self,
        group_size: int,
        spec: OptimizerSpec,
        slots: int,
        whole_slots: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        across: dist.ProcessGroup,
        tables: tuple[str, ...],
        collectives: Collectives,
    ) -> None:
        super().__init__(group_size, spec, nn.Parameter(torch.zeros(slots, dim, dtype=dtype, device=device)))
        self._across, self._tables, self._whole, self._collectives = across, tables, whole_slots, collectives
        self._gradient: torch.Tensor | None = None
        self._open: tuple[PendingCollective | None, TouchedRows | None] | None = None

    # -- backward

    def reduce(self, slots: torch.Tensor, gradient: torch.Tensor, scale: float) -> None:
        """Start bringing the copies' gradients together; the update follows when backward ends."""
        self.finish()  # a model that looks up twice updates twice, as with FBGEMM
        dense, touched = None, None
        if self._whole:
            if self._gradient is None:
                self._gradient = torch.zeros_like(self.weight[: self._whole])
            self._accumulate(slots, gradient, scale)
            dense = self._collectives.all_reduce(self._gradient, self._across, self._label("replicas"))
        if self._whole < self.weight.shape[0]:
            cold = slots >= self._whole
            collectives, across = self._collectives, self._across
            touched = TouchedRows(slots[cold], gradient[cold], scale, collectives, across, self._label)
        self._open = dense, touched
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def _accumulate(self, slots: torch.Tensor, gradient: torch.Tensor, scale: float) -> None:
        assert self._gradient is not None
        if self._whole < self.weight.shape[0]:
            hot = slots < self._whole
            slots, gradient = slots[hot], gradient[hot]
        if gradient.dtype == torch.float32:
            self._gradient.index_add_(0, slots, gradient, alpha=scale)
        else:  # sums of 16-bit numbers lose too much; only their result is kept in 16 bits
            distinct, sums = sum_by_slot(slots, gradient)
            self._gradient.index_copy_(0, distinct, (sums * scale).to(gradient.dtype))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the copies' gradients and update the rows."""
        if self._open is None:
            return
        (dense, touched), self._open = self._open, None
        if dense is not None:
            assert self._gradient is not None
            dense.wait()
            self.update_rows(slice(0, self._whole), self._gradient, seed=self.group_size)
            self._gradient.zero_()
        if touched is not None:
            slots, gradient = touched.wait()
            self.update_rows(slots, gradient, seed=self.group_size)

    def _label(self, content: str) -> Label:
        return Label(self.group_size, content, self._tables)
