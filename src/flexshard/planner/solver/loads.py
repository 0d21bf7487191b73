"""What the ranks of a placement look up and serve, from access profiles; for the memory of the fullest of them."""

from __future__ import annotations

from collections.abc import Callable
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
from flexshard.planner.solver.holders import HottestRows, holders_apart, hottest_rows
from flexshard.planner.solver.instance import Allocation, Instance
from flexshard.profiling import AccessProfile, LengthMoments
from flexshard.tables import Table

__all__ = ["fullest_rank_bytes", "held_beside_rows", "loads_of"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_KNOWN: WeakKeyDictionary[Instance, _Moments] = WeakKeyDictionary()
_BLOCK_COUNTS = 1 << 15


def fullest_rank_bytes(
    instance: Instance, allocation: Allocation, *, in_order: bool, holders: IntArray | None = None
) -> float | None:
    """Dynamic memory that the fullest rank of a step exceeds in one step of a thousand; None where a table's profile
    does not know how many ids samples have. Arguments as of :func:`flexshard.costmodels.fullest_bytes`; ``holders``, by
    default, as of :func:`holders_apart`.
    """
    if any(table.profile.lengths is None for table in instance.tables):
        return None
    loads = loads_of(instance, allocation, holders)
    return fullest_bytes(loads, instance.cluster.world_size, QUANTILE, in_order=in_order)


def held_beside_rows(instance: Instance) -> float:
    """Bytes that the fullest rank's dynamic memory is above the expected dynamic memory of any placement, at least:
    what lookups take besides rows that travel, and what these take besides their weights.
    """
    per_lookup, per_row = _lookup_bytes(instance)
    lookups = np.array([table.lookups(instance.batch_size) for table in instance.tables])
    return float(lookups @ per_lookup + instance.total_reads @ (per_row - instance.row_bytes))


def _lookup_bytes(instance: Instance) -> tuple[FloatArray, FloatArray]:
    """Of each table, per lookup and per row that travels, as :func:`lookup_bytes`; shape (T,) each."""
    both = np.array([lookup_bytes(one.row_bytes, one.gradient_bytes) for one in instance.widths])
    per_lookup, per_row = both[instance.table_kind].T
    return per_lookup, per_row


def loads_of(instance: Instance, allocation: Allocation, holders: IntArray | None = None) -> Loads:
    """Lookups of each table, by the level that serves them; ``holders`` as of :func:`holders_apart`."""
    tables = instance.tables
    per_lookup, per_row = _lookup_bytes(instance)
    gradient_bytes = np.array([one.gradient_bytes for one in instance.widths])[instance.table_kind]
    lookups = np.array([table.lookups(instance.batch_size) for table in tables])
    samples = [table.distinct_samples(instance.batch_size) for table in tables]
    reads, ends = instance.tier_reads(allocation), np.cumsum(allocation, axis=1)
    of_counts = _Moments.of(instance)
    hottest = hottest_rows(instance, allocation)
    holders = holders_apart(instance, hottest) if holders is None else holders
    variance, third, _ = of_counts.of_rows(ends[:, -1:], instance.groups_within)
    return Loads(
        lookups * per_lookup + reads.sum(axis=1) * per_row,
        lookups * (per_lookup + gradient_bytes),
        per_row,
        np.where(instance.deduplicated, variance[:, 0], 0.0),
        np.where(instance.deduplicated, third[:, 0], 0.0),
        np.stack(
            [_batch_lengths(table.profile.lengths, number) for table, number in zip(tables, samples, strict=True)]
        ),
        np.array([_length(table.profile, number) for table, number in zip(tables, samples, strict=True)]),
        [
            _served(instance, of_counts, level, ends, reads[:, level], of_level.turned(holders[:, level]))
            for level, of_level in hottest.items()
        ],
    )


class _Moments:
    """Second and third central moments of one rank's lookups of a row of each count, and their sums.

    Of ids that are sent once a row is a draw of a rank, of others one of each of its samples: then the second moment is
    w(1 - w/draws), and the third at most that. Rows that samples repeat have moments of their own.
    """

    def __init__(self, instance: Instance) -> None:
        tables, starts = instance.tables, instance.starts
        self._starts, self._cum_rows, self._reads = starts, instance.cum_rows, instance.reads
        self._cum_units, self._unit_reads = instance.cum_units, instance.unit_reads
        samples = np.array([one.distinct_samples(instance.batch_size) for one in tables])
        self._draws = np.where(instance.deduplicated, 1.0, samples)
        repeats = np.array([one.profile.samples is not None for one in tables]) & ~instance.deduplicated
        # Rows that are read more often than there are samples, though the profile does not know of repeats.
        more_than_draws = instance.reads[starts[:-1]] > self._draws
        self._own = repeats | more_than_draws
        sizes = np.diff(starts)
        self._own_starts = np.concatenate([[0], np.cumsum(np.where(self._own, sizes, 0))])
        self._own_moments = np.zeros((2, int(self._own_starts[-1])))
        self._own_sums = np.zeros((2, int(self._own_starts[-1]) + 1))
        for index in np.flatnonzero(self._own).tolist():
            start, end = self._own_starts[index : index + 2].tolist()
            part = slice(*starts[index : index + 2].tolist())
            draws, repeated = float(self._draws[index]), bool(repeats[index])
            moments = np.stack(_central_moments(tables[index], instance.reads[part], draws, repeats=repeated))
            self._own_moments[:, start:end] = moments
            added = moments * np.diff(instance.cum_rows[part], prepend=0)
            np.cumsum(added, axis=1, out=self._own_sums[:, start + 1 : end + 1])
            self._own_sums[:, start + 1 : end + 1] += self._own_sums[:, start, None]
        self._squares = np.zeros(instance.reads.size + 1)
        # A few tables at a time: what is between stays in the processor's cache.
        ends = np.searchsorted(starts, np.arange(_BLOCK_COUNTS, instance.reads.size, _BLOCK_COUNTS))
        for first, last in pairwise(np.unique([0, *ends, len(tables)]).tolist()):
            start, end = int(starts[first]), int(starts[last])
            added = instance.reads[start:end] ** 2
            rows = np.diff(instance.cum_rows[start:end], prepend=0)
            of_first = starts[first:last]
            rows[of_first - start] = instance.cum_rows[of_first]
            added *= rows
            added[0] += self._squares[start]
            np.cumsum(added, out=self._squares[start + 1 : end + 1])

    @classmethod
    def of(cls, instance: Instance) -> _Moments:
        """Of an instance, worked out once in a row."""
        known = _KNOWN.get(instance)
        if known is None:
            known = cls(instance)
            _KNOWN.clear()  # those of one at a time: they take as much memory as the instance
            _KNOWN[instance] = known
        return known

    def of_counts(self, groups: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """W, variance and third moment of a row of each table's counts; shapes as of ``groups``, (T, M)."""
        reads = self._reads[self._starts[:-1, None] + groups]
        variance = np.asarray(reads * (1 - reads / self._draws[:, None]))
        if not self._own.any():
            return reads, variance, variance
        at = np.minimum(self._own_starts[:-1, None] + groups, self._own_moments.shape[1] - 1)
        own, third = np.where(self._own[:, None], self._own_moments[:, at], variance)
        return reads, own, third

    def of_rows(
        self, ends: IntArray, groups_within: Callable[[IntArray], IntArray]
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Sums of variance, third moment and squared reads over each table's hottest rows; shapes as of ``ends``."""
        starts, whole = self._starts, groups_within(ends)
        at = starts[:-1, None] + whole
        before = np.maximum(at - 1, 0)
        inside = whole > 0
        partial = ends - np.where(inside, self._cum_rows[before], 0)
        following = np.minimum(whole, np.diff(starts)[:, None] - 1)
        reads, variance, third = self.of_counts(following)
        squares = self._squares[at] - self._squares[starts[:-1, None]]
        read = np.where(inside, self._cum_units[before], 0) * self._unit_reads[:, None]
        found = np.asarray(read - squares / self._draws[:, None], np.float64)
        of_whole = np.stack([found, found])
        if self._own.any():
            first = self._own_starts[:-1, None]
            own_at = np.minimum(first + whole, self._own_sums.shape[1] - 1)
            of_whole = np.where(self._own[:, None], self._own_sums[:, own_at] - self._own_sums[:, first], of_whole)
        return of_whole[0] + partial * variance, of_whole[1] + partial * third, squares + partial * reads**2


def _central_moments(table: Table, reads: FloatArray, draws: float, *, repeats: bool) -> tuple[FloatArray, FloatArray]:
    """Second and third, of the counts of a table that is read ``draws`` times."""
    variance = np.maximum(reads * (1 - reads / draws), 0.0)
    if not repeats:
        return variance, variance
    third = variance.copy()
    part = slice(0, table.profile.counts.size)
    reads, share = reads[part], table.profile.counts / table.profile.num_samples
    more = _repeats(share / table.profile.sample_share)  # a sample that contains a row repeats it so often
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
    ends: IntArray,
    reads: FloatArray,
    hottest: HottestRows,
) -> ServedRows:
    size, first, there = hottest.group_size, hottest.first, hottest.there
    hot, variance, third = (np.where(there, values, 0.0) for values in of_counts.of_counts(hottest.group))
    bounds = np.stack([np.minimum(first + there.shape[1], ends[:, level]), ends[:, level]], axis=1)
    rest = [np.maximum(np.diff(sums, axis=1)[:, 0], 0.0) for sums in of_counts.of_rows(bounds, instance.groups_within)]
    bursts = np.zeros((3, first.size))
    bursts[2] = 1.0
    for index, table in enumerate(instance.tables):
        if table.profile.bursts is None:
            continue
        samples = table.distinct_samples(instance.batch_size) * size
        bursts[:, index] = _burst(table.profile, samples, int(first[index]), int(ends[index, level]))
        if instance.deduplicated[index]:  # each rank asks for a row once
            bursts[:2, index] = np.minimum(bursts[:2, index], (size, 16 * size**2))
    return ServedRows(size, reads, hot, variance, third, hottest.holder, *rest, *bursts)


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
