"""Where a table's last tier begins, and how long its rows stay in a cache, at prices of time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from flexshard.planner.solver.cached_rows import Options, Side, options_and_least, options_of
from flexshard.planner.solver.cached_sums import CachedSums, Cuts, Prices, Range, least_of
from flexshard.planner.solver.instance import Allocation
from flexshard.planner.solver.thresholds import allocate, thresholds

__all__ = ["Between", "cheapest"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Between = Literal["looked at", "bounded", "left out"]  # counts between some

_ROUNDING = 1e-12  # relative, of sums over a table's counts: those of rows that any cache keeps are alike


def cheapest(
    sides: Sequence[Side],
    levels: IntArray,
    prices: Prices,
    batches: Sequence[int],
    *,
    between: Between,
    host_bytes: float = np.inf,
) -> tuple[Options, FloatArray, FloatArray]:
    """Of every table, looked up in each way, the best option without a cache, and with one, at prices of a second, of a
    byte of a rank's memory and of one of its host's; what they cost so; and what all that are like them cost at least,
    where a batch need not fit into its cache. Shape (N,) each.

    Args:
        sides: with the same caches.
        levels: indices of the levels that may be used, ascending.
        prices: the first is 1, or 0 to count memory alone.
        batches: for which rows may stay; none where the last level is not the row-wise one, which caches are of.
        between: whether the last tier may begin behind every count, if its rows are behind a cache, or behind some;
            or behind some while what is said of all holds for every count, which takes a third of the time.
        host_bytes: of the host's memory: rows that a table cannot have there even alone, but for those of a count, are
            not behind its cache.
    """
    weight, price, host_price = prices
    tables = np.arange(len(sides[0].instance.tables))
    found, loose, slack = [], [], [np.zeros((len(sides), tables.size))]
    for side in sides:
        plain, _ = allocate(side.instance, levels, price if weight else np.inf)
        found.append(options_of(side, tables, plain, np.zeros_like(tables)))
        loose.append(found[-1])
    first = _first_cuts(sides[0].caches, host_bytes)
    best = _best_cuts(sides, levels, prices, batches, first, between=between)
    for side, (number, cut, less) in zip(sides, best, strict=False):
        rows = _cut(side, levels, price if weight else np.inf, cut)
        options, least = options_and_least(side, tables, rows, number)
        found.append(options)
        loose.append(least)
        slack.append(less[None])

    def priced(options: Options) -> FloatArray:
        return weight * options.seconds + price * options.hbm_bytes + host_price * options.host_bytes

    both = Options.joined(found)
    return both, priced(both), priced(Options.joined(loose)) - np.concatenate(slack).ravel()


def _cut(side: Side, levels: IntArray, price: float, cut: IntArray) -> Allocation:
    """Rows per level where the last one begins at ``cut``, shape (T,)."""
    instance, copies = side.instance, levels[:-1]
    result = np.zeros((cut.size, instance.group_sizes.size), np.int64)
    result[:, levels[-1]] = instance.num_rows - cut
    if copies.size:
        marks = thresholds(instance, copies, price)[instance.table_class]
        rows, _ = instance.of_groups(instance.groups_at_least(marks))
        edges = np.minimum(np.concatenate([rows, instance.num_rows[:, None]], axis=1), cut[:, None])
        result[:, copies] = np.diff(edges, axis=1, prepend=0)
    return result


def _first_cuts(caches: CachedSums, host_bytes: float) -> IntArray:
    """The first count behind which the last tier of each table may begin, if its rows are to fit the host's memory; -1
    where all do; shape (T,).
    """
    instance = caches.instance
    if np.isinf(host_bytes):
        return np.full(instance.num_rows.size, -1)
    ahead = instance.num_rows - np.floor(host_bytes / caches.row_host_bytes)
    whole = instance.groups_within(np.maximum(ahead, 0).astype(np.int64)[:, None], np.arange(ahead.size))[:, 0]
    return np.where(whole > 0, instance.starts[:-1] + whole - 1, -1)


def _best_cuts(
    sides: Sequence[Side],
    levels: IntArray,
    prices: Prices,
    batches: Sequence[int],
    first: IntArray,
    *,
    between: Between,
) -> list[tuple[IntArray, IntArray, FloatArray]]:
    """For how many batches each table's rows stay at these prices, how many rows have copies, and by how much a choice
    that was not looked at may be cheaper; shape (T,) each, for each side. Empty where there are no caches.
    """
    if not batches:
        return []
    caches = sides[0].caches
    cuts, intervals = caches.some_cuts, caches.intervals
    # Where it may begin first, that may be best though it grows better all the way to there.
    begun = np.zeros(intervals.last.size, np.bool_)
    begun[np.searchsorted(intervals.last, first[first >= 0])] = True
    at_first = intervals.cuts(begun)
    behind = [_behind(caches, cuts, stays, prices) for stays in batches]
    found = []
    for side in sides:
        gain = _gain_of_caches(side, levels, prices, cuts)
        best = _Best.nothing(first)
        for stays, each in zip(batches, behind, strict=True):
            best.take(stays, each[cuts.ends], None if gain is None else gain - each, cuts)
        if gain is not None and at_first.counts.size:
            gain_there = _gain_of_caches(side, levels, prices, at_first)
            assert gain_there is not None
            for stays, each in zip(batches, behind, strict=True):
                best.take(stays, each[cuts.ends], gain_there - _behind(caches, at_first, stays, prices), at_first)
        slack = np.zeros(cuts.sizes.size)
        if gain is not None and between != "left out":
            of = side, levels, prices, dict(zip(batches, behind, strict=True)), gain, best
            slack = _look_between(*of, bounded=between == "bounded")
        rows = np.where(best.count < 0, 0, caches.instance.cum_rows[np.maximum(best.count, 0)])
        found.append((best.stays, rows, slack))
    return found


def _behind(caches: CachedSums, cuts: Cuts, stays: int, prices: Prices) -> FloatArray:
    """What places and fetches of the rows up to some counts cost; shape (P,)."""
    (weight, price, _), (held, moved) = prices, caches.sums_at(cuts, stays)
    return np.asarray(price * held + weight * moved)


@dataclass(eq=False)
class _Best:
    """The best choice of every table so far.

    Attributes:
        value: what it costs more than a cache of which places and fetches cost nothing; shape (T,).
        stays: for how many batches rows stay; shape (T,).
        count: the last one with copies, -1 for none; shape (T,).
        first: which it may be, as of :func:`_first_cuts`; shape (T,).
    """

    value: FloatArray
    stays: IntArray
    count: IntArray
    first: IntArray

    @classmethod
    def nothing(cls, first: IntArray) -> _Best:
        return cls(np.full(first.size, np.inf), np.zeros(first.size, np.int64), np.full(first.size, -1), first)

    def take(self, stays: int, behind: FloatArray, change: FloatArray | None, cuts: Cuts) -> None:
        """Let rows stay for so many batches where that is better.

        Args:
            stays: them.
            behind: what places and fetches of all rows of a table cost; shape (T,).
            change: what it costs more to have copies of the rows up to some counts; shape (P,). None where there are
                no copies.
            cuts: these counts.
        """
        none = np.where(self.first < 0, 0.0, np.inf)  # of the rows with copies
        least, count = none, np.full(behind.size, -1)
        if change is not None:
            least, count = least_of(np.where(cuts.counts >= self.first[cuts.table], change, np.inf), cuts)
        value = behind + np.minimum(least, none)
        better = value < self.value
        self.value = np.where(better, value, self.value)
        self.stays = np.where(better, stays, self.stays)
        self.count = np.where(better, np.where(least < none, count, -1), self.count)


def _look_between(
    side: Side,
    levels: IntArray,
    prices: Prices,
    behind: Mapping[int, FloatArray],
    gain: FloatArray,
    best: _Best,
    *,
    bounded: bool,
) -> FloatArray:
    """Look at the counts between those that were looked at, where one of them may be better: in intervals in which
    copies of one more row may cost more or less, and that are not too dear whatever these rows cost. By how much what
    was not looked at may be better, shape (T,): by nothing, unless all are ``bounded`` and none is looked at.
    """
    caches, cuts = side.caches, side.caches.some_cuts
    intervals, table = caches.intervals, caches.intervals.table
    gains = intervals.gains(side.instance, levels, _tier_ends(side, levels, prices), prices)
    nbytes, _ = side.sums_at(cuts)
    nbytes = nbytes - cuts.before(nbytes)
    of_bytes = [intervals.places_and_fetches(stays, prices) for stays in behind]
    bounds = np.stack(
        [
            each[cuts.ends][table] + _least_between(gain - each, gains, costs, nbytes, cuts)
            for each, costs in zip(behind.values(), of_bytes, strict=True)
        ]
    )
    live = (intervals.last > intervals.first) & (intervals.last >= best.first[table]) & (bounds < best.value[table])
    if bounded or not live.any():
        return best.value - np.minimum.reduceat(np.where(live, bounds, best.value[table]).min(axis=0), cuts.starts)
    some = np.flatnonzero(live.any(axis=0))
    following = np.stack([each[cuts.ends][table[some]] - cuts.before(each)[some] for each in behind.values()])
    of_some = np.array([[one[some] for one in costs] for costs in of_bytes])
    live[:, some] &= ~_dominated(bounds[:, some], following, of_some, nbytes[some])
    union = np.asarray(live.any(axis=0))
    every, sizes = intervals.cuts(union), (intervals.last - intervals.first)[union]
    gain_between = _gain_of_caches(side, levels, prices, every)
    assert gain_between is not None
    for (stays, each), mask in zip(behind.items(), live, strict=True):
        if mask.any():
            between = intervals.cuts(mask)
            change = gain_between[np.repeat(mask[union], sizes)] - _behind(caches, between, stays, prices)
            best.take(stays, each[cuts.ends], change, between)
    return np.zeros(cuts.sizes.size)


def _least_between(change: FloatArray, gains: Range, costs: Range, nbytes: FloatArray, cuts: Cuts) -> FloatArray:
    """The least that a change may be between two cuts, where it is known at both; infinite where it is at one of them.
    Shape (P,), as all of these.

    Args:
        change: up to each cut, from 0 before a table's first one.
        gains, costs: the least and the most by which a byte of the rows in between makes it more, and less.
        nbytes: of these rows.
    """
    falls, rises = gains[0] - costs[1], gains[1] - costs[0]
    inside = (falls < 0) & (rises > 0)
    before = cuts.before(change)
    # At worst it falls as fast as it can, and then rises as fast as it can to where it ends.
    falling = (rises * nbytes - (change - before)) / np.where(inside, rises - falls, 1.0)
    return np.where(inside, before + falls * np.clip(falling, 0.0, nbytes), np.inf)


def _dominated(
    bounds: FloatArray, following: FloatArray, of_bytes: FloatArray, nbytes: FloatArray
) -> npt.NDArray[np.bool_]:
    """For which numbers of batches an interval need not be looked at, since another one is no worse wherever in it the
    last tier begins; shape (numbers, n).

    Args:
        bounds: the least that each may cost; shape (numbers, n).
        following: what places and fetches of the rows from the interval's first on cost; shape (numbers, n).
        of_bytes: the least and the most that those of a byte in it cost; shape (numbers, 2, n).
        nbytes: in it; shape (n,).
    """
    best = bounds.argmin(axis=0)
    intervals = np.arange(best.size)
    least_of_best = of_bytes[best, 0, intervals]
    more = following - following[best, intervals] + np.minimum(least_of_best - of_bytes[:, 1], 0.0) * nbytes
    result = more >= -_ROUNDING * following
    result[best, intervals] = False
    return np.asarray(result)


def _tier_ends(side: Side, levels: IntArray, prices: Prices) -> IntArray:
    """How many counts of each table are in the tiers of copies up to each but the last, if all rows have copies; shape
    (T, M - 1).
    """
    weight, price, _ = prices
    marks = thresholds(side.instance, levels[:-1], price if weight else np.inf)[side.instance.table_class]
    return side.instance.groups_at_least(marks)


def _gain_of_caches(side: Side, levels: IntArray, prices: Prices, cuts: Cuts) -> FloatArray | None:
    """What the rows of a table up to some counts cost more with copies than behind a cache, but for its places and
    fetches; shape (P,). None where there are no copies.
    """
    copies, last = levels[:-1], int(levels[-1])
    if not copies.size:
        return None
    instance, (weight, price, host_price) = side.instance, prices
    nbytes, reads = side.sums_at(cuts)

    def cost(level: int, held: FloatArray, nbytes: FloatArray, reads: FloatArray) -> FloatArray:
        """Of rows at a level, where a byte of weights costs ``held``, by class of tables."""
        fixed = (weight * instance.comm_fixed[:, level] + held)[instance.table_class]
        per_read = (weight * instance.comm_per_read[:, level] + price * instance.memory_per_read[level])[
            instance.table_class
        ]
        return np.asarray(cuts.each(fixed) * nbytes + cuts.each(per_read) * reads)

    groups = _tier_ends(side, levels, prices)
    gain = -cost(last, host_price * instance.memory_fixed[:, last], nbytes, reads)
    tables = np.arange(instance.table_class.size)
    before_bytes, before_reads = np.zeros(1), np.zeros(1)
    for index, level in enumerate(copies.tolist()):
        if index < copies.size - 1:  # sums grow with the counts, so those up to the tier's end are the lesser of both
            at = instance.starts[:-1] + groups[:, index] - 1
            inside = groups[:, index] > 0
            ends = (np.where(inside, sums, 0.0) for sums in side.sums(np.maximum(at, 0), tables))
            up_to_bytes, up_to_reads = (
                np.minimum(sums, cuts.each(end)) for sums, end in zip((nbytes, reads), ends, strict=True)
            )
        else:
            up_to_bytes, up_to_reads = nbytes, reads
        held = price * instance.memory_fixed[:, level]
        gain += cost(level, held, up_to_bytes - before_bytes, up_to_reads - before_reads)
        before_bytes, before_reads = up_to_bytes, up_to_reads
    return gain
