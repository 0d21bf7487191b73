"""Tables of a model that TorchRec shards: their part of a plan as TorchRec's sharders take it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import CacheParams, ParameterSharding
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from flexshard.errors import PlanError
from flexshard.planner.constraints import TableConstraints
from flexshard.planner.plan import Plan
from flexshard.planner.pooled_plan import PooledTablePlan
from flexshard.planner.torchrec.model_tables import check_table
from flexshard.planner.torchrec.rankings import key_of
from flexshard.planner.torchrec.table_constraints import table_constraints
from flexshard.planner.whole_tables import WholeTable

__all__ = ["left_pooled", "parameter_sharding", "pooled_shardings"]


def left_pooled(
    collections: Mapping[str, EmbeddingBagCollection],
    names: Collection[str],
    constraints: Mapping[str, ParameterConstraints],
    *,
    planned: bool,
) -> set[tuple[str, str]]:
    """Pooled tables (module, name) that another planner keeps: those named, those of modules named, and those whose
    constraints ask for what our costs do not know; or, of a plan that there is, for anything at all.
    """
    left = set()
    for fqn, part in collections.items():
        for config in part.embedding_bag_configs():
            asked = table_constraints(constraints.get(config.name))
            constrained = asked is None or (planned and asked != TableConstraints())
            if constrained or {fqn, config.name, f"{fqn}.{config.name}"} & set(names):
                left.add((fqn, config.name))
    return left


def pooled_shardings(
    modules: Mapping[str, Sequence[BaseEmbeddingConfig]], plan: Plan, left: Collection[tuple[str, str]] = ()
) -> tuple[dict[str, dict[str, ParameterSharding]], set[str]]:
    """Shardings of the tables that TorchRec shards under a plan, by module, but for those ``left`` to another planner;
    and which of the plan's tables the model has.

    Args:
        modules: tables of each collection.
        plan: that may have them.
        left: (module, table) of those that another planner keeps.

    Raises:
        PlanError: the plan is for other rows or dimensions, for kernels that need CUDA, or has tables that the model
            has not.
    """
    found: dict[str, dict[str, ParameterSharding]] = {}
    used = set()
    # By whether they are pooled: a bag and a sequence may have one name.
    tables = {
        bags: {n: one for n, one in plan.pooled.items() if (one.pooling != "none") is bags} for bags in (True, False)
    }
    for fqn, configs in modules.items():
        for config in configs:
            name = key_of(fqn, config.name, tables[isinstance(config, EmbeddingBagConfig)])
            if name is None:
                continue
            used.add(name)
            if (fqn, config.name) in left:
                continue
            table = plan.pooled[name]
            _check(name, table, config)
            found.setdefault(fqn, {})[config.name] = _sharding(table, plan)
    return found, used


def _check(name: str, table: PooledTablePlan, config: BaseEmbeddingConfig) -> None:
    check_table(name, table, config)
    has = config.pooling.value.lower() if isinstance(config, EmbeddingBagConfig) else "none"
    if table.pooling != has:
        raise PlanError(f"table {name!r}: the plan is for pooling {table.pooling}, the model has {has}; plan again")


def _sharding(table: PooledTablePlan, plan: Plan) -> ParameterSharding:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and table.compute_kernel.startswith("fused_uvm"):
        raise PlanError(
            f"table {table.name!r}: the plan has kernel {table.compute_kernel}, which runs on CUDA alone; plan without"
            " host_memory to train here"
        )
    return parameter_sharding(WholeTable.of_pooled(table), plan.cluster.ranks_per_node, device)


def parameter_sharding(table: WholeTable, ranks_per_node: int, device: str) -> ParameterSharding:
    """A whole table's part of TorchRec's plan, with shards on ranks' ``device`` ("cuda" or "cpu")."""
    if table.shards is None:
        return ParameterSharding(table.sharding_type, table.compute_kernel, table.ranks)
    shards = [
        ShardMetadata(
            shard_offsets=[shard.first_row, shard.first_column],
            shard_sizes=[shard.rows, shard.columns],
            placement=placement(device, shard.rank, ranks_per_node),
        )
        for shard in table.shards
    ]
    cached = None if table.cache_load_factor is None else CacheParams(load_factor=table.cache_load_factor)
    return ParameterSharding(
        table.sharding_type, table.compute_kernel, table.ranks, EnumerableShardingSpec(shards), cache_params=cached
    )
