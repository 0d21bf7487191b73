"""Binary searches in what is sorted table after table in one array."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["leading_counts", "search_steps"]

IntArray = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]

# As many are sought one by one, which takes 2 to 3 microseconds each; numpy takes 100 however few they are.
_FEW = 16


def leading_counts(
    values: Numbers,
    starts: IntArray,
    sizes: IntArray,
    steps: Callable[[], list[IntArray]],
    wanted: Numbers,
    *,
    above: bool,
) -> IntArray:
    """How many leading values of each table are >= (``above``) or <= what is wanted: one binary search for all.

    Args:
        values: of all tables, descending (``above``) or ascending within each; shape (K,).
        starts, sizes: where those of each table start, and how many they are; shape (T,).
        steps: gives :func:`search_steps` of the sizes.
        wanted: shape (T, M).

    Returns:
        shape (T, M).
    """
    if wanted.size <= _FEW:
        return _one_by_one(values, starts, sizes, wanted, above=above)
    sought = np.ascontiguousarray(wanted.T)  # tables last: numpy's inner loops are as long as the last axis
    before = starts - 1
    last = np.broadcast_to(before, sought.shape)  # that is known to be as wanted
    for step in steps():
        middle = last + step
        at = values.take(middle)
        last = np.where((at >= sought) if above else (at <= sought), middle, last)
    return np.ascontiguousarray((last - before).T)


def _one_by_one(values: Numbers, starts: IntArray, sizes: IntArray, wanted: Numbers, *, above: bool) -> IntArray:
    numbers = values.data

    def leading(start: int, size: int, sought: float) -> int:
        if above:
            return bisect_left(range(start, start + size), True, key=lambda at: not numbers[at] >= sought)
        return bisect_left(range(start, start + size), True, key=lambda at: not numbers[at] <= sought)

    each = zip(starts.tolist(), sizes.tolist(), wanted.tolist(), strict=True)
    found = [leading(start, size, one) for start, size, sought in each for one in sought]
    return np.array(found, np.int64).reshape(wanted.shape)


def search_steps(sizes: IntArray) -> list[IntArray]:
    """By how much a search in so many values moves on where it may; shape (T,) each."""
    steps, possible = [], sizes + 1  # numbers that the result may be
    while (possible > 1).any():
        steps.append(possible >> 1)
        possible = possible - steps[-1]
    return steps
