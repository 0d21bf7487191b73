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

__all__ = ["bag_part_of", "left_tables", "model_of_the_rest", "part_of"]

TableKey = tuple[str, str]


def left_tables(
    tables: Iterable[TableKey],
    names: Collection[str],
    constraints: Mapping[str, ParameterConstraints],
    pooled: Mapping[str, EmbeddingBagCollection],
    planned: Collection[TableKey] = (),
) -> set[TableKey]:
    """Tables (module, name) that another planner keeps: those named, those of modules named, and those whose
    constraints ask for sharding types or kernels of TorchRec's and do not allow tiers, unless a plan is made for them
    that keeps the constraints (``planned``).

    Raises:
        PlanError: a name that the model has not.
    """
    known = list(tables)
    wanted = set(names)
    left = {(fqn, name) for fqn, name in known if wanted & {name, f"{fqn}.{name}", fqn}}
    bags = [(fqn, config.name) for fqn, part in pooled.items() for config in part.embedding_bag_configs()]
    unknown = wanted - {text for fqn, name in (*known, *bags) for text in (name, f"{fqn}.{name}", fqn)}
    if unknown:
        shown = ", ".join(f"{fqn}.{name}" if fqn else name for fqn, name in (*known, *bags))
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
    module: nn.Module,
    collections: Mapping[str, EmbeddingCollection],
    left: Collection[TableKey],
    kinds: Collection[Any],
    planned: Mapping[str, Collection[str]],
) -> nn.Module | None:
    """What TorchRec's planner is to plan, under the names that it has in the model; None if there is nothing.

    Args:
        module: the whole model.
        collections: its embedding collections by name, of which TorchRec keeps the tables in ``left``.
        kinds: types of modules that other sharders shard.
        planned: pooled tables that are planned already, by module.
    """
    rest = {fqn: part for fqn, part in module.named_modules() if type(part) in kinds}
    for fqn, names in planned.items():
        bags = rest.pop(fqn)
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
