"""Tables of a plan that TorchRec can shard by itself: whole, by columns, or by even shares of their rows."""

from __future__ import annotations

from dataclasses import dataclass

from flexshard.errors import PlanError
from flexshard.planner.plan import Plan, TablePlan
from flexshard.planner.pooled_plan import PooledShard, PooledTablePlan

__all__ = ["WholeTable", "whole_tables"]


@dataclass(frozen=True)
class WholeTable:
    """A table as TorchRec shards it.

    Attributes:
        sharding_type, compute_kernel: in TorchRec's words.
        ranks: that hold a shard, in the shards' order.
        shards: None where every rank has a copy.
        cache_load_factor: of kernels that cache.
    """

    sharding_type: str
    compute_kernel: str
    ranks: list[int]
    shards: tuple[PooledShard, ...] | None = None
    cache_load_factor: float | None = None

    @classmethod
    def of_pooled(cls, table: PooledTablePlan) -> WholeTable:
        """A pooled table of a plan."""
        shards = None if table.sharding_type == "data_parallel" else table.shards
        ranks = [shard.rank for shard in table.shards]
        return cls(table.sharding_type, table.compute_kernel, ranks, shards, table.cache_load_factor)

    @classmethod
    def of_sequence(cls, plan: Plan, table: TablePlan) -> WholeTable:
        """A table of one tier, of all ranks or of copies; raises PlanError for others."""
        world = plan.cluster.world_size
        sizes = [tier.group_size for tier in table.tiers]
        if sizes not in ([1], [world]):
            tiers = ", ".join(f"{tier.rows:,} rows {tier.strategy}" for tier in table.tiers)
            raise PlanError(
                f"table {table.name!r} has tiers ({tiers}), which other projects' plans do not know; train it with"
                " FlexShardPlanner, or make a plan of whole tables"
            )
        if table.cache is not None:
            raise PlanError(f"table {table.name!r} has a cache of FlexShard's own; plan without host_memory")
        ranks = list(range(world))
        if sizes == [1] and world > 1:
            return cls("data_parallel", "dense", ranks)
        block = -(-table.rows // world)  # as TorchRec cuts rows: the last shards may be shorter, or empty
        firsts = [min(rank * block, table.rows) for rank in range(world + 1)]
        shards = tuple(
            PooledShard(rank, firsts[rank + 1] - firsts[rank], table.dim, firsts[rank], 0, 0.0, 0.0, 0.0)
            for rank in ranks
        )
        return cls("row_wise", "fused", ranks, shards)


def whole_tables(plan: Plan) -> dict[str, WholeTable]:
    """All tables of a plan, as TorchRec shards them.

    Raises:
        PlanError: a table has tiers, or a cache that only FlexShard's sharder has; names it.
    """
    found = {name: WholeTable.of_sequence(plan, table) for name, table in plan.tables.items()}
    return found | {name: WholeTable.of_pooled(table) for name, table in plan.pooled.items()}
