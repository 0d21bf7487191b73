"""Rows that FBGEMM has no kernel for on a device (Adam on CPUs, say), as executors look them up and update them there:
in torch alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flexshard._internal import sum_by_slot
from flexshard.tables import Optimizer, StepOptions

__all__ = ["PlainRows"]


class PlainRows(nn.Module):
    """A table whose lookups can be followed by ``backward``, which updates it."""

    def __init__(
        self, rows: int, dim: int, dtype: torch.dtype, optimizer: Optimizer, pooled: bool, device: torch.device
    ) -> None:
        super().__init__()
        self._pooled, self._optimizer, self._options = pooled, optimizer, StepOptions(learning_rate=1e-6)
        self._weight = torch.zeros(rows, dim, dtype=dtype, device=device)
        self._states = {state.name: torch.zeros(rows, state.width(dim), device=device) for state in optimizer.states}
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Rows, or sums of each bag's; shape (bags, D), float32."""
        found: torch.Tensor = _LookUp.apply(self._anchor, self, ids, offsets)
        return found

    @torch.no_grad()
    def look_up(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """What :meth:`forward` gives."""
        if self._pooled:
            return nn.functional.embedding_bag(ids, self._weight, offsets[:-1], mode="sum").float()
        return self._weight.index_select(0, ids).float()

    @torch.no_grad()
    def update(self, ids: torch.Tensor, offsets: torch.Tensor, gradient: torch.Tensor) -> None:
        """By the gradient of what was looked up."""
        if self._pooled:
            gradient = gradient.repeat_interleave(offsets.diff(), dim=0)
        rows, sums, _ = sum_by_slot(ids, gradient)
        weight = self._weight.index_select(0, rows)
        state = {name: values.index_select(0, rows) for name, values in self._states.items()}
        change = self._optimizer.change(sums, weight.float(), state, self._options)
        self._weight.index_copy_(0, rows, (weight - change).to(weight.dtype))
        for name, values in self._states.items():
            values.index_copy_(0, rows, state[name])


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, table: PlainRows, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ctx.table, ctx.ids, ctx.offsets = table, ids, offsets
        return table.look_up(ids, offsets)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None, None]:
        ctx.table.update(ctx.ids, ctx.offsets, gradients[0])
        return None, None, None, None
