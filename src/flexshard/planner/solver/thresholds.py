"""From a price of memory to tiers: thresholds on w from the lower envelope of the group sizes' lines."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard.planner.solver.instance import Allocation, Instance

__all__ = ["allocate", "allocation_of_cuts", "crossing_prices", "thresholds", "thresholds_at"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def thresholds(instance: Instance, levels: IntArray, price: float) -> FloatArray:
    """The w down to which rows belong to the first 1, 2, ... of some levels, when memory has a price.

    Line i of the levels is ``a_i + b_i·w``, with b ascending. The first j levels beat the others at w if one of them
    is at most every other: ``w >= min_{i<j} max_{k>=j} (a_i - a_k) / (b_k - b_i)``.

    Args:
        levels: indices into the instance's levels, ascending; shape (L,).
        price: λ, seconds per byte; infinite to count memory alone.

    Returns:
        shape (C, L - 1), one row per class of tables.
    """
    (marks,) = thresholds_at(instance, levels, np.array([price]))
    return np.asarray(marks)


def thresholds_at(instance: Instance, levels: IntArray, prices: FloatArray) -> FloatArray:
    """:func:`thresholds` of each of some prices, shape (P,); shape (P, C, L - 1)."""
    memory_fixed, memory_per_read = instance.memory_fixed[:, levels], instance.memory_per_read[levels]
    each = prices[:, None, None]
    alone = np.isinf(each)
    with np.errstate(divide="ignore", invalid="ignore"):
        a = np.where(alone, memory_fixed, instance.comm_fixed[:, levels] + each * memory_fixed)
        b = np.where(alone, memory_per_read, instance.comm_per_read[:, levels] + each * memory_per_read)
        above = a[..., :, None] - a[..., None, :]
        gained = b[..., None, :] - b[..., :, None]
        crossing = np.where(gained > 0, above / gained, np.where(above <= 0, -np.inf, np.inf))
    marks = np.empty((prices.size, len(memory_fixed), levels.size - 1))
    for j in range(1, levels.size):
        marks[..., j - 1] = crossing[..., :j, j:].max(axis=-1).min(axis=-1)
    return marks


def allocate(instance: Instance, levels: IntArray, price: float) -> tuple[Allocation, FloatArray]:
    """The allocation that minimises communication plus ``price`` times memory, and its tiers' reads.

    Returns:
        rows and reads per table and tier, shape (T, G) each, none where a level is not among ``levels``. A table with a
        row too hot for all of these has infinitely many reads.
    """
    if instance.most_reads is None:
        return _in_ranges(instance, levels, thresholds(instance, levels, price)[instance.table_class])
    return _limited(instance, levels, price, instance.most_reads[:, levels])


def _in_ranges(instance: Instance, levels: IntArray, marks: FloatArray) -> tuple[Allocation, FloatArray]:
    """Rows and reads of tiers that end at w of these marks, shape (T, L - 1)."""
    rows, units = instance.of_groups(instance.groups_at_least(marks))
    reads = _spread(instance, levels, units, instance.total_units) * instance.unit_reads[:, None]
    return allocation_of_cuts(instance, levels, rows), reads.astype(np.float64, copy=False)


def _limited(instance: Instance, levels: IntArray, price: float, most: FloatArray) -> tuple[Allocation, FloatArray]:
    """As :func:`allocate`, with w limited at each level; ``most`` of shape (T, L).

    A level's rows are colder than those of the levels before it, and so under their limits as well: a table may be
    better off without a level whose limit is lower than that of one behind it.
    """
    skippable = [j for j in range(levels.size - 1) if np.any(most[:, j] < most[:, j + 1 :].max(axis=1))]
    hottest = instance.reads[instance.starts[:-1]]
    if not skippable:  # the usual case, with nothing to compare
        limits = np.minimum.accumulate(most, axis=1)
        there = (hottest <= limits[:, 0])[:, None]
        rows, reads = _in_ranges(instance, levels, _marks(instance, levels, price, limits))
        return np.where(there, rows, 0), np.where(there, reads, np.inf)
    shape = len(instance.tables), instance.group_sizes.size
    best, rows, reads = np.full(shape[0], np.inf), np.zeros(shape, np.int64), np.full(shape, np.inf)
    for count in range(len(skippable) + 1):
        for skipped in combinations(skippable, count):
            kept = np.array([j for j in range(levels.size) if j not in skipped])
            limits = np.minimum.accumulate(most[:, kept], axis=1)
            own_rows, own_reads = _in_ranges(instance, levels[kept], _marks(instance, levels[kept], price, limits))
            seconds, memory = instance.per_table(own_rows, own_reads)
            value = memory if np.isinf(price) else seconds + price * memory
            better = (value < best) & (hottest <= limits[:, 0])
            best, rows[better], reads[better] = np.where(better, value, best), own_rows[better], own_reads[better]
    return rows, reads


def _marks(instance: Instance, levels: IntArray, price: float, limits: FloatArray) -> FloatArray:
    """The w down to which each table's rows belong to the first 1, 2, ... levels, shape (T, L - 1), where no row above
    ``limits``, shape (T, L), descending from level to level, may be at one.

    Rows too hot for level j are among the first j whatever follows, and choose among these alone.
    """
    marks = thresholds(instance, levels, price)[instance.table_class]
    above = np.nextafter(limits, np.inf)
    for j in range(1, levels.size):
        marks[:, j - 1] = np.minimum(marks[:, j - 1], above[:, j])
        if j > 1:
            among = thresholds(instance, levels[:j], price)[instance.table_class]
            marks[:, : j - 1] = np.minimum(marks[:, : j - 1], np.maximum(among, above[:, j, None]))
    return marks


def allocation_of_cuts(instance: Instance, levels: IntArray, cuts: IntArray) -> Allocation:
    """Rows per tier from the ranks at which tiers end; cuts of shape (T, L - 1)."""
    return _spread(instance, levels, cuts, instance.num_rows)


def _spread(
    instance: Instance, levels: IntArray, cumulative: npt.NDArray[Any], total: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Differences of cumulative sums (of the first levels, and the total), in the columns of their levels."""
    edges = np.concatenate([np.zeros_like(total)[:, None], cumulative, total[:, None]], axis=1)
    result = np.zeros((total.size, instance.group_sizes.size), total.dtype)
    result[:, levels] = np.diff(edges, axis=1)
    return result


