"""The allocations of many prices of memory at once, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexshard.planner.solver.instance import Instance
from flexshard.planner.solver.thresholds import thresholds_at

__all__ = ["Vertices", "vertices_at"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_AT_ONCE = 200_000  # tables times prices


@dataclass(frozen=True)
class Vertices:
    """Allocations that each are the best at a price; arrays of shape (P,), of rows (P, G).

    Attributes:
        memory_bytes: per rank.
        exposed_seconds: per iteration.
        waits_seconds: the part of it in which ranks wait for the owners of the hottest rows.
        rows: of all tables, per level.
    """

    memory_bytes: FloatArray
    exposed_seconds: FloatArray
    waits_seconds: FloatArray
    rows: IntArray


def vertices_at(instance: Instance, levels: IntArray, prices: FloatArray) -> Vertices:
    """What :func:`~flexshard.planner.solver.thresholds.allocate` gives at each price, as an instance without limits of
    w and without gathering counts it.

    Args:
        levels: indices into the instance's levels, ascending; shape (L,).
        prices: seconds per byte, infinite to count memory alone; shape (P,).
    """
    number = max(1, _AT_ONCE // len(instance.tables))
    parts = [_vertices(instance, levels, prices[at : at + number]) for at in range(0, prices.size, number)]
    return Vertices(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("memory_bytes", "exposed_seconds", "waits_seconds", "rows")
        )
    )


def _vertices(instance: Instance, levels: IntArray, prices: FloatArray) -> Vertices:
    marks = thresholds_at(instance, levels, prices)[:, instance.table_class]  # (P, T, L - 1)
    shape = len(instance.tables), prices.size, levels.size - 1
    cuts = instance.groups_at_least(marks.transpose(1, 0, 2).reshape(shape[0], -1))
    ends, units = (one.reshape(shape) for one in instance.of_groups(cuts))
    rows = _differences(ends, instance.num_rows)
    reads = (_differences(units, instance.total_units) * instance.unit_reads[:, None, None]).astype(np.float64)

    first = instance.starts[:-1, None, None] + np.insert(cuts.reshape(shape), 0, 0, axis=2)
    hottest = np.where(rows > 0, instance.reads[np.minimum(first, instance.reads.size - 1)], 0.0)
    waits = (instance.hot_seconds_per_read[:, None, levels] * hottest).max(axis=0).sum(axis=1)

    def summed(fixed: FloatArray, per_read: FloatArray) -> FloatArray:
        return np.asarray(np.einsum("t,tpl->p", instance.row_bytes, rows * fixed[:, None] + reads * per_read))

    memory = summed(instance.table_memory_fixed[:, levels], instance.memory_per_read[levels])
    seconds = summed(instance.table_comm_fixed[:, levels], instance.table_comm_per_read[:, None, levels])
    by_level = np.zeros((prices.size, instance.group_sizes.size), np.int64)
    by_level[:, levels] = rows.sum(axis=0)
    used, which = np.unique(by_level > 0, axis=0, return_inverse=True)
    latency = np.array([instance.latency_seconds(one) for one in used])[which.reshape(-1)]
    return Vertices(memory + instance.held_bytes, seconds + latency + waits, waits, by_level)


def _differences(cumulative: npt.NDArray[np.int64], total: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Of cumulative sums of the first tiers, shape (T, P, L - 1), and the total; shape (T, P, L)."""
    whole = np.broadcast_to(total[:, None, None], (*cumulative.shape[:2], 1))
    return np.diff(np.concatenate([cumulative, whole], axis=2), axis=2, prepend=0)
