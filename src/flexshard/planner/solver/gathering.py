"""What it saves to gather gradients of copies, row by row (docs/model.md, "Replicated tiers").

Legend: T tables, G levels, K counts, as of :mod:`flexshard.planner.solver.instance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard.costmodels import NUMBER_BYTES, Overlap, RowWidths, hidden_share, row_reduction_seconds
from flexshard.tables import Table, expected_distinct
from flexshard.topologies import Cluster

__all__ = ["Gathering", "GatheringCosts", "latency_of_gathering"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Gathering:
    """How gradients of copies may be brought together.

    Attributes:
        costs: of gathering those of a row.
        latency_seconds: of a level's calls that gather, more than of the one that reduces; shape (G,).
        levels: indices of those at which some or all tiers are gathered.
        always: whether all tiers are, and not those alone where that takes less.
        tiers_of: which tiers of an allocation are in the end; shape (T, G).
    """

    costs: GatheringCosts
    latency_seconds: FloatArray
    levels: tuple[int, ...]
    always: bool
    tiers_of: Callable[[Any, IntArray], BoolArray]

    def is_at(self, levels: IntArray) -> bool:
        """Whether a choice of levels has those of some tiers that are gathered; without them it is another problem."""
        return self.always or set(self.levels) <= set(levels.tolist())


@dataclass(frozen=True, eq=False)
class GatheringCosts:
    """What it saves to gather the gradients of a row.

    Attributes:
        tables, cluster, batch_size, hidden: the problem.
        group_sizes: of the levels, in the instance's order; shape (G,).
        starts: where each table's counts start, and the end; shape (T + 1,).
    """

    tables: Sequence[Table]
    cluster: Cluster
    batch_size: int
    hidden: Overlap
    group_sizes: IntArray
    starts: IntArray

    @cached_property
    def every(self) -> FloatArray:
        """Seconds that it saves for one row of each count at each level, below 0 where it takes longer, 0 where there
        are no copies; shape (K, G).
        """
        return self._saved(None)

    @cached_property
    def saving(self) -> tuple[IntArray, FloatArray]:
        """Counts of which it saves anything at some level, shape (n,), and how much, at least 0; shape (n, G)."""
        which = []
        for table, start in zip(self.tables, self.starts[:-1].tolist(), strict=True):
            # Rows so rare that a group's batch reads them with less than the chance at which both take as long.
            share = table.profile.sample_share
            rare = np.zeros(share.size, np.bool_)
            for column, size in enumerate(self.group_sizes.tolist()):
                reduced, gathered = self._of_row(table, column)
                samples = table.distinct_samples(self.batch_size) * size
                if gathered > 0 and samples > 0:
                    chance = min(reduced / gathered, 1.0)
                    rare |= share <= -np.expm1(np.log1p(-chance) / samples) if chance < 1 else True
            which.append(start + np.flatnonzero(rare))
            if table.rows > table.profile.rows_read:
                which.append(np.array([start + share.size]))
        counts = np.concatenate(which).astype(np.int64)
        return counts, np.maximum(self._saved(counts), 0.0)

    def _of_row(self, table: Table, column: int) -> tuple[float, float]:
        """Seconds of reducing a row's gradients at a level, and of gathering them if it is touched."""
        size, widths = int(self.group_sizes[column]), RowWidths.of_table(table)
        return row_reduction_seconds(self.cluster, size, widths, self.hidden)

    def _saved(self, counts: IntArray | None) -> FloatArray:
        """Of some counts, which ascend, or all; shape (n, G)."""
        number = int(self.starts[-1]) if counts is None else counts.size
        saved = np.zeros((number, self.group_sizes.size))
        ends = self.starts if counts is None else np.searchsorted(counts, self.starts)
        for table, first, (start, end) in zip(
            self.tables, self.starts[:-1].tolist(), pairwise(ends.tolist()), strict=True
        ):
            own = np.arange(end - start) if counts is None else counts[start:end] - first
            share = np.append(table.profile.sample_share, 0.0)  # rows that are never read stand last
            for column, size in enumerate(self.group_sizes.tolist()):
                reduced, gathered = self._of_row(table, column)
                samples = table.distinct_samples(self.batch_size) * size
                saved[start:end, column] = reduced - gathered * expected_distinct(share[own], samples)
        return saved


def latency_of_gathering(cluster: Cluster, classes: int, hidden: Overlap, group_sizes: IntArray) -> FloatArray:
    """Exposed seconds that the calls of gathering, which say first how many rows there are, take more than the one of
    reducing, whatever they carry; shape (G,), 0 where there are no copies.

    Args:
        classes: K of tables, each of which has a number of rows.
        group_sizes: of the levels, in the instance's order.
    """
    found = np.zeros(group_sizes.size)
    for index, size in enumerate(group_sizes.tolist()):
        rates = cluster.level(size)
        if rates.all_reduce is None or rates.all_gather is None:
            continue
        replicas, touched = (1 - hidden_share(hidden, "all_reduce", size, one) for one in ("replicas", "touched"))
        rows, alpha = 1 - hidden_share(hidden, "all_gather", size, "touched_rows"), rates.all_reduce.alpha_seconds
        found[index] = touched * (alpha + NUMBER_BYTES * classes / rates.all_reduce.bytes_per_s)
        found[index] += rows * rates.all_gather.alpha_seconds - replicas * alpha
    return found
