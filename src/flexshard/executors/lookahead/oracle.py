"""Which rows a cache of known batches holds, and when they come and go: BagPipe's Algorithm 1, one batch at a time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard._internal import check_int, has_numba
from flexshard.errors import CacheError, MissingDependencyError

__all__ = ["Admission", "LookaheadOracle", "PlacedRows"]

IntArray = npt.NDArray[np.int64]
Slots = npt.NDArray[np.uint32]
_MOST = (1 << 32) - 1


@dataclass(frozen=True)
class PlacedRows:
    """Rows that come into the cache, leave it or are in it; shape (n,) each.

    Attributes:
        rows: their ids.
        slots: their places in the cache.
    """

    rows: IntArray
    slots: IntArray


@dataclass(frozen=True)
class Admission:
    """What a cache does for a batch. What leaves goes before what comes: slots are used again at once.

    Attributes:
        batch: its number, from 1.
        slots: of each lookup; shape (n,).
        rows: distinct ones, in the order of their first lookups; shape (d,), of 32 bits.
        row_slots: theirs; shape (d,).
        fetched: those that were not in the cache.
        evicted: what leaves for them.
        carried: which of them the batch before reads too, as indices of ``rows``: of the gradients of that batch they
            alone are needed at once. (If it had been retired already and let its rows go, they are not counted.)
    """

    batch: int
    slots: Slots
    rows: Slots
    row_slots: Slots
    fetched: PlacedRows
    evicted: PlacedRows
    carried: Slots


class LookaheadOracle:
    """Decides for one cache of rows, whose batches it is told ahead.

    A row stays for as long as a batch that was admitted and not retired reads it, so that such batches find the newest
    values there, and what is fetched ahead of its batch has no update to come (section 3.2 of BagPipe). Rows beyond
    that stay until their slots are needed, longest idle first, or, as in Algorithm 1, leave at once.

    How many rows are fetched depends on the slots, not on how many batches are known: what is known comes sooner. Work
    per batch is proportional to its lookups, however many batches are known. Memory: 8 bytes per row and up to 36 per
    slot.

    Args:
        num_rows: rows that may be read; below 2^32.
        slots: of the cache; below 2^31.
        keep: whether rows that no known batch reads stay while there is room. False: Algorithm 1 to the letter.
    """

    def __init__(self, num_rows: int, slots: int, *, keep: bool = True) -> None:
        if not has_numba():
            raise MissingDependencyError(
                "a lookahead cache needs numba, which is not installed: pip install 'flexshard[fast]'"
            )
        self.num_rows = check_int(num_rows, "num_rows", CacheError, least=0)
        self.slots = check_int(slots, "slots", CacheError, least=1)
        if num_rows > _MOST or slots > _MOST // 2:
            raise CacheError(f"{num_rows:,} rows, {slots:,} slots: a cache has fewer than 2^32 rows and 2^31 slots")
        self.keep = keep
        self._row_words = np.zeros(num_rows, np.uint64)
        self._last_read, self._slot_rows = np.zeros(slots + 1, np.uint32), np.zeros(slots, np.uint32)
        self._free, self._num_free = np.arange(slots, dtype=np.uint32)[::-1].copy(), slots
        self._idle, self._idle_first, self._idle_end = np.zeros(1, np.uint64), 0, 0
        self._admitted: deque[Admission] = deque()
        self._batch = self._needed = self._missing = 0
        self._room: list[npt.NDArray[Any]] = []

    @property
    def window(self) -> int:
        """Batches that were admitted and not retired."""
        return len(self._admitted)

    @property
    def needed(self) -> tuple[int, int]:
        """Of the batch that was refused last: distinct rows, and how many of them are not in the cache."""
        return self._needed, self._missing

    def admit(self, ids: npt.NDArray[Any]) -> Admission | None:
        """Take up a batch, or None where the rows of those under way leave it no room; retire some first.

        Args:
            ids: rows of its lookups; shape (n,).

        Raises:
            CacheError: an id that is no row; nothing has changed then.
        """
        from flexshard.executors.lookahead import oracle_kernels

        ids = _as_numbers(ids)
        slots, sizes = np.empty(ids.size, np.uint32), np.zeros(6, np.int64)
        rows, row_slots, before, *fetched, evicted_rows, evicted_slots, carried = self._scratch(ids.size)
        outcome = oracle_kernels.admit(
            ids, self._batch + 1, self._row_words, self._last_read, self._slot_rows, self._free, self._num_free,
            self._idle, self._idle_first, self._idle_end, slots, rows, row_slots, before, *fetched,
            evicted_rows, evicted_slots, carried, sizes,
        )  # fmt: skip
        distinct, fetches, evictions, carries, num_free, self._idle_first = sizes.tolist()
        if outcome == oracle_kernels.NO_ROW:
            self._check_rows(ids)
        if outcome == oracle_kernels.NO_ROOM:
            self._needed, self._missing = distinct, fetches
            return None
        self._batch, self._num_free = self._batch + 1, num_free
        admission = Admission(
            self._batch,
            slots,
            rows[:distinct].copy(),
            row_slots[:distinct].copy(),
            PlacedRows(*(of_rows[:fetches].copy() for of_rows in fetched)),
            PlacedRows(evicted_rows[:evictions].copy(), evicted_slots[:evictions].copy()),
            carried[:carries].copy(),
        )
        self._admitted.append(admission)
        return admission

    def _check_rows(self, ids: npt.NDArray[Any]) -> None:
        if not ids.size:
            return
        least = ids.min() if ids.dtype.kind == "i" else 0
        if least < 0 or ids.max() >= self.num_rows:
            row = least if least < 0 else ids.max()
            raise CacheError(f"row {row} is outside the table, which has rows 0 to {self.num_rows - 1}")

    def _scratch(self, lookups: int) -> list[npt.NDArray[Any]]:
        """Room for what a batch's loops write; new memory for every batch would cost a third of their time."""
        most = min(lookups, self.num_rows) + 1
        if not self._room or self._room[0].size < most:
            types = (np.uint32, np.uint32, np.uint64, np.int64, np.int64, np.int64, np.int64, np.uint32)
            self._room = [np.empty(most + most // 8, kind) for kind in types]
        return self._room

    def retire(self) -> PlacedRows:
        """The oldest batch has been trained, or will not be: what leaves the cache."""
        from flexshard.executors.lookahead import oracle_kernels

        if not self._admitted:
            raise CacheError("no batch is under way that could be retired")
        batch = self._admitted.popleft()
        distinct = batch.row_slots.size
        if self.keep and self._idle_end - self._idle_first + distinct > self._idle.size:
            self._make_room(distinct)
        leaving = 0 if self.keep else distinct
        rows, slots = np.empty(leaving, np.int64), np.empty(leaving, np.int64)
        free = self._num_free
        self._num_free, self._idle_end = oracle_kernels.retire(
            batch.batch, self.keep, batch.row_slots, self._row_words, self._last_read, self._slot_rows, self._free,
            free, self._idle, self._idle_end, rows, slots,
        )  # fmt: skip
        left = self._num_free - free
        return PlacedRows(rows[:left], slots[:left])

    def _make_room(self, entries: int) -> None:
        """Let the ring of idle slots have room for so many more.

        Entries that do not count any more go; those that do, and those that come, are of different slots. The ring is
        no larger than it has to be, so that a processor's caches hold what it is at.
        """
        from flexshard.executors.lookahead import oracle_kernels

        kept = np.empty(min(self._idle_end - self._idle_first, self.slots), np.uint64)
        count = oracle_kernels.compact(self._last_read, self._idle, self._idle_first, self._idle_end, kept)
        size = max(self._idle.size, 2 * (count + entries))
        if size > self._idle.size:
            self._idle = np.empty(0, np.uint64)  # before there is another
            self._idle = np.zeros(size, np.uint64)
        self._idle[:count] = kept[:count]
        self._idle_first, self._idle_end = 0, count

    def find(self, ids: npt.NDArray[np.int64]) -> IntArray:
        """Slots of rows, -1 for those that are not in the cache; shape (n,). Nothing moves.

        Raises:
            CacheError: an id that is no row.
        """
        from flexshard.executors.lookahead import oracle_kernels

        ids = _as_numbers(ids)
        self._check_rows(ids)
        slots = np.empty(ids.size, np.int64)
        oracle_kernels.find(ids, self._row_words, slots)
        return slots

    def held(self) -> PlacedRows:
        """The rows that are in the cache, and their slots; nothing moves."""
        slots = np.flatnonzero(self._last_read[:-1])
        return PlacedRows(self._slot_rows[slots].astype(np.int64), slots)


def _as_numbers(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """For compiled loops, which take what this machine counts with."""
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise CacheError(f"ids of rows must be whole numbers in one dimension, found {ids.dtype}, {ids.shape}")
    return ids.astype(ids.dtype.newbyteorder("="), copy=False)
