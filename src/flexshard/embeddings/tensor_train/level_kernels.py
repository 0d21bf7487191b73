"""Compiled search for what ascending ids have in common: one pass per level, and a sort by counting."""

from __future__ import annotations

import numba
import numpy as np

__all__ = ["ids_level", "prefix_level"]


@numba.njit(cache=True, nogil=True)
def prefix_level(ids, below, factor, before, row_index):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Distinct prefixes of a level, in order of their last digit.

    Args:
        ids: ascending; shape (u,), int64.
        below: ids that share a prefix.
        factor: row factor of the level.
        before: distinct prefixes of the level before, ascending; none for the first inner level.
        row_index: of those, in the order of the level before.

    Returns:
        the prefixes, ascending; where each is in order of its last digit; then in that order the index of each one's
        prefix in the level before, its last digit, where runs of a digit start (and the last ends), and their digits.
    """
    prefixes = np.empty(ids.size, np.int64)
    counts = np.zeros(factor + 1, np.int64)
    found, last = 0, -1
    for n in range(ids.size):
        prefix = ids[n] // below
        if prefix != last:
            prefixes[found], last = prefix, prefix
            counts[prefix % factor + 1] += 1
            found += 1
    prefixes = prefixes[:found].copy()
    runs = 0
    for digit in range(factor):
        runs += counts[digit + 1] > 0
    starts, digits = np.empty(runs + 1, np.int64), np.empty(runs, np.int64)
    runs = 0
    for digit in range(factor):
        if counts[digit + 1] > 0:
            starts[runs], digits[runs] = counts[digit], digit
            runs += 1
        counts[digit + 1] += counts[digit]
    starts[runs] = found
    place, parent, own = np.empty(found, np.int64), np.empty(found, np.int64), np.empty(found, np.int64)
    above = 0
    for n in range(found):
        prefix = prefixes[n] // factor
        digit = prefixes[n] - prefix * factor
        index = prefix
        if before.size:
            while before[above] != prefix:
                above += 1
            index = row_index[above]
        slot = counts[digit]
        counts[digit] += 1
        place[n], parent[slot], own[slot] = slot, index, digit
    return prefixes, place, parent, own, starts, digits


@numba.njit(cache=True, nogil=True)
def ids_level(ids, factor, before, place):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Ids in order of where their prefixes are.

    Args:
        ids, factor: as of :func:`prefix_level`.
        before: distinct prefixes of the last inner level, ascending; none with two cores.
        place: where each is among them in the level's order.

    Returns:
        index of each id among ``ids``, index of its prefix, and its last digit.
    """
    row_index, parent, digit = np.empty(ids.size, np.int64), np.empty(ids.size, np.int64), np.empty(ids.size, np.int64)
    if not before.size:
        for n in range(ids.size):
            prefix = ids[n] // factor
            row_index[n], parent[n], digit[n] = n, prefix, ids[n] - prefix * factor
        return row_index, parent, digit
    starts = np.zeros(before.size + 1, np.int64)
    above = 0
    for n in range(ids.size):
        while before[above] != ids[n] // factor:
            above += 1
        starts[place[above] + 1] += 1
    for n in range(before.size):
        starts[n + 1] += starts[n]
    above = 0
    for n in range(ids.size):
        prefix = ids[n] // factor
        while before[above] != prefix:
            above += 1
        slot = starts[place[above]]
        starts[place[above]] += 1
        row_index[slot], parent[slot], digit[slot] = n, place[above], ids[n] - prefix * factor
    return row_index, parent, digit
