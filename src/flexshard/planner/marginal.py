"""Memory and communication against row-wise as ever more rows are replicated (FlexShard paper, Figure 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import numpy as np
import numpy.typing as npt

from flexshard.planner.problem import FrontierOptions, Problem
from flexshard.planner.solver.deduplication import Variants
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["MarginalCurve", "marginal_curve"]

FloatArray = npt.NDArray[np.float64]

_TAKES = [name for name in FrontierOptions.__annotations__ if name not in ("host_memory", "reduction")]


@dataclass(frozen=True, eq=False)
class MarginalCurve:
    """Cumulative difference to row-wise when the hottest rows of all tables are replicated.

    Latencies are left out, as in the paper.

    Attributes:
        rows: how many rows are replicated, from 0 to all; shape (n,).
        memory_bytes: memory per rank less that of row-wise; shape (n,).
        seconds: exposed communication less that of row-wise; shape (n,).
        marks: index of the paper's four points by name: "greatest_memory_saving", "memory_neutral",
            "communication_neutral" and "full_replication".
        title: what was planned, in a few words.
    """

    rows: npt.NDArray[np.int64]
    memory_bytes: FloatArray
    seconds: FloatArray
    marks: dict[str, int]
    title: str = ""


def marginal_curve(
    tables: Problem | Sequence[Table], cluster: Cluster | None = None, **options: Unpack[FrontierOptions]
) -> MarginalCurve:
    """The curve of the paper's Figure 5 for data-parallel against row-wise; arguments as for :func:`pareto`."""
    problem = Problem.of(tables, cluster, options, takes=_TAKES).refusing_sharded("a marginal curve")
    instance = Variants(replace(problem, objective="communication", step=None)).fixed
    sizes = instance.group_sizes.tolist()
    dp, rw = sizes.index(1), sizes.index(problem.cluster.world_size)
    order = np.argsort(-instance.reads, kind="stable")
    table, reads, rows = instance.table_of_count[order], instance.reads[order], instance.rows_of_count[order]
    size = instance.row_bytes[table] * rows
    held = instance.table_memory_fixed[:, dp] - instance.table_memory_fixed[:, rw]
    memory = size * (held[table] + (instance.memory_per_read[dp] - instance.memory_per_read[rw]) * reads)
    fixed, per_read = (
        lines[:, dp] - lines[:, rw] for lines in (instance.table_comm_fixed, instance.table_comm_per_read)
    )
    seconds = size * (fixed[table] + per_read[table] * reads)
    cumulative = np.stack([np.concatenate([[0.0], np.cumsum(part)]) for part in (rows, memory, seconds)])
    cumulative, neutral = _with_crossing(cumulative)
    marks = {
        "greatest_memory_saving": int(cumulative[1].argmin()),
        "memory_neutral": neutral,
        "communication_neutral": int(cumulative[2].argmin()),
        "full_replication": cumulative.shape[1] - 1,
    }
    return MarginalCurve(np.rint(cumulative[0]).astype(np.int64), cumulative[1], cumulative[2], marks, problem.title)


def _with_crossing(points: FloatArray) -> tuple[FloatArray, int]:
    """The points with one more where memory (their second row) last crosses zero upwards, and its index.

    Rows of one count are interchangeable, so the curve is straight between two points.
    """
    last = int(np.flatnonzero(points[1] <= 0)[-1])
    if last == points.shape[1] - 1 or points[1, last] == 0:
        return points, last
    share = points[1, last] / (points[1, last] - points[1, last + 1])
    between = points[:, last] + share * (points[:, last + 1] - points[:, last])
    between[1] = 0.0
    return np.insert(points, last + 1, between, axis=1), last + 1
