"""Six metrics of every strategy (docs/model.md; FlexShard paper section 3.2, Tables 2 and 3).

Legend: E rows, D·s = row_bytes, R = B·L = expected reads per rank and iteration, g group size, U ranks.
"""

from __future__ import annotations

from flexshard.costmodels.cost import Collective, CollectiveKind, Cost
from flexshard.costmodels.overlap import Overlap
from flexshard.tables import Table
from flexshard.topologies import Cluster, CollectiveRate

__all__ = ["collective", "column_wise_cost", "placement_cost", "strategy_name", "table_wise_cost"]

_CALLS = {"all_to_all": 2, "all_reduce": 1, "all_gather": 1}


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

    Args:
        table: gives D, s and κ.
        cluster: has a level of this group size.
        group_size: g; 1 is data-parallel, W flex, U row-wise.
        rows: E of the set.
        reads: R of the set, the sum of its rows' w.
        variation: standard deviation over mean of R from batch to batch, if known.
        overlap: share of each collective's time that is hidden, by (kind, group size).
    """
    world, level = cluster.world_size, cluster.level(group_size)
    kappa = table.kappa_sharded if group_size == world else table.kappa_replicated
    copies_of_reads = 1 + (group_size > 1)  # at the owner and at the reader
    sent = reads * table.row_bytes
    collectives = []
    if rows > 0 and level.all_reduce is not None:
        nbytes = rows * table.row_bytes / group_size
        collectives.append(collective("all_reduce", group_size, level.all_reduce, nbytes, overlap))
    if rows > 0 and level.all_to_all is not None:
        collectives.append(collective("all_to_all", group_size, level.all_to_all, sent, overlap))
    return Cost(
        static_memory_bytes=kappa * rows * table.row_bytes / group_size,
        dynamic_memory_bytes=copies_of_reads * sent,
        input_ids=reads if group_size > 1 else 0.0,
        rows_read=reads,
        collectives=tuple(collectives),
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
        whole.collectives,
        whole.dynamic_memory_sigma_bytes,
    )


def table_wise_cost(table: Table, cluster: Cluster, *, reads: float, share: float) -> Cost:
    """What serving all ranks costs the one that owns ``share`` of a table's columns.

    Not one of the paper's strategies: TorchRec's planner uses it, so ``compare`` must price it. What every rank sends
    and receives, whoever serves it, is not in it.
    """
    world = cluster.world_size
    rate = cluster.level(world).all_to_all
    served = reads * world * share
    nbytes = served * table.row_bytes
    return Cost(
        static_memory_bytes=table.kappa_sharded * table.rows * table.row_bytes * share,
        dynamic_memory_bytes=nbytes,
        rows_read=reads * world,
        collectives=() if rate is None else (collective("all_to_all", world, rate, nbytes, None),),
        dynamic_memory_sigma_bytes=None,
    )


def collective(
    kind: CollectiveKind, group_size: int, rate: CollectiveRate, nbytes: float, overlap: Overlap | None
) -> Collective:
    """One collective of an iteration at a level's rate: an all-to-all forward and backward, an all-reduce once."""
    hidden = 0.0 if overlap is None else overlap.get((kind, group_size), 0.0)
    return Collective(kind, group_size, _CALLS[kind], nbytes, rate.alpha_seconds, rate.bytes_per_s, hidden)
