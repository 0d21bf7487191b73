"""Plans in other projects' files: a ShardingPlan of TorchRec, the ``plan`` file of TorchEasyRec's checkpoints.

Both know whole tables, their columns and even shares of their rows. Rows in tiers are FlexShard's own, and refused by
name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flexshard._internal import INSTALL_TORCHREC, PathLike, replacing, there_are, write_text
from flexshard.errors import MissingDependencyError, PlanError
from flexshard.planner.plan import Plan
from flexshard.planner.whole_tables import whole_tables

__all__ = ["export_torcheasyrec", "export_torchrec", "modules_of"]


def modules_of(plan: Plan, given: list[str]) -> dict[str, str]:
    """The module of each table, of texts "PATH" (of all tables) and "TABLE=PATH".

    Raises:
        PlanError: a table of none, or a text about none.
    """
    names = [*plan.tables, *plan.pooled]
    found: dict[str, str] = {}
    for text in given:
        table, equals, path = text.partition("=")
        if equals and table not in names:
            raise PlanError(f"{text}: the plan has no table {table!r}; {there_are(names)}")
        found |= {table: path} if equals else {name: text for name in names if name not in found}
    missing = [name for name in names if name not in found]
    if missing:
        raise PlanError(f"which module has table {missing[0]!r}? name it: {missing[0]}=PATH, or PATH for all tables")
    return found


def export_torcheasyrec(plan: Plan, modules: Mapping[str, str], path: PathLike) -> None:
    """Write the ``plan`` file of a TorchEasyRec checkpoint: type, kernel and ranks of each table, by module.

    TorchEasyRec takes sharding types from it where FORCE_LOAD_SHARDING_PLAN is set, and places shards itself.

    Raises:
        PlanError: as :func:`whole_tables`.
        OutputError: it could not be written.
    """
    document: dict[str, dict[str, Any]] = {}
    for name, table in whole_tables(plan).items():
        document.setdefault(modules[name], {})[name] = {
            "sharding_type": table.sharding_type,
            "compute_kernel": table.compute_kernel,
            "ranks": table.ranks,
        }
    write_text(path, json.dumps(document))


def export_torchrec(plan: Plan, modules: Mapping[str, str], path: PathLike, *, device: str = "cuda") -> None:
    """Write a ``ShardingPlan``, which ``torch.load(path, weights_only=False)`` reads without FlexShard.

    Args:
        plan, modules: what is written, and the module of each table.
        path: of the file.
        device: that shards are placed on, "cuda" or "cpu".

    Raises:
        PlanError: as :func:`whole_tables`.
        MissingDependencyError: TorchRec is not installed.
        OutputError: it could not be written.
    """
    tables = whole_tables(plan)
    try:
        import torch
        from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

        from flexshard.planner.torchrec.pooled_shardings import parameter_sharding
    except ImportError as error:
        raise MissingDependencyError(f"TorchRec's plans need TorchRec ({error}); {INSTALL_TORCHREC}") from error
    found: dict[str, Any] = {}
    for name, table in tables.items():
        module = found.setdefault(modules[name], EmbeddingModuleShardingPlan())
        module[name] = parameter_sharding(table, plan.cluster.ranks_per_node, device)
    with replacing(path) as temporary:
        torch.save(ShardingPlan(found), temporary)
