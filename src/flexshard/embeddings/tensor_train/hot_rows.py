"""Rows of a tensor-train table that are pinned: held dense, and trained nowhere else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flexshard._internal import deprecated_attribute
from flexshard.embeddings.tensor_train.core_optimizer import CoreOptimizer
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
        sums: the fused optimizer's state, if it has any.
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
        if optimizer is not None and optimizer.has_state:
            self.sums: torch.Tensor
            self.register_buffer("sums", optimizer.new_state(self.rows.shape, device).view(capacity, -1))

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
        if hasattr(self, "sums"):
            self.sums[spare] = 0
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

    def clear(self) -> None:
        """Pin nothing."""
        self.drop(self.pinned)

    @torch.no_grad()
    def backward(self, slots: torch.Tensor, gradient: torch.Tensor, changes: int) -> torch.Tensor | None:
        """The gradient of all rows; or none, if the fused optimizer has taken its step.

        Args:
            slots: distinct ones; shape (n,).
            gradient: of their rows; shape (n, D).
            changes: as they were counted at the lookup.

        Raises:
            TableError: rows were changed since the lookup, or another rank has gradients of its own.
        """
        if changes != self.changes:
            raise TableError(
                "hot rows were changed between a lookup and its backward pass; pin and unpin after it, and with a fused"
                " optimizer look up all ids of a step at once"
            )
        optimizer = self._optimizer
        if optimizer is None:
            to_rows = torch.zeros_like(self.rows)
            to_rows[slots] = gradient
            return to_rows
        optimizer.check_alone()
        self.changes += 1
        if self.rows.requires_grad:
            rows = self.rows[slots].float()
            state = None
            if optimizer.has_state:
                self.sums = self.sums.float()  # whatever the model was cast to
                state = self.sums[slots]
            optimizer.step(rows, gradient.float(), state)
            self.rows[slots] = rows.to(self.rows.dtype)
            if state is not None:
                self.sums[slots] = state
        return None


class _Taken(torch.autograd.Function):
    """Rows at distinct slots; their gradient, or their step."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, slots: torch.Tensor, hot: HotRows) -> Any:
        ctx.slots, ctx.hot, ctx.changes = slots, hot, hot.changes
        return rows[slots]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.hot.backward(ctx.slots, gradient, ctx.changes), None, None
