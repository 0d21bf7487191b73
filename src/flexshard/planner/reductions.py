"""How gradients of copies are brought together: all rows of a replicated tier reduced, or those that were touched
gathered.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flexshard.costmodels import Cost, gathered_bytes, touched_rows
from flexshard.planner.named import Named
from flexshard.planner.solver.instance import Allocation, Instance

__all__ = ["REDUCTIONS", "Auto", "Dense", "Reduction", "Sparse", "cost_with_reductions"]

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]


class Reduction(Named):
    """Which tiers gather the rows that were touched instead of reducing all."""

    def sparse_tiers(self, instance: Instance, allocation: Allocation) -> BoolArray:
        """Tiers whose gradients are gathered; shape (T, G), in the instance's order of levels."""
        raise NotImplementedError


class Dense(Reduction):
    """All-reduce of every row."""

    name = "dense"

    def sparse_tiers(self, instance: Instance, allocation: Allocation) -> BoolArray:
        """None."""
        return np.zeros_like(_replicated(instance, allocation))


class Sparse(Reduction):
    """All-gather of the rows that were touched."""

    name = "sparse"

    def sparse_tiers(self, instance: Instance, allocation: Allocation) -> BoolArray:
        """All that have copies."""
        return _replicated(instance, allocation)


class Auto(Reduction):
    """Whichever is predicted to take less."""

    name = "auto"

    def sparse_tiers(self, instance: Instance, allocation: Allocation) -> BoolArray:
        """Per level the cheapest of: all tables dense, all sparse, or each the one with the smaller transfer (a level
        with both pays two latencies).
        """
        possible = _replicated(instance, allocation)
        chosen = np.zeros_like(possible)
        for level in np.flatnonzero(possible.any(axis=0)).tolist():
            size = int(instance.group_sizes[level])
            rates = instance.cluster.level(size)
            assert rates.all_reduce is not None
            assert rates.all_gather is not None
            sums = np.array([one.sum_bytes for one in instance.widths])[instance.table_kind]
            dense = allocation[:, level] * sums / size / rates.all_reduce.bytes_per_s
            touched = _touched(instance, allocation, level)
            tables = np.eye(len(instance.tables), dtype=bool)
            gathered = [_gathered_bytes(instance, allocation, table, level, touched) for table in tables]
            gathered_seconds = np.array(gathered) / rates.all_gather.bytes_per_s
            options = (
                np.zeros_like(possible[:, level]),
                possible[:, level],
                possible[:, level] & (gathered_seconds < dense),
            )
            alone = np.where(np.arange(allocation.shape[1]) == level, allocation, 0)

            def seconds(
                option: BoolArray, level: int = level, touched: FloatArray = touched, alone: Allocation = alone
            ) -> float:
                nbytes = _gathered_bytes(instance, allocation, option, level, touched)
                sparse = np.zeros_like(possible)
                sparse[:, level] = option
                size = int(instance.group_sizes[level])
                calls = instance.collectives(alone, np.zeros(alone.shape), sparse, {size: nbytes})
                return sum(one.seconds for one in calls if one.kind != "all_to_all")

            chosen[:, level] = min(options, key=seconds)
        return chosen


REDUCTIONS: dict[str, Reduction] = {one.name: one for one in (Dense(), Sparse(), Auto())}


def _replicated(instance: Instance, allocation: Allocation) -> BoolArray:
    """Tiers that hold rows with copies; shape (T, G)."""
    replicated: BoolArray = (allocation > 0) & (instance.group_sizes < instance.cluster.world_size)
    return replicated


def cost_with_reductions(instance: Instance, allocation: Allocation, sparse: BoolArray) -> Cost:
    """The six metrics of an allocation whose marked tiers gather the rows that were touched."""
    cost = instance.cost(allocation)
    if not sparse.any():
        return cost
    gathered = {
        int(instance.group_sizes[level]): _gathered_bytes(instance, allocation, sparse[:, level], level)
        for level in np.flatnonzero(sparse.any(axis=0)).tolist()
    }
    calls = instance.collectives(allocation, instance.tier_reads(allocation), sparse, gathered)
    return replace(cost, collectives=calls)


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


def _gathered_bytes(
    instance: Instance, allocation: Allocation, wanted: BoolArray, level: int, touched: FloatArray | None = None
) -> float:
    """Bytes that the wanted tables (shape (T,)) gather together at a level; ``touched`` where that is known already."""
    touched = _touched(instance, allocation, level) if touched is None else touched
    gradient_bytes = np.array([one.gradient_bytes for one in instance.widths])[instance.table_kind]
    size = int(instance.group_sizes[level])
    return gathered_bytes(instance.cluster, size, touched[wanted], gradient_bytes[wanted])
