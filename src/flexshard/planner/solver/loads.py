"""What the ranks of a placement look up and serve, from access profiles; for the memory of the fullest of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from flexshard.costmodels import (
    BATCH_SHARES,
    QUANTILE,
    Loads,
    ServedRows,
    batch_lengths,
    fullest_bytes,
    lookup_bytes,
)
from flexshard.planner.solver.instance import Allocation, Instance
from flexshard.profiling import AccessProfile, LengthMoments, splitmix64
from flexshard.tables import Table

__all__ = ["fullest_rank_bytes", "loads_of"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_KNOWN: WeakKeyDictionary[Instance, _Moments] = WeakKeyDictionary()
_HOT_ROWS = 1 << 16  # looked at one by one, of all tables and levels together
_MOST_PLACES = 1 << 22
_BLOCK_COUNTS = 1 << 15


def fullest_rank_bytes(instance: Instance, allocation: Allocation, *, in_order: bool) -> float | None:
    """Dynamic memory that the fullest rank of a step exceeds in one step of a thousand; None where a table's profile
    does not know how many ids samples have. Arguments as of :func:`flexshard.costmodels.fullest_bytes`.
    """
    if any(table.profile.lengths is None for table in instance.tables):
        return None
    loads = loads_of(instance, allocation)
    return fullest_bytes(loads, instance.cluster.world_size, QUANTILE, in_order=in_order)


def loads_of(instance: Instance, allocation: Allocation) -> Loads:
    """Lookups of each table, by the level that serves them."""
    tables = instance.tables
    both = np.array([lookup_bytes(one.row_bytes, one.gradient_bytes) for one in instance.widths])
    per_lookup, per_row = both[instance.table_kind].T
    gradient_bytes = np.array([one.gradient_bytes for one in instance.widths])[instance.table_kind]
    lookups = np.array([table.lookups(instance.batch_size) for table in tables])
    samples = [table.distinct_samples(instance.batch_size) for table in tables]
    reads, ends = instance.tier_reads(allocation), np.cumsum(allocation, axis=1)
    levels = np.flatnonzero((instance.group_sizes > 1) & allocation.any(axis=0)).tolist()
    hot_rows = int(np.clip(_HOT_ROWS // (len(tables) * max(len(levels), 1)), 16, 4096))
    of_counts = _Moments.of(instance)
    return Loads(
        lookups * per_lookup + reads.sum(axis=1) * per_row,
        lookups * (per_lookup + gradient_bytes),
        per_row,
        np.stack(
            [_batch_lengths(table.profile.lengths, number) for table, number in zip(tables, samples, strict=True)]
        ),
        np.array([_length(table.profile, number) for table, number in zip(tables, samples, strict=True)]),
        [_served(instance, of_counts, level, allocation, ends, reads[:, level], hot_rows) for level in levels],
    )


class _Moments:
    """Second and third central moments of one rank's lookups of a row of each count; shape (K,) each."""

    def __init__(self, instance: Instance) -> None:
        starts, count = instance.starts, instance.reads.size
        self._starts, self._cum_rows, self._reads = starts, instance.cum_rows, instance.reads
        # Of rows that samples read once, the third moment is at most the second.
        self._repeats = any(one.profile.samples is not None for one in instance.tables)
        self.variance = np.empty(count)
        self.third = np.empty(count) if self._repeats else self.variance
        self._sums = [np.zeros(count + 1) for _ in range(3 if self._repeats else 2)]
        # A few tables at a time: what is between stays in the processor's cache.
        ends = np.searchsorted(starts, np.arange(_BLOCK_COUNTS, count, _BLOCK_COUNTS))
        for first, last in pairwise(np.unique([0, *ends, len(instance.tables)]).tolist()):
            part = slice(int(starts[first]), int(starts[last]))
            self.variance[part], self.third[part] = variance, third = _central_moments(instance, first, last)
            rows = np.diff(instance.cum_rows[part], prepend=0)
            of_first = starts[first:last]
            rows[of_first - part.start] = instance.cum_rows[of_first]
            for sums, values in zip(self._sums, (variance, instance.reads[part] ** 2, third), strict=False):
                added = values * rows
                added[0] += sums[part.start]
                np.cumsum(added, out=sums[part.start + 1 : part.stop + 1])

    @classmethod
    def of(cls, instance: Instance) -> _Moments:
        """Of an instance, worked out once in a row."""
        known = _KNOWN.get(instance)
        if known is None:
            known = cls(instance)
            _KNOWN.clear()  # those of one at a time: they take as much memory as the instance
            _KNOWN[instance] = known
        return known

    def of_rows(
        self, ends: IntArray, groups_within: Callable[[IntArray], IntArray]
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Sums of variance, third moment and squared reads over each table's hottest rows; shapes as of ``ends``."""
        starts, cum_rows = self._starts, self._cum_rows
        whole = groups_within(ends)
        at = starts[:-1, None] + whole
        before = np.where(whole > 0, cum_rows[np.maximum(at - 1, 0)], 0)
        following = np.minimum(at, starts[1:, None] - 1)
        first = starts[:-1, None]
        values = self.variance[following], self._reads[following] ** 2, self.third[following]
        found = [
            np.asarray(sums[at] - sums[first] + (ends - before) * each)
            for each, sums in zip(values, self._sums, strict=False)
        ]
        return found[0], found[2] if self._repeats else found[0], found[1]


def _central_moments(instance: Instance, first: int, last: int) -> tuple[FloatArray, FloatArray]:
    """Second and third, of the counts of tables ``first`` to ``last``."""
    tables, starts = instance.tables[first:last], instance.starts[first : last + 1]
    w = instance.reads[starts[0] : starts[-1]]
    samples = np.array([one.distinct_samples(instance.batch_size) for one in tables])
    # Of ids that are sent once, a draw of a rank; of others, one of each of its samples.
    variance = w / np.repeat(np.where(instance.deduplicated[first:last], -1.0, -samples), np.diff(starts))
    variance += 1.0
    np.maximum(variance, 0.0, out=variance)
    variance *= w
    third = variance.copy() if any(one.profile.samples is not None for one in tables) else variance
    for one, start, once in zip(tables, starts - starts[0], instance.deduplicated[first:last], strict=False):
        if one.profile.samples is None or once:
            continue
        part = slice(int(start), int(start) + one.profile.counts.size)
        reads, share = w[part], one.profile.counts / one.profile.num_samples
        more = _repeats(share / one.profile.sample_share)  # a sample that contains a row repeats it so often
        variance[part] = reads * np.maximum(1 + more - share, 0.0)
        third[part] = reads * np.maximum(1 + 3 * more + more**2 - 3 * share * (1 + more) + 2 * share**2, 0.0)
    return variance, third


def _repeats(often: FloatArray) -> FloatArray:
    """Mean of a Poisson distribution that has this mean where it is not 0: how often samples that may read a row do."""
    mean = np.maximum(2 * (often - 1), 1e-12)
    for _ in range(30):
        above_0 = -np.expm1(-mean)
        slope = (above_0 - mean * np.exp(-mean)) / above_0**2
        mean = np.maximum(mean - (mean / above_0 - often) / np.maximum(slope, 0.4), 1e-12)
    return np.asarray(np.where(often > 1 + 1e-9, mean, 0.0))


@lru_cache(maxsize=4096)
def _batch_lengths(lengths: LengthMoments | None, samples: float) -> FloatArray:
    if lengths is None or lengths.total == 0:
        return np.ones(BATCH_SHARES.size)
    known = lengths.values
    if known is None:  # in profiles of earlier releases: as if samples were of two lengths, equally often
        deviation = np.sqrt(lengths.variance)
        known = np.maximum(lengths.mean + np.array([-deviation, deviation]), 0.0), np.array([0.5, 0.5])
    return batch_lengths(*known, samples)


def _served(
    instance: Instance,
    of_counts: _Moments,
    level: int,
    allocation: Allocation,
    ends: IntArray,
    reads: FloatArray,
    hot_rows: int,
) -> ServedRows:
    size, rows = int(instance.group_sizes[level]), allocation[:, level]
    first = ends[:, level] - rows
    position = first[:, None] + np.arange(hot_rows)
    there = np.arange(hot_rows) < rows[:, None]
    group = instance.starts[:-1, None] + instance.groups_within(np.where(there, position, 0))
    group = np.minimum(group, instance.starts[1:, None] - 1)
    hot, variance, third = (
        np.where(there, values[group], 0.0) for values in (instance.reads, of_counts.variance, of_counts.third)
    )
    bounds = np.stack([np.minimum(first + hot_rows, ends[:, level]), ends[:, level]], axis=1)
    rest = [np.maximum(np.diff(sums, axis=1)[:, 0], 0.0) for sums in of_counts.of_rows(bounds, instance.groups_within)]
    last = size == instance.cluster.world_size and level == instance.group_sizes.size - 1
    holder = (position - first[:, None]) % size
    if last:
        holder = _dealt_by_id(instance.tables, position, there, holder, size)
    bursts = np.zeros((3, rows.size))
    bursts[2] = 1.0
    for index, table in enumerate(instance.tables):
        if table.profile.bursts is None:
            continue
        samples = table.distinct_samples(instance.batch_size) * size
        bursts[:, index] = _burst(table.profile, samples, int(first[index]), int(ends[index, level]))
        if instance.deduplicated[index]:  # each rank asks for a row once
            bursts[:2, index] = np.minimum(bursts[:2, index], (size, 16 * size**2))
    return ServedRows(size, reads, hot, variance, third, holder, *rest, *bursts)


def _dealt_by_id(
    tables: Sequence[Table], position: IntArray, there: npt.NDArray[np.bool_], holder: IntArray, size: int
) -> IntArray:
    """Which of ``size`` ranks hold the rows at these places of each table, dealt by id, shape (T, k); of rows whose ids
    the profile does not know, any, and of tables without rows there those of ``holder``.
    """
    dealt = (splitmix64(position, 1) % np.uint64(size)).astype(np.int64)
    for index, table in enumerate(tables):
        profile = table.profile
        if profile.row_counts is None or not there[index, 0]:
            continue
        places, known = int(position[index, 0]), int(there[index].sum())
        if places + known <= _MOST_PLACES:
            ids = profile.hottest_rows(places + known)
            placed, hot = np.sort(ids[:places]), ids[places:]
            dealt[index, : hot.size] = (hot - np.searchsorted(placed, hot)) % size
    return np.where(there[:, :1], dealt, holder)


def _length(profile: AccessProfile, samples: float) -> float:
    """Most ids of so many consecutive samples, as a multiple of the expected."""
    if profile.bursts is None or not profile.bursts.windows:
        return 1.0
    sizes = [one.size for one in profile.bursts.windows]
    most = [float(one.lengths.max()) / (one.size * profile.avg_length) for one in profile.bursts.windows]
    return max(_between(samples, sizes, most), 1.0)


def _burst(profile: AccessProfile, samples: float, first: int, end: int) -> tuple[float, float, float]:
    """Of so many consecutive samples: most lookups of one row among those from ``first`` to ``end``, most of the sum of
    the next ones' squares, most lookups in all.
    """
    if profile.bursts is None or not profile.bursts.windows or first == end:
        return 0.0, 0.0, 1.0
    sizes, hottest, squares = [], [], []
    # Of rows that are read equally often it is not known which are hotter.
    cumulative, ascending = np.concatenate([[0], np.cumsum(profile.rows)]), profile.counts[::-1]
    for one in profile.bursts.windows:
        ahead = profile.counts.size - np.searchsorted(ascending, one.totals, side="right")
        through = profile.counts.size - np.searchsorted(ascending, one.totals, side="left")
        here = (one.counts > 0) & (cumulative[through] > first) & (cumulative[ahead] < end)
        counts = np.where(here, one.counts, 0).astype(np.float64)
        most = counts.max(axis=1)
        sizes.append(one.size)
        hottest.append(float(most.max()))
        squares.append(float(((counts**2).sum(axis=1) - most**2).max()))
    # Fewer samples than any stretch have no more than they hold.
    most_ids = np.inf if profile.lengths is None else max(samples, 1.0) * profile.lengths.maximum
    return (
        min(_between(samples, sizes, hottest, power=1), most_ids),
        min(_between(samples, sizes, squares, power=2), most_ids**2),
        _length(profile, samples),
    )


def _between(samples: float, sizes: list[int], values: list[float], power: int = 0) -> float:
    """A value for so many samples from those for others: straight between their logarithms, growing with a power of
    their number beyond the largest.
    """
    known = float(np.expm1(np.interp(np.log(samples), np.log(sizes), np.log1p(values))))
    return known * max(samples / sizes[-1], 1.0) ** power
