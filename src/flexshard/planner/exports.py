"""Plans in other projects' files: a ShardingPlan of TorchRec, the ``plan`` file of TorchEasyRec's checkpoints.

Both know whole tables, their columns and even shares of their rows. Rows in tiers are FlexShard's own, and refused by
name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flexshard._internal import INSTALL_TORCHREC, PathLike, name_and_value, replacing, there_are, write_text
from flexshard.errors import MissingDependencyError, PlanError
from flexshard.planner.plan import Plan
from flexshard.planner.whole_tables import WholeTable, whole_tables

__all__ = ["export_torcheasyrec", "export_torchrec", "modules_of"]


def modules_of(plan: Plan, given: list[str]) -> dict[str, str]:
    """The module of each table, of texts "PATH" (of all tables) and "TABLE=PATH".

    Raises:
        PlanError: a table of none, or of two, or a text about none; or tables with pooling and without in one.
    """
    names = [*plan.tables, *plan.pooled]
    found: dict[str, str] = {}
    of_all: str | None = None
    for text in given:
        table, path = name_and_value(text, names)
        if table is None:
            if of_all is not None:
                raise PlanError(f"{of_all} and {text} are both the module of all tables; write TABLE=PATH for some")
            of_all = path
            continue
        if table not in names:
            raise PlanError(f"{text}: the plan has no table {table!r}; {there_are(names)}")
        if table in found:
            raise PlanError(f"{text}: table {table!r} is in module {found[table]} already; give it one")
        found[table] = path
    if of_all is not None:
        found = dict.fromkeys(names, of_all) | found
    missing = [name for name in names if name not in found]
    if missing:
        raise PlanError(f"which module has table {missing[0]!r}? name it: {missing[0]}=PATH, or PATH for all tables")
    pooled = {found[name]: name for name in names if _is_pooled(plan, name)}
    beside = next((name for name in names if found[name] in pooled and not _is_pooled(plan, name)), None)
    if beside is not None:
        path = found[beside]
        raise PlanError(
            f"module {path} has table {pooled[path]!r}, which is pooled, and {beside!r}, which is not; these are an"
            f" EmbeddingBagCollection and an EmbeddingCollection: name the one of {beside!r}, {beside}=PATH"
        )
    return found


def _is_pooled(plan: Plan, name: str) -> bool:
    return name in plan.pooled and plan.pooled[name].pooling != "none"


def export_torcheasyrec(plan: Plan, modules: Mapping[str, str], path: PathLike) -> None:
    """Write the ``plan`` file of a TorchEasyRec checkpoint: type, kernel and ranks of each table, by module.

    TorchEasyRec takes sharding types from it where FORCE_LOAD_SHARDING_PLAN is set, and places shards itself.

    Raises:
        PlanError: as :func:`whole_tables`.
        OutputError: it could not be written.
    """
    document: dict[str, dict[str, Any]] = {}
    for name, table in whole_tables(plan).items():
        document.setdefault(modules[name], {})[_own_name(name, modules[name])] = {
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
        PlanError: as :func:`whole_tables`; or on CPUs sequences that TorchRec cannot run there.
        MissingDependencyError: TorchRec is not installed.
        OutputError: it could not be written.
    """
    tables = whole_tables(plan)
    sequences = [name for name in tables if not _is_pooled(plan, name)]
    for name in sequences if device == "cpu" else ():
        _check_runs_on_cpus(name, tables[name])
    try:
        import torch
        from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

        from flexshard.planner.torchrec.pooled_shardings import parameter_sharding
    except ImportError as error:
        raise MissingDependencyError(f"TorchRec's plans need TorchRec ({error}); {INSTALL_TORCHREC}") from error
    found: dict[str, Any] = {}
    for name, table in tables.items():
        module = found.setdefault(modules[name], EmbeddingModuleShardingPlan())
        module[_own_name(name, modules[name])] = parameter_sharding(table, plan.cluster.ranks_per_node, device)
    with replacing(path) as temporary:
        torch.save(ShardingPlan(found), temporary)


def _own_name(name: str, module: str) -> str:
    """A table's name in its module, where a plan of several modules has both."""
    return name.removeprefix(f"{module}.")


def _check_runs_on_cpus(name: str, table: WholeTable) -> None:
    """Raises PlanError for a sequence table that TorchRec has no lookup for on CPUs."""
    if table.sharding_type == "data_parallel":
        raise PlanError(
            f"table {name!r} has a copy on every rank, which sequence tables of TorchRec cannot have on CPUs; plan with"
            " fewer tiers and a smaller budget, or export for cuda"
        )
    if any(shard.rows == 0 for shard in table.shards or ()):
        raise PlanError(
            f"table {name!r} leaves some ranks without rows, which TorchRec cannot look up on CPUs; use fewer ranks, or"
            " export for cuda"
        )
