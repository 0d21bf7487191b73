"""Rows without copies in a plain tensor: what the sharded store does, in torch alone, for tests and for machines on
which FBGEMM has no kernels. Slower; the same numbers up to the order of sums.
"""

from __future__ import annotations

from typing import Any

import torch

from flexshard.executors.comm.deferred_gradient import DeferredGradient
from flexshard.executors.stores.base import RowStore
from flexshard.executors.stores.touched_rows import sum_by_slot
from flexshard.executors.stores.updates import OptimizerSpec, apply_update, new_state

__all__ = ["MemoryStore"]


class _MemoryLookup(torch.autograd.Function):
    """Rows of the store; their gradient updates it within backward."""

    @staticmethod
    def forward(
        ctx: Any, _: torch.Tensor, slots: torch.Tensor, store: MemoryStore, gradient: DeferredGradient
    ) -> torch.Tensor:
        ctx.store, ctx.gradient = store, gradient
        ctx.save_for_backward(slots)
        return store.values.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None, None, None]:
        (slots,) = ctx.saved_tensors
        ctx.store.update(slots, ctx.gradient.take() * ctx.gradient.scale)
        return None, None, None, None


class MemoryStore(RowStore):
    """A drop-in for :class:`ShardedStore`; see :class:`TableGroup`'s ``sharded_store``."""

    def __init__(
        self, group_size: int, spec: OptimizerSpec, slots: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(group_size, spec)
        self._values = torch.zeros(slots, dim, dtype=dtype, device=device)
        self._state = new_state(spec, slots, dim, device)
        self._learning_rate, self._step = spec.learning_rate, 0
        self._wants_gradient = torch.zeros(0, device=device, requires_grad=True)  # so that backward comes here

    def rows(self, slots: torch.Tensor, gradient: DeferredGradient) -> torch.Tensor:
        result: torch.Tensor = _MemoryLookup.apply(self._wants_gradient, slots.long(), self, gradient)
        return result

    @property
    def values(self) -> torch.Tensor:
        return self._values

    def states(self) -> dict[str, torch.Tensor]:
        return self._state

    def set_learning_rate(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate

    def begin_step(self, step: int) -> None:
        self._step = step

    @torch.no_grad()
    def update(self, slots: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update the rows at slots, each by the sum of its gradients."""
        distinct, sums = sum_by_slot(slots, gradient)
        weight = self._values[distinct]
        state = {name: values[distinct] for name, values in self._state.items()}
        apply_update(self.spec, weight, sums, state, learning_rate=self._learning_rate, step=self._step)
        self._values[distinct] = weight
        for name, values in state.items():
            self._state[name][distinct] = values
