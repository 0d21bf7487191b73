"""Compiled loops over rows of lists, for the exact search of duplicates; a plain path stands beside each.

A row is found by a hash of its length and of some values only: four at either end and the one in the middle (of the
last alone of further features, which mostly change together), and then compared with the candidate as a whole. Rows
that such a hash takes for others' are found by a hash of all their values, and compared again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["first_rows", "gather", "overlaps"]

IntArray = npt.NDArray[np.int64]


def first_rows(columns: Sequence[tuple[npt.NDArray[Any], IntArray]], rows: int) -> IntArray | None:
    """For each row, the first that is the same in all columns; shape (rows,).

    Args:
        columns: values (seen as unsigned integers) and offsets of each.
        rows: of every column.

    Returns:
        None where even hashes of whole rows collide; the plain path decides then.
    """
    hashes = np.zeros(rows, np.uint64)
    first = np.empty(rows, np.int64)
    same = np.ones(rows, np.bool_)
    table = np.zeros(1 << max(4, (2 * rows - 1).bit_length()), np.uint64)
    every = np.arange(rows)
    for number, (values, offsets) in enumerate(columns):
        _hash_some(values, offsets, hashes, number == 0)
    _probe(hashes, table, first)
    for values, offsets in columns:
        _compare(values, offsets, every, first, same)
    wrong = np.flatnonzero(~same)
    if not wrong.size:
        return first
    matches = np.empty(wrong.size, np.int64)
    full = np.zeros(wrong.size, np.uint64)
    for values, offsets in columns:
        _hash_whole(values, offsets, wrong, full)
    _probe(full, np.zeros(1 << max(4, (2 * wrong.size - 1).bit_length()), np.uint64), matches)
    first[wrong] = wrong[matches]
    same[wrong] = True
    for values, offsets in columns:
        _compare(values, offsets, wrong, first, same)
    return first if same.all() else None


@numba.njit(cache=True)
def _mixed(h, value):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    h = (h ^ value) * np.uint64(0x9E3779B97F4A7C15)
    return h ^ (h >> np.uint64(32))


@numba.njit(cache=True)
def _hash_some(values, offsets, hashes, several):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    for row in range(hashes.size):
        begin, stop = offsets[row], offsets[row + 1]
        h = _mixed(hashes[row], np.uint64(stop - begin))
        if stop > begin:
            h = _mixed(h, np.uint64(values[stop - 1]))
            if several:
                # Four at either end tell lists apart that are padded, or share a first or last token. Each times an
                # odd number of its own: sums wait for no product.
                both, factor = np.uint64(values[begin]), np.uint64(0xBF58476D1CE4E5B9)
                for position in range(begin + 1, min(begin + 4, stop)):
                    both += np.uint64(values[position]) * factor
                    factor += np.uint64(0x9E3779B97F4A7C16)
                if stop - begin > 8:
                    for position in range(stop - 4, stop - 1):
                        both += np.uint64(values[position]) * factor
                        factor += np.uint64(0x9E3779B97F4A7C16)
                    h = _mixed(h, np.uint64(values[(begin + stop) // 2]))
                h = _mixed(h, both)
        hashes[row] = h


@numba.njit(cache=True)
def _hash_whole(values, offsets, rows, hashes):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    for index in range(rows.size):
        begin, stop = offsets[rows[index]], offsets[rows[index] + 1]
        h = _mixed(hashes[index], np.uint64(stop - begin))
        for position in range(begin, stop):
            h = _mixed(h, np.uint64(values[position]))
        hashes[index] = h


@numba.njit(cache=True)
def _probe(hashes, table, first):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    # An entry is half a hash and the row, from 1, that brought it.
    high = np.uint64(0xFFFFFFFF00000000)
    mask = np.uint64(table.size - 1)
    for row in range(hashes.size):
        tag = hashes[row] & high
        slot = (hashes[row] >> np.uint64(7)) & mask
        while True:
            entry = table[slot]
            if entry == 0:
                table[slot] = tag | np.uint64(row + 1)
                first[row] = row
                break
            if entry & high == tag:
                first[row] = np.int64(entry & ~high) - 1
                break
            slot = (slot + np.uint64(1)) & mask


@numba.njit(cache=True)
def _compare(values, offsets, rows, first, same):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    for row in rows:
        other = first[row]
        if other == row or not same[row]:
            continue
        begin, size = offsets[row], offsets[row + 1] - offsets[row]
        if offsets[other + 1] - offsets[other] != size:
            same[row] = False
            continue
        mine, theirs = values[begin : begin + size], values[offsets[other] : offsets[other] + size]
        differ = np.uint64(0)
        for position in range(size):  # no way out early, so that it becomes vector instructions
            differ |= np.uint64(mine[position] ^ theirs[position])
        if differ != 0:
            same[row] = False


def overlaps(columns: Sequence[npt.NDArray[Any]], offsets: IntArray, max_shift: int) -> IntArray:
    """How many values at the start of each row are, in order, the last ones of the row before, in all columns.

    Args:
        columns: values (seen as unsigned integers), all with the same offsets.
        offsets: of rows.
        max_shift: most values of the row before that may stand before those.
    """
    shifts = np.zeros(offsets.size - 1, np.int64)
    shifts[:1] = -1
    agreed = 0
    while agreed < len(columns):  # each column may put shifts further, which others have to agree with
        for values in columns:
            agreed = 1 if _advance(values, offsets, max_shift, shifts) else agreed + 1
            if agreed >= len(columns):
                break
    lengths = np.diff(offsets)
    return np.where(shifts >= 0, np.roll(lengths, 1) - shifts, 0)


@numba.njit(cache=True)
def _advance(values, offsets, max_shift, shifts):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Put each row's shift to the least, from where it is on, at which this column agrees; -1 where none does."""
    moved = False
    for row in range(1, shifts.size):
        if shifts[row] < 0:
            continue
        begin, stop, end = offsets[row - 1], offsets[row], offsets[row + 1]
        found = -1
        for shift in range(shifts[row], min(max_shift + 1, stop - begin)):
            size = stop - begin - shift
            if size > end - stop:
                continue
            position = 0
            while position < size and values[begin + shift + position] == values[stop + position]:
                position += 1
            if position == size:
                found = shift
                break
        if found != shifts[row]:
            shifts[row] = found
            moved = True
    return moved


@numba.njit(cache=True)
def gather(values, offsets, rows, taken):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Values of these rows, one after the other, into ``taken``."""
    end = 0
    for index in range(rows.size):
        begin, size = offsets[rows[index]], offsets[rows[index] + 1] - offsets[rows[index]]
        source, target = values[begin : begin + size], taken[end : end + size]
        for position in range(size):
            target[position] = source[position]
        end += size
