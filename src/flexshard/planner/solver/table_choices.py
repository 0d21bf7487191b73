"""Choices of tables to plan beside those that prices of memory give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from flexshard.planner.solver.deadline import is_enough
from flexshard.planner.solver.instance import Instance
from flexshard.planner.solver.solution import Solution

__all__ = ["ROUNDED", "between", "choices_left", "climb", "most_of_best"]

BoolArray = npt.NDArray[np.bool_]
Found = Sequence[tuple[Instance, Solution]]

ROUNDED = 1e-9  # of a bound, more than rounding changes
_ON_THE_WAY, _GOOD = 9, 1e-3  # the latter of a bound
_MOST_TRIED, _MOST_OF_ALL = 1_000_000, 1_000_000  # counts of instances that may be planned to come closer to a bound
_OTHERS = 24  # choices of one other table each that are tried from one
_LEAST_COUNTS = 2_000  # of an instance, as which smaller ones count: planning them takes no less
_COUNT_WORK = 0.3  # microseconds a count of an instance that is planned


def climb(
    saved: npt.NDArray[np.float64], bound: float, like: Instance, found: Found, plan: Callable[[BoolArray, float], None]
) -> None:
    """From what was found, best first, plan choices of one other table each, as long as one of them is better and the
    bound is not met: where the budget is just missed, or ranks wait for hot rows, the choices of prices are not the
    best.

    Args:
        saved: by sending each table's repeated ids once, in seconds and at the price of memory; shape (T,).
        bound: that no choice is below.
        like: an instance, for how long one takes to be planned.
        found: choices that were planned, to which ``plan`` adds.
        plan: plans a choice, shape (T,), which is to be better than so many seconds.
    """
    tried = {instance.deduplicated.tobytes() for instance, _ in found}
    left, counts = _MOST_TRIED, max(like.reads.size, _LEAST_COUNTS)
    for instance, start in sorted(found, key=lambda pair: pair[1].seconds):
        mask, best, better = instance.deduplicated, start.seconds, True
        while better and not _is_good(found, bound):
            better = False
            for table in np.argsort(np.where(mask, saved, -saved), kind="stable")[:_OTHERS].tolist():
                other = mask.copy()
                other[table] = not mask[table]
                if other.tobytes() in tried:
                    continue
                tried.add(other.tobytes())
                left -= counts
                if left < 0 or is_enough(_COUNT_WORK * counts):
                    return
                before = len(found)
                plan(other, best)
                if len(found) > before and found[-1][1].seconds < best * (1 - ROUNDED):
                    mask, best, better = other, found[-1][1].seconds, True
                    break


def choices_left(bound: float, like: Instance, found: Found) -> list[BoolArray] | None:
    """All choices that were not planned; None where the bound is met, or there are too many."""
    tables, counts = like.deduplicated.size, max(like.reads.size, _LEAST_COUNTS)
    if _is_good(found, bound) or counts << tables > _MOST_OF_ALL or is_enough(_COUNT_WORK * counts * 2**tables):
        return None
    tried = {instance.deduplicated.tobytes() for instance, _ in found}
    every = (np.array(mask) for mask in product((False, True), repeat=tables))
    return [mask for mask in every if mask.tobytes() not in tried]


def _is_good(found: Found, bound: float) -> bool:
    return most_of_best(found) <= bound * (1 + _GOOD)


def most_of_best(found: Found) -> float:
    """What the best of these takes, and any other that is as good but for rounding; of such, one may be preferred."""
    return min((one.seconds for _, one in found), default=np.inf) * (1 + ROUNDED)


def between(a: BoolArray, b: BoolArray) -> Iterator[BoolArray]:
    """Both choices, and some on the way from one to the other, to fill what one leaves of the budget."""
    differ = np.flatnonzero(a != b)
    for number in np.unique(np.linspace(0, differ.size, min(differ.size + 1, _ON_THE_WAY)).astype(np.int64)).tolist():
        mask = a.copy()
        mask[differ[:number]] = b[differ[:number]]
        yield mask
