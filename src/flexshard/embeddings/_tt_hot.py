"""Rows of a tensor-train table that are held dense, and trained nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flexshard.errors import TableError

if TYPE_CHECKING:
    from flexshard.embeddings._tt_table import TTTable

__all__ = ["HotRows"]

_UNUSED = torch.iinfo(torch.int64).max


class HotRows(nn.Module):
    """Up to a number of rows, by id.

    Attributes:
        ids: of the rows, ascending; those that are not in use are the largest int64. Shape (capacity,).
        places: where the row of each id is, so that a row that stays held stays in its place, and with it what an
            optimizer of torch remembers of it; shape (capacity,).
        rows: shape (capacity, D).
        sums: the fused optimizer's state, if it has any.
    """

    def __init__(self, capacity: int, table: TTTable, *, device: torch.device | str | None) -> None:
        """Room for ``capacity`` rows of a table, none of them in use."""
        super().__init__()
        dim, optimizer = table.embedding_dim, table.optimizer
        self.changes = 0  # of which rows are where, and fused updates of them: a lookup is of one state
        self.ids: torch.Tensor
        self.register_buffer("ids", torch.full((capacity,), _UNUSED, device=device))
        self.places: torch.Tensor
        self.register_buffer("places", torch.arange(capacity, device=device))
        self.rows = nn.Parameter(torch.zeros(capacity, dim, device=device, dtype=table.cores[0].dtype))
        if optimizer in ("adagrad", "rowwise_adagrad"):
            size = (capacity, dim) if optimizer == "adagrad" else (capacity, 1)
            self.sums: torch.Tensor
            self.register_buffer("sums", torch.zeros(size, device=device))

    @property
    def capacity(self) -> int:
        """Most rows."""
        return self.ids.numel()

    @property
    def held(self) -> torch.Tensor:
        """Ids in use, ascending."""
        return self.ids[self.ids < _UNUSED]

    def find(self, distinct: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of distinct ids are held, and where; shape (u,) each."""
        order = torch.searchsorted(self.ids, distinct).clamp(max=self.capacity - 1)
        return self.ids[order] == distinct, self.places[order]

    def take(self, place: torch.Tensor, table: TTTable) -> torch.Tensor:
        """Rows at distinct places; with a fused optimizer their gradient is a step."""
        return _Taken.apply(self.rows, place, self, table)

    @torch.no_grad()
    def fill(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Hold these ids, ascending, and no others; those that were held before keep the optimizer's state."""
        stays, place = self.find(ids)
        free = torch.ones(self.capacity, dtype=torch.bool, device=self.ids.device)
        free[place[stays]] = False
        spare = free.nonzero().flatten()
        count, fresh = ids.numel(), int((~stays).sum())
        place = place.clone()
        place[~stays] = spare[:fresh]
        if hasattr(self, "sums"):
            self.sums[spare] = 0
        self.rows[spare] = 0
        self.rows[place] = rows.to(self.rows.dtype)
        self.ids[:count], self.ids[count:] = ids, _UNUSED
        self.places[:count], self.places[count:] = place, spare[fresh:]
        self.changes += 1

    @torch.no_grad()
    def drop(self, ids: torch.Tensor) -> None:
        """Hold these ids no longer."""
        stay = self.held[~torch.isin(self.held, ids)]
        self.fill(stay, self.rows[self.find(stay)[1]])

    def clear(self) -> None:
        """Hold nothing."""
        self.drop(self.held)

    @torch.no_grad()
    def update(self, place: torch.Tensor, gradient: torch.Tensor, table: TTTable) -> None:
        """The step of the table's optimizer, of rows at distinct places."""
        self.changes += 1
        if not self.rows.requires_grad:
            return
        if table.optimizer == "sgd":
            step = table.learning_rate * gradient
        else:
            self.sums = self.sums.float()  # whatever the model was cast to
            state = self.sums[place]
            step = table._adagrad(gradient, state)
            self.sums[place] = state
        self.rows[place] -= step.to(self.rows.dtype)


class _Taken(torch.autograd.Function):
    """Rows at distinct places; their gradient, or their step."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, place: torch.Tensor, hot: HotRows, table: TTTable) -> Any:
        ctx.place, ctx.hot, ctx.table, ctx.changes = place, hot, table, hot.changes
        return rows[place]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hot = ctx.hot
        if ctx.changes != hot.changes:
            raise TableError(
                "hot rows were changed between a lookup and its backward pass; hold and fold after it, and with a fused"
                " optimizer look up all ids of a step at once"
            )
        if ctx.table.optimizer is not None:
            ctx.table._check_alone()
            hot.update(ctx.place, gradient.float(), ctx.table)
            return None, None, None, None
        found = torch.zeros_like(hot.rows)
        found[ctx.place] = gradient
        return found, None, None, None
