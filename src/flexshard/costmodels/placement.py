"""Six metrics of every strategy (docs/model.md; FlexShard paper section 3.2, Tables 2 and 3).

Legend: E rows, D·s = row_bytes, R = B·L = expected reads per rank and iteration, g group size, U ranks.
"""

from __future__ import annotations

import numpy as np

from flexshard.costmodels.collectives import RowWidths, collectives_between, priced
from flexshard.costmodels.cost import Cost
from flexshard.costmodels.overlap import Overlap
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["column_wise_cost", "placement_cost", "strategy_name", "table_wise_cost"]


def strategy_name(group_size: int, world_size: int) -> str:
    """TorchRec's name of a strategy: "data_parallel" for g = 1, "row_wise" for g = U, "flex" between."""
    if group_size == world_size:
        return "row_wise"
    return "data_parallel" if group_size == 1 else "flex"


def placement_cost(
    table: Table,
    cluster: Cluster,
    group_size: int,
    *,
    rows: float,
    reads: float,
    variation: float | None = None,
    overlap: Overlap | None = None,
) -> Cost:
    """Cost of a set of rows of a table that are split over ``group_size`` ranks and copied U/g times.

    What all tables share, the exchange of how many ids come, is not in it, and all owners are taken to serve alike.

    Args:
        table: gives D, s and κ.
        cluster: has a level of this group size.
        group_size: g; 1 is data-parallel, W flex, U row-wise.
        rows: E of the set.
        reads: R of the set, the sum of its rows' w.
        variation: standard deviation over mean of R from batch to batch, if known.
        overlap: share of each collective's time that is hidden, by (kind, group size).
    """
    world = cluster.world_size
    kappa = table.kappa_sharded if group_size == world else table.kappa_replicated
    copies_of_reads = 1 + (group_size > 1)  # at the owner and at the reader
    sent = reads * table.row_bytes
    calls = (
        collectives_between(
            world,
            (cluster.level(group_size).group_size,),
            [RowWidths.of_table(table)],
            np.array([[rows / group_size]]),
            np.array([False]),
            id_bytes=4,
        )
        if rows > 0
        else ()
    )
    own = [call for call in calls if call.content != "counts"]
    return Cost(
        static_memory_bytes=kappa * rows * table.row_bytes / group_size,
        dynamic_memory_bytes=copies_of_reads * sent,
        input_ids=reads if group_size > 1 else 0.0,
        rows_read=reads,
        collectives=priced(own, {group_size: np.array([reads])}, cluster, overlap),
        dynamic_memory_sigma_bytes=None if variation is None else copies_of_reads * sent * variation,
    )


def column_wise_cost(
    table: Table,
    cluster: Cluster,
    *,
    rows: float,
    reads: float,
    variation: float | None = None,
    overlap: Overlap | None = None,
) -> Cost:
    """Cost of rows whose columns are split over all ranks: as row-wise, but every rank reads for every other.

    ``rows_read`` counts reads of D/U elements each.
    """
    whole = placement_cost(
        table, cluster, cluster.world_size, rows=rows, reads=reads, variation=variation, overlap=overlap
    )
    everybody = reads * cluster.world_size
    return Cost(
        whole.static_memory_bytes,
        whole.dynamic_memory_bytes,
        everybody,
        everybody,
        tuple(c if c.content != "ids" else c.scaled(cluster.world_size) for c in whole.collectives),
        whole.dynamic_memory_sigma_bytes,
    )


def table_wise_cost(table: Table, cluster: Cluster, *, reads: float, share: float) -> Cost:
    """What serving all ranks costs the one that owns ``share`` of a table's columns.

    Not one of the paper's strategies: TorchRec's planner uses it, so ``compare`` must price it. What every rank sends
    and receives, whoever serves it, is not in it.
    """
    world = cluster.world_size
    whole = placement_cost(table, cluster, world, rows=table.rows, reads=reads * world)
    return Cost(
        static_memory_bytes=table.kappa_sharded * table.rows * table.row_bytes * share,
        dynamic_memory_bytes=reads * world * share * table.row_bytes,
        rows_read=reads * world,
        collectives=tuple(c if c.content == "ids" else c.scaled(share) for c in whole.collectives),
        dynamic_memory_sigma_bytes=None,
    )
