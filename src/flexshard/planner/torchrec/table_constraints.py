"""TorchRec's ``ParameterConstraints`` as constraints of ours."""

from __future__ import annotations

from dataclasses import fields, replace

from torchrec.distributed.planner.types import ParameterConstraints

from flexshard.costmodels import SEQUENCE_TYPES
from flexshard.planner.constraints import TIERS, TableConstraints

__all__ = ["asks_for_torchrec", "sequence_constraints", "table_constraints"]

_SAID = ("sharding_types", "compute_kernels", "min_partition", "cache_params")
# Of TorchRec's constraints, those that say what tables are read like, which profiles do here.
_OF_PROFILES = ("pooling_factors", "num_poolings", "batch_sizes", "feature_names")


def table_constraints(given: ParameterConstraints | None) -> TableConstraints | None:
    """TorchRec's constraints of a table as ours; None where they ask for what our costs do not know."""
    if given is None:
        return TableConstraints()
    default = ParameterConstraints()
    told = {one.name for one in fields(given) if getattr(given, one.name) != getattr(default, one.name)}
    if told - {*_SAID, *_OF_PROFILES}:
        return None
    cached = None if given.cache_params is None else given.cache_params.load_factor
    return TableConstraints(
        sharding_types=given.sharding_types,
        compute_kernels=None if given.compute_kernels == ["fused"] else given.compute_kernels,  # as by default
        min_partition=given.min_partition,
        cache_load_factors=TableConstraints.cache_load_factors if cached is None else (cached,),
    )


def asks_for_torchrec(given: ParameterConstraints) -> bool:
    """Whether constraints of a table without pooling ask for sharding types or kernels of TorchRec's."""
    types = given.sharding_types or []
    return any(one != TIERS for one in types) or bool(given.compute_kernels and not types)


def sequence_constraints(given: ParameterConstraints | None) -> TableConstraints | None:
    """The same of a table without pooling. Types that TorchRec has for pooled tables alone it passes over, too; None
    where none is left, and where constraints ask for what our costs do not know.
    """
    if given is None or not asks_for_torchrec(given):
        return TableConstraints()
    asked = table_constraints(given)
    if asked is None:
        return None
    types = [one for one in asked.sharding_types or SEQUENCE_TYPES if one in (*SEQUENCE_TYPES, TIERS)]
    return replace(asked, sharding_types=types) if types else None
