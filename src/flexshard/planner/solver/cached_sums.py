"""What caches hold and fetch of tables' rows, summed over the counts behind which their last tiers may begin.

In most intervals of counts one more row ahead of a cache is for the better, or for the worse, throughout: so the best
count is found without looking at every one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from flexshard._internal import spread
from flexshard.costmodels import cached_share, cached_shares, log_unread
from flexshard.planner.solver.instance import Instance

__all__ = ["BATCHES", "SLACK", "CachedSums", "Cuts", "Intervals", "Prices", "Range", "least_of"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Range = tuple[FloatArray, FloatArray]
Prices = tuple[float, float, float]  # of a second, of a byte of a rank's memory, and of one of its host's

# Batches for which rows may stay, that which reads them included: at least two are known besides it.
BATCHES = (3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 257, 513, 1_025, 4_097, 16_385)
_SOME_CUTS = 96
_AT_ONCE = 1 << 14
_SOME = 1e-250  # of rows that are held or fetched; less is rounding
SLACK = 1.05  # places of a cache over those that are expected to be taken: batches differ


@dataclass(frozen=True, eq=False)
class Cuts:
    """Counts of every table behind which its last tier may begin.

    Attributes:
        counts: indices of counts, table by table; shape (P,).
        starts: where each table's begin among them; shape (T,).
        sizes: how many each table has; shape (T,).
    """

    counts: IntArray
    starts: IntArray
    sizes: IntArray

    @cached_property
    def ends(self) -> IntArray:
        """Where each table's last one is, if it has any; shape (T,)."""
        return self.starts + self.sizes - 1

    @cached_property
    def table(self) -> IntArray:
        """Whose count each is; shape (P,)."""
        return np.repeat(np.arange(self.sizes.size), self.sizes)

    def within(self, values: FloatArray) -> FloatArray:
        """Cumulative sums within each table, few counts of which there are; shape (P,)."""
        place = np.arange(values.size) - self.starts[self.table]
        rows = np.zeros((self.sizes.size, int(self.sizes.max(initial=0))))
        rows[self.table, place] = values
        return np.asarray(np.cumsum(rows, axis=1)[self.table, place])

    def before(self, sums: FloatArray) -> FloatArray:
        """Of sums up to each count, those up to the one before; shape (P,), where every table has some."""
        before = np.roll(sums, 1)
        before[self.starts] = 0.0
        return before

    def each(self, of_tables: FloatArray) -> FloatArray | float:
        """A number of each table for each of its counts; one number if tables are alike."""
        if np.all(of_tables == of_tables[0]):
            return float(of_tables[0])
        return np.repeat(of_tables, self.sizes)


