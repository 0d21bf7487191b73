"""Rows that U/g ranks hold copies of."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flexshard.executors.comm.collectives import Collectives, Label, PendingCollective
from flexshard.executors.comm.deferred_gradient import DeferredGradient
from flexshard.executors.stores.base import RowStore
from flexshard.executors.stores.touched_rows import TouchedRows, sum_by_slot
from flexshard.executors.stores.updates import OptimizerSpec, apply_update, new_state

__all__ = ["ReplicatedStore"]


class _ReplicatedLookup(torch.autograd.Function):
    """Rows of a replicated store; its backward keeps their gradients in the store instead of ``weight.grad``."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, slots: torch.Tensor, store: ReplicatedStore, gradient: DeferredGradient
    ) -> torch.Tensor:
        ctx.store, ctx.gradient = store, gradient
        ctx.save_for_backward(slots)
        return weight.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None, None, None]:
        (slots,) = ctx.saved_tensors
        ctx.store.reduce(slots, ctx.gradient.take(), ctx.gradient.scale)
        return None, None, None, None


class ReplicatedStore(RowStore):
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
        super().__init__(group_size, spec)
        self.weight = nn.Parameter(torch.zeros(slots, dim, dtype=dtype, device=device))
        self._state = new_state(spec, slots, dim, device)
        self._across, self._tables, self._whole, self._collectives = across, tables, whole_slots, collectives
        self._learning_rate, self._step = spec.learning_rate, 0
        self._gradient: torch.Tensor | None = None
        self._open: tuple[PendingCollective | None, TouchedRows | None] | None = None

    def rows(self, slots: torch.Tensor, gradient: DeferredGradient) -> torch.Tensor:
        slots = slots.long()  # index_add is several times slower with int32
        result: torch.Tensor = _ReplicatedLookup.apply(self.weight, slots, self, gradient)
        return result

    @property
    def values(self) -> torch.Tensor:
        return self.weight.detach()

    def states(self) -> dict[str, torch.Tensor]:
        return self._state

    def set_learning_rate(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate

    def begin_step(self, step: int) -> None:
        self._step = step

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
            self._update(slice(0, self._whole), self._gradient)
            self._gradient.zero_()
        if touched is not None:
            slots, gradient = touched.wait()
            self._update(slots, gradient)

    def _update(self, where: slice | torch.Tensor, gradient: torch.Tensor) -> None:
        weight = self.weight.detach()[where]
        state = {name: values[where] for name, values in self._state.items()}
        rate, step = self._learning_rate, self._step
        apply_update(self.spec, weight, gradient, state, learning_rate=rate, step=step, seed=self.group_size)
        if isinstance(where, torch.Tensor):  # indexing made copies
            self.weight.detach().index_copy_(0, where, weight)
            for name, values in state.items():
                self._state[name].index_copy_(0, where, values)

    def _label(self, content: str) -> Label:
        return Label(self.group_size, content, self._tables)
