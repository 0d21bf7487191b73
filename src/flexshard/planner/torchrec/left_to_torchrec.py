"""Tables and modules that TorchRec's own planner and sharders keep."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from flexshard.errors import PlanError
from flexshard.planner.constraints import TIERS
from flexshard.planner.torchrec.table_constraints import asks_for_torchrec

__all__ = [
    "TableKey",
    "all_tables",
    "bag_part_of",
    "left_tables",
    "model_of_the_rest",
    "modules_to_shard",
    "part_of",
    "tables_of_others",
]

TableKey = tuple[str, str]


def modules_to_shard(module: nn.Module, kinds: Collection[type]) -> dict[str, nn.Module]:
    """Modules of some types by name, in a model's order. What is inside one of them is none by itself: its sharder sees
    to it, as ``DistributedModelParallel`` has it.
    """
    found: dict[str, nn.Module] = {}
    for fqn, part in module.named_modules():
        if type(part) in kinds and not any(_is_inside(fqn, outer) for outer in found):
            found[fqn] = part
    return found


def _is_inside(fqn: str, outer: str) -> bool:
    return not outer or fqn.startswith(f"{outer}.")


def all_tables(module: nn.Module, fqn: str = "") -> list[TableKey]:
    """Tables (module, name) of all collections of a model, or of a module of this name in it."""
    found: list[TableKey] = []
    for name, part in module.named_modules(prefix=fqn):
        if isinstance(part, EmbeddingCollection):
            found += [(name, config.name) for config in part.embedding_configs()]
        elif isinstance(part, EmbeddingBagCollection):
            found += [(name, config.name) for config in part.embedding_bag_configs()]
    return found


def tables_of_others(parts: Mapping[str, nn.Module]) -> dict[TableKey, str]:
    """Tables (module, name) inside modules that sharders of their own take, and the names of these modules."""
    others = {
        fqn: part for fqn, part in parts.items() if type(part) not in (EmbeddingCollection, EmbeddingBagCollection)
    }
    return {key: outer for outer, part in others.items() for key in all_tables(part, outer)}


def left_tables(
    tables: Iterable[TableKey],
    names: Collection[str],
    constraints: Mapping[str, ParameterConstraints],
    others: Collection[TableKey],
    planned: Collection[TableKey] = (),
) -> set[TableKey]:
    """Tables (module, name) that another planner keeps: those named, those of modules named, and those whose
    constraints ask for sharding types or kernels of TorchRec's and do not allow tiers, unless a plan is made for them
    that keeps the constraints (``planned``). ``others`` are the model's other tables, which may be named too.

    Raises:
        PlanError: a name that the model has not.
    """
    known = list(tables)
    wanted = set(names)
    left = {(fqn, name) for fqn, name in known if wanted & {name, f"{fqn}.{name}", fqn}}
    unknown = wanted - {text for fqn, name in (*known, *others) for text in (name, f"{fqn}.{name}", fqn)}
    if unknown:
        shown = ", ".join(f"{fqn}.{name}" if fqn else name for fqn, name in (*known, *others))
        raise PlanError(
            f"no collection and no table is called {min(unknown)!r}, which is to be left to TorchRec; there are {shown}"
        )
    for fqn, name in known:
        given = constraints.get(name)
        if given is None or (fqn, name) in planned:
            continue
        if asks_for_torchrec(given) and TIERS not in (given.sharding_types or ()):
            left.add((fqn, name))
        elif (fqn, name) not in left:
            _name_what_decides_nothing(name, given)
    return left


def _name_what_decides_nothing(name: str, given: ParameterConstraints) -> None:
    """Warn of constraints on a planned table that plans of rows do not know."""
    default = ParameterConstraints()
    told = [
        one.name
        for one in fields(given)
        if one.name != "sharding_types" and getattr(given, one.name) != getattr(default, one.name)
    ]
    if told:
        warnings.warn(
            f"table {name!r}: its constraints say {', '.join(told)}, which decides nothing where FlexShard plans its"
            " rows; give sharding_types to leave the table to TorchRec",
            UserWarning,
            stacklevel=6,
        )


def part_of(collection: EmbeddingCollection, configs: Sequence[EmbeddingConfig]) -> EmbeddingCollection:
    """A collection of some of a collection's tables, with the same weights."""
    part = EmbeddingCollection(list(configs), device=torch.device("meta"), need_indices=collection.need_indices())
    for config in configs:
        part.embeddings[config.name] = collection.embeddings[config.name]
    part._device = collection.device
    return part


def bag_part_of(collection: Any, configs: Sequence[EmbeddingBagConfig]) -> EmbeddingBagCollection:
    """A collection of some of a collection's pooled tables, with the same weights."""
    meta = torch.device("meta")
    part = EmbeddingBagCollection(list(configs), is_weighted=collection.is_weighted(), device=meta)
    for config in configs:
        part.embedding_bags[config.name] = collection.embedding_bags[config.name]
    part._device = collection.device
    return part


def model_of_the_rest(
    parts: Mapping[str, nn.Module],
    collections: Mapping[str, EmbeddingCollection],
    left: Collection[TableKey],
    planned: Mapping[str, Collection[str]],
) -> nn.Module | None:
    """What TorchRec's planner is to plan, under the names that it has in the model; None if there is nothing.

    Args:
        parts: what sharders take of the model, by name.
        collections: its embedding collections by name, of which TorchRec keeps the tables in ``left``.
        planned: pooled tables that are planned already, by module.
    """
    rest = {fqn: part for fqn, part in parts.items() if fqn not in collections}
    for fqn, names in planned.items():
        bags: Any = rest.pop(fqn)
        left_of = [config for config in bags.embedding_bag_configs() if config.name not in names]
        if left_of:
            rest[fqn] = bag_part_of(bags, left_of)
    for fqn, collection in collections.items():
        configs = [config for config in collection.embedding_configs() if (fqn, config.name) in left]
        if configs:
            rest[fqn] = part_of(collection, configs)
    if not rest:
        return None
    if "" in rest:
        return rest[""]
    tree = nn.Module()
    for fqn, part in rest.items():
        *path, last = fqn.split(".")
        node = tree
        for name in path:
            if not hasattr(node, name):
                setattr(node, name, nn.Module())
            node = getattr(node, name)
        setattr(node, last, part)
    return tree
