"""Compiled loops over rows of lists, for the exact search of duplicates; a plain path stands beside each.

A row is found by a hash of its length and of its first and last values only (of the last alone of further features,
which mostly change together), and then compared with the candidate as a whole. Rows that such a hash takes for others'
are found by a hash of all their values, and compared again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["first_rows", "gather"]

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
        _hash_ends(values, offsets, hashes, number == 0)
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
def _hash_ends(values, offsets, hashes, both):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    for row in range(hashes.size):
        begin, stop = offsets[row], offsets[row + 1]
        h = _mixed(hashes[row], np.uint64(stop - begin))
        if stop > begin:
            h = _mixed(h, np.uint64(values[stop - 1]))
            if both:
                h = _mixed(h, np.uint64(values[begin]))
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
