"""Tables and modules that TorchRec's own planner and sharders keep."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from flexshard.errors import PlanError
from flexshard.planner.torchrec.parameter_sharding import FLEX_SHARD

__all__ = ["left_tables", "model_of_the_rest", "part_of"]

TableKey = tuple[str, str]


def left_tables(
    tables: Iterable[TableKey], names: Collection[str], constraints: Mapping[str, ParameterConstraints]
) -> set[TableKey]:
    """Tables (module, name) that TorchRec keeps: those named, those of modules named, and those whose constraints ask
    for sharding types or kernels of TorchRec's.

    Raises:
        PlanError: a name that the model has not.
    """
    known = list(tables)
    wanted = set(names)
    left = {(fqn, name) for fqn, name in known if wanted & {name, f"{fqn}.{name}", fqn}}
    unknown = wanted - {text for fqn, name in known for text in (name, f"{fqn}.{name}", fqn)}
    if unknown:
        shown = ", ".join(f"{fqn}.{name}" if fqn else name for fqn, name in known)
        raise PlanError(
            f"no EmbeddingCollection and no table is called {min(unknown)!r}, which is to be left to TorchRec; there"
            f" are {shown}"
        )
    for fqn, name in known:
        given = constraints.get(name)
        if given is None:
            continue
        if (given.sharding_types or given.compute_kernels) and FLEX_SHARD not in (given.sharding_types or ()):
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


def model_of_the_rest(
    module: nn.Module,
    collections: Mapping[str, EmbeddingCollection],
    left: Collection[TableKey],
    kinds: Collection[Any],
) -> nn.Module | None:
    """What TorchRec's planner is to plan, under the names that it has in the model; None if there is nothing.

    Args:
        module: the whole model.
        collections: its embedding collections by name, of which TorchRec keeps the tables in ``left``.
        kinds: types of modules that other sharders shard.
    """
    rest = {fqn: part for fqn, part in module.named_modules() if type(part) in kinds}
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
