"""Ranges of rows whose copies' gradients may be gathered, found by what every count takes at every level.

Legend: T tables, G levels, L of them in use, as of :mod:`flexshard.planner.solver.instance`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from flexshard.planner.solver.instance import Allocation, Instance
from flexshard.planner.solver.thresholds import allocation_of_cuts

__all__ = ["CountCosts", "RangesInOrder", "costs_of_counts", "least_cuts"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CountCosts:
    """All rows of some counts at each level, without latencies.

    Attributes:
        table: of each count; shape (n,).
        seconds: if reduced whole; infinite where such rows may not be; shape (G, n).
        saved: by gathering; shape (G, n).
        memory: shape (G, n).
    """

    table: IntArray
    seconds: FloatArray
    saved: FloatArray
    memory: FloatArray

    @classmethod
    def of(cls, instance: Instance, which: slice | IntArray, saved: FloatArray) -> CountCosts:
        """Of an instance's counts; ``saved`` by one row of each, shape (n, G)."""
        assert instance.gathering is not None
        table, reads = instance.table_of_count[which], instance.reads[which]
        rows = instance.rows_of_count[which].astype(np.float64)
        nbytes, kind = rows * instance.row_bytes[table], instance.table_class[table]
        less = rows * saved.T
        less[[level for level in range(len(less)) if level not in instance.gathering.levels]] = 0.0
        seconds = nbytes * (instance.comm_fixed.T[:, kind] + instance.comm_per_read.T[:, kind] * reads)
        memory = nbytes * (instance.memory_fixed.T[:, kind] + instance.memory_per_read[:, None] * reads)
        if instance.most_reads is not None:
            seconds = np.where(reads > instance.most_reads.T[:, table], np.inf, seconds)
        return cls(table, seconds, less, memory)

    @cached_property
    def gathered(self) -> FloatArray:
        """Seconds if gathered, shape (G, n)."""
        return self.seconds - self.saved

    @cached_property
    def less(self) -> FloatArray:
        """Seconds if gathered where that takes less, shape (G, n)."""
        return self.seconds - np.maximum(self.saved, 0.0)


def costs_of_counts(instance: Instance, *, every: bool) -> CountCosts:
    """Of an instance's counts, or of those alone where gathering saves anything; worked out once."""
    kept = _EVERY if every else _SAVING
    known, gathering = kept.get(instance), instance.gathering
    assert gathering is not None
    if known is None:
        if len(kept) > 1:  # a bound asks for tables with all of their ids and with distinct ones in turn
            kept.clear()
        of = (slice(None), gathering.costs.every) if every else gathering.costs.saving
        known = kept[instance] = CountCosts.of(instance, *of)
    return known


_EVERY: WeakKeyDictionary[Instance, CountCosts] = WeakKeyDictionary()
_SAVING: WeakKeyDictionary[Instance, CountCosts] = WeakKeyDictionary()


class RangesInOrder:
    """Ranges of every table at some levels, each tier reduced or gathered."""

    def __init__(self, instance: Instance, levels: IntArray) -> None:
        costs, gathering = costs_of_counts(instance, every=True), instance.gathering
        assert gathering is not None
        self.instance, self._levels, self._memory = instance, levels, costs.memory[levels]
        barred = np.isinf(costs.seconds[levels])  # the hottest counts of a table
        self._barred = np.add.reduceat(barred.astype(np.int64), instance.starts[:-1], axis=1)
        self._seconds, self._saved = np.where(barred, 0.0, costs.seconds[levels]), costs.saved[levels]
        self._copied = np.flatnonzero(np.isin(levels, gathering.levels))
        self._ways: tuple[bool, ...] = (False, True)
        if gathering.always:  # which nothing chooses any more
            self._seconds[self._copied] -= self._saved[self._copied]
            self._ways = (False,)

    def at(self, price: float) -> Allocation:
        """Those that cost least at a price of memory."""
        instance, starts = self.instance, self.instance.starts
        best = np.full(len(instance.tables), np.inf)
        cuts = np.zeros((len(instance.tables), self._levels.size - 1), np.int64)
        reduced = self._seconds + price * self._memory
        for way in product(self._ways, repeat=self._copied.size):
            gathered = self._copied[np.array(way, np.bool_)]
            values = reduced.copy() if gathered.size else reduced
            values[gathered] -= self._saved[gathered]
            for table, (start, end) in enumerate(pairwise(starts.tolist())):
                value, found = least_cuts(values[:, start:end], self._barred[:, table])
                if value < best[table]:
                    best[table], cuts[table] = value, found
        whole = starts[:-1, None] + cuts - 1
        rows = np.where(cuts > 0, instance.cum_rows[np.maximum(whole, 0)], 0)
        return allocation_of_cuts(instance, self._levels, rows)


def least_cuts(values: FloatArray, barred: IntArray) -> tuple[float, IntArray]:
    """Where the levels of one table end so that all counts together cost least, if the first so many counts may not be
    at each.

    Args:
        values: of each count at each level; shape (L, n).
        barred: of each level; shape (L,).

    Returns:
        what that costs, and how many counts are at the first 1, 2, ... levels; shape (L - 1,).
    """
    levels, counts = values.shape
    up_to = np.zeros((levels, counts + 1))
    np.cumsum(values, axis=1, out=up_to[:, 1:])
    number = np.arange(counts + 1)
    best = up_to[0].copy()
    if barred[0]:
        best[1:] = np.inf
    begins = []
    for level in range(1, levels):
        before = best - up_to[level]
        before[: barred[level]] = np.inf
        least = np.minimum.accumulate(before)
        at = np.maximum.accumulate(np.where(before == least, number, 0))
        value = up_to[level] + least
        better = value < best
        begins.append(np.where(better, at, number))
        best = np.where(better, value, best)
    cuts, end = np.zeros(levels - 1, np.int64), counts
    for level in range(levels - 1, 0, -1):
        end = cuts[level - 1] = begins[level - 1][end]
    return float(best[-1]), cuts
