"""A plan's own placement, if repeated ids were sent once a node: priced beside it, and not run."""

from __future__ import annotations

import numpy as np

from flexshard.costmodels import Cost, NodeReads, RowWidths, has_two_stages, two_stage_cost
from flexshard.planner.problem import Problem
from flexshard.planner.solver.instance import Allocation, Instance
from flexshard.tables import Table

__all__ = ["once_per_node"]


def once_per_node(problem: Problem, instance: Instance, allocation: Allocation, cost: Cost) -> Cost | None:
    """What a placement would cost (``cost`` as it is). None where no table without copies of all its rows sends ids
    once, or the cluster has no nodes of several ranks.
    """
    held = allocation[:, -1]
    once = np.flatnonzero(instance.deduplicated & (held > 0))
    if not once.size or not has_two_stages(problem.cluster):
        return None
    by_rank = instance.tier_reads(allocation)[:, -1]
    tables = [
        NodeReads(
            RowWidths.of_table(instance.tables[index]),
            float(by_rank[index]),
            _distinct(instance.tables[index], int(held[index]), problem.batch_size * problem.cluster.ranks_per_node),
        )
        for index in once.tolist()
    ]
    return two_stage_cost(
        cost,
        problem.cluster,
        tables,
        instance.overlap,
        id_bytes=instance.id_bytes,
        seconds_per_id=problem.index_dedup_seconds_per_id,
        hottest_once=bool((instance.deduplicated | (held == 0)).all()),
    )


def _distinct(table: Table, held: int, samples: int) -> float:
    """Distinct rows that so many samples read among a table's least frequent ones, ``held`` of them."""
    ends = np.cumsum(table.profile.rows)
    among = np.diff(np.maximum(ends - (table.rows - held), 0), prepend=0)
    return float(table.reads(samples, index_dedup=True) @ among)
