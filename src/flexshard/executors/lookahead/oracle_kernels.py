"""Compiled loops over a batch's lookups: one pass decides what a cache does for it; and over the rows that move.

A row's word holds the number of the last batch that read it (from 1; 0: none) and its slot; a slot's word that number
and its row. Both are 32 bits each. A row is in its slot if the slot's word says so.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from flexshard.executors.lookahead.prefetching import prefetch

__all__ = ["admit", "compact", "copy_rows", "find", "retire"]

Words = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.uint32]

# How far ahead of its turn a word of a row, a word of a slot, and a row to copy is asked for. At 32 and 16 loops over
# words take up to a tenth longer, at 96 and 48 as long; at 8 and at 16 copies take the same.
_ROWS_AHEAD, _SLOTS_AHEAD, _COPIED_AHEAD = 64, 32, 8

# Lookups of a block, and where of fewer than one in so many the row is new, a processor guesses rightly that none is.
_BLOCK, _RARELY = 256, 16

_compiled = numba.njit(cache=True, nogil=True, boundscheck=False, error_model="numpy")


@_compiled
def _following(at: int, size: int) -> int:
    """The next place of a ring; a remainder for every entry would take longer than the entry."""
    return at + 1 if at + 1 < size else 0


@_compiled
def _number_rows(
    ids: npt.NDArray[Any],
    batch: int,
    row_words: Words,
    slots: Slots,
    rows: npt.NDArray[np.int64],
    before: Words,
) -> np.uint64:
    """Number a batch's distinct rows in the order of their first lookups: how many there are.

    Rows' words get the batch and the row's number, ``slots`` the number of each lookup's row; ``rows`` and ``before``
    are filled as :func:`admit` says. All that counts is unsigned: signed indices are looked at for being negative.
    """
    number, shift, one = np.uint64(batch), np.uint64(32), np.uint64(1)
    stamp, distinct, size = number << shift, np.uint64(0), np.uint64(ids.size)
    block, rarely, ahead = np.uint64(_BLOCK), np.uint64(_RARELY), np.uint64(_ROWS_AHEAD)
    start, new_rows = np.uint64(0), block
    while start < size:
        end, distinct_before = min(start + block, size), distinct
        if new_rows * rarely < block:  # of the block before this one: lookups come table after table
            for index in range(start, end):
                prefetch(row_words, ids[min(index + ahead, size - one)])
                row = np.uint64(ids[index])
                word = row_words[row]
                if word >> shift != number:
                    rows[distinct], before[distinct] = np.int64(row), word
                    word = stamp | distinct
                    row_words[row] = word
                    distinct += one
                slots[index] = np.uint32(word)
        else:  # what is done does not depend on what is found; what does not count is written over
            for index in range(start, end):
                prefetch(row_words, ids[min(index + ahead, size - one)])
                row = np.uint64(ids[index])
                word = row_words[row]
                new = word >> shift != number
                rows[distinct], before[distinct] = np.int64(row), word
                word = stamp | distinct if new else word
                row_words[row], slots[index] = word, np.uint32(word)
                distinct += np.uint64(new)
        start, new_rows = end, distinct - distinct_before
    return distinct


@_compiled
def admit(
    ids: npt.NDArray[Any],
    batch: int,
    row_words: Words,
    slot_words: Words,
    free: Slots,
    num_free: int,
    idle: Words,
    idle_first: int,
    idle_end: int,
    slots: Slots,
    rows: npt.NDArray[np.int64],
    row_slots: Slots,
    before: Words,
    fetched: Slots,
    evicted_rows: npt.NDArray[np.int64],
    evicted_slots: Slots,
    carried: Slots,
    sizes: npt.NDArray[np.int64],
) -> bool:
    """Find every lookup of a batch a slot; what leaves the cache for it has been idle longest.

    First a batch's distinct rows are numbered, then these are looked for in the cache, and in the end lookups get slots
    for numbers. What is done hardly depends on what is found: where a processor would guess it wrongly every few
    lookups, that takes longer than to write what may not count.

    Args:
        ids: rows, shape (n,).
        batch: its number, from 1.
        row_words, slot_words: of all rows and slots.
        free: a stack of free slots, of which ``num_free`` count.
        idle: slots (low bits) that no batch under way reads, with the number of the one that did last, longest idle
            first; a ring from ``idle_first`` to ``idle_end``, neither of them wrapped. Those read since do not count.
        slots: to fill, of each lookup; shape (n,).
        rows, row_slots, before: to fill, of each distinct row: its id, slot, and word before. They, ``fetched`` and
            ``carried`` have room for one more.
        fetched: to fill, which of the distinct rows were not in the cache.
        evicted_rows, evicted_slots: to fill, what has to leave.
        carried: to fill, which of the distinct rows the batch before read too, if they have stayed since.
        sizes: to fill: distinct rows, and how many entries the last three kinds have; then ``num_free`` and
            ``idle_first`` after it.

    Returns:
        False where there is no room; nothing has changed then, though the first two sizes and ``idle_first`` are
        known.
    """
    number, low, shift = np.uint64(batch), np.uint64(0xFFFFFFFF), np.uint64(32)
    zero, one, ahead = np.uint64(0), np.uint64(1), np.uint64(_SLOTS_AHEAD)
    stamp, before_it = number << shift, number - one
    at = idle_first % idle.size
    while idle_first < idle_end:  # those that do not count are seen once, though the batch may be refused
        entry = idle[at]
        if slot_words[entry & low] >> shift == entry >> shift:
            break
        idle_first += 1
        at = _following(at, idle.size)
    sizes[5] = idle_first
    distinct = _number_rows(ids, batch, row_words, slots, rows, before)
    fetches = carries = zero
    for index in range(distinct):
        prefetch(slot_words, before[min(index + ahead, distinct - one)] & low)
        was, row = before[index], np.uint64(rows[index])
        slot = was & low
        word = slot_words[slot]
        resident = (word == (was ^ slot) | row) & (was >> shift != zero)
        slot_words[slot] = stamp | row if resident else word
        row_slots[index], carried[carries], fetched[fetches] = np.uint32(slot), np.uint32(index), np.uint32(index)
        carries += np.uint64(resident & (was >> shift == before_it))
        fetches += np.uint64(not resident)
    sizes[0], sizes[1] = np.int64(distinct), np.int64(fetches)
    missing = int(fetches)
    wanted, first, evictions = max(missing - num_free, 0), idle_first, 0
    while evictions < wanted and first < idle_end:
        entry = idle[at]
        if at + _SLOTS_AHEAD < idle.size:  # behind the last one are some that will come to count, or did
            prefetch(slot_words, idle[at + _SLOTS_AHEAD] & low)
        word = slot_words[entry & low]
        evicted_rows[evictions] = np.int64(word & low)
        evicted_slots[evictions] = entry & low
        evictions += int(word >> shift == entry >> shift)
        first += 1
        at = _following(at, idle.size)
    if evictions < wanted:  # let everything be as it was
        for index in range(distinct):
            word, row, slot = before[index], np.uint64(rows[index]), row_slots[index]
            row_words[row] = word
            if slot_words[slot] == stamp | row:
                slot_words[slot] = (word >> shift << shift) | row
        return False
    for index in range(missing):
        left, place = num_free - index, fetched[index]
        slot = np.uint64(free[left - 1]) if left > 0 else np.uint64(evicted_slots[-left])
        row_slots[place] = slot
        slot_words[slot] = stamp | np.uint64(rows[place])
    for index in range(distinct):
        prefetch(row_words, rows[min(index + ahead, distinct - one)])
        row_words[np.uint64(rows[index])] = stamp | np.uint64(row_slots[index])
    for index in range(np.uint64(ids.size)):
        slots[index] = row_slots[slots[index]]
    sizes[2], sizes[3], sizes[4], sizes[5] = evictions, np.int64(carries), max(num_free - missing, 0), first
    return True


@_compiled
def retire(
    batch: int,
    keep: bool,
    row_slots: Slots,
    slot_words: Words,
    free: Slots,
    num_free: int,
    idle: Words,
    idle_end: int,
    evicted_rows: npt.NDArray[np.int64],
    evicted_slots: Slots,
) -> tuple[int, int]:
    """Let go of the rows that no batch behind this one reads.

    Args:
        batch: its number.
        keep: they stay for as long as nobody needs their slots; or else they leave at once.
        row_slots: slots of its distinct rows.
        evicted_rows, evicted_slots: to fill, with what leaves at once.

    The others are those of :func:`admit`.

    Returns:
        ``num_free`` and ``idle_end`` after it.
    """
    number, shift, low = np.uint64(batch), np.uint64(32), np.uint64(0xFFFFFFFF)
    evictions, at = 0, idle_end % idle.size
    for index in range(row_slots.size):
        if index + _SLOTS_AHEAD < row_slots.size:
            prefetch(slot_words, row_slots[index + _SLOTS_AHEAD])
        slot = row_slots[index]
        word = slot_words[slot]
        leaves = word >> shift == number
        if keep:  # written though it may not count, as in admit
            idle[at] = (number << shift) | np.uint64(slot)
            at = _following(at, idle.size) if leaves else at
            idle_end += int(leaves)
        elif leaves:
            evicted_rows[evictions] = np.int64(word & low)
            evicted_slots[evictions] = slot
            evictions += 1
            free[num_free] = slot
            num_free += 1
            slot_words[slot] = np.uint64(0)
    return num_free, idle_end


@_compiled
def compact(slot_words: Words, idle: Words, idle_first: int, idle_end: int, target: Words) -> int:
    """Copy the idle slots that still count, in order; how many there are."""
    shift, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    capacity, kept = idle.size, 0
    for at in range(idle_first, idle_end):
        entry = idle[at % capacity]
        if slot_words[entry & low] >> shift == entry >> shift:
            target[kept] = entry
            kept += 1
    return kept


@_compiled
def find(ids: npt.NDArray[Any], row_words: Words, slot_words: Words, slots: npt.NDArray[np.int64]) -> None:
    """The slot of each row, -1 where it is not in the cache; shape (n,)."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for index in range(ids.size):
        row = np.uint64(ids[index])
        word = row_words[row]
        slot = word & low
        here = word >> shift != np.uint64(0) and slot_words[slot] == (word & ~low) | row
        slots[index] = np.int64(slot) if here else -1


@_compiled
def copy_rows(
    source: npt.NDArray[Any], rows: npt.NDArray[np.int64], target: npt.NDArray[Any], places: npt.NDArray[np.int64]
) -> None:
    """Let ``target[places]`` be ``source[rows]``; shape (n, width) both, rows there are not checked."""
    for number in range(rows.size):
        if number + _COPIED_AHEAD < rows.size:
            prefetch(source, rows[number + _COPIED_AHEAD])
            prefetch(target, places[number + _COPIED_AHEAD])
        row, place = rows[number], places[number]
        for column in range(source.shape[1]):
            target[place, column] = source[row, column]
