"""Which replicated tiers gather the rows that were touched instead of reducing all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flexshard.costmodels import Collective, Cost, dense_reduction, gathered_bytes, sparse_reduction, touched_rows
from flexshard.planner._instance import Allocation, Instance

__all__ = ["cost_with_reductions", "sparse_tiers"]

BoolArray = npt.NDArray[np.bool_]


def sparse_tiers(instance: Instance, allocation: Allocation, reduction: str) -> BoolArray:
    """Tiers whose gradients are gathered; shape (T, G), in the instance's order of levels.

    With "auto", per level the cheapest of: all tables dense, all sparse, or each the one with the smaller transfer (a
    level with both pays two latencies).
    """
    replicated = instance.group_sizes < instance.cluster.world_size
    possible = (allocation > 0) & replicated
    if reduction == "dense":
        return np.zeros_like(possible)
    if reduction == "sparse":
        return possible
    chosen = np.zeros_like(possible)
    for level in np.flatnonzero(possible.any(axis=0)).tolist():
        size = int(instance.group_sizes[level])
        rates = instance.cluster.level(size)
        assert rates.all_reduce is not None
        assert rates.all_gather is not None
        dense = allocation[:, level] * instance.row_bytes / size / rates.all_reduce.bytes_per_s
        gathered = [
            _gathered_bytes(instance, allocation, np.arange(len(instance.tables)) == t, level)
            for t in range(len(instance.tables))
        ]
        gathered_seconds = np.array(gathered) / rates.all_gather.bytes_per_s
        options = (
            np.zeros_like(possible[:, level]),
            possible[:, level],
            possible[:, level] & (gathered_seconds < dense),
        )
        chosen[:, level] = min(
            options, key=lambda option: sum(c.seconds for c in _reductions(instance, allocation, option, level))
        )
    return chosen


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
        for c in _reductions(instance, allocation, sparse[:, level], level)
    )
    merged = sorted(others + reductions, key=lambda c: (c.kind, c.group_size))
    return replace(cost, collectives=tuple(merged))


def _reductions(instance: Instance, allocation: Allocation, sparse: BoolArray, level: int) -> tuple[Collective, ...]:
    """Collectives that bring one level's gradients together."""
    size, rows = int(instance.group_sizes[level]), allocation[:, level]
    found = []
    if (rows[~sparse] > 0).any():
        reduced = float(instance.row_bytes[~sparse] @ rows[~sparse]) / size
        found.append(dense_reduction(instance.cluster, size, reduced, instance.overlap))
    if sparse.any():
        gathered = _gathered_bytes(instance, allocation, sparse, level)
        found.append(sparse_reduction(instance.cluster, size, gathered, instance.overlap))
    return tuple(found)


def _gathered_bytes(instance: Instance, allocation: Allocation, wanted: BoolArray, level: int) -> float:
    """Bytes that the wanted tables (shape (T,)) gather together at a level."""
    size = int(instance.group_sizes[level])
    first = np.cumsum(allocation, axis=1) - allocation
    chosen = np.flatnonzero(wanted & (allocation[:, level] > 0)).tolist()
    touched = [
        touched_rows(instance.tables[t], instance.batch_size, size, int(first[t, level]), int(allocation[t, level]))
        for t in chosen
    ]
    return gathered_bytes(instance.cluster, size, touched, instance.row_bytes[chosen].tolist())
