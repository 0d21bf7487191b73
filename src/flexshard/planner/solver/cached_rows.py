"""Tables whose rows without copies may be kept in the host's memory, behind a cache of their owner.

A row that stays in the cache for n batches from one that reads it needs its place there for a share of the time and is
fetched now and then (:mod:`flexshard.costmodels.lookahead`); neither is a straight line in its reads. So a table's
tiers are still ranges of its rows, but where the last one begins is found by trying every count: at prices of the
rank's memory and of the host's, sums over the counts ahead and behind say what each costs. Every table with its
cheapest option at some prices bounds all plans from below (Lagrange). The prices with the highest bound are the duals
of a linear program over the options met so far, which is solved again with those that its prices ask for (column
generation, as in Dantzig and Wolfe); then one option per table is chosen by a mixed-integer program.

Legend: T tables, G levels, K counts, as of :mod:`flexshard.planner.solver.instance`; N options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flexshard.costmodels import cached_share
from flexshard.planner.solver.instance import Allocation, Instance

__all__ = ["BATCHES", "SIGMAS", "SLACK", "CachedSums", "Cuts", "Options", "Side", "hottest", "options_of"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Batches for which rows may stay, that which reads them included: at least two are known besides it.
BATCHES = (3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 257, 513, 1_025, 4_097, 16_385)
_SOME_CUTS = 96
SIGMAS = 4.0  # of the rows that a rank's part of a batch reads
SLACK = 1.05  # places of a cache over those that are expected to be taken: batches differ


@dataclass(frozen=True, eq=False)
class Options:
    """What tables may have.

    Attributes:
        table: of each; shape (N,).
        once: whether its ids are sent once per batch; shape (N,).
        batches: for which its rows without copies stay in a cache, 0 where they have none; shape (N,).
        allocation: rows per level; shape (N, G).
        seconds: exposed communication but for latencies, with the link to the host; shape (N,).
        hbm_bytes, host_bytes: of a rank; shape (N,).
        places, fetched: rows over all ranks that caches have places for, and that are fetched in a step; shape (N,).
    """

    table: IntArray
    once: npt.NDArray[np.bool_]
    batches: IntArray
    allocation: Allocation
    seconds: FloatArray
    hbm_bytes: FloatArray
    host_bytes: FloatArray
    places: FloatArray
    fetched: FloatArray

    def __getitem__(self, which: npt.NDArray[np.generic]) -> Options:
        return Options(*(getattr(self, one.name)[which] for one in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Options]) -> Options:
        """All of several."""
        return cls(*(np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(cls)))

    def distinct(self) -> Options:
        """Each once."""
        keys = np.column_stack([self.table, self.once, self.batches, self.allocation])
        _, first = np.unique(keys, axis=0, return_index=True)
        return self[np.sort(first)]


@dataclass(frozen=True, eq=False)
class Cuts:
    """Counts of every table behind which its last tier may begin.

    Attributes:
        counts: indices of counts, table by table; shape (P,).
        starts: where each table's begin among them; shape (T,).
        sizes: how many each table has; shape (T,).
    """

    counts: IntArray | slice
    starts: IntArray
    sizes: IntArray

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
        return 2.0 * self.row_host_bytes / self.host_bytes_per_s

    def of_rows(self, batches: float, counts: slice | IntArray = slice(None)) -> tuple[FloatArray, FloatArray]:
        """Places, and fetches per step, of one row of each count."""
        cached, fetched = cached_share(self.chances[counts], batches)
        if any(self.stretches):
            scales = self.scales(batches)[:, self.instance.table_of_count[counts]]
            cached, fetched = cached * scales[0], np.minimum(fetched * scales[1], self.chances[counts])
        return np.minimum(SLACK * cached, 1.0), fetched

    def scales(self, batches: float) -> FloatArray:
        """By how much what a cache holds and fetches of each table differs from what popularity alone says, since rows
        are read in bursts; shape (2, T).
        """
        if batches not in self._scales:
            found, instance = np.ones((2, len(self.stretches))), self.instance
            shares = cached_share(self.chances, batches)
            alone = np.array([np.add.reduceat(instance.rows_of_count * one, instance.starts[:-1]) for one in shares])
            for table, of in enumerate(self.stretches):
                if of is not None and np.all(alone[:, table] > 0):
                    held = of(batches * self.samples[table])
                    new = held - of((batches - 1) * self.samples[table]) if batches > 1 else held
                    found[:, table] = np.array([held, new]) / alone[:, table]
            self._scales[batches] = found
        return self._scales[batches]

    @cached_property
    def _scales(self) -> dict[float, FloatArray]:
        return {}

    @cached_property
    def every_cut(self) -> Cuts:
        """All counts."""
        starts = self.instance.starts
        return Cuts(slice(None), starts[:-1], np.diff(starts))

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
    def _sums(self) -> dict[int, tuple[FloatArray, FloatArray]]:
        return {}

    @cached_property
    def _some_sums(self) -> dict[int, tuple[FloatArray, FloatArray]]:
        return {}

    def sums(self, batches: int) -> tuple[FloatArray, FloatArray]:
        """Bytes of a rank's places, and seconds of its fetches, for the rows up to and including each count of its
        table; shape (K,) each.
        """
        if batches not in self._sums:
            places, fetched = self.of_rows(batches)
            held, moved = self._of_counts
            self._sums[batches] = self.within(held * places), self.within(moved * fetched)
        return self._sums[batches]

    @cached_property
    def _of_counts(self) -> tuple[FloatArray, FloatArray]:
        """Bytes and seconds of the rows of each count, if all had places, and if all were fetched; shape (K,) each."""
        rows, sizes = self.instance.rows_of_count.astype(np.float64), np.diff(self.instance.starts)
        return rows * np.repeat(self.row_host_bytes, sizes), rows * np.repeat(self.fetch_seconds, sizes)

    def sums_at(self, cuts: Cuts, batches: int) -> tuple[FloatArray, FloatArray]:
        """The same at some counts; shape (P,) each."""
        if cuts is self.every_cut:
            return self.sums(batches)
        if batches not in self._some_sums:
            places, fetched = self.sums(batches)
            self._some_sums[batches] = places[cuts.counts], fetched[cuts.counts]
        return self._some_sums[batches]

    def within(self, values: FloatArray) -> FloatArray:
        """Cumulative sums within each table; shape (K,)."""
        sums, starts = np.cumsum(values), self.instance.starts
        before = np.where(starts[:-1] > 0, sums[starts[:-1] - 1], 0.0)
        sums -= np.repeat(before, np.diff(starts))
        return sums


@dataclass(frozen=True, eq=False)
class Side:
    """Tables as they are looked up.

    Attributes:
        instance: of which every id is sent, or a batch's once.
        once: which of both.
        extra_seconds: what that takes of each table besides, wherever its rows are; shape (T,).
        caches: of the tables, however they are looked up.
    """

    instance: Instance
    once: bool
    extra_seconds: FloatArray
    caches: CachedSums

    @cached_property
    def _sums(self) -> tuple[FloatArray, FloatArray]:
        instance = self.instance
        nbytes = np.asarray(
            instance.rows_of_count * np.repeat(instance.row_bytes, np.diff(instance.starts)), np.float64
        )
        return self.caches.within(nbytes), self.caches.within(nbytes * instance.reads)

    @cached_property
    def _some_sums(self) -> tuple[FloatArray, FloatArray]:
        nbytes, reads = self._sums
        return nbytes[self.caches.some_cuts.counts], reads[self.caches.some_cuts.counts]

    def sums_at(self, cuts: Cuts) -> tuple[FloatArray, FloatArray]:
        """Bytes of weights, and of those that a step reads, of the rows up to and including some counts of their table;
        shape (P,) each.
        """
        return self._sums if cuts is self.caches.every_cut else self._some_sums


def options_of(side: Side, table: IntArray, allocation: Allocation, batches: IntArray) -> Options:
    """Options with these rows per level, shape (N, G), and these batches, shape (N,)."""
    instance, last = side.instance, side.instance.group_sizes.size - 1
    row_bytes, num_rows = instance.row_bytes[table], instance.num_rows[table]
    reads = _tier_reads(instance, table, allocation)
    kind = instance.table_class[table]
    per_byte = (allocation * instance.comm_fixed[kind] + reads * instance.comm_per_read[kind]).sum(axis=1)
    held = (allocation * instance.memory_fixed[kind]).sum(axis=1) + reads @ instance.memory_per_read
    seconds = row_bytes * per_byte + side.extra_seconds[table]
    hbm = row_bytes * held
    places, fetched = np.zeros(table.size), np.zeros(table.size)
    behind = allocation[:, last]
    for number in np.unique(batches[batches > 0]).tolist():
        of = np.flatnonzero((batches == number) & (behind > 0))
        places[of], fetched[of] = _behind(side.caches, table[of], num_rows[of] - behind[of], number)
        # Rows of a batch have to fit, whatever else is there: some more than a rank is expected to read.
        _, read = _behind(side.caches, table[of], num_rows[of] - behind[of], 1)
        ranks = instance.cluster.world_size
        places[of] = np.maximum(places[of], read + ranks * SIGMAS * (np.sqrt(read / ranks) + 1.0))
    # A cache of all rows is none.
    cached = (batches > 0) & (places < behind)
    places, fetched = np.where(cached, places, 0.0), np.where(cached, fetched, 0.0)
    host_bytes = np.where(cached, side.caches.row_host_bytes[table], 0.0)
    hbm = hbm - host_bytes * (behind - places)
    seconds = seconds + side.caches.fetch_seconds[table] * fetched
    host = np.asarray(host_bytes * behind, np.float64)
    return Options(
        table,
        np.full(table.size, side.once),
        np.where(cached, batches, 0),
        allocation,
        seconds,
        hbm,
        host,
        places,
        fetched,
    )


def _tier_reads(instance: Instance, table: IntArray, allocation: Allocation) -> FloatArray:
    """As :meth:`Instance.tier_reads`, of several options of a table; shape (N, G)."""
    ends = np.cumsum(allocation, axis=1)
    reads = np.column_stack([_up_to(instance, table, ends[:, level]) for level in range(ends.shape[1])])
    return np.asarray(np.diff(reads, axis=1, prepend=0.0))


def _up_to(instance: Instance, table: IntArray, rows: IntArray) -> FloatArray:
    """Reads of a table's hottest rows; shape (N,)."""
    whole, left = _counts_in(instance, table, rows)
    start = instance.starts[table]
    done = np.where(whole > 0, instance.cum_units[start + whole - 1], 0) * instance.unit_reads[table]
    following = np.minimum(start + whole, instance.starts[table + 1] - 1)
    return np.asarray(done + left * instance.reads[following], np.float64)


