"""Tables whose rows without copies may be kept in the host's memory, behind a cache of their owner.

A row that stays in the cache for n batches from one that reads it needs its place there for a share of the time and is
fetched now and then (:mod:`flexshard.costmodels.lookahead`); neither is a straight line in its reads. So a table's
tiers are still ranges of its rows, but where the last one begins is found by trying counts: at prices of the rank's
memory and of the host's, sums over the counts ahead and behind say what each costs. Every table with its
cheapest option at some prices bounds all plans from below (Lagrange). The prices with the highest bound are the duals
of a linear program over the options met so far, which is solved again with those that its prices ask for (column
generation, as in Dantzig and Wolfe); then one option per table is chosen by a mixed-integer program.

Legend: T tables, G levels, K counts, as of :mod:`flexshard.planner.solver.instance`; N options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flexshard.planner.solver.cached_sums import CachedSums, Cuts, Range
from flexshard.planner.solver.instance import Allocation, Instance

__all__ = ["SIGMAS", "Options", "Side", "hottest", "options_and_least", "options_of"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

SIGMAS = 4.0  # of the rows that a rank's part of a batch reads


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

    def sums(self, counts: IntArray, table: IntArray) -> Range:
        """Bytes of weights, and of those that a step reads, of the rows of tables up to and including a count of each;
        shape (n,) each.
        """
        instance = self.instance
        row_bytes = instance.row_bytes[table]
        reads = instance.cum_units[counts] * instance.unit_reads[table]
        return np.asarray(instance.cum_rows[counts] * row_bytes, np.float64), np.asarray(reads * row_bytes, np.float64)

    @cached_property
    def _some_sums(self) -> Range:
        cuts = self.caches.some_cuts
        return self.sums(cuts.counts, cuts.table)

    def sums_at(self, cuts: Cuts) -> Range:
        """The same up to some counts; shape (P,) each."""
        return self._some_sums if cuts is self.caches.some_cuts else self.sums(cuts.counts, cuts.table)


def options_of(side: Side, table: IntArray, allocation: Allocation, batches: IntArray) -> Options:
    """Options with these rows per level, shape (N, G), and these batches, shape (N,)."""
    return options_and_least(side, table, allocation, batches)[0]


def options_and_least(
    side: Side, table: IntArray, allocation: Allocation, batches: IntArray
) -> tuple[Options, Options]:
    """As :func:`options_of`, and the same with caches of as many places as their rows take on average, whether or not a
    batch fits: what options cost at least.
    """
    instance, last = side.instance, side.instance.group_sizes.size - 1
    row_bytes = instance.row_bytes[table]
    reads = _tier_reads(instance, table, allocation)
    kind = instance.table_class[table]
    per_byte = (allocation * instance.comm_fixed[kind] + reads * instance.comm_per_read[kind]).sum(axis=1)
    held = (allocation * instance.memory_fixed[kind]).sum(axis=1) + reads @ instance.memory_per_read
    seconds, hbm = row_bytes * per_byte + side.extra_seconds[table], row_bytes * held
    behind = allocation[:, last]
    places, fetched, needed = np.zeros((3, table.size))
    of = np.flatnonzero((batches > 0) & (behind > 0))
    if of.size:
        # Rows of a batch have to fit, whatever else is there: some more than a rank is expected to read.
        first, ranks = instance.num_rows[table[of]] - behind[of], instance.cluster.world_size
        (places[of], _), (fetched[of], read) = _behind(side.caches, table[of], first, batches[of])
        needed[of] = np.maximum(places[of], read + ranks * SIGMAS * (np.sqrt(read / ranks) + 1.0))

    def with_places(places: FloatArray, cached: npt.NDArray[np.bool_]) -> Options:
        taken, moved = np.where(cached, places, 0.0), np.where(cached, fetched, 0.0)
        host_bytes = np.where(cached, side.caches.row_host_bytes[table], 0.0)
        return Options(
            table,
            np.full(table.size, side.once),
            np.where(cached, batches, 0),
            allocation,
            seconds + side.caches.fetch_seconds[table] * moved,
            hbm - host_bytes * (behind - taken),
            np.asarray(host_bytes * behind, np.float64),
            taken,
            moved,
        )

    # A cache of all rows is none.
    return with_places(needed, (batches > 0) & (needed < behind)), with_places(places, batches > 0)


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
    whole = instance.groups_within(rows[:, None], table)[:, 0]
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


def _behind(caches: CachedSums, table: IntArray, first: IntArray, batches: IntArray) -> Range:
    """Places and fetches of the rows of tables from position ``first`` on, where they stay for so many batches, and for
    one; shape (2, N) each.
    """
    instance = caches.instance
    whole, left = _counts_in(instance, table, first)
    start, sizes = instance.starts[table], np.diff(instance.starts)[table]
    following = np.minimum(start + whole, start + sizes - 1)
    stays = np.concatenate([batches, np.ones_like(batches)])
    table, whole, left, following, sizes = (np.tile(each, 2) for each in (table, whole, left, following, sizes))
    units = caches.row_host_bytes[table], caches.fetch_seconds[table]
    totals, before = (caches.sums_of_rows(stays, table, counts) for counts in (sizes, whole))
    found = [
        np.maximum((total - ahead) / unit - left * one, 0.0).reshape(2, -1)
        for total, ahead, one, unit in zip(totals, before, caches.of_rows(stays, following), units, strict=True)
    ]
    return found[0], found[1]