@dataclass(frozen=True, eq=False)
class CachedSums:
    """Tables, and what caches hold and fetch of their rows.

    Attributes:
        instance: the tables; its last level is row-wise.
        chances: q of the rows of each count, that a batch of all ranks reads them; shape (K,).
        host_bytes_per_s: of the link between a rank and its host.
        samples: of a batch of all ranks, by table; shape (T,).
        stretches: of each table, how many distinct rows so many consecutive samples read; None where samples come in
            any order, or that is not known.
        batches: for which rows may stay.
    """

    instance: Instance
    chances: FloatArray
    host_bytes_per_s: float
    samples: FloatArray
    stretches: tuple[Callable[[float], float] | None, ...]
    batches: tuple[int, ...] = BATCHES

    @cached_property
    def row_host_bytes(self) -> FloatArray:
        """Weights and states of a rank's share of one row of each table; shape (T,)."""
        return self.instance.row_bytes * self.instance.table_memory_fixed[:, -1]

    @cached_property
    def fetch_seconds(self) -> FloatArray:
        """Time of one fetched row of each table that all ranks share, which is written back, too; shape (T,)."""
        return self.row_host_bytes * self._seconds_per_byte

    @property
    def _seconds_per_byte(self) -> float:
        """Of rows that come and go again."""
        return 2.0 / self.host_bytes_per_s

    def of_rows(self, batches: int | IntArray, counts: slice | IntArray = slice(None)) -> Range:
        """Places, and fetches per step, of one row of each count, where rows stay for so many batches."""
        tables = self.instance.table_of_count[counts] if any(self.stretches) else None
        return self.of_chances(batches, self.chances[counts], tables, self._unread[counts])

    def of_chances(
        self,
        batches: int | IntArray,
        chances: FloatArray,
        tables: IntArray | None = None,
        unread: FloatArray | None = None,
    ) -> Range:
        """The same of rows that a batch reads with these chances, shape (n,), of these tables where any has bursts;
        ``unread`` as :func:`flexshard.costmodels.cached_share` has it.
        """
        return self._taken(batches, cached_share(chances, batches, unread), chances, tables)

    def _taken(self, batches: int | IntArray, shares: Range, chances: FloatArray, tables: IntArray | None) -> Range:
        """Places and fetches of rows, of which caches hold and fetch these shares as they are popular."""
        cached, fetched = shares
        if any(self.stretches):
            scales = self._scales[:, self._index(batches), tables]
            cached, fetched = cached * scales[0], np.minimum(fetched * scales[1], chances)
        return np.minimum(SLACK * cached, 1.0), fetched

    def scales(self, batches: int) -> FloatArray:
        """By how much what a cache holds and fetches of each table differs from what popularity alone says, since rows
        are read in bursts; shape (2, T).
        """
        return np.asarray(self._scales[:, self._index(batches)])

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        """Of batches, for which something is worked out; ascending. Rows that stay for one are those that it reads."""
        return (1, *self.batches)

    def _index(self, batches: int | IntArray) -> IntArray:
        """Where these are among the numbers."""
        return np.searchsorted(self._numbers, batches)

    @cached_property
    def _scales(self) -> FloatArray:
        """Of each number of batches; shape (2, numbers, T)."""
        found = np.ones((2, len(self._numbers), len(self.stretches)))
        if any(self.stretches):
            rows = self.instance.rows_of_count
            alone = self._summed(lambda of, _, shares: [rows[of] * one for one in shares])[:, :, self.some_cuts.ends]
            for table, distinct in enumerate(self.stretches):
                for at, number in enumerate(self._numbers):
                    if distinct is not None and np.all(alone[:, at, table] > _SOME):
                        held = distinct(number * self.samples[table])
                        new = held - distinct((number - 1) * self.samples[table]) if number > 1 else held
                        found[:, at, table] = np.array([held, new]) / alone[:, at, table]
        return found

    def _summed(self, parts: Callable[[slice, int, Range], Sequence[FloatArray]]) -> FloatArray:
        """For each number of batches two sums over the rows up to and including each of ``some_cuts`` of its table;
        shape (2, numbers, P). ``parts``: what is added up of a slice of counts, a number, and the shares of it that
        caches hold and fetch as rows are popular.
        """
        first, size = self.intervals.first, int(self.instance.starts[-1])
        found = np.empty((2, len(self._numbers), first.size))
        # In stretches of counts that a processor's cache holds.
        edges = np.unique([*np.searchsorted(first, np.arange(0, size, _AT_ONCE)), first.size])
        for start, end in pairwise(edges.tolist()):
            of = slice(int(first[start]), int(first[end]) if end < first.size else size)
            shares = cached_shares(self.chances[of], self._numbers)
            for at, (number, one) in enumerate(zip(self._numbers, shares, strict=True)):
                for sums, part in zip(found, parts(of, number, one), strict=True):
                    np.add.reduceat(part, first[start:end] - of.start, out=sums[at, start:end])
        return np.array([[self.some_cuts.within(each) for each in sums] for sums in found])

    @cached_property
    def _unread(self) -> FloatArray:
        return log_unread(self.chances)

    @cached_property
    def some_cuts(self) -> Cuts:
        """Some of each table, closer together where rows are read often."""
        parts, sizes = [], np.diff(self.instance.starts)
        for start, size in zip(self.instance.starts[:-1].tolist(), sizes.tolist(), strict=True):
            ranks = (
                np.unique(np.geomspace(1, size, _SOME_CUTS).astype(np.int64))
                if size > _SOME_CUTS
                else range(1, size + 1)
            )
            parts.append(start - 1 + np.asarray(ranks, np.int64))
        chosen = np.array([part.size for part in parts])
        return Cuts(np.concatenate(parts), np.cumsum(chosen) - chosen, chosen)

    @cached_property
    def intervals(self) -> Intervals:
        """The counts between those of ``some_cuts``."""
        return Intervals(self)

    @cached_property
    def _bytes(self) -> FloatArray:
        """Of the rows of each count, if all had places; shape (K,)."""
        sizes = np.diff(self.instance.starts)
        return np.asarray(self.instance.rows_of_count * np.repeat(self.row_host_bytes, sizes), np.float64)

    def _of_counts(self, batches: int | IntArray, counts: IntArray) -> Range:
        """Bytes of a rank's places, and seconds of its fetches, of the rows of some counts; shape (n,) each."""
        return self._in_units(counts, self.of_rows(batches, counts))

    def _in_units(self, counts: slice | IntArray, taken: Range) -> Range:
        nbytes, (places, fetched) = self._bytes[counts], taken
        return nbytes * places, nbytes * fetched * self._seconds_per_byte

    @cached_property
    def _sums(self) -> FloatArray:
        """Bytes of a rank's places, and seconds of its fetches, of each number of batches, for the rows up to and
        including each of ``some_cuts`` of its table; shape (2, numbers, P).
        """
        tables = self.instance.table_of_count if any(self.stretches) else None

        def parts(of: slice, number: int, shares: Range) -> Range:
            whose = None if tables is None else tables[of]
            return self._in_units(of, self._taken(number, shares, self.chances[of], whose))

        return self._summed(parts)

    def _ahead(self, batches: int | IntArray, interval: IntArray) -> FloatArray:
        """The same for the rows ahead of intervals in their tables; shape (2, n)."""
        before = self._sums[:, self._index(batches), interval - 1]
        return np.where(interval == self.some_cuts.starts[self.intervals.table[interval]], 0.0, before)

    def sums_at(self, cuts: Cuts, batches: int) -> Range:
        """The same for those up to some counts: ``some_cuts``, or all between some of them; shape (P,) each."""
        if cuts is self.some_cuts:
            held, moved = self._sums[:, self._index(batches)]
            return held, moved
        starts = np.flatnonzero(np.diff(cuts.counts, prepend=-2) != 1)
        ahead = self._ahead(batches, np.searchsorted(self.intervals.last, cuts.counts[starts]))
        sizes = np.diff(starts, append=cuts.counts.size)
        found = []
        for each, before in zip(self._of_counts(batches, cuts.counts), ahead, strict=True):
            run = np.cumsum(each)
            found.append(run + np.repeat(before - (run[starts] - each[starts]), sizes))
        return found[0], found[1]

    def sums_of_rows(self, batches: IntArray, table: IntArray, counts: IntArray) -> Range:
        """The same for the rows of so many counts of tables; arguments and results of shape (N,)."""
        intervals, at = self.intervals, self.instance.starts[table] + counts - 1
        interval = np.searchsorted(intervals.last, np.maximum(at, 0))
        whole = (counts == 0) | (at == intervals.last[interval])
        part = np.flatnonzero(~whole)
        first = intervals.first[interval[part]]
        sizes = at[part] - first + 1
        inner, starts = spread(first, sizes), np.cumsum(sizes) - sizes
        found = np.where(counts > 0, self._sums[:, self._index(batches), interval], 0.0)
        if part.size:
            within = self._of_counts(np.repeat(batches[part], sizes), inner)
            found[:, part] = self._ahead(batches[part], interval[part])
            found[:, part] += [np.add.reduceat(each, starts) for each in within]
        return found[0], found[1]