def crossing_prices(instance: Instance, levels: IntArray, most: int) -> FloatArray:
    """Prices just beside which some count changes between two of the levels, free memory and memory alone."""
    prices: list[FloatArray] = [np.array([np.inf])]
    step = max(1, instance.reads.size // most)
    reads = np.unique(instance.reads[::step])
    for i, k in combinations(levels.tolist(), 2):
        per_read = instance.memory_per_read[k] - instance.memory_per_read[i]
        for fixed, comm_fixed, comm_per_read in zip(
            instance.memory_fixed, instance.comm_fixed, instance.comm_per_read, strict=True
        ):
            memory = fixed[k] - fixed[i] + per_read * reads
            comm = comm_fixed[k] - comm_fixed[i] + (comm_per_read[k] - comm_per_read[i]) * reads
            with np.errstate(divide="ignore", invalid="ignore"):
                crossing = -comm / memory
            prices.append(crossing[np.isfinite(crossing) & (crossing > 0)])
    crossings = np.unique(np.concatenate(prices))
    if crossings.size > most:
        crossings = crossings[np.unique(np.linspace(0, crossings.size - 1, most).astype(np.int64))]
    least = float(crossings[0]) * 1e-9 if np.isfinite(crossings[0]) else 1e-30
    beside = np.concatenate([crossings * (1 - 1e-9), crossings * (1 + 1e-9)])
    return np.concatenate([beside[np.isfinite(beside)], [least, np.inf]])
