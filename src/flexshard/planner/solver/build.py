"""From a problem to arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard.costmodels import row_lines
from flexshard.planner.problem import Problem
from flexshard.planner.solver.instance import Instance
from flexshard.tables import Table

__all__ = ["build_instance"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def build_instance(problem: Problem) -> Instance:
    """Arrays of a planning problem."""
    tables, cluster, batch_size = problem.tables, problem.cluster, problem.batch_size
    hidden, index_dedup = problem.hidden, problem.index_dedup
    translation, world_size = problem.translation, cluster.world_size
    shared = row_lines(cluster, 1.0, 1.0, hidden)
    sizes = np.array(shared.group_sizes, np.int64)
    # Data-parallel reads nothing from others, so it leads even where an overlap hides all of another's traffic.
    order = np.lexsort((sizes, shared.comm_per_read, sizes > 1))
    # Row-wise rows are dealt by id where they come last: then only the others need places.
    by_id = bool(sizes[order[-1]] == world_size)
    places = [translation.place_bytes(t.rows) / t.row_bytes if by_id else 0.0 for t in tables]
    classes: dict[tuple[float, float, float], int] = {}
    table_class = [
        classes.setdefault((t.kappa_replicated, t.kappa_sharded, place), len(classes))
        for t, place in zip(tables, places, strict=True)
    ]
    memory_fixed = [
        row_lines(cluster, replicated, sharded, hidden).memory_fixed + place * (sizes < world_size)
        for replicated, sharded, place in classes
    ]
    return Instance(
        tables,
        cluster,
        batch_size,
        hidden,
        index_dedup,
        sizes[order],
        np.stack(memory_fixed)[:, order],
        shared.memory_per_read[order],
        shared.comm_fixed[order],
        shared.comm_per_read[order],
        shared.alpha_seconds[order],
        np.array(table_class, np.int64),
        np.array([table.row_bytes for table in tables], np.float64),
        np.array([table.rows for table in tables], np.int64),
        *_concatenated(tables, batch_size, index_dedup),
        np.array([translation.held_bytes(table.rows, dealt_by_id=by_id) for table in tables], np.float64),
    )


def _concatenated(
    tables: Sequence[Table], batch_size: int, index_dedup: bool
) -> tuple[IntArray, FloatArray, IntArray, npt.NDArray[Any], FloatArray]:
    sizes = [t.profile.counts.size + (t.rows > t.profile.rows_read) for t in tables]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    reads = np.zeros(starts[-1], np.float64)
    cum_rows = np.zeros(starts[-1], np.int64)
    cum_units = np.zeros(starts[-1], np.float64 if index_dedup else np.int64)
    for table, start, end in zip(tables, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        profile, count = table.profile, table.profile.counts.size
        part = slice(start, start + count)
        reads[part] = table.reads(batch_size, index_dedup=index_dedup)
        np.cumsum(profile.rows, out=cum_rows[part])
        np.cumsum((reads[part] if index_dedup else profile.counts) * profile.rows, out=cum_units[part])
        cum_rows[start + count : end] = table.rows
        cum_units[start + count : end] = cum_units[start + count - 1]
    unit_reads = np.array(
        [1.0 if index_dedup else table.distinct_samples(batch_size) / table.profile.num_samples for table in tables]
    )
    return starts, reads, cum_rows, cum_units, unit_reads
