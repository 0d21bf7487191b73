"""Drift: how long a profile stays true."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from flexshard._internal import check_finite
from flexshard.errors import ProfileError
from flexshard.profiling.drift_point import DriftPoint
from flexshard.profiling.profile import AccessProfile
from flexshard.profiling.same_ids import check_same_ids

__all__ = ["drift"]


def drift(before: AccessProfile, now: AccessProfile, cuts: Sequence[float]) -> tuple[DriftPoint, ...]:
    """See :meth:`AccessProfile.drift`."""
    if not isinstance(now, type(before)):
        raise ProfileError(f"a profile drifts from a profile, found {type(now).__name__}; AccessProfile.load reads one")
    shares = list(cuts) if isinstance(cuts, Iterable) else [cuts]
    cuts = [check_finite(cut, "a cut", ProfileError) for cut in shares]
    if before.num_rows != now.num_rows:
        raise ProfileError(f"profiles of tables with {before.num_rows:,} and {now.num_rows:,} rows cannot be compared")
    if any(not 0 < cut <= 1 for cut in cuts):
        raise ProfileError(f"cuts are shares of the rows above 0 and at most 1; found {cuts}")
    check_same_ids(before, now)
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
