"""From a problem to arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flexshard.costmodels import LocalRates, Overlap, RowWidths, idle_seconds, kind_of, row_lines
from flexshard.planner.reductions import Reduction
from flexshard.planner.solver.instance import Instance
from flexshard.planner.solver.local_work import LocalShares, seconds_per_read
from flexshard.planner.translations import Translation
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["ToPlan", "all_once", "build_instance"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
_Counts = tuple[IntArray, IntArray, FloatArray, npt.NDArray[Any], FloatArray]


class ToPlan(Protocol):
    """A problem, as far as its arrays go."""

    @property
    def tables(self) -> tuple[Table, ...]: ...  # noqa: D102 - as a Problem has them
    @property
    def cluster(self) -> Cluster: ...  # noqa: D102 - as a Problem has it
    @property
    def batch_size(self) -> int: ...  # noqa: D102 - as a Problem has it
    @property
    def hidden(self) -> Overlap: ...  # noqa: D102 - as a Problem has it
    @property
    def translation(self) -> Translation: ...  # noqa: D102 - as a Problem has it
    @property
    def index_dedup(self) -> bool | str: ...  # noqa: D102 - as a Problem has it
    @property
    def index_dedup_seconds_per_id(self) -> float: ...  # noqa: D102 - as a Problem has it
    @property
    def rates(self) -> LocalRates | None: ...  # noqa: D102 - as a Problem has them, where they count
    @property
    def local_shares(self) -> LocalShares: ...  # noqa: D102 - as an Instance has them
    @property
    def objective(self) -> str: ...  # noqa: D102 - as a Problem has it
    @property
    def reduction(self) -> Reduction: ...  # noqa: D102 - as a Problem has it


def build_instance(
    problem: ToPlan,
    deduplicated: npt.NDArray[np.bool_] | None = None,
    order: IntArray | None = None,
    like: Instance | None = None,
) -> Instance:
    """Arrays of a planning problem.

    Args:
        problem: what to plan.
        deduplicated: tables whose ids are sent once per batch, shape (T,); none by default.
        order: of the cluster's levels; by their time per read by default.
        like: of the same tables and batches, with the ids of the same tables sent once: has the same counts.
    """
    tables, cluster, batch_size = problem.tables, problem.cluster, problem.batch_size
    hidden, translation, world_size = problem.hidden, problem.translation, cluster.world_size
    once = np.zeros(len(tables), np.bool_) if deduplicated is None else deduplicated
    # Ids travel as slots, of which a rank has at least its share of the rows.
    id_bytes = 4 if sum(-(-table.rows // world_size) for table in tables) < 1 << 31 else 8
    sizes = np.array(cluster.group_sizes, np.int64)
    # Data-parallel reads nothing from others, so it leads even where an overlap hides all of another's traffic.
    per_read = row_lines(tables[0], cluster, hidden, id_bytes=id_bytes).comm_per_read
    order = np.lexsort((sizes, per_read, sizes > 1)) if order is None else order
    # Row-wise rows are dealt by id where they come last: then only the others need places.
    by_id = bool(sizes[order[-1]] == world_size)
    _, more = problem.local_shares.of(seconds_per_read(tables, problem.rates))
    row_wise_more = dict(zip((table.name for table in tables), more.tolist(), strict=True))
    members: dict[tuple[Any, ...], int] = {}
    first: list[Table] = []
    table_class = []
    for table in tables:
        key = *kind_of(table), table.kappa_replicated, translation.place_bytes(table.rows), row_wise_more[table.name]
        if key not in members:
            members[key] = len(first)
            first.append(table)
        table_class.append(members[key])
    lines = [row_lines(table, cluster, hidden, id_bytes=id_bytes) for table in first]
    # All rows with copies are updated, whichever were read.
    sweep = 0.0 if problem.rates is None else problem.rates.sweep
    swept = np.where(sizes < world_size, sweep / sizes, 0.0)
    places = [translation.place_bytes(table.rows) / table.row_bytes if by_id else 0.0 for table in first]
    fixed = [line.memory_fixed + place * (sizes < world_size) for line, place in zip(lines, places, strict=True)]
    kinds = {kind: index for index, kind in enumerate(dict.fromkeys(kind_of(table) for table in tables))}
    widths = {kinds[kind_of(table)]: RowWidths.of_table(table) for table in reversed(first)}
    shared = [widths[index] for index in range(len(kinds))]
    always = idle_seconds(cluster, (), shared, hidden)
    return Instance(
        tables,
        cluster,
        batch_size,
        hidden,
        once,
        id_bytes,
        sizes[order],
        np.stack(fixed)[:, order],
        lines[0].memory_per_read[order],
        np.stack([line.comm_fixed + swept for line in lines])[:, order],
        np.stack(
            [
                line.comm_per_read + by_id * (sizes == world_size) * row_wise_more[table.name] / table.row_bytes
                for table, line in zip(first, lines, strict=True)
            ]
        )[:, order],
        np.array([idle_seconds(cluster, [size], shared, hidden) - always for size in sizes[order].tolist()]),
        always,
        np.array([table.lookups(batch_size) for table in tables]) * problem.index_dedup_seconds_per_id,
        np.array(table_class, np.int64),
        np.array([kinds[kind_of(table)] for table in tables], np.int64),
        tuple(shared),
        np.array([table.row_bytes for table in tables], np.float64),
        np.array([table.rows for table in tables], np.int64),
        *(_concatenated(tables, batch_size, once) if like is None else _counts_of(like)),
        np.array([translation.held_bytes(table.rows, dealt_by_id=by_id) for table in tables], np.float64),
        problem.rates,
        problem.objective == "step",
        problem.local_shares,
    )


def all_once(plain: Instance, like: Instance | None = None) -> Instance:
    """The same problem with the ids of every table sent once per batch, from that with all sent; ``like`` as for
    :func:`build_instance`.
    """
    once = np.ones(len(plain.tables), np.bool_)
    if like is None:
        reads, cum_units, unit_reads = _reads_of(plain.tables, plain.batch_size, plain.starts, once)
    else:
        reads, cum_units, unit_reads = like.reads, like.cum_units, like.unit_reads
    return replace(plain, deduplicated=once, reads=reads, cum_units=cum_units, unit_reads=unit_reads)


def _counts_of(like: Instance) -> _Counts:
    return like.starts, like.cum_rows, like.reads, like.cum_units, like.unit_reads


def _concatenated(tables: Sequence[Table], batch_size: int, deduplicated: npt.NDArray[np.bool_]) -> _Counts:
    sizes = [t.profile.counts.size + (t.rows > t.profile.rows_read) for t in tables]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    cum_rows = np.zeros(starts[-1], np.int64)
    for table, start, end in zip(tables, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        count = table.profile.counts.size
        np.cumsum(table.profile.rows, out=cum_rows[start : start + count])
        cum_rows[start + count : end] = table.rows
    return starts, cum_rows, *_reads_of(tables, batch_size, starts, deduplicated)


def _reads_of(
    tables: Sequence[Table], batch_size: int, starts: IntArray, deduplicated: npt.NDArray[np.bool_]
) -> tuple[FloatArray, npt.NDArray[Any], FloatArray]:
    """Of the counts of tables that start there: reads, units up to and including each, and reads of a unit."""
    reads = np.zeros(starts[-1], np.float64)
    # Wider than a float64 where the platform has it, so that differences of sums of whole numbers stay exact.
    cum_units = np.zeros(starts[-1], np.longdouble if deduplicated.any() else np.int64)
    for index, (table, start, end) in enumerate(zip(tables, starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        profile, once = table.profile, bool(deduplicated[index])
        part = slice(start, start + profile.counts.size)
        reads[part] = table.reads(batch_size, index_dedup=once)
        np.cumsum((reads[part] if once else profile.counts) * profile.rows, out=cum_units[part])
        cum_units[part.stop : end] = cum_units[part.stop - 1]
    unit_reads = [
        1.0 if once else table.distinct_samples(batch_size) / table.profile.num_samples
        for table, once in zip(tables, deduplicated.tolist(), strict=True)
    ]
    return reads, cum_units, np.array(unit_reads)
