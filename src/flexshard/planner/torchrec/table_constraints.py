"""TorchRec's ``ParameterConstraints`` as constraints of ours."""

from __future__ import annotations

from dataclasses import fields, replace

from torchrec.distributed.planner.types import ParameterConstraints

from flexshard.costmodels import column_width
from flexshard.errors import JobError
from flexshard.planner.constraints import SEQUENCE_SHARDINGS, TIERS, TableConstraints

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


def sequence_constraints(
    given: ParameterConstraints | None, dim: int, world_size: int, *, host_memory: bool
) -> TableConstraints | None:
    """The same of a table without pooling, of ``dim`` columns, on so many ranks. Types that we do not plan for it, and
    those that would not cut it, are passed over, and kernels with UVM where there is no host memory. Where nothing is
    left, or constraints ask for what our costs do not know: tiers, if they are allowed; None otherwise.
    """
    if given is None or not asks_for_torchrec(given):
        return TableConstraints()
    tiers = TIERS in (given.sharding_types or ())
    nothing = TableConstraints() if tiers else None
    try:
        asked = table_constraints(given)
    except JobError:
        return nothing
    if asked is None:
        return nothing
    cut = {"column_wise": column_width(dim, asked.min_partition) < dim, "row_wise": world_size > 1}
    listed = given.sharding_types or SEQUENCE_SHARDINGS
    types = [one for one in listed if one in SEQUENCE_SHARDINGS and cut.get(one, True)]
    kernels = asked.compute_kernels
    if kernels is not None and not host_memory:
        kernels = [one for one in kernels if not one.startswith("fused_uvm")]
    if not types or (kernels is not None and (not kernels or "dense" in kernels)):
        return nothing
    kernels = None if kernels == ["fused"] else kernels  # as by default
    return replace(asked, sharding_types=[*types, *([TIERS] if tiers else [])], compute_kernels=kernels)
