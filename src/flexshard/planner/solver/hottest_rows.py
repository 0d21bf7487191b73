"""The hottest row of a level that is split makes its owner the busiest rank, and all others wait for it.

That is the largest of something over rows, not a sum, so prices alone do not see it. Where no row of a level may make
it wait longer than some time, the rest is a sum again; which times are worth trying is found by branch and bound: no
placement whose wait lies in an interval takes less than the best sum under its upper end, and its lower end besides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flexshard.planner.solver.deadline import is_enough
from flexshard.planner.solver.instance import Instance
from flexshard.planner.solver.solution import Solution

__all__ = ["FEW_COUNTS", "least_with_excess"]

FloatArray = npt.NDArray[np.float64]

FEW_COUNTS = 200
_MOST_TRIES, _MOST_TRIES_OF_MANY = 400, 12
_CLOSE, _CLOSE_OF_MANY = 1e-12, 1e-5
_WORK_OF_TRY, _WORK_OF_COUNT = 1_000.0, 0.1  # microseconds


@dataclass(frozen=True, eq=False)
class _Interval:
    """Waits of each level above ``least`` (below 0: none is one of them) and up to ``most``, shape (G,) both; the best
    sum under ``most``, and the waits that it has.
    """

    least: FloatArray
    most: FloatArray
    found: Solution
    waits: FloatArray

    @property
    def bound(self) -> float:
        return self.found.lower_bound_seconds + float(self.longer.sum())

    @cached_property
    def longer(self) -> FloatArray:
        """What the waits are at least."""
        return np.maximum(self.least, 0.0)

    @cached_property
    def widest(self) -> int:
        """The level whose wait is furthest above its lower end."""
        return int((self.waits - self.longer).argmax())


def least_with_excess(
    instance: Instance,
    solve: Callable[[Instance], Solution | None],
    most_tries: int = _MOST_TRIES,
    *,
    known_seconds: float = np.inf,
) -> Solution | None:
    """The best solution, with a bound that counts waits.

    Args:
        instance: without a limit on hot rows.
        solve: the best sum for an instance, whose bound leaves waits out; None if nothing fits.
        most_tries: how often that may be asked.
        known_seconds: what another placement takes; once no better one is left here, the search ends.
    """
    few = instance.reads.size <= FEW_COUNTS
    tries, close = (_MOST_TRIES, _CLOSE) if few else (_MOST_TRIES_OF_MANY, _CLOSE_OF_MANY)
    tries = min(tries, most_tries)
    best = solve(instance)
    if best is None:
        return None
    shape = instance.group_sizes.size
    waits = instance.excess_seconds(best.allocation)
    open_intervals = [_Interval(np.full(shape, -1.0), np.full(shape, np.inf), best, waits)]
    while tries and not is_enough(_WORK_OF_TRY + _WORK_OF_COUNT * instance.reads.size):
        open_intervals.sort(key=lambda one: one.bound, reverse=True)
        lowest = open_intervals.pop()
        level = lowest.widest
        low, high = float(lowest.least[level]), float(lowest.waits[level])
        if lowest.bound >= min(best.seconds, known_seconds) * (1 - close) or high <= lowest.longer[level]:
            open_intervals.append(lowest)
            break
        split = _split(instance, level, low, high) if few else (max(low, 0.0) + high) / 2
        least, most = lowest.least.copy(), lowest.most.copy()
        # No row waits longer than the split and less than the one that does now, or: the same sum is the best there.
        least[level] = high if split is None else split
        open_intervals.append(replace(lowest, least=least))
        if split is None:
            continue
        most[level] = split
        tries -= 1
        below = solve(instance.with_most(most))
        if below is not None:
            open_intervals.append(_Interval(lowest.least, most, below, instance.excess_seconds(below.allocation)))
            best = min(best, below, key=lambda one: one.seconds)
    return replace(best, lower_bound_seconds=min(best.seconds, *(one.bound for one in open_intervals)))


def _split(instance: Instance, level: int, low: float, high: float) -> float | None:
    """The wait that some row would cause, nearest to the middle between two; None if there is none between them."""
    waits = instance.hot_seconds_per_read[instance.table_of_count, level] * instance.reads
    between = waits[(waits > low + 1e-9 * abs(low)) & (waits < high * (1 - 1e-9))]
    return float(between[np.abs(between - (max(low, 0.0) + high) / 2).argmin()]) if between.size else None
