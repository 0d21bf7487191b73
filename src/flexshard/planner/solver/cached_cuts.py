"""Where a table's last tier begins, and how long its rows stay in a cache, at prices of time and memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flexshard.planner.solver.cached_rows import CachedSums, Cuts, Options, Side, options_of
from flexshard.planner.solver.instance import Allocation
from flexshard.planner.solver.thresholds import allocate, thresholds

__all__ = ["cheapest"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def cheapest(
    sides: Sequence[Side], levels: IntArray, prices: tuple[float, float, float], batches: Sequence[int], cuts: Cuts
) -> tuple[Options, FloatArray]:
    """Of every table, looked up in each way, the best option without a cache, and with one, at prices of a second, of a
    byte of a rank's memory and of one of its host's; and what they cost so, shape (N,).

    Args:
        sides: with the same caches.
        levels: indices of the levels that may be used, ascending.
        prices: the first is 1, or 0 to count memory alone.
        batches: for which rows may stay; none where the last level is not the row-wise one, which caches are of.
        cuts: where the last tier may begin, if its rows are behind a cache.
    """
    weight, price, host_price = prices
    tables = np.arange(len(sides[0].instance.tables))
    found = []
    for side in sides:
        plain, _ = allocate(side.instance, levels, price if weight else np.inf)
        found.append(options_of(side, tables, plain, np.zeros_like(tables)))
    for side, (number, cut) in zip(sides, _best_cuts(sides, levels, prices, batches, cuts), strict=False):
        found.append(options_of(side, tables, _cut(side, levels, price if weight else np.inf, cut), number))
    both = Options.joined(found)
    return both, weight * both.seconds + price * both.hbm_bytes + host_price * both.host_bytes


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


def _best_cuts(
    sides: Sequence[Side], levels: IntArray, prices: tuple[float, float, float], batches: Sequence[int], cuts: Cuts
) -> list[tuple[IntArray, IntArray]]:
    """For how many batches each table's rows stay at these prices, and how many rows have copies; shape (T,) each, for
    each side. Empty where there are no caches to choose from.
    """
    caches, (weight, price, _) = sides[0].caches, prices
    if not batches:
        return []
    tables, ends = cuts.starts.size, cuts.starts + cuts.sizes - 1
    gains = [_gain_of_caches(side, levels, prices, cuts) for side in sides]
    best, number = np.full((len(sides), tables), np.inf), np.zeros((len(sides), tables), np.int64)
    for stays in batches:
        held, moved = caches.sums_at(cuts, stays)
        behind = price * held
        behind += weight * moved
        for index, gain in enumerate(gains):
            value = behind[ends]
            if gain is not None:
                value = value + np.minimum(np.minimum.reduceat(gain - behind, cuts.starts), 0.0)
            better = value < best[index]
            best[index] = np.where(better, value, best[index])
            number[index] = np.where(better, stays, number[index])
    return [
        (chosen, _rows_ahead(caches, gain, chosen, (price, weight), cuts))
        for chosen, gain in zip(number, gains, strict=True)
    ]


def _rows_ahead(
    caches: CachedSums,
    gain: FloatArray | None,
    number: IntArray,
    units: tuple[float, float],
    cuts: Cuts,
) -> IntArray:
    """Rows that had better have copies where those behind them stay in a cache for so many batches; shape (T,)."""
    if gain is None:
        return np.zeros(number.size, np.int64)
    moved = gain.copy()
    for stays in np.unique(number).tolist():
        mine = np.flatnonzero(np.repeat(number == stays, cuts.sizes))
        for unit, sums in zip(units, caches.sums_at(cuts, stays), strict=True):
            moved[mine] -= unit * sums[mine]
    least = np.minimum.reduceat(moved, cuts.starts)
    at = np.flatnonzero(moved == np.repeat(least, cuts.sizes))
    first = at[np.searchsorted(at, cuts.starts)]
    ahead = caches.instance.cum_rows[cuts.counts][first]
    return np.where(least < 0, ahead, 0)


def _gain_of_caches(side: Side, levels: IntArray, prices: tuple[float, float, float], cuts: Cuts) -> FloatArray | None:
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

    marks = thresholds(instance, copies, price if weight else np.inf)[instance.table_class]
    groups = instance.groups_at_least(marks)
    gain = -cost(last, host_price * instance.memory_fixed[:, last], nbytes, reads)
    all_bytes, all_reads = side.sums_at(side.caches.every_cut)
    before_bytes, before_reads = np.zeros(1), np.zeros(1)
    for index, level in enumerate(copies.tolist()):
        if index < copies.size - 1:  # sums grow with the counts, so those up to the tier's end are the lesser of both
            at = instance.starts[:-1] + groups[:, index] - 1
            inside = groups[:, index] > 0
            ends = (np.where(inside, sums[np.maximum(at, 0)], 0.0) for sums in (all_bytes, all_reads))
            up_to_bytes, up_to_reads = (
                np.minimum(sums, cuts.each(end)) for sums, end in zip((nbytes, reads), ends, strict=True)
            )
        else:
            up_to_bytes, up_to_reads = nbytes, reads
        held = price * instance.memory_fixed[:, level]
        gain += cost(level, held, up_to_bytes - before_bytes, up_to_reads - before_reads)
        before_bytes, before_reads = up_to_bytes, up_to_reads
    return gain