def _counts_in(instance: Instance, table: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
    """How many counts of each table the hottest rows have in full, and how many rows are left; shape (N,) each."""
    if np.array_equal(table, np.arange(len(instance.tables))):
        whole = instance.groups_within(rows[:, None])[:, 0]
    else:
        whole = np.empty(table.size, np.int64)
        for one in np.unique(table).tolist():
            of = np.flatnonzero(table == one)
            counts = instance.cum_rows[instance.starts[one] : instance.starts[one + 1]]
            whole[of] = np.searchsorted(counts, rows[of], side="right")
    done = np.where(whole > 0, instance.cum_rows[instance.starts[table] + whole - 1], 0)
    return whole, rows - done


def hottest(instance: Instance, options: Options) -> FloatArray:
    """W of the first row of each level of options, 0 where there is none; shape (N, G)."""
    first = np.cumsum(options.allocation, axis=1) - options.allocation
    found = []
    for level in range(first.shape[1]):
        whole, _ = _counts_in(instance, options.table, first[:, level])
        at = np.minimum(instance.starts[options.table] + whole, instance.reads.size - 1)
        found.append(np.where(options.allocation[:, level] > 0, instance.reads[at], 0.0))
    return np.column_stack(found)


def _behind(caches: CachedSums, table: IntArray, first: IntArray, batches: int) -> tuple[FloatArray, FloatArray]:
    """Places and fetches of the rows of tables from position ``first`` on; shape (N,) each."""
    instance = caches.instance
    whole, left = _counts_in(instance, table, first)
    start, end = instance.starts[table], instance.starts[table + 1]
    following = np.minimum(start + whole, end - 1)
    found, units = [], (caches.row_host_bytes[table], caches.fetch_seconds[table])
    for total, each, unit in zip(caches.sums(batches), caches.of_rows(batches, following), units, strict=True):
        before = np.where(whole > 0, total[start + whole - 1], 0.0)
        found.append(np.maximum((total[end - 1] - before) / unit - left * each, 0.0))
    return found[0], found[1]
