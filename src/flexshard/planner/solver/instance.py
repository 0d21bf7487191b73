"""The planning problem as arrays, and what an allocation of rows costs.

Legend: T tables, G levels of the cluster, K distinct counts of all tables together. Levels are kept in order of their
communication per read (data-parallel first), because in that order the tiers of a table are ranges of its rows in
descending w: exchanging two rows of a table that are the wrong way round never costs anything, but where a level that
moves rows faster makes them wait longer for the owner of the hottest. Bounds are of tiers in this order.

An *allocation* is how many rows each table has in each tier, shape (T, G); the hottest go first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard._internal import plain_sum
from flexshard.costmodels import (
    Collective,
    Cost,
    LocalRates,
    Overlap,
    RowWidths,
    collectives_between,
    priced,
    with_excess,
    with_hottest,
)
from flexshard.planner.solver.gathering import Gathering
from flexshard.planner.solver.leading_counts import leading_counts, search_steps
from flexshard.planner.solver.local_work import COUNTS_IN_FULL, LocalShares, busiest_rank_seconds, seconds_per_read
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["Allocation", "Instance", "memory_limit"]

_CONTENTS = ("ids", "embeddings", "gradients")

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Allocation = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Instance:
    """Tables on a cluster at a batch size, in frequency-of-frequency form.

    Attributes:
        tables, cluster, batch_size, overlap: the problem; id_bytes: of an id on the wire.
        deduplicated: tables whose ids are sent once per batch; shape (T,).
        group_sizes: g per level, in tier order; shape (G,).
        memory_fixed: κ_g/g, and the place of a row that is not row-wise, per byte of weight, for each class of tables
            of equal lines; shape (C, G).
        memory_per_read: see :class:`RowLines`; shape (G,).
        comm_fixed, comm_per_read: see :class:`RowLines`, with what of local work depends on the level; shape (C, G).
        alpha_seconds: exposed latency of a level's calls, paid once where it is used at all; shape (G,).
        always_seconds: exposed time of what every plan calls.
        once_seconds: time to find the distinct ids of a table's lookups; shape (T,). table_class: of each; shape (T,).
        table_kind: of each table, what travels with what; shape (T,).
        widths: of the rows of each kind. row_bytes, num_rows: D·s and E; shape (T,) each.
        starts: where each table's counts start in the arrays below, and the end; shape (T + 1,).
        cum_rows: rows of the table up to and including each count; shape (K,).
        reads: w of the rows of each count, descending within a table, rows never read last; shape (K,).
        cum_units: accesses up to and including each count, as whole numbers so that differences are exact (of
            deduplicated tables, w itself); shape (K,).
        unit_reads: w per unit. table_held_bytes: static memory of a rank in every placement; of each table, (T,) each.
        rates: of lookups and updates, where they count.
        whole_steps: whether costs are of steps, each call of which waits for its own fullest rank.
        local_shares: of what lookups and updates take, what counts.
        most_reads: w above which a row may not be at a level; shape (T, G), or None.
        gathering: how gradients of copies may be gathered; None where all are reduced whole.
    """

    tables: tuple[Table, ...]
    cluster: Cluster
    batch_size: int
    overlap: Overlap
    deduplicated: npt.NDArray[np.bool_]
    id_bytes: int
    group_sizes: IntArray
    memory_fixed: FloatArray
    memory_per_read: FloatArray
    comm_fixed: FloatArray
    comm_per_read: FloatArray
    alpha_seconds: FloatArray
    always_seconds: float
    once_seconds: FloatArray
    table_class: IntArray
    table_kind: IntArray
    widths: tuple[RowWidths, ...]
    row_bytes: FloatArray
    num_rows: IntArray
    starts: IntArray
    cum_rows: IntArray
    reads: FloatArray
    cum_units: Numbers
    unit_reads: FloatArray
    table_held_bytes: FloatArray
    rates: LocalRates | None = None
    whole_steps: bool = False
    local_shares: LocalShares = COUNTS_IN_FULL
    most_reads: FloatArray | None = None
    gathering: Gathering | None = None

    # -- looking rows up

    def groups_at_least(self, thresholds: FloatArray) -> IntArray:
        """How many counts of each table have w of at least a threshold; thresholds and result of shape (T, M)."""
        return leading_counts(
            self.reads, self.starts[:-1], self._counts, lambda: self._search_steps, thresholds, above=True
        )

    def of_groups(self, groups: IntArray) -> tuple[IntArray, npt.NDArray[Any]]:
        """Rows and units of each table's hottest counts; shape (T, M) each."""
        last = self.starts[:-1, None] + groups - 1
        inside = groups > 0
        last = np.where(inside, last, 0)
        return np.where(inside, self.cum_rows[last], 0), np.where(inside, self.cum_units[last], 0)

    @cached_property
    def total_units(self) -> npt.NDArray[Any]:
        """Units of each table; shape (T,)."""
        return self.cum_units[self.starts[1:] - 1]

    @cached_property
    def total_reads(self) -> FloatArray:
        """Sum of w of each table; shape (T,)."""
        return np.asarray(self.total_units * self.unit_reads, np.float64)

    def groups_within(self, rows: IntArray, tables: IntArray | slice = slice(None)) -> IntArray:
        """How many counts of tables (T of them) the hottest rows have in full; rows and result of shape (T, M)."""
        starts, counts = self.starts[:-1][tables], self._counts[tables]
        steps = lambda: [step[tables] for step in self._search_steps]  # noqa: E731
        return leading_counts(self.cum_rows, starts, counts, steps, rows, above=False)

    @cached_property
    def _counts(self) -> IntArray:
        """How many of each table; shape (T,)."""
        return np.diff(self.starts)

    @cached_property
    def _search_steps(self) -> list[IntArray]:
        return search_steps(self._counts)

    @property
    def level_order(self) -> IntArray:
        """Indices of the cluster's levels in tier order; shape (G,)."""
        return np.array([self.cluster.group_sizes.index(size) for size in self.group_sizes.tolist()])

    @cached_property
    def table_of_count(self) -> IntArray:
        """Table of each count; shape (K,)."""
        return np.repeat(np.arange(len(self.tables)), np.diff(self.starts))

    @cached_property
    def rows_of_count(self) -> IntArray:
        """Rows that have each count; shape (K,)."""
        rows = np.diff(self.cum_rows, prepend=0)
        rows[self.starts[:-1]] = self.cum_rows[self.starts[:-1]]
        return rows

    # -- what an allocation costs

    @cached_property
    def held_bytes(self) -> float:
        """Static memory of a rank that every placement needs."""
        return float(self.table_held_bytes.sum())

    @cached_property
    def table_memory_fixed(self) -> FloatArray:
        """``memory_fixed`` of each table; shape (T, G)."""
        return self.memory_fixed[self.table_class]

    @cached_property
    def table_comm_fixed(self) -> FloatArray:
        """``comm_fixed`` of each table; shape (T, G)."""
        return self.comm_fixed[self.table_class]

    @cached_property
    def table_comm_per_read(self) -> FloatArray:
        """``comm_per_read`` of each table; shape (T, G)."""
        return self.comm_per_read[self.table_class]

    def tier_reads(self, allocation: Allocation) -> FloatArray:
        """Sum of w of each tier; shape (T, G)."""
        ends = np.cumsum(allocation, axis=1)
        whole = self.groups_within(ends)
        rows, units = self.of_groups(whole)
        # The next count's rows are taken in part; past the last count there is nothing left to take.
        following = np.minimum(self.starts[:-1, None] + whole, self.starts[1:, None] - 1)
        partial = (ends - rows) * self.reads[following]
        whole_reads = np.diff(units, axis=1, prepend=0) * self.unit_reads[:, None]
        return np.asarray(whole_reads + np.diff(partial, axis=1, prepend=0.0), np.float64)

    def memory_bytes(self, allocation: Allocation, reads: FloatArray | None = None) -> float:
        """Static and expected dynamic memory per rank, what every placement needs included; ``reads`` are the tiers',
        where they are known already.
        """
        reads = self.tier_reads(allocation) if reads is None else reads
        per_byte = allocation * self.table_memory_fixed + reads * self.memory_per_read
        return float(self.row_bytes @ per_byte.sum(axis=1)) + self.held_bytes

    def variable_seconds(self, allocation: Allocation, reads: FloatArray | None = None) -> float:
        """Exposed seconds without latencies; ``reads`` as for :meth:`memory_bytes`."""
        reads = self.tier_reads(allocation) if reads is None else reads
        per_byte = allocation * self.table_comm_fixed + reads * self.table_comm_per_read
        return float(self.row_bytes @ per_byte.sum(axis=1))

    def per_table(self, allocation: Allocation, reads: FloatArray | None = None) -> tuple[FloatArray, FloatArray]:
        """Exposed seconds without latencies, and memory, of each table by itself, shape (T,) each; ``reads`` as for
        :meth:`memory_bytes`.
        """
        reads = self.tier_reads(allocation) if reads is None else reads
        seconds = (allocation * self.table_comm_fixed + reads * self.table_comm_per_read).sum(axis=1)
        memory = (allocation * self.table_memory_fixed).sum(axis=1) + reads @ self.memory_per_read
        return self.row_bytes * seconds, self.row_bytes * memory

    @cached_property
    def local_seconds_per_read(self) -> FloatArray:
        """Time to look a row up, and to update it, of each table; shape (T, 2)."""
        return seconds_per_read(self.tables, self.rates)

    @cached_property
    def local_seconds(self) -> FloatArray:
        """Time to look up and to update what each table reads, as far as it counts at every level; shape (T,)."""
        return np.asarray(self.total_reads * self.local_shares.of(self.local_seconds_per_read)[0])

    @property
    def local_call_seconds(self) -> tuple[float, float]:
        """Time of the calls that look up and that update, whatever they read."""
        if self.rates is None:
            return 0.0, 0.0
        return len(self.widths) * self.rates.look_up[0], len(self.widths) * self.rates.update[0]

    @cached_property
    def hot_seconds_per_read(self) -> FloatArray:
        """How much longer a level's all-to-alls take for each lookup of a tier's hottest row, since its owner answers
        all of its group; shape (T, G).
        """
        sharing = np.array([self.cluster.ranks_on_link(size) for size in self.group_sizes.tolist()])
        row_wise = (self.group_sizes == self.cluster.world_size) & (self.group_sizes[-1] == self.cluster.world_size)
        everywhere, more = self.local_shares.of(self.local_seconds_per_read)[:, :, None]
        at_last = more * row_wise  # which ``comm_per_read`` has
        comm = (self.table_comm_per_read * self.row_bytes[:, None] - at_last) / sharing
        return np.asarray((self.group_sizes - 1) * (comm + everywhere + at_last))

    def hottest_reads(self, allocation: Allocation) -> FloatArray:
        """W of the first row of each tier, 0 where there is none; shape (T, G)."""
        first = np.cumsum(allocation, axis=1) - allocation
        group = self.starts[:-1, None] + self.groups_within(first)
        return np.where(allocation > 0, self.reads[np.minimum(group, self.reads.size - 1)], 0.0)

    def excess_seconds(self, allocation: Allocation) -> FloatArray:
        """How much longer each level's all-to-alls take for the rank that holds the hottest row there; shape (G,)."""
        hot = self.hot_seconds_per_read * self.hottest_reads(allocation)
        return np.asarray(hot.max(axis=0))

    def with_most(self, excess_seconds: FloatArray) -> Instance:
        """The same with no row at a level (shape (G,)) whose owner would make it wait longer than that."""
        hot = self.hot_seconds_per_read
        # A row that makes them wait just so long may be there, however it is rounded.
        most = np.divide(excess_seconds * (1 + 1e-10), hot, out=np.full_like(hot, np.inf), where=hot > 0)
        return replace(self, most_reads=most)

    def latency_seconds(self, levels: npt.NDArray[Any]) -> float:
        """Exposed time of what does not depend on where rows are, where these levels hold any: of calls, to find
        distinct ids, and to look up and update where rates are known.
        """
        local = float(self.local_seconds.sum()) + plain_sum(self.local_call_seconds)
        alpha = self.alpha_seconds if self.gathering is None else self.alpha_seconds + self.gathering.latency_seconds
        return float(alpha[levels].sum()) + self.always_seconds + self.index_dedup_seconds + local

    @property
    def index_dedup_seconds(self) -> float:
        """Time to find the distinct ids of the tables that are deduplicated."""
        return float(self.once_seconds[self.deduplicated].sum())

    def exposed_seconds(self, allocation: Allocation) -> float:
        """Exposed communication of the busiest rank, with lookups and updates where rates are known: what the solver
        minimises.
        """
        even = self.variable_seconds(allocation) + self.latency_seconds(np.any(allocation, axis=0))
        return even + float(self.excess_seconds(allocation).sum())

    def level_subsets(self, most: int) -> list[IntArray]:
        """Indices of every choice of at most ``most`` levels, the smallest choices first."""
        count = self.group_sizes.size
        return [
            np.array(levels) for size in range(1, min(most, count) + 1) for levels in combinations(range(count), size)
        ]

    def uniform(self, group_size: int) -> Allocation:
        """Every row in one tier."""
        return np.where(self.group_sizes == group_size, self.num_rows[:, None], 0)

    def cost(self, allocation: Allocation) -> Cost:
        """The six metrics of an allocation, all tables together: the sum of their tiers' ``placement_cost``, and what
        every placement holds.
        """
        return self.cost_of(allocation, self.tier_reads(allocation), self.hottest_reads(allocation))

    def cost_of(self, allocation: Allocation, tier_reads: FloatArray, hottest: FloatArray) -> Cost:
        """The same where tiers have these reads, and their hottest rows these; shape (T, G) each."""
        variations = [table.length_variation(self.batch_size) for table in self.tables]
        known = [variation for variation in variations if variation is not None]
        read_bytes, all_known = tier_reads @ self.memory_per_read, len(known) == len(variations)
        sigma = float((self.row_bytes * read_bytes) @ np.array(known)) if all_known else None
        static = float(self.row_bytes @ (allocation * self.table_memory_fixed).sum(axis=1))
        return Cost(
            static_memory_bytes=static + self.held_bytes,
            dynamic_memory_bytes=float(self.row_bytes @ read_bytes),
            input_ids=float(tier_reads[:, self.group_sizes > 1].sum()),
            rows_read=float(tier_reads.sum()),
            collectives=self.collectives(allocation, tier_reads, hottest=hottest),
            dynamic_memory_sigma_bytes=sigma,
            index_dedup_seconds=self.index_dedup_seconds,
            **self._local(allocation, tier_reads, hottest),
        )

    def _local(self, allocation: Allocation, reads: FloatArray, hottest: FloatArray) -> dict[str, float]:
        """Time of lookups and updates on each level's busiest rank, as :class:`Cost` names it."""
        if self.rates is None:
            return {}
        each = busiest_rank_seconds(reads, hottest, self.local_seconds_per_read, self.group_sizes)
        others, calls = self.group_sizes < self.cluster.world_size, self.local_call_seconds
        row_wise, beside = each[~others].sum(axis=0).tolist(), each[others].sum(axis=0).tolist()
        swept = float(self.row_bytes @ (allocation / self.group_sizes)[:, others].sum(axis=1)) * self.rates.sweep
        return {
            "look_up_seconds": row_wise[0] + calls[0],
            "update_seconds": calls[1] + swept,
            "overlapped_look_up_seconds": beside[0],
            "overlapped_update_seconds": beside[1],
            "row_wise_update_seconds": row_wise[1],
        }

    def collectives(
        self,
        allocation: Allocation,
        reads: FloatArray,
        sparse: npt.NDArray[np.bool_] | None = None,
        gathered_bytes: Mapping[int, float] | None = None,
        hottest: FloatArray | None = None,
    ) -> tuple[Collective, ...]:
        """All that a step calls.

        Args:
            allocation, reads: rows and reads per table and tier; shape (T, G).
            sparse: tiers whose gradients are gathered; shape (T, G); none by default.
            gathered_bytes: expected buffer of each level's all-gather, by group size.
            hottest: reads of each tier's hottest row, where it is not its first; shape (T, G).
        """
        gathers = np.zeros(allocation.shape, np.bool_) if sparse is None else sparse & (allocation > 0)
        used = sorted(np.flatnonzero(allocation.any(axis=0)).tolist(), key=lambda level: self.group_sizes[level])
        sizes = self.group_sizes[used]

        def by_kind(values: FloatArray) -> FloatArray:
            """Sums over the tables of each kind; shape (levels in use, K)."""
            sums = np.zeros((len(self.widths), values.shape[1]))
            np.add.at(sums, self.table_kind, values)
            return sums.T[used]

        calls = collectives_between(
            self.cluster.world_size,
            sizes.tolist(),
            self.widths,
            by_kind(np.where(gathers, 0, allocation) / self.group_sizes),
            np.any(gathers[:, used], axis=0),
            self.id_bytes,
        )
        lookups = dict(zip(sizes.tolist(), by_kind(reads), strict=True))
        found = priced(calls, lookups, self.cluster, self.overlap, gathered_bytes)
        reads_of_hottest = self.hottest_reads(allocation) if hottest is None else hottest
        busiest = (self.hot_seconds_per_read * reads_of_hottest).argmax(axis=0)
        for level, size in zip(used, sizes.tolist(), strict=True):
            table = int(busiest[level])
            widths = self.widths[self.table_kind[table]]
            hot, sharing = float(reads_of_hottest[table, level]), self.cluster.ranks_on_link(size)
            if self.whole_steps:  # every call waits for its own fullest rank
                of_table = np.array([[self.id_bytes, one.row_bytes, one.gradient_bytes] for one in self.widths])
                moved = (reads_of_hottest[:, level, None] * of_table[self.table_kind]).max(axis=0)
                found = with_excess(found, size, dict(zip(_CONTENTS, (moved / sharing).tolist(), strict=True)))
            else:
                found = with_hottest(found, size, hot, widths, self.id_bytes, sharing)
        return found


def memory_limit(budget_bytes: float) -> float:
    """A budget, and the share of it by which sums of float64 bytes differ with their order."""
    return budget_bytes + 1e-12 * abs(budget_bytes)
