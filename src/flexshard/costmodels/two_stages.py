"""Repeated ids sent once a node instead of once a rank: what that would take. It is priced, and not run.

A rank asks, inside its node, the one with the local number of the row's holder; that one asks the holder across nodes
for what any of its node's ranks asked for, once. Rows come back, and gradients go, by the same two stages. So fewer
bytes cross nodes, but all of them cross the node besides, and every stage waits for the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flexshard._internal import plain_sum
from flexshard.costmodels.collectives import RowWidths, collective
from flexshard.costmodels.cost import Collective, Cost
from flexshard.costmodels.overlap import Overlap
from flexshard.topologies import Cluster

__all__ = ["NodeReads", "has_two_stages", "two_stage_cost"]


@dataclass(frozen=True)
class NodeReads:
    """Rows without copies of a table whose ids are sent once.

    Attributes:
        widths: of a row.
        by_rank: distinct ones that a rank's batch reads, expected.
        by_node: that any batch of a node's ranks reads.
    """

    widths: RowWidths
    by_rank: float
    by_node: float


def has_two_stages(cluster: Cluster) -> bool:
    """Whether there are nodes of several ranks to tell apart."""
    inner = {level.group_size: level for level in cluster.levels}.get(cluster.ranks_per_node)
    return cluster.nodes > 1 and inner is not None and inner.all_to_all is not None


def two_stage_cost(
    cost: Cost,
    cluster: Cluster,
    tables: Sequence[NodeReads],
    overlap: Overlap | None,
    *,
    id_bytes: int = 4,
    seconds_per_id: float = 1e-9,
    hottest_once: bool = True,
) -> Cost:
    """What a placement costs if rows of some tables cross nodes once for each node.

    Args:
        cost: of the placement, with ids sent once a rank.
        cluster: of nodes of several ranks (:func:`has_two_stages`).
        tables: those whose ids are sent once, as far as they have rows without copies.
        overlap: share of each collective's time that is hidden.
        id_bytes: of an id on the wire.
        seconds_per_id: to find distinct ids, which the second stage does again.
        hottest_once: whether the row that most ranks ask for is of these tables.

    Returns:
        The cost with the outermost all-to-alls smaller, and "node ids", "node embeddings" and "node gradients" inside
        nodes. Lookups and updates are left as they are, though holders would serve fewer rows.
    """
    width, world = cluster.ranks_per_node, cluster.world_size
    inner = cluster.level(width).all_to_all
    assert inner is not None
    found: list[Collective] = []
    for one in cost.collectives:
        if one.name != f"all_to_all@{world}" or one.content not in ("ids", "embeddings", "gradients"):
            found.append(one)
            continue
        items = [table.widths.moved(id_bytes)[one.content] for table in tables]
        inside = plain_sum(table.by_rank * item for table, item in zip(tables, items, strict=True))
        saved = inside - plain_sum(table.by_node / width * item for table, item in zip(tables, items, strict=True))
        # All ranks asked the owner of the hottest row; now all nodes do, and in each of them all ranks ask one.
        fewer = (cluster.nodes - 1) / (world - 1) if hottest_once else 1.0
        nbytes = max(one.nbytes - saved / one.calls, 0.0)
        found.append(replace(one, nbytes=nbytes, excess_bytes=one.excess_bytes * fewer))
        content = f"node {one.content}"
        stage = collective("all_to_all", width, inner, inside / one.calls, overlap, content, one.calls)
        whole = one.excess_bytes * cluster.ranks_on_link(world) / cluster.ranks_on_link(width)  # the owner's own link
        most = whole * (width - 1) / (world - 1) if hottest_once else 0.0
        found.append(replace(stage, excess_bytes=most))
    return replace(
        cost,
        collectives=tuple(sorted(found, key=lambda one: one.key)),
        dynamic_memory_bytes=cost.dynamic_memory_bytes
        + plain_sum(table.by_node / width * table.widths.row_bytes for table in tables),
        index_dedup_seconds=cost.index_dedup_seconds + seconds_per_id * plain_sum(table.by_rank for table in tables),
        fullest_dynamic_bytes=None,
    )
