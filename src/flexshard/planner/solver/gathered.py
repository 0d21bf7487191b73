"""Placements whose copies' gradients may be gathered row by row, instead of reduced whole (docs/model.md, "Replicated
tiers").

What it takes to gather a row is no straight line in its reads, since a row is touched once however often it is read.
So at a price of memory every count is priced by itself at every level, in whichever way it takes less; that bounds all
placements from below (Lagrange). Placements are ranges of rows, and all of a tier's are gathered or none: the best of
these at the price are found by a pass over each table's counts. What a placement takes is then worked out as a whole:
latencies, and that all copies send as many rows as the one that has most.

Legend: T tables, G levels, L of them in use, K counts, as of :mod:`flexshard.planner.solver.instance`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flexshard.costmodels import (
    NUMBER_BYTES,
    CollectiveKind,
    gathered_bytes,
    hidden_share,
    row_reduction_seconds,
    touched_rows,
)
from flexshard.planner.solver.bisection import bisect_floats, first_passing
from flexshard.planner.solver.gathered_ranges import RangesInOrder, costs_of_counts
from flexshard.planner.solver.instance import Allocation, Instance
from flexshard.planner.solver.rounding import fill
from flexshard.planner.solver.solution import Solution
from flexshard.planner.solver.thresholds import allocate
from flexshard.topologies import CollectiveRate

__all__ = [
    "MANY_COUNTS",
    "cheapest_tiers",
    "gathered_of_tiers",
    "least_of_tables",
    "reduced_seconds",
    "replicated",
    "saved_of_tiers",
    "solve_gathered",
]

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MANY_COUNTS = 5_000_000  # of which not all are priced one by one if all tiers are gathered: a gigabyte
_CHEAPER = (0.99, 0.9, 0.5, 0.0)
_FULL = 1e-6  # of memory, that is not worth being filled
_BITS = 36  # of prices that are not told apart, of 52
_CALLS: tuple[tuple[CollectiveKind, str], ...] = (
    ("all_reduce", "replicas"),
    ("all_reduce", "touched"),
    ("all_gather", "touched_rows"),
)


# -- what a placement takes


def _touched(instance: Instance, allocation: Allocation, level: int) -> FloatArray:
    """Mean and variance of the rows of each table's tier that a rank's group touches; shape (T, 2)."""
    first = (np.cumsum(allocation, axis=1) - allocation)[:, level].tolist()
    size, rows = int(instance.group_sizes[level]), allocation[:, level].tolist()
    return np.array(
        [
            touched_rows(table, instance.batch_size, size, start, number) if number else (0.0, 0.0)
            for table, start, number in zip(instance.tables, first, rows, strict=True)
        ]
    )


def _gathered_bytes(instance: Instance, wanted: BoolArray, level: int, touched: FloatArray) -> float:
    """Bytes that the wanted tables (shape (T,)) gather together at a level."""
    gradient_bytes = np.array([one.gradient_bytes for one in instance.widths])[instance.table_kind]
    size = int(instance.group_sizes[level])
    return gathered_bytes(instance.cluster, size, touched[wanted], gradient_bytes[wanted], instance.table_kind[wanted])


def gathered_of_tiers(
    instance: Instance, allocation: Allocation, sparse: BoolArray, touched: FloatArray | None = None
) -> dict[int, float]:
    """Expected buffer of each level's all-gather, by its g, with these tiers (T, G) gathered; ``touched`` (G, T, 2)."""
    found = {}
    for level in np.flatnonzero(sparse.any(axis=0)).tolist():
        own = _touched(instance, allocation, level) if touched is None else touched[level]
        found[int(instance.group_sizes[level])] = _gathered_bytes(instance, sparse[:, level], level, own)
    return found


def _seconds_at(instance: Instance, rows: IntArray, wanted: BoolArray, level: int, touched: FloatArray) -> float:
    """Exposed time of bringing a level's gradients together, where those of the wanted tables are gathered; as
    :meth:`Instance.collectives` has it.

    Args:
        rows: of each table there; shape (T,).
        wanted: shape (T,).
        touched: see :func:`_touched`.
    """
    size, seconds = int(instance.group_sizes[level]), 0.0
    reduce, gather, shown = _rates(instance, level)
    whole = np.where(wanted, 0, rows) @ _sum_bytes(instance) / size
    if whole:
        seconds += shown["replicas"] * reduce.seconds(float(whole))
    if np.any(wanted & (rows > 0)):
        seconds += shown["touched"] * reduce.seconds(NUMBER_BYTES * len(instance.widths))
        nbytes = _gathered_bytes(instance, wanted, level, touched)
        seconds += shown["touched_rows"] * gather.seconds(nbytes)
    return float(seconds)


