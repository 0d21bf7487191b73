"""Cores that are to give certain rows, and to leave others as they are: least squares."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

__all__ = ["Folded", "fit_rows", "relative_error"]

Rows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Folded:
    """How well the cores took pinned rows over; relative errors (Frobenius).

    Attributes:
        before, after: of the cores' rows to the pinned ones, before and after.
        others: how far other rows moved.
    """

    before: float
    after: float
    others: float


def fit_rows(
    cores: Iterable[torch.Tensor],
    rows: Rows,
    wanted: tuple[torch.Tensor, torch.Tensor],
    kept: tuple[torch.Tensor, torch.Tensor],
    steps: int,
) -> None:
    """Change cores by L-BFGS, in place.

    Args:
        cores: that take gradients.
        rows: what the cores give for ids.
        wanted: ids and the rows that they are to have; shape (n,) and (n, D).
        kept: ids and the rows that they have now.
        steps: at most.
    """
    scales = [max(float(target.norm()) ** 2, 1e-30) for _, target in (wanted, kept)]
    optimizer = torch.optim.LBFGS(cores, max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((rows(wanted[0]) - wanted[1]) ** 2).sum() / scales[0]
        loss = loss + ((rows(kept[0]) - kept[1]) ** 2).sum() / scales[1]
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)


@torch.no_grad()
def relative_error(rows: Rows, ids: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of what the cores give for ids to other rows; 0 where these are nothing."""
    norm = float(wanted.norm())
    return float((rows(ids).float() - wanted).norm()) / norm if norm else 0.0
