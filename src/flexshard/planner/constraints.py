"""What the plan of a table may be, in the words of TorchRec's ``ParameterConstraints`` and a few more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from flexshard._internal import check_finite, check_int, there_are
from flexshard.costmodels import POOLED_KERNELS, POOLED_TYPES
from flexshard.errors import JobError
from flexshard.tables import DATA_TYPES, Table
from flexshard.topologies import Cluster

__all__ = ["SEQUENCE_SHARDINGS", "TIERS", "TableConstraints", "check_constraints", "check_dedup_factors", "is_sharded"]

TIERS = "flex_shard"  # tiers of rows, as a sharding type
# Of tables without pooling. TorchRec cannot run copies of them on CPUs, nor the dense kernel; tiers have copies.
SEQUENCE_SHARDINGS = ("table_wise", "column_wise", "row_wise")
_CACHED = 0.2  # TorchRec's share of rows that a cache holds
_NAMES = ("sharding_types", "compute_kernels", "dtypes", "forbid", "with_tables", "apart")
_NOT_EMPTY = ("sharding_types", "compute_kernels", "dtypes", "cache_load_factors")


@dataclass(frozen=True)
class TableConstraints:
    """What is asked of a table; nothing by default, which leaves pooled tables every type and the others tiers of rows.

    Attributes:
        sharding_types: allowed, in TorchRec's words; None for all. Of a table without pooling those that TorchRec has
            for it, and "flex_shard" for tiers of rows, which it has by default: the other constraints are of what
            TorchRec shards.
        compute_kernels: allowed: "fused", "dense", "fused_uvm", "fused_uvm_caching"; None for "fused", and where the
            problem has host memory the two with UVM. Data-parallel tables have "dense" always.
        min_partition: least columns of a column shard, 128 by default; TorchRec takes the least width from there on
            that divides the table's.
        cache_load_factors: shares of the rows that "fused_uvm_caching" may hold in a rank's memory.
        pin: the rank of each shard, in order of rows and columns; options of as many shards are left.
        forbid: sharding types, kernels, or both ("row_wise/fused"), that are not allowed.
        with_tables: tables (``with`` in job files) that are sharded as this one is, each of their shards on the rank of
            this one's.
        dtypes: data types that its weights may have; None for its own alone. The model is to be built with the one that
            is chosen; what it costs in quality is not looked at.
        apart: tables none of whose shards may share a rank with one of this table's; nor may two of its own then.
        device_group: TorchRec's; a cluster's ranks are all of one kind, so that it decides nothing and is refused.
    """

    sharding_types: Sequence[str] | None = None
    compute_kernels: Sequence[str] | None = None
    min_partition: int | None = None
    cache_load_factors: Sequence[float] = (_CACHED,)
    pin: Sequence[int] = ()
    forbid: Sequence[str] = ()
    with_tables: Sequence[str] = ()
    apart: Sequence[str] = ()
    dtypes: Sequence[str] | None = None
    device_group: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:  # as the field is by default
                object.__setattr__(self, field.name, field.default)
                continue
            if field.name in ("min_partition", "device_group"):
                continue
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise JobError(f"{_word(field.name)} must be a list, found {value!r}")
            if field.name in _NAMES and not all(isinstance(one, str) for one in value):
                raise JobError(f"{_word(field.name)} must be a list of names, found {value!r}")
            if field.name in _NOT_EMPTY and not value:
                raise JobError(f"{_word(field.name)} allows nothing; leave it out to allow all")
            object.__setattr__(self, field.name, tuple(value))
        _known(self.sharding_types, (*POOLED_TYPES, TIERS), "sharding_types")
        _known(self.compute_kernels, POOLED_KERNELS, "compute_kernels")
        _known(self.dtypes, tuple(name for name, kind in DATA_TYPES.items() if kind.torchrec), "dtypes")
        both = [f"{kind}/{kernel}" for kind in POOLED_TYPES for kernel in POOLED_KERNELS]
        for one in self.forbid:
            if one not in (*POOLED_TYPES, *POOLED_KERNELS, *both):
                raise JobError(
                    f"forbid must be of {', '.join((*POOLED_TYPES, *POOLED_KERNELS))}, or a type and a kernel such as"
                    f" row_wise/fused, found {one!r}"
                )
        if self.min_partition is not None:
            object.__setattr__(self, "min_partition", check_int(self.min_partition, "min_partition", JobError))
        for share in self.cache_load_factors:
            if not 0 < check_finite(share, "cache_load_factors", JobError) <= 1:
                raise JobError(f"cache_load_factors are shares of the rows above 0 and up to 1, found {share!r}")
        for rank in self.pin:
            check_int(rank, "pin", JobError, least=0)
        if self.device_group is not None:
            raise JobError(
                "device_group decides nothing: all ranks of a cluster are of one kind; leave it out, or plan by"
                " TorchRec's costs with OptimalShardingPlanner"
            )

    def __str__(self) -> str:
        """What is asked, in words."""
        given = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        return ", ".join(f"{_word(name)} {_listed(value)}" for name, value, usual in given if value != usual)

    @property
    def torchrec_types(self) -> tuple[str, ...]:
        """Of the sharding types that are allowed by name, TorchRec's."""
        return tuple(one for one in self.sharding_types or () if one != TIERS)

    def allows_tiers(self) -> bool:
        """Whether rows of a table without pooling may be in tiers."""
        return self.sharding_types is None or TIERS in self.sharding_types

    def forbids(self, sharding_type: str, compute_kernel: str) -> bool:
        """Whether an option is forbidden."""
        return any(one in (sharding_type, compute_kernel, f"{sharding_type}/{compute_kernel}") for one in self.forbid)

    def kernels(self, *, host_memory: bool) -> tuple[str, ...]:
        """Kernels that may be used."""
        if self.compute_kernels is not None:
            return tuple(self.compute_kernels)
        return ("fused", "fused_uvm", "fused_uvm_caching") if host_memory else ("fused",)