@dataclass(frozen=True, eq=False)
class Intervals:
    """The counts of every table up to and including one of :attr:`CachedSums.some_cuts`, from behind the one before it
    on; P of them.

    Attributes:
        caches: of the tables.
    """

    caches: CachedSums

    @cached_property
    def last(self) -> IntArray:
        """The last count of each; shape (P,)."""
        return np.asarray(self.caches.some_cuts.counts, np.int64)

    @cached_property
    def first(self) -> IntArray:
        """The first count of each; shape (P,)."""
        first = np.roll(self.last, 1) + 1
        first[self.caches.some_cuts.starts] = self.caches.instance.starts[:-1]
        return first

    @property
    def table(self) -> IntArray:
        """Whose counts they are; shape (P,)."""
        return self.caches.some_cuts.table

    @cached_property
    def _chances(self) -> Range:
        """The least and the most that a batch reads a row with; shape (P,) each."""
        chances = self.caches.chances
        return np.minimum.reduceat(chances, self.first), np.maximum.reduceat(chances, self.first)

    @cached_property
    def _shares(self) -> dict[int, tuple[Range, Range]]:
        return {}

    def shares(self, batches: int) -> tuple[Range, Range]:
        """The least and the most of a row's places, and of its fetches, where rows stay for so many batches."""
        if batches not in self._shares:
            low, high = self._chances
            (least_places, least), (most_places, most) = (
                self.caches.of_chances(batches, chances, self.table) for chances in (low, high)
            )
            # Rows are fetched most that a batch reads with a chance of 1 in so many batches, or where they have bursts,
            # with a greater one, but never more often than they are read.
            at_ends, peak = [cached_share(chances, batches)[1] for chances in (low, high)], 1.0 / batches
            within = np.where((low < peak) & (peak < high), cached_share(np.array([peak]), batches)[1], 0.0)
            most_fetched = np.maximum(np.maximum(*at_ends), within)
            if any(self.caches.stretches):
                most_fetched = most_fetched * self.caches.scales(batches)[1, self.table]
            most_fetched = np.minimum(most_fetched, high)
            self._shares[batches] = (least_places, most_places), (np.minimum(least, most), most_fetched)
        return self._shares[batches]

    def gains(self, instance: Instance, levels: IntArray, groups: IntArray, prices: Prices) -> Range:
        """The least and the most that a byte of rows costs more with copies than behind a cache, but for its places and
        fetches; shape (P,) each.

        Args:
            instance: the tables, as they are looked up.
            levels: indices of the levels that may be used; the last has caches.
            groups: how many counts of each table have copies at each of the others but the last, or more; (T, M - 1).
            prices: of a second, of a byte of a rank's memory, and of one of its host's.
        """
        copies, last = levels[:-1], int(levels[-1])
        weight, price, host_price = prices
        most_reads, least_reads = instance.reads[self.first], instance.reads[self.last]  # they descend
        position = [counts - instance.starts[self.table] for counts in (self.first, self.last)]
        ahead, behind = (np.sum(groups[self.table] <= at[:, None], axis=1) for at in position)
        low, high = np.full(self.table.size, np.inf), np.full(self.table.size, -np.inf)
        for index, level in enumerate(copies.tolist()):
            fixed = weight * (instance.comm_fixed[:, level] - instance.comm_fixed[:, last])
            fixed = fixed + price * instance.memory_fixed[:, level] - host_price * instance.memory_fixed[:, last]
            per_read = weight * (instance.comm_per_read[:, level] - instance.comm_per_read[:, last])
            per_read = per_read + price * (instance.memory_per_read[level] - instance.memory_per_read[last])
            slope, constant = (each[instance.table_class][self.table] for each in (per_read, fixed))
            ends = constant + slope * least_reads, constant + slope * most_reads
            inside = (ahead <= index) & (index <= behind)
            low = np.where(inside, np.minimum(low, np.minimum(*ends)), low)
            high = np.where(inside, np.maximum(high, np.maximum(*ends)), high)
        return low, high

    def places_and_fetches(self, batches: int, prices: Prices) -> Range:
        """The least and the most that a byte of rows behind a cache costs for its places and fetches; (P,) each."""
        weight, price, _ = prices
        held = self.caches.instance.table_memory_fixed[self.table, -1]
        (least, most), (least_fetched, most_fetched) = self.shares(batches)
        fetch = weight * 2.0 / self.caches.host_bytes_per_s
        return held * (price * least + fetch * least_fetched), held * (price * most + fetch * most_fetched)

    def cuts(self, which: npt.NDArray[np.bool_]) -> Cuts:
        """The counts of some of them but the last of each, which is one of ``some_cuts``; ``which`` of shape (P,)."""
        first, sizes = self.first[which], (self.last - self.first)[which]
        counts = spread(first, sizes)
        tables = len(self.caches.instance.tables)
        each = np.bincount(self.table[which], weights=sizes, minlength=tables).astype(np.int64)
        return Cuts(counts, np.cumsum(each) - each, each)


def least_of(values: FloatArray, cuts: Cuts) -> tuple[FloatArray, IntArray]:
    """The least value of each table, infinite where it has none, and the first count with it; shape (T,) each."""
    least, count = np.full(cuts.sizes.size, np.inf), np.zeros(cuts.sizes.size, np.int64)
    some = cuts.sizes > 0
    starts = cuts.starts[some]
    if starts.size:
        least[some] = np.minimum.reduceat(values, starts)
        at = np.flatnonzero(values == np.repeat(least[some], cuts.sizes[some]))
        count[some] = cuts.counts[at[np.searchsorted(at, starts)]]
    return least, count