def _sum_bytes(instance: Instance) -> FloatArray:
    """Of a row of each table in an all-reduce; shape (T,)."""
    return np.array([one.sum_bytes for one in instance.widths], np.float64)[instance.table_kind]


def _rates(instance: Instance, level: int) -> tuple[CollectiveRate, CollectiveRate, dict[str, float]]:
    """Of a level's all-reduce and all-gather, and the share of each content that is not hidden."""
    size = int(instance.group_sizes[level])
    rates = instance.cluster.level(size)
    assert rates.all_reduce is not None
    assert rates.all_gather is not None
    shown = {content: 1 - hidden_share(instance.overlap, kind, size, content) for kind, content in _CALLS}
    return rates.all_reduce, rates.all_gather, shown


def _cheapest_at(instance: Instance, allocation: Allocation, level: int) -> BoolArray:
    """Which tables gather at a level: none, all that are there, or each by what it moves, since a level with both pays
    for two kinds of calls.
    """
    rows, touched = allocation[:, level], _touched(instance, allocation, level)
    possible, (reduce, gather, _) = rows > 0, _rates(instance, level)
    dense = rows * _sum_bytes(instance) / instance.group_sizes[level] / reduce.bytes_per_s
    gathered = np.zeros(rows.size)
    for table in np.flatnonzero(possible).tolist():
        gathered[table] = _gathered_bytes(instance, np.arange(rows.size) == table, level, touched)
    options = [np.zeros_like(possible), possible, possible & (gathered / gather.bytes_per_s < dense)]
    seconds = [_seconds_at(instance, rows, option, level, touched) for option in options]
    return np.asarray(options[int(np.argmin(seconds))])


def cheapest_tiers(instance: Instance, allocation: Allocation) -> BoolArray:
    """Tiers whose gradients had better be gathered; shape (T, G)."""
    chosen = np.zeros(allocation.shape, np.bool_)
    for level in np.flatnonzero(replicated(instance, allocation).any(axis=0)).tolist():
        chosen[:, level] = _cheapest_at(instance, allocation, level)
    return chosen


def replicated(instance: Instance, allocation: Allocation) -> BoolArray:
    """Tiers that hold rows with copies; shape (T, G)."""
    held: BoolArray = (allocation > 0) & (instance.group_sizes < instance.cluster.world_size)
    return held


def reduced_seconds(instance: Instance, allocation: Allocation, sparse: BoolArray) -> float:
    """Exposed communication with these tiers gathered, shape (T, G)."""
    seconds, none = instance.exposed_seconds(allocation), np.zeros(len(sparse), np.bool_)
    for level in np.flatnonzero(sparse.any(axis=0)).tolist():
        touched = _touched(instance, allocation, level)
        seconds += _seconds_at(instance, allocation[:, level], sparse[:, level], level, touched)
        seconds -= _seconds_at(instance, allocation[:, level], none, level, touched)
    return seconds


def saved_of_tiers(instance: Instance, allocation: Allocation) -> FloatArray:
    """Seconds, without latencies, that each tier takes less if its gradients are gathered; shape (T, G)."""
    saved = np.zeros(allocation.shape)
    for level in np.flatnonzero(replicated(instance, allocation).any(axis=0)).tolist():
        size = int(instance.group_sizes[level])
        rates = [row_reduction_seconds(instance.cluster, size, one, instance.overlap) for one in instance.widths]
        reduced, gathered = np.array(rates)[instance.table_kind].T
        touched = _touched(instance, allocation, level)[:, 0] * size  # of a rank's share
        saved[:, level] = allocation[:, level] * reduced - touched * gathered
    return saved


# -- which placement takes least


