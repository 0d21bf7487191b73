"""Drift: how long a profile stays true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flexshard.errors import ProfileError

if TYPE_CHECKING:
    from flexshard.profiling._profile import AccessProfile

__all__ = ["DriftPoint", "drift"]


@dataclass(frozen=True)
class DriftPoint:
    """What the hottest rows of one profile cover, in its own data and in later data.

    Attributes:
        cut: share of the table's rows.
        rows: that many rows.
        covered_before: share of the first profile's accesses that its hottest ``rows`` cover.
        covered_now: share of the later profile's accesses that the *same* rows cover.
        best_now: share of the later profile's accesses that its *own* hottest ``rows`` cover.
        kept: share of the first profile's hottest rows that are among the later one's hottest.
    """

    cut: float
    rows: int
    covered_before: float
    covered_now: float
    best_now: float
    kept: float


def drift(before: AccessProfile, now: AccessProfile, cuts: Sequence[float]) -> tuple[DriftPoint, ...]:
    """See :meth:`AccessProfile.drift`."""
    if before.num_rows != now.num_rows:
        raise ProfileError(f"profiles of tables with {before.num_rows:,} and {now.num_rows:,} rows cannot be compared")
    if any(not 0 < cut <= 1 for cut in cuts):
        raise ProfileError(f"cuts are shares of the rows above 0 and at most 1; found {list(cuts)}")
    old, new = before.ranked_rows, now.ranked_rows
    # Rows never read in the first profile are its coldest.
    accesses = now.dense_counts()
    cumulative = np.concatenate([[0], np.cumsum(accesses[old])])
    points = []
    for cut in cuts:
        rows = max(1, round(cut * before.num_rows))
        common = np.intersect1d(old[:rows], new[:rows], assume_unique=True).size
        points.append(
            DriftPoint(
                cut,
                rows,
                before.covered(rows),
                float(cumulative[min(rows, old.size)]) / now.num_accesses,
                now.covered(rows),
                common / min(rows, old.size),
            )
        )
    return tuple(points)
