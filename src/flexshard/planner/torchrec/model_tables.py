"""Tables of a model as plans know them: data types, optimizers, and whether they are the plan's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from flexshard.costmodels import apart
from flexshard.errors import PlanError
from flexshard.planner.plan import Plan, TablePlan, Tier
from flexshard.planner.pooled_plan import PooledTablePlan
from flexshard.planner.torchrec.parameter_sharding import FlexShardParameterSharding
from flexshard.tables import OPTIMIZERS, data_type_of_torchrec, optimizer_of_torchrec

__all__ = ["check_model", "check_table", "dtype_of", "optimizer_class", "optimizer_of", "row_wise_plan"]


def check_model(parts: Mapping[str, nn.Module], decided: ShardingPlan) -> None:
    """Whether this rank's model has the tables that rank 0 planned for. ``parts``: what sharders take of it, by name.

    Raises:
        PlanError: it has others.
    """
    for fqn, part in parts.items():
        if type(part) is EmbeddingCollection:
            configs = part.embedding_configs()
        elif type(part) is EmbeddingBagCollection and decided.plan.get(fqn):
            configs = part.embedding_bag_configs()
        else:
            continue
        shardings = dict(decided.plan.get(fqn) or {})
        for config in configs:
            if config.name not in shardings:
                raise PlanError(
                    f"table {config.name!r} of {fqn or 'the model'} has no sharding: rank 0's model has no such"
                    " table, or its constraints leave it none; build one model on all ranks, and look at constraints"
                )
            how = shardings[config.name]
            if isinstance(how, FlexShardParameterSharding) and how.table is not None:
                check_table(config.name, how.table, config)


def dtype_of(config: BaseEmbeddingConfig) -> str:
    """Our name of a table's data type.

    Raises:
        PlanError: tables of it cannot be trained.
    """
    kind = data_type_of_torchrec(config.data_type.name)
    if kind is None:
        raise PlanError(
            f"table {config.name!r}: data type {config.data_type.name} cannot be trained; use FP32, FP16 or BF16"
        )
    return kind.name


def optimizer_class(name: str, weight: torch.Tensor) -> Any:
    """What ``apply_optimizer_in_backward`` left on a table's parameter; None where nobody called it.

    Raises:
        PlanError: it was called with several optimizers.
    """
    kinds = getattr(weight, "_optimizer_classes", [None])
    if len(kinds) != 1:
        named = ", ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
        raise PlanError(
            f"table {name!r}: apply_optimizer_in_backward gave it {len(kinds)} optimizers, {named}; a table has one"
        )
    return kinds[0]


def optimizer_of(name: str, weight: torch.Tensor, sharder: Any) -> str:
    """Our name of the optimizer that a table will have, SGD (FBGEMM's default) where none is set.

    Raises:
        PlanError: the memory of its state is not known.
    """
    from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

    kind = optimizer_class(name, weight)
    try:
        wanted = optimizer_type_to_emb_opt_type(kind) if kind else (sharder.fused_params or {}).get("optimizer")
    except ValueError:  # one that TorchRec has no kernel of
        wanted = getattr(kind, "__name__", kind)
    wanted = getattr(wanted, "value", wanted) or "sgd"
    known = optimizer_of_torchrec(wanted)
    if known is None:
        raise PlanError(
            f"table {name!r}: optimizer {wanted} is none that plans are made for; use one of {', '.join(OPTIMIZERS)}"
        )
    return known.name


def check_table(name: str, table: TablePlan | PooledTablePlan, config: BaseEmbeddingConfig) -> None:
    """Whether a plan's table is that of the model.

    Raises:
        PlanError: it is of another shape, type or features.
    """
    expected = (table.rows, table.dim, table.dtype)
    actual = (config.num_embeddings, config.embedding_dim, dtype_of(config))
    for what, planned, has in zip(("rows", "dim", "dtype"), expected, actual, strict=True):
        if planned != has:
            raise PlanError(f"table {name!r}: the plan is for {what} {planned}, the model has {has}; plan again")
    if table.features and set(table.features) != set(config.feature_names):
        raise PlanError(
            f"table {name!r}: the plan is for features {', '.join(table.features)}, the model has"
            f" {', '.join(config.feature_names)}; plan again"
        )


def row_wise_plan(config: EmbeddingConfig, plan: Plan, number: int) -> TablePlan:
    """All rows over all ranks, of the ``number``-th table of a collection."""
    world = plan.cluster.world_size
    tier = Tier(
        "row_wise", world, config.num_embeddings, 0, 1.0, None, 0.0, 0.0, 0.0, first_holder=apart(number, world)
    )
    return TablePlan(
        name=config.name,
        rows=config.num_embeddings,
        dim=config.embedding_dim,
        dtype=dtype_of(config),
        optimizer="",
        features=tuple(config.feature_names),
        kappa_replicated=1.0,
        kappa_sharded=1.0,
        profile_digest="",
        profile_path=None,
        num_samples=0,
        avg_length=0.0,
        tiers=(tier,),
        index_dedup=plan.settings.index_dedup is True,
    )