def least_of_tables(instance: Instance, levels: IntArray, price: float) -> tuple[FloatArray, FloatArray]:
    """Seconds and memory of each table whose every count is where it costs least at a price of memory, reduced or
    gathered as takes less: no placement at these levels costs less; shape (T,) each.

    A table with a row too hot for all of these levels takes infinitely long.
    """
    assert instance.gathering is not None
    always = instance.gathering.always and instance.reads.size <= MANY_COUNTS
    by_count = always or instance.most_reads is not None
    if by_count:
        costs = costs_of_counts(instance, every=True)
        seconds, nbytes = _least_at(price, levels, costs.gathered if always else costs.less, costs.memory)
        starts = instance.starts[:-1]
        return np.add.reduceat(seconds, starts), np.add.reduceat(nbytes, starts)
    # All counts at their best if reduced, and those that had better be gathered.
    costs = costs_of_counts(instance, every=False)
    found = instance.per_table(*allocate(instance, levels, price))
    seconds, nbytes = _least_at(price, levels, costs.less, costs.memory)
    without = _least_at(price, levels, costs.seconds, costs.memory)
    saved, kept = (
        np.bincount(costs.table, values, minlength=len(instance.tables))
        for values in (seconds - without[0], nbytes - without[1])
    )
    return found[0] + saved, found[1] + kept


def _least_at(price: float, levels: IntArray, seconds: FloatArray, memory: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Seconds and memory, shape (n,) each, of every count at the first level where it costs least at a price of memory;
    of these at all levels, shape (G, n) each.
    """
    first, *others = levels.tolist()
    best = seconds[first], memory[first]
    least = seconds[first] + price * memory[first]
    for level in others:
        cost = seconds[level] + price * memory[level]
        better = cost < least
        best = np.where(better, seconds[level], best[0]), np.where(better, memory[level], best[1])
        np.copyto(least, cost, where=better)
    return best


def solve_gathered(
    instance: Instance, levels: IntArray, limit_bytes: float, prices: tuple[float, float]
) -> Solution | None:
    """The best placement that was found at these levels, with a bound of all that leaves out how much longer hot rows
    make them; None where none fits.

    Args:
        limit_bytes: of memory.
        prices: at the least of which memory only breaks ties, and at the most of which time only does.
    """
    latency, held = instance.latency_seconds(levels), instance.held_bytes

    def at(price: float) -> tuple[float, float]:
        seconds, memory = least_of_tables(instance, levels, price)
        return float(seconds.sum()), float(memory.sum()) + held

    def fits(price: float) -> bool:
        return at(price)[1] <= limit_bytes

    low, high = prices
    if not (np.isfinite(at(high)[0]) and fits(high)):
        return None
    if fits(low):
        bound, high = at(0.0)[0], low
    else:
        low, high = bisect_floats(low, high, fits, bits=_BITS)
        bound = -np.inf
        for price in (low, high):
            seconds, memory = at(price)
            bound = max(bound, seconds + price * (memory - limit_bytes))
    in_order = RangesInOrder(instance, levels)
    inside = _within(in_order, high, prices[1], limit_bytes)
    if inside is None:
        return None
    filled = inside
    for price in (low, *(share * high for share in _CHEAPER)):
        if instance.memory_bytes(filled) >= limit_bytes * (1 - _FULL):
            break
        filled = fill(instance, filled, in_order.at(price), limit_bytes)
    found = [inside, filled]
    seconds, best = min(((_seconds(instance, one), one) for one in found), key=lambda one: one[0])
    return Solution(best, seconds, min(bound + latency, seconds), high if low < high else 0.0, levels)


def _seconds(instance: Instance, allocation: Allocation) -> float:
    assert instance.gathering is not None
    whole = replace(instance, gathering=None)  # whose latencies are those of reductions
    return reduced_seconds(whole, allocation, instance.gathering.tiers_of(whole, allocation))


def _within(in_order: RangesInOrder, price: float, most: float, limit: float) -> Allocation | None:
    """The best ranges at the price, up to ``most``, at which they fit, which may be far above that of their counts."""
    tried: dict[float, Allocation] = {}

    def fits(price: float) -> bool:
        tried[price] = in_order.at(price)
        return in_order.instance.memory_bytes(tried[price]) <= limit

    found = first_passing(price, most, fits)
    return None if found is None else tried[found]
