"""How gradients of copies are brought together: all rows of a replicated tier reduced, or those that were touched
gathered.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flexshard.costmodels import Collective, Cost, collective, gathered_bytes, sparse_reduction, touched_rows
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
            dense = allocation[:, level] * instance.row_bytes / size / rates.all_reduce.bytes_per_s
            touched = _touched(instance, allocation, level)
            tables = np.eye(len(instance.tables), dtype=bool)
            gathered = [_gathered_bytes(instance, touched, table, size) for table in tables]
            gathered_seconds = np.array(gathered) / rates.all_gather.bytes_per_s
            options = (
                np.zeros_like(possible[:, level]),
                possible[:, level],
                possible[:, level] & (gathered_seconds < dense),
            )

            def seconds(option: BoolArray, level: int = level, touched: FloatArray = touched) -> float:
                return sum(c.seconds for c in _reductions(instance, allocation, option, level, touched))

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
    others = tuple(c for c in cost.collectives if c.kind == "all_to_all")
    reductions = tuple(
        c
        for level in np.flatnonzero(allocation.any(axis=0)).tolist()
        if instance.group_sizes[level] < instance.cluster.world_size
        for c in _reductions(instance, allocation, sparse[:, level], level, _touched(instance, allocation, level))
    )
    merged = sorted(others + reductions, key=lambda c: (c.kind, c.group_size))
    return replace(cost, collectives=tuple(merged))


def _reductions(
    instance: Instance, allocation: Allocation, sparse: BoolArray, level: int, touched: FloatArray
) -> tuple[Collective, ...]:
    """Collectives that bring one level's gradients together; ``touched`` as :func:`_touched` gives it."""
    size, rows = int(instance.group_sizes[level]), allocation[:, level]
    document = []
    if (rows[~sparse] > 0).any():
        rate = instance.cluster.level(size).all_reduce
        assert rate is not None
        reduced = float(instance.row_bytes[~sparse] @ rows[~sparse]) / size
        document.append(collective("all_reduce", size, rate, reduced, instance.overlap))
    if sparse.any():
        gathered = _gathered_bytes(instance, touched, sparse, size)
        document.append(sparse_reduction(instance.cluster, size, gathered, instance.overlap))
    return tuple(document)


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


def _gathered_bytes(instance: Instance, touched: FloatArray, wanted: BoolArray, size: int) -> float:
    """Bytes that the wanted tables (shape (T,)) gather together."""
    return gathered_bytes(instance.cluster, size, touched[wanted], instance.row_bytes[wanted])
