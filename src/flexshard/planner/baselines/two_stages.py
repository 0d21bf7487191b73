"""A plan's own placement, if repeated ids were sent once a node: priced beside it, and not run."""

from __future__ import annotations

import numpy as np

from flexshard.costmodels import Cost, NodeReads, RowWidths, has_two_stages, two_stage_cost
from flexshard.planner.problem import Problem
from flexshard.planner.solver.instance import Allocation, Instance
from flexshard.tables import Table

__all__ = ["once_per_node"]


def once_per_node(problem: Problem, instance: Instance, allocation: Allocation, cost: Cost) -> Cost | None:
    """What a placement would cost (``cost`` as it is). None where no table that sends ids once has rows
    without copies, or the cluster has no nodes of several ranks.
    """
    levels = np.flatnonzero(instance.group_sizes == problem.cluster.world_size)
    if not levels.size or not has_two_stages(problem.cluster):
        return None
    level = int(levels[0])  # tiers are in order of time, so it need not be the last
    held, ends = allocation[:, level], allocation[:, : level + 1].sum(axis=1)
    once = np.flatnonzero(instance.deduplicated & (held > 0))
    if not once.size:
        return None
    by_rank = instance.tier_reads(allocation)[:, level]
    samples = problem.batch_size * problem.cluster.ranks_per_node
    tables = [
        NodeReads(
            RowWidths.of_table(instance.tables[index]),
            float(by_rank[index]),
            _distinct(instance.tables[index], int(ends[index] - held[index]), int(ends[index]), samples),
        )
        for index in once.tolist()
    ]
    return two_stage_cost(
        cost,
        problem.cluster,
        tables,
        problem.hidden,
        id_bytes=instance.id_bytes,
        seconds_per_id=problem.index_dedup_seconds_per_id,
        hottest_once=bool((instance.deduplicated | (held == 0)).all()),
    )


def _distinct(table: Table, first: int, end: int, samples: int) -> float:
    """Distinct rows that so many samples read among a table's rows from one position to another."""
    among = np.diff(np.clip(np.cumsum(table.profile.rows), first, end).astype(np.float64), prepend=float(first))
    return float(table.reads(samples, index_dedup=True) @ among)
