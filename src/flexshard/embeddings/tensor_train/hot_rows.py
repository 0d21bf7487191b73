"""Rows of a tensor-train table that are pinned: held dense, and trained nowhere else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flexshard._internal import deprecated_attribute
from flexshard.embeddings.tensor_train.core_optimizer import CoreOptimizer, StepCount, full_buffer, full_dtype, in_full
from flexshard.errors import TableError

__all__ = ["HotRows"]

_UNUSED = torch.iinfo(torch.int64).max


class HotRows(nn.Module):
    """Up to a number of rows, by id.

    Attributes:
        ids: of the rows, ascending; those that are not in use are the largest int64. Shape (capacity,).
        places: slot of the row of each id, so that a row that stays pinned keeps its slot, and with it what an
            optimizer of torch remembers of it; shape (capacity,).
        rows: shape (capacity, D).
        sums: Adagrad's state, if the fused optimizer is that; others' have their own names.
    """

    def __init__(
        self,
        size: tuple[int, int],
        optimizer: CoreOptimizer | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        """Room for (capacity, D) rows, none of them in use; with a fused optimizer their gradient is a step."""
        super().__init__()
        capacity, dim = size
        self._optimizer = optimizer
        self.changes = 0  # of which rows are where, and fused updates of them: a lookup is of one state
        self.ids: torch.Tensor
        self.register_buffer("ids", torch.full((capacity,), _UNUSED, device=device))
        self.places: torch.Tensor
        self.register_buffer("places", torch.arange(capacity, device=device))
        self.rows = nn.Parameter(torch.zeros(capacity, dim, device=device, dtype=dtype))
        if optimizer is not None:
            for name, state in optimizer.new_states(self.rows.detach()).items():
                self.register_buffer(_buffer(name), state.view(capacity, -1))
            if optimizer.rule.counts_steps:
                self.register_buffer("steps", torch.zeros(1, dtype=torch.int64, device=device))
        self._counted = StepCount(1)

    def _states(self) -> dict[str, torch.Tensor]:
        """The fused optimizer's, in full precision whatever the model was cast to."""
        assert self._optimizer is not None
        kind, states = full_dtype(self.rows.dtype), self._optimizer.rule.states
        return {state.name: full_buffer(self, _buffer(state.name), kind) for state in states}

    def _take_step(self, gradient: torch.Tensor, which: torch.Tensor) -> None:
        """The fused optimizer's step, of rows at distinct slots by gradients of these, or, with a bool of each row, of
        those that were read by gradients of all.
        """
        optimizer = self._optimizer
        assert optimizer is not None
        if not self.rows.requires_grad:
            return
        rows, step = in_full(self.rows.detach()), optimizer.step_at
        if which.dtype == torch.bool:
            step = optimizer.step_of_read
        step(rows, which, in_full(gradient), self._states(), self._counted.add(self))
        if rows.dtype != self.rows.dtype:
            self.rows.copy_(rows)

    @property
    def capacity(self) -> int:
        """Most rows."""
        return self.ids.numel()

    @property
    def pinned(self) -> torch.Tensor:
        """Ids in use, ascending."""
        return self.ids[self.ids < _UNUSED]

    held = deprecated_attribute("held", "pinned")

    def find(self, distinct: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of distinct ids are pinned, and their slots; shape (u,) each."""
        order = torch.searchsorted(self.ids, distinct).clamp(max=self.capacity - 1)
        return self.ids[order] == distinct, self.places[order]

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows at distinct slots; with a fused optimizer their gradient is a step."""
        rows: torch.Tensor = _Taken.apply(self.rows, slots, self)
        return rows

    def take_all(self, read: torch.Tensor) -> torch.Tensor:
        """All rows, of which some are ``read``, shape (capacity,), bool: the others are not updated."""
        rows: torch.Tensor = _Taken.apply(self.rows, read, self)
        return rows

    @torch.no_grad()
    def fill(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Pin these ids, ascending, and no others; those that were pinned before keep the optimizer's state."""
        stays, slot = self.find(ids)
        free = torch.ones(self.capacity, dtype=torch.bool, device=self.ids.device)
        free[slot[stays]] = False
        spare = free.nonzero().flatten()
        count, fresh = ids.numel(), int((~stays).sum())
        slot = slot.clone()
        slot[~stays] = spare[:fresh]
        if self._optimizer is not None:
            for state in self._states().values():
                state[spare] = 0
        self.rows[spare] = 0
        self.rows[slot] = rows.to(self.rows.dtype)
        self.ids[:count], self.ids[count:] = ids, _UNUSED
        self.places[:count], self.places[count:] = slot, spare[fresh:]
        self.changes += 1

    @torch.no_grad()
    def drop(self, ids: torch.Tensor) -> None:
        """Pin these ids no longer."""
        stay = self.pinned[~torch.isin(self.pinned, ids)]
        self.fill(stay, self.rows[self.find(stay)[1]])

    @torch.no_grad()
    def reset(self) -> None:
        """Pin nothing, and forget what the optimizer knew."""
        self.ids.fill_(_UNUSED)
        self.places.copy_(torch.arange(self.capacity, device=self.places.device))
        self.rows.zero_()
        if self._optimizer is not None:
            for state in self._states().values():
                state.zero_()
        if hasattr(self, "steps"):
            self.steps.zero_()
        self._counted = StepCount(1)
        self.changes += 1

    @torch.no_grad()
    def backward(self, which: torch.Tensor, gradient: torch.Tensor, changes: int) -> torch.Tensor | None:
        """The gradient of all rows; or none, if the fused optimizer has taken its step.

        Args:
            which: distinct slots, shape (n,), or which of all rows were read, shape (capacity,), bool.
            gradient: of the rows at these slots, shape (n, D), or of all.
            changes: as they were counted at the lookup.

        Raises:
            TableError: rows were changed since the lookup.
        """
        if changes != self.changes:
            raise TableError(
                "hot rows were changed between a lookup and its backward pass; pin and unpin after it, and with a fused"
                " optimizer look up all ids of a step at once"
            )
        optimizer = self._optimizer
        if optimizer is None or optimizer.is_distributed:
            to_rows = gradient
            if which.dtype != torch.bool:
                to_rows = torch.zeros_like(self.rows)
                to_rows[which] = gradient
            if optimizer is None:
                return to_rows
            self.changes += 1
            if not optimizer.is_skipping:
                (averaged,) = optimizer.averaged([in_full(to_rows)])
                self._take_step(averaged, averaged.any(1))
            return None
        self.changes += 1
        if not optimizer.is_skipping:
            self._take_step(gradient, which)
        return None


def _buffer(state: str) -> str:
    """What a state's buffer is called: Adagrad's as it was before others came."""
    return "sums" if state == "momentum1" else state


class _Taken(torch.autograd.Function):
    """Rows at distinct slots, or all, of which some are read; their gradient, or their step."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, which: torch.Tensor, hot: HotRows) -> Any:
        ctx.which, ctx.hot, ctx.changes = which, hot, hot.changes
        return rows.view_as(rows) if which.dtype == torch.bool else rows[which]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.hot.backward(ctx.which, gradient, ctx.changes), None, None
