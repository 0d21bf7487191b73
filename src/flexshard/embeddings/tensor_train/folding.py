"""Cores that are to give certain rows, and to leave others as they are: least squares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from flexshard.errors import TableError
from flexshard.profiling import AccessProfile

__all__ = ["MOST_ROWS", "Fit", "Folded", "Frequencies", "SeenIds", "fit_rows", "most_rows", "relative_error"]

Rows = Callable[[torch.Tensor], torch.Tensor]


_SEEN, _PER_LOOKUP = 1 << 16, 256
# That a fit is told of, but for those that are unpinned.
MOST_ROWS = 1 << 14
_BISECTIONS = 3


@dataclass(frozen=True)
class Folded:
    """How well the cores took pinned rows over; relative errors (Frobenius), rows weighted by how often they are read.

    Attributes:
        before, after: of the cores' rows to the pinned ones that they took over, before and after.
        others: how far other rows moved, those that the fit was not told of among them (a sample of these).
        weights: where frequencies are from: "profile", "lookups" (a sample of the ids that were trained on), or "none"
            where neither was there and all rows counted alike.
        kept: rows that stay pinned, since the cores cannot hold them too.
    """

    before: float
    after: float
    others: float
    weights: str = "none"
    kept: int = 0


class SeenIds(nn.Module):
    """A sample of the ids that were looked up in training, the latest :data:`_SEEN` of them."""

    def __init__(self, device: torch.device | str | None) -> None:
        super().__init__()
        self.ids: torch.Tensor
        self.register_buffer("ids", torch.zeros(_SEEN, dtype=torch.int64, device=device), persistent=False)
        self.count = 0

    def add(self, ids: torch.Tensor) -> None:
        """Keep a few of a batch's ids, repeated ones as often as they repeat."""
        flat = ids.detach().reshape(-1)
        number = min(flat.numel(), _PER_LOOKUP)
        if not number:
            return
        steps = torch.arange(number, device=flat.device) * 7919 + self.count  # all over the batch, whatever its order
        at = (torch.arange(number, device=flat.device) + self.count) % _SEEN
        self.ids[at] = flat[steps % flat.numel()].to(self.ids.dtype)
        self.count += number

    def counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Distinct ids and how often each was seen; shape (n,) each."""
        return torch.unique(self.ids[: min(self.count, _SEEN)], return_counts=True)


@dataclass(frozen=True)
class Frequencies:
    """How often the rows that are read most are read.

    Attributes:
        ids: of these rows, ascending; shape (n,).
        counts: of each; shape (n,).
        source: as :attr:`Folded.weights`.
    """

    ids: torch.Tensor
    counts: torch.Tensor
    source: str

    @classmethod
    def of(
        cls, profile: AccessProfile | None, seen: SeenIds | None, num_rows: int, device: torch.device
    ) -> Frequencies:
        """Of a profile, or of the ids that were seen in training, or none.

        Raises:
            TableError: a profile of a larger table.
        """
        if profile is not None:
            if profile.num_rows > num_rows:
                raise TableError(
                    f"the profile is of {profile.num_rows:,} rows, the table has {num_rows:,}; give this table's"
                )
            ranked = np.asarray(profile.ranked_rows[:MOST_ROWS], np.int64)
            counts = np.repeat(profile.counts, profile.rows)[: len(ranked)].astype(np.float32)
            order = np.argsort(ranked)
            return cls(
                torch.from_numpy(ranked[order]).to(device), torch.from_numpy(counts[order]).to(device), "profile"
            )
        if seen is not None and seen.count:
            ids, found = seen.counts()
            most = torch.sort(torch.topk(found, min(MOST_ROWS, found.numel())).indices).values
            return cls(ids[most], found[most].float(), "lookups")
        return cls(torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, device=device), "none")

    def of_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Weights of rows: rarely read ones count half of the least known; shape (n,)."""
        if not self.ids.numel():
            return torch.ones(ids.numel(), device=ids.device)
        at = torch.searchsorted(self.ids, ids).clamp(max=self.ids.numel() - 1)
        return torch.where(self.ids[at] == ids, self.counts[at], 0.5 * self.counts.min())


@dataclass(frozen=True)
class Fit:
    """Cores that were fitted to some of the pinned rows, and to the others as they were.

    Attributes:
        cores: fitted.
        squares: weighted squared error of each of these pinned rows; shape (n,).
        error: relative, weighted: of these rows, or of all that were fitted, whichever is more.
    """

    cores: Sequence[torch.Tensor]
    squares: torch.Tensor
    error: float


def most_rows(
    fit: Callable[[torch.Tensor], Fit], count: int, tolerance: float, device: torch.device
) -> tuple[torch.Tensor, Fit] | None:
    """The most of ``count`` rows that cores hold within a tolerance, more or less: those whose errors weigh most are
    left out first, half of what remains at a time, and of the last half as few as three more fits find.

    Args:
        fit: to the rows of a mask of shape (count,).
        count: of rows.
        tolerance: greatest error of a fit.
        device: of masks.

    Returns:
        the mask and its fit; None where no row can be held.
    """
    mask = torch.ones(count, dtype=torch.bool, device=device)
    found = fit(mask)
    if found.error <= tolerance:
        return mask, found
    while mask.any():
        order = mask.nonzero().flatten()[torch.argsort(found.squares, descending=True, stable=True)]
        too_few, enough = 0, -(-order.numel() // 2)
        best = _without(mask, order[:enough], fit)
        for _ in range(_BISECTIONS if best[1].error <= tolerance else 0):
            middle = (too_few + enough) // 2
            if middle == too_few:
                break
            tried = _without(mask, order[:middle], fit)
            if tried[1].error <= tolerance:
                enough, best = middle, tried
            else:
                too_few = middle
        mask, found = best
        if mask.any() and found.error <= tolerance:
            return best
    return None


def _without(mask: torch.Tensor, rows: torch.Tensor, fit: Callable[[torch.Tensor], Fit]) -> tuple[torch.Tensor, Fit]:
    fewer = mask.clone()
    fewer[rows] = False
    return fewer, fit(fewer)


def fit_rows(
    cores: Iterable[torch.Tensor],
    rows: Rows,
    ids: torch.Tensor,
    wanted: torch.Tensor,
    weights: torch.Tensor,
    steps: int,
) -> None:
    """Change cores by L-BFGS, in place, to least squares.

    Args:
        cores: that take gradients.
        rows: what the cores give for ids.
        ids: of rows; shape (n,).
        wanted: what they are to be; shape (n, D).
        weights: how much each counts; shape (n,).
        steps: at most.
    """
    each = weights[:, None] / max(float((weights[:, None] * wanted**2).sum()), 1e-30)
    optimizer = torch.optim.LBFGS(cores, max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (each * (rows(ids) - wanted) ** 2).sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)


@torch.no_grad()
def relative_error(rows: Rows, ids: torch.Tensor, wanted: torch.Tensor, weights: torch.Tensor) -> float:
    """Of what the cores give for ids to other rows, each weighted; 0 where these are nothing."""
    norm = float((weights[:, None] * wanted**2).sum())
    return (float((weights[:, None] * (rows(ids).float() - wanted) ** 2).sum()) / norm) ** 0.5 if norm else 0.0
