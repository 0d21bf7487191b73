"""Choices of tables to plan beside those that one price of memory gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from flexshard.planner.solver.deadline import is_enough
from flexshard.planner.solver.instance import Instance
from flexshard.planner.solver.solution import Solution
from flexshard.planner.solver.table_bounds import TableCosts, below

__all__ = ["ROUNDED", "between", "climb", "is_good", "making_up", "most_of_best", "plan_lowest"]

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
Found = Sequence[tuple[Instance, Solution]]

ROUNDED = 1e-9  # of a bound, more than rounding changes
_ON_THE_WAY, _GOOD = 9, 1e-3  # the latter of a bound
_MOST_TRIED = 1_000_000  # counts of instances that may be planned to come closer to a bound
_LOOK_AGAIN = 1e-3  # part of the best that is known by which a better one leaves far fewer choices
_MOST_IDLE = 64  # choices that are planned one after the other, though none is better
_MADE_UP = 8  # choices in which others make up for one table
_OTHERS = 24  # choices of one other table each that are tried from one
_LEAST_COUNTS = 2_000  # of an instance, as which smaller ones count: planning them takes no less
_COUNTS_OF_TABLE = 100  # as which a table counts that has fewer
_GATHERED = 4  # times as long a plan takes whose gradients may be gathered
_FAR, _MOST_FAR = 0.01, 20.0  # gaps above which more is tried, and how many times as much at most
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
    left = _plans_to_try(found, bound, like)
    for instance, start in sorted(found, key=lambda pair: pair[1].seconds):
        mask, best, better = instance.deduplicated, start.seconds, True
        while better and not is_good(found, bound):
            better = False
            for table in np.argsort(np.where(mask, saved, -saved), kind="stable")[:_OTHERS].tolist():
                other = mask.copy()
                other[table] = not mask[table]
                if other.tobytes() in tried:
                    continue
                tried.add(other.tobytes())
                left -= 1
                if left < 0 or is_enough(_work_of_plan(like)):
                    return
                before = len(found)
                plan(other, best)
                if len(found) > before and found[-1][1].seconds < best * (1 - ROUNDED):
                    mask, best, better = other, found[-1][1].seconds, True
                    break


def making_up(seconds: FloatArray, memory: FloatArray, prices: FloatArray, limit: float) -> list[BoolArray]:
    """Choices with one table another way than at a price, where all others make up for it best, at one of the prices:
    what is needed where one large table just does not fit.

    Args:
        seconds, memory: of each table at each price with all its lookups sent, and with distinct ids alone; (K, 2, T).
        prices: shape (K,).
        limit: of memory.

    Returns:
        Those that take least, shape (T,) each.
    """
    picked = (seconds + prices[:, None, None] * memory).argmin(axis=1)  # (K, T)

    def with_another(of: FloatArray) -> FloatArray:
        each = np.take_along_axis(of, picked[:, None], 1)
        return np.asarray(each.sum(axis=2, keepdims=True) - each + of)

    least = np.where(with_another(memory) <= limit, with_another(seconds), np.inf)
    best, at_price = least.min(axis=0).ravel(), least.argmin(axis=0).ravel()
    masks = {}
    for index in np.argsort(best, kind="stable")[:_MADE_UP].tolist():
        side, table = divmod(index, picked.shape[1])
        mask = picked[at_price[index]].astype(np.bool_)
        mask[table] = bool(side)
        if np.isfinite(best[index]):
            masks[mask.tobytes()] = mask
    return list(masks.values())


def plan_lowest(
    costs: Sequence[TableCosts],
    least: float,
    like: Instance,
    found: Found,
    plan: Callable[[BoolArray, float], None],
) -> float:
    """Plan choices whose bound is below the best that is known, lowest first, until there are none, or many were; what
    bounds all choices then.

    Args:
        costs: of tables at prices of memory.
        least: what bounds all choices already.
        like, found, plan: as of :func:`climb`.
    """
    left, tried = _plans_to_try(found, least, like), {instance.deduplicated.tobytes() for instance, _ in found}
    bound, tables = -np.inf, like.deduplicated.size
    idle, best = 0, most_of_best(found)
    while True:
        known = most_of_best(found)
        choices = below(costs, known, tables)
        for mask, at_least in zip(choices.masks, choices.bounds.tolist(), strict=True):
            if at_least > most_of_best(found) or most_of_best(found) < known * (1 - _LOOK_AGAIN):
                break
            if mask.tobytes() in tried:
                continue
            left -= 1
            idle = 0 if most_of_best(found) < best else idle + 1
            best = most_of_best(found)
            if left < 0 or idle > _MOST_IDLE or is_enough(_work_of_plan(like)):
                return max(bound, _least(found, at_least, choices.others))
            tried.add(mask.tobytes())
            plan(mask, most_of_best(found))
        else:
            at_least = np.inf
        bound = max(bound, _least(found, at_least, choices.others))
        if most_of_best(found) >= known * (1 - _LOOK_AGAIN) or is_good(found, bound):
            return bound


def _times(like: Instance) -> int:
    return 1 if like.gathering is None else _GATHERED


def _work_of_plan(like: Instance) -> float:
    """Microseconds that planning an instance takes."""
    return _COUNT_WORK * max(like.reads.size, _LEAST_COUNTS) * _times(like)


def _plans_to_try(found: Found, bound: float, like: Instance) -> int:
    """How many choices may be planned: of many tables few, but the more, the further what is known is from the bound;
    never more than their counts allow.
    """
    counts = max(like.reads.size, _LEAST_COUNTS)
    slower = max(counts, _COUNTS_OF_TABLE * len(like.tables)) * _times(like)
    gap = most_of_best(found) / bound - 1 if bound > 0 else np.inf
    return int(min(_MOST_TRIED / counts, _MOST_TRIED * np.clip(gap / _FAR, 1.0, _MOST_FAR) / slower))


def _least(found: Found, *others: float) -> float:
    return min(*(one.lower_bound_seconds for _, one in found), *others)


def is_good(found: Found, bound: float) -> bool:
    """Whether the best of these is as good as a bound, but for a little."""
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