def check_constraints(
    constraints: Mapping[str, TableConstraints], tables: Sequence[Table], cluster: Cluster, *, host_memory: bool
) -> None:
    """Whether constraints are of tables that there are, and can be kept.

    Raises:
        JobError: one is not, with the table and the constraint.
    """
    if not isinstance(constraints, Mapping):
        raise JobError(f"constraints must be a mapping of tables' names, found {constraints!r}")
    known = {table.name: table for table in tables}
    for name, constraint in constraints.items():
        where = f"constraints of table {name!r}"
        if not isinstance(constraint, TableConstraints):
            raise JobError(f"{where}: must be TableConstraints, found {constraint!r}")
        if name not in known:
            raise JobError(f"{where}: there is no such table; {there_are(known)}")
        _check_types(where, known[name], constraint)
        for word, others in (("with", constraint.with_tables), ("apart", constraint.apart)):
            if others and not known[name].is_pooled and constraint.allows_tiers():
                raise JobError(f"{where}: {word} is of tables that are sharded in any case; leave {TIERS!r} out")
            for other in others:
                if word == "with" and other in known and known[other].is_pooled is not known[name].is_pooled:
                    raise JobError(f"{where}: with names {other!r}, and only one of the two is pooled; leave it out")
                if other == name or other not in known or not is_sharded(known[other], constraints.get(other)):
                    raise JobError(f"{where}: {word} names {other!r}, which is no other table that TorchRec shards")
        for rank in constraint.pin:
            if rank >= cluster.world_size:
                raise JobError(f"{where}: pin names rank {rank} of {cluster.world_size}, counted from 0")
        uvm = [one for one in constraint.compute_kernels or () if one.startswith("fused_uvm")]
        if uvm and not host_memory:
            raise JobError(f"{where}: {uvm[0]} needs host memory; say how much a rank may take of it (host_memory)")


def check_dedup_factors(tables: Sequence[Table], batch_size: int) -> None:
    """Whether batches can repeat as much as tables say: the fewest distinct lists of a batch are one.

    Raises:
        JobError: one cannot.
    """
    for table in tables:
        if table.dedup_factor > batch_size:
            raise JobError(
                f"table {table.name!r}: a batch of {batch_size:,} samples has no DedupFactor of"
                f" {table.dedup_factor:g}; it is at most {batch_size:,}"
            )


def is_sharded(table: Table, asked: TableConstraints | None) -> bool:
    """Whether TorchRec shards a table in any case: it is pooled, or tiers are not allowed."""
    return table.is_pooled or (asked is not None and not asked.allows_tiers())


def _check_types(where: str, table: Table, asked: TableConstraints) -> None:
    """Whether the sharding types are those of such a table, and the other constraints decide anything."""
    types = asked.torchrec_types
    if table.is_pooled:
        if TIERS in (asked.sharding_types or ()):
            raise JobError(f"{where}: {TIERS!r} is of tables without pooling, and it is pooled; leave it out")
        return
    other = next((one for one in types if one not in SEQUENCE_SHARDINGS), None)
    if other is not None:
        raise JobError(
            f"{where}: tables without pooling are not planned as {other!r}; there are {', '.join(SEQUENCE_SHARDINGS)},"
            f" and {TIERS!r}, which has copies of rows"
        )
    if "dense" in (asked.compute_kernels or ()):
        raise JobError(f"{where}: kernel 'dense' is not planned for tables without pooling; take 'fused'")
    if not types and asked != TableConstraints():
        raise JobError(
            f"{where} decide nothing, since its rows are placed one by one; leave them out, or name sharding_types for"
            f" TorchRec to shard it ({', '.join(SEQUENCE_SHARDINGS)})"
        )


def _known(given: Sequence[str] | None, known: Sequence[str], name: str) -> None:
    for one in given or ():
        if one not in known:
            raise JobError(f"{name} must be of {', '.join(known)}, found {one!r}")


def _listed(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _word(name: str) -> str:
    return "with" if name == "with_tables" else name
