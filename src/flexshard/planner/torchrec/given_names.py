"""Whether what ``FlexShardPlanner`` is given says anything: arguments, and the tables that they name."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from flexshard.errors import JobError, PlanError
from flexshard.planner.problem import PlannerOptions
from flexshard.planner.torchrec.left_to_torchrec import TableKey, all_tables
from flexshard.planner.torchrec.rankings import key_of

__all__ = ["check_cached", "check_names", "check_options", "name_profiles_of_others"]


def check_options(plan: object | None, torchrec_tables: object, given: Mapping[str, object]) -> None:
    """Whether there are such options, and none that a plan or a problem would overrule.

    Raises:
        JobError, TypeError: not so.
    """
    unknown = set(given) - {"cluster", "dedup_factors", *PlannerOptions.__annotations__}
    if unknown:
        raise TypeError(f"FlexShardPlanner() got an unexpected keyword argument {min(unknown)!r}")
    told = [name for name, value in given.items() if value is not None]
    if plan is not None and told:
        raise JobError(
            f"FlexShardPlanner has a plan or a problem, beside which {', '.join(told)} would decide nothing: leave one"
            " of them out"
        )
    if isinstance(torchrec_tables, str):
        raise JobError(f"torchrec_tables is a list of names, not {torchrec_tables!r}; give [{torchrec_tables!r}]")


def check_names(module: nn.Module, dedup_factors: Collection[str], constraints: Collection[str]) -> None:
    """Whether what is said of single tables is said of the model's; else warn of constraints.

    Raises:
        PlanError: a DedupFactor of another table.
    """
    tables = all_tables(module)
    shown = ", ".join(f"{fqn}.{name}" if fqn else name for fqn, name in tables)
    unknown = set(dedup_factors) - {text for fqn, name in tables for text in (name, f"{fqn}.{name}")}
    if unknown:
        raise PlanError(f"dedup_factors: the model has no table {min(unknown)!r}; there are {shown}")
    parts = {part for name, _ in module.named_parameters() for part in name.split(".")}
    for name in sorted(set(constraints) - parts - {name for _, name in tables}):
        warnings.warn(
            f"constraints: the model has no table {name!r}, so that they decide nothing; they are by a table's own"
            f" name, and there are {shown}",
            UserWarning,
            stacklevel=5,
        )


def check_cached(sharders: Mapping[type[nn.Module], Any], parts: Mapping[str, nn.Module]) -> None:
    """Whether sharders that are to keep tables behind caches get modules at all: no module tells them otherwise.

    Args:
        sharders: by types of modules.
        parts: modules that sharders take, by name.

    Raises:
        PlanError: one gets none.
    """
    types = {type(part) for part in parts.values()}
    for kind, sharder in sharders.items():
        named = getattr(sharder, "cache_load_factors", None)
        if named and kind not in types:
            raise PlanError(
                f"cache_load_factors of {type(sharder).__name__} name table {min(named)!r}, and the model has no"
                f" {kind.__name__} for it; name a table in those of the sharder that shards it"
            )


def name_profiles_of_others(
    inside: Mapping[TableKey, str],
    parts: Mapping[str, nn.Module],
    sharders: Mapping[Any, Any],
    profiles: Mapping[str, object],
    torchrec_tables: Collection[str],
) -> None:
    """Warn of profiles for tables that sharders of other modules take.

    Args:
        inside: such tables (module, name), and the modules that have them.
        parts: modules by name.
        sharders: by types of modules.
        profiles: by table.
        torchrec_tables: left to TorchRec, as asked.
    """
    named = set(torchrec_tables)
    known = [
        (name, outer)
        for (fqn, name), outer in inside.items()
        if key_of(fqn, name, profiles) is not None
        and not named & {name, fqn, f"{fqn}.{name}", outer, f"{outer}.{name}"}
    ]
    for name, outer in known[:1]:
        sharder = type(sharders[type(parts[outer])]).__name__
        warnings.warn(
            f"table {name!r} is inside {outer or 'the model'}, which {sharder} shards: its profile decides nothing, and"
            " TorchRec's costs place it; leave that sharder out to plan its rows",
            UserWarning,
            stacklevel=5,
        )
