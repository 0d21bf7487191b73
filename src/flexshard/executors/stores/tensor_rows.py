"""Rows in a plain tensor, looked up by torch and updated within the backward pass."""

from __future__ import annotations

import abc
from typing import Any

import torch

from flexshard.executors.comm.deferred_gradient import DeferredGradient
from flexshard.executors.stores.base import RowStore
from flexshard.executors.stores.updates import OptimizerSpec, apply_update, new_state

__all__ = ["TensorRows"]


class _Lookup(torch.autograd.Function):
    """Rows of a store; backward gives their gradients to the store instead of ``weight.grad``."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, slots: torch.Tensor, store: TensorRows, gradient: DeferredGradient
    ) -> torch.Tensor:
        ctx.store, ctx.gradient = store, gradient
        ctx.save_for_backward(slots)
        return weight.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None, None, None]:
        (slots,) = ctx.saved_tensors
        ctx.store.reduce(slots, ctx.gradient.take(), ctx.gradient.scale)
        return None, None, None, None


class TensorRows(RowStore):
    """What stores share whose rows and state are tensors of ours.

    Attributes:
        weight: shape (slots, D); requires a gradient, so that backward comes to the store.
    """

    weight: torch.Tensor

    def __init__(self, group_size: int, spec: OptimizerSpec, weight: torch.Tensor) -> None:
        super().__init__(group_size, spec)
        self.weight = weight
        self._state = new_state(spec, weight.shape[0], weight.shape[1], weight.device)
        self._learning_rate, self._step = spec.learning_rate, 0

    def rows(self, slots: torch.Tensor, gradient: DeferredGradient) -> torch.Tensor:
        slots = slots.long()  # index_add is several times slower with int32
        result: torch.Tensor = _Lookup.apply(self.weight, slots, self, gradient)
        return result

    @abc.abstractmethod
    def reduce(self, slots: torch.Tensor, gradient: torch.Tensor, scale: float) -> None:
        """Take the gradients of looked up rows, to be multiplied by ``scale``, in backward."""

    @property
    def values(self) -> torch.Tensor:
        return self.weight.detach()

    def states(self) -> dict[str, torch.Tensor]:
        return self._state

    def set_learning_rate(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate

    def begin_step(self, step: int) -> None:
        self._step = step

    def update_rows(self, where: slice | torch.Tensor, gradient: torch.Tensor, *, seed: int = 0) -> None:
        """Update rows (a range, or distinct slots) by their summed gradients; ``seed`` as for :func:`apply_update`."""
        weight = self.values[where]
        state = {name: values[where] for name, values in self._state.items()}
        rate, step = self._learning_rate, self._step
        apply_update(self.spec, weight, gradient, state, learning_rate=rate, step=step, seed=seed)
        if isinstance(where, torch.Tensor):  # indexing made copies
            self.values.index_copy_(0, where, weight)
            for name, values in state.items():
                self._state[name].index_copy_(0, where, values)
