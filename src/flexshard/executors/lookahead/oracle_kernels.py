"""Compiled loops over a batch's lookups: one pass decides what a cache does for it; and over the rows that move.

A row's word holds the number of the last batch that read it (from 1) and its slot, 32 bits each, and is 0 for a row
that is in no slot. Of a slot there are the last batch that read it (0: free) and its row, apart from each other, since
most loops ask for the first alone.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from flexshard.executors.lookahead.prefetching import prefetch

__all__ = ["ADMITTED", "NO_ROOM", "NO_ROW", "admit", "compact", "copy_rows", "find", "flagged", "retire", "set_flags"]

# What becomes of a batch.
ADMITTED, NO_ROOM, NO_ROW = 0, 1, 2

Words = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.uint32]
IntArray = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# How far ahead of its turn a word of a row or of a slot, and a row to copy, is asked for. Of words, 128 take up to a
# tenth longer, 32 up to twice as long; at 8 and at 16 copies take the same.
_WORDS_AHEAD, _COPIED_AHEAD = 256, 8

# Lookups of a block, and where of fewer than one in so many the row is new, a processor guesses rightly that none is,
# and has most words at hand.
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
    rows: Slots,
    before: Words,
) -> tuple[np.uint64, bool]:
    """Number a batch's distinct rows in the order of their first lookups: how many there are, and whether all exist.

    It ends before a block with an id that is no row. Rows' words get the batch and the row's number, ``slots`` the
    number of each lookup's row; ``rows`` and ``before`` are filled as :func:`admit` says. All that counts is unsigned:
    signed indices are looked at for being negative.
    """
    number, shift, one = np.uint64(batch), np.uint64(32), np.uint64(1)
    stamp, distinct, size = number << shift, np.uint64(0), np.uint64(ids.size)
    block, rarely, ahead = np.uint64(_BLOCK), np.uint64(_RARELY), np.uint64(_WORDS_AHEAD)
    start, new_rows, limit = np.uint64(0), block, np.uint64(row_words.size)
    while start < size:
        end, distinct_before = min(start + block, size), distinct
        outside: Any = False
        for index in range(start, end):  # while the block's ids are at hand
            outside |= np.uint64(ids[index]) >= limit
        if outside:
            return distinct, False
        if new_rows * rarely < block:  # of the block before this one: lookups come table after table
            for index in range(start, end):
                row = np.uint64(ids[index])
                word = row_words[row]
                if word >> shift != number:
                    rows[distinct], before[distinct] = np.uint32(row), word
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
                rows[distinct], before[distinct] = np.uint32(row), word
                word = stamp | distinct if new else word
                row_words[row], slots[index] = word, np.uint32(word)
                distinct += np.uint64(new)
        start, new_rows = end, distinct - distinct_before
    return distinct, True


@_compiled
def admit(
    ids: npt.NDArray[Any],
    batch: int,
    row_words: Words,
    last_read: Slots,
    slot_rows: Slots,
    free: Slots,
    num_free: int,
    idle: Words,
    idle_first: int,
    idle_end: int,
    slots: Slots,
    rows: Slots,
    row_slots: Slots,
    before: Words,
    fetched_rows: IntArray,
    fetched_slots: IntArray,
    evicted_rows: IntArray,
    evicted_slots: IntArray,
    carried: Slots,
    sizes: npt.NDArray[np.int64],
) -> int:
    """Find every lookup of a batch a slot; what leaves the cache for it has been idle longest.

    First a batch's distinct rows are numbered, then these are looked for in the cache, and in the end lookups get slots
    for numbers. What is done hardly depends on what is found: where a processor would guess it wrongly every few
    lookups, that takes longer than to write what may not count.

    Args:
        ids: rows, shape (n,).
        batch: its number, from 1.
        row_words: of all rows.
        last_read, slot_rows: of all slots; the first has room for one more.
        free: a stack of free slots, of which ``num_free`` count.
        idle: slots (low bits) that no batch under way reads, with the number of the one that did last, longest idle
            first; a ring from ``idle_first`` to ``idle_end``, neither of them wrapped. Those read since do not count.
        slots: to fill, of each lookup; shape (n,).
        rows, row_slots, before: to fill, of each distinct row: its id, slot, and word before. They and the next three
            have room for one more.
        fetched_rows, fetched_slots: to fill, those of the distinct rows that were not in the cache.
        evicted_rows, evicted_slots: to fill, what has to leave.
        carried: to fill, which of the distinct rows the batch before read too, if they have stayed since.
        sizes: to fill: distinct rows, and how many entries the last three kinds have; then ``num_free`` and
            ``idle_first`` after it.

    Returns:
        ADMITTED; or NO_ROOM, where nothing has changed, though the first two sizes and ``idle_first`` are known; or
        NO_ROW for an id that is none, where nothing has changed either.
    """
    number, low, shift = np.uint64(batch), np.uint64(0xFFFFFFFF), np.uint64(32)
    zero, one, ahead = np.uint64(0), np.uint64(1), np.uint64(_WORDS_AHEAD)
    stamp, before_it = number << shift, number - one
    at = idle_first % idle.size
    while idle_first < idle_end:  # those that do not count are seen once, though the batch may be refused
        entry = idle[at]
        if np.uint64(last_read[entry & low]) == entry >> shift:
            break
        idle_first += 1
        at = _following(at, idle.size)
    sizes[5] = idle_first
    distinct, inside = _number_rows(ids, batch, row_words, slots, rows, before)
    if not inside:
        for index in range(distinct):
            row_words[rows[index]] = before[index]
        return NO_ROW
    fetches = carries = zero
    nowhere = np.uint64(slot_rows.size)
    for index in range(distinct):
        prefetch(last_read, before[min(index + ahead, distinct - one)] & low)
        was = before[index]
        missing = was == zero
        slot = nowhere if missing else was & low
        last_read[slot] = np.uint32(number)
        row_slots[index], carried[carries], fetched_rows[fetches] = np.uint32(slot), np.uint32(index), np.int64(index)
        carries += np.uint64((was >> shift == before_it) & (not missing))
        fetches += np.uint64(missing)
    sizes[0], sizes[1] = np.int64(distinct), np.int64(fetches)
    fetch = int(fetches)
    wanted, first, evictions = max(fetch - num_free, 0), idle_first, 0
    while evictions < wanted and first < idle_end:
        entry = idle[at]
        if at + _WORDS_AHEAD < idle.size:  # behind the last one are some that will come to count, or did
            coming = idle[at + _WORDS_AHEAD] & low
            prefetch(last_read, coming)
            prefetch(slot_rows, coming)
        slot = entry & low
        evicted_rows[evictions], evicted_slots[evictions] = np.int64(slot_rows[slot]), np.int64(slot)
        evictions += int(np.uint64(last_read[slot]) == entry >> shift)
        first += 1
        at = _following(at, idle.size)
    if evictions < wanted:  # let everything be as it was
        for index in range(distinct):
            was = before[index]
            row_words[np.uint64(rows[index])] = was
            if was != zero:
                last_read[was & low] = np.uint32(was >> shift)
        return NO_ROOM
    for index in range(evictions):
        prefetch(row_words, evicted_rows[min(index + _WORDS_AHEAD, evictions - 1)])
        row_words[np.uint64(evicted_rows[index])] = zero
    for index in range(fetch):
        left, place = num_free - index, np.uint64(fetched_rows[index])  # of the distinct rows, so far
        slot = np.uint64(free[left - 1]) if left > 0 else np.uint64(evicted_slots[-left])
        row_slots[place], last_read[slot], slot_rows[slot] = np.uint32(slot), np.uint32(number), rows[place]
        fetched_rows[index], fetched_slots[index] = np.int64(rows[place]), np.int64(slot)
    for index in range(distinct):
        prefetch(row_words, rows[min(index + ahead, distinct - one)])
        row_words[np.uint64(rows[index])] = stamp | np.uint64(row_slots[index])
    for index in range(np.uint64(ids.size)):
        slots[index] = row_slots[slots[index]]
    sizes[2], sizes[3], sizes[4], sizes[5] = evictions, np.int64(carries), max(num_free - fetch, 0), first
    return ADMITTED


@_compiled
def retire(
    batch: int,
    keep: bool,
    row_slots: Slots,
    row_words: Words,
    last_read: Slots,
    slot_rows: Slots,
    free: Slots,
    num_free: int,
    idle: Words,
    idle_end: int,
    evicted_rows: IntArray,
    evicted_slots: IntArray,
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
    number, shift = np.uint64(batch), np.uint64(32)
    evictions, at = 0, idle_end % idle.size
    for index in range(row_slots.size):
        if index + _WORDS_AHEAD < row_slots.size:
            prefetch(last_read, row_slots[index + _WORDS_AHEAD])
        slot = np.uint64(row_slots[index])
        leaves = np.uint64(last_read[slot]) == number
        if keep:  # written though it may not count, as in admit
            idle[at] = (number << shift) | slot
            at = _following(at, idle.size) if leaves else at
            idle_end += int(leaves)
        elif leaves:
            row = slot_rows[slot]
            evicted_rows[evictions], evicted_slots[evictions] = np.int64(row), np.int64(slot)
            evictions += 1
            free[num_free] = slot
            num_free += 1
            last_read[slot], row_words[np.uint64(row)] = np.uint32(0), np.uint64(0)
    return num_free, idle_end


@_compiled
def compact(last_read: Slots, idle: Words, idle_first: int, idle_end: int, target: Words) -> int:
    """Copy the idle slots that still count, in order; how many there are."""
    shift, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    capacity, kept = idle.size, 0
    for at in range(idle_first, idle_end):
        entry = idle[at % capacity]
        if np.uint64(last_read[entry & low]) == entry >> shift:
            target[kept] = entry
            kept += 1
    return kept


@_compiled
def find(ids: npt.NDArray[Any], row_words: Words, slots: IntArray) -> None:
    """The slot of each row, -1 where it is not in the cache; shape (n,)."""
    low, nowhere = np.uint64(0xFFFFFFFF), np.uint64(0)
    for index in range(ids.size):
        word = row_words[np.uint64(ids[index])]
        slots[index] = -1 if word == nowhere else np.int64(word & low)


@_compiled
def set_flags(flags: Flags, places: Slots) -> None:
    """Let the flags of these places be set."""
    for index in range(places.size):
        flags[np.uint64(places[index])] = True


@_compiled
def flagged(flags: Flags, rows: IntArray, slots: IntArray, flagged_rows: IntArray, flagged_slots: IntArray) -> int:
    """Fill in those whose slots' flags are set, all of shape (n,); how many there are."""
    found = 0
    for index in range(slots.size):
        slot = slots[index]
        flagged_rows[found], flagged_slots[found] = rows[index], slot
        found += int(flags[np.uint64(slot)])
    return found


@_compiled
def copy_rows(source: npt.NDArray[Any], rows: IntArray, target: npt.NDArray[Any], places: IntArray) -> None:
    """Let ``target[places]`` be ``source[rows]``; shape (n, width) both, rows there are not checked."""
    for number in range(rows.size):
        if number + _COPIED_AHEAD < rows.size:
            prefetch(source, rows[number + _COPIED_AHEAD])
            prefetch(target, places[number + _COPIED_AHEAD])
        row, place = rows[number], places[number]
        for column in range(source.shape[1]):
            target[place, column] = source[row, column]
