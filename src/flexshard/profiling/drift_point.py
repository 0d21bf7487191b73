"""How long a profile stays true, at one cut of the rows."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DriftPoint"]


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
