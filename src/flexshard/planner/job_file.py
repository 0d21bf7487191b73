"""Job files: what to plan, as YAML."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, field_validator

from flexshard import units
from flexshard._internal import DocumentFormat, PathLike, StrictModel, load_yaml, located, replacing, save_yaml
from flexshard.costmodels import StepWork, TTRates, overlap_of
from flexshard.errors import ClusterError, FlexShardError, JobError
from flexshard.planner.budget import parse_budget
from flexshard.planner.compression.decision import TTOption
from flexshard.planner.constraints import TableConstraints, check_constraints, check_dedup_factors
from flexshard.planner.job import Job
from flexshard.profiling import AccessProfile
from flexshard.tables import Table, TTShape
from flexshard.topologies import Cluster

__all__ = ["job_files", "load_job", "save_job"]

FORMAT = DocumentFormat("flexshard.job", 1, "a job", "flexshard.job", JobError, "write one with 'flexshard job'")

ValueT = TypeVar("ValueT")


class CompressSpec(StrictModel):
    """A tensor train that a table may become: one rank for all, or each."""

    ranks: int | list[int]
    cores: int = 3
    loss: float = 0.0


class ConstraintsSpec(StrictModel):
    """What is asked of a pooled table; fields as of :class:`TableConstraints`."""

    sharding_types: list[str] | None = None
    compute_kernels: list[str] | None = None
    min_partition: int | None = None
    cache_load_factors: list[float] | None = None
    pin: list[int] = Field(default_factory=list)
    forbid: list[str] = Field(default_factory=list)
    with_tables: list[str] = Field(default_factory=list, alias="with")
    apart: list[str] = Field(default_factory=list)
    dtypes: list[str] | None = None
    device_group: str | None = None


class TableSpec(StrictModel):
    """A table of a job file; rows default to the profile's."""

    name: str
    dim: int
    profile: str
    rows: int | None = None
    dtype: str = "float32"
    optimizer: str = "rowwise_adagrad"
    replication_multiplier: float | None = None
    features: list[str] = Field(default_factory=list)
    dedup_factor: float = 1.0
    compress: list[CompressSpec] = Field(default_factory=list)
    pooling: Literal["none", "sum", "mean"] = "none"
    constraints: ConstraintsSpec | None = None


class JobSpec(StrictModel):
    """A job file."""

    cluster: str
    batch_size: int = Field(ge=1, lt=1 << 40)
    tables: list[TableSpec]
    budget: str = "neutral"
    tiers: int = Field(default=3, ge=1)
    method: Literal["optimal", "paper"] = "optimal"
    overlap: str | dict[str, float] | None = None
    index_dedup: bool | Literal["auto"] = "auto"
    index_dedup_seconds_per_id: float = 1e-9
    reduction: Literal["dense", "sparse", "auto"] = "dense"
    translation: Literal["loader", "device"] = "loader"
    memory: Literal["mean", "p99.9"] = "mean"
    sample_order: Literal["file", "shuffled"] = "file"
    objective: Literal["communication", "step"] | None = None
    dense: str | None = None
    rates: str | None = None
    loss_limit: float | None = None
    host_memory: str | None = None
    timeout_seconds: float = 60.0
    gap: float = 0.002

    @field_validator("index_dedup", mode="before")
    @classmethod
    def _is_a_choice(cls, value: Any) -> Any:
        if not isinstance(value, bool) and value != "auto":
            raise ValueError(f"expected true, false or auto, found {value!r}")
        return value

    @field_validator("budget", "host_memory", mode="before")
    @classmethod
    def _has_unit(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError(f"memory has a unit, such as 40GiB; found {value}")
        return value


def load_job(path: PathLike) -> Job:
    """Read a job file; paths in it are relative to it.

    Raises:
        JobError: unreadable, of another version, or with a field that cannot be used; names file, line and field.
    """
    spec, tree = load_yaml(path, JobSpec, FORMAT)
    folder = Path(path).parent

    def at(loc: Sequence[str | int], make: Callable[[], ValueT]) -> ValueT:
        try:
            return make()
        except FlexShardError as error:
            raise JobError(f"{located(path, tree, loc)}: {error}") from error

    if not spec.tables:
        raise JobError(f"{located(path, tree, ['tables'])}: there are no tables to plan")
    names: set[str] = set()
    for index, table in enumerate(spec.tables):
        if table.name in names:
            where = located(path, tree, ["tables", index, "name"])
            raise JobError(
                f"{where}: table {table.name!r} is given twice; tables need distinct names (flexshard profile --name"
                " gives another)"
            )
        names.add(table.name)
    cluster = at(["cluster"], lambda: _cluster(folder, spec.cluster))
    at(["overlap"], lambda: overlap_of(spec.overlap, cluster))
    at(["budget"], lambda: parse_budget(spec.budget).limit_bytes(0.0, cluster))
    host = spec.host_memory
    if host is not None:
        at(["host_memory"], lambda: units.parse_bytes(host))
    tables = tuple(at(["tables", index], partial(_table, folder, table)) for index, table in enumerate(spec.tables))
    for index, made in enumerate(tables):
        at(["tables", index, "dedup_factor"], partial(check_dedup_factors, [made], spec.batch_size))
    options = {
        table.name: tuple(
            at(["tables", index, "compress", number], partial(_option, table, option))
            for number, option in enumerate(spec.tables[index].compress)
        )
        for index, table in enumerate(tables)
        if spec.tables[index].compress
    }
    constraints = {
        table.name: at(["tables", index, "constraints"], partial(_constraints, asked))
        for index, table in enumerate(tables)
        if (asked := spec.tables[index].constraints) is not None
    }
    for index, planned in enumerate(tables):
        if planned.name in constraints:
            one = {planned.name: constraints[planned.name]}
            check = partial(check_constraints, one, tables, cluster, host_memory=host is not None)
            at(["tables", index, "constraints"], check)
    step = None
    if spec.dense is not None:
        text = spec.dense
        step = at(["dense"], lambda: StepWork(units.parse_seconds(text)))
        if spec.objective == "communication":
            raise JobError(
                f"{located(path, tree, ['dense'])}: dense decides nothing where the objective is 'communication'; leave"
                " one of them out"
            )
    if spec.rates is not None:
        if step is None:
            raise JobError(
                f"{located(path, tree, ['rates'])}: rates decide nothing without dense; say what a step takes"
            )
        file, known = folder / spec.rates, step
        step = at(["rates"], lambda: replace(known, rates=TTRates.load(file).local))
    others = spec.model_dump(exclude={"tables", "cluster", "dense", "rates"})
    try:
        return Job(tables, cluster, options=options, step=step, constraints=constraints, **others)
    except FlexShardError as error:
        first = str(error).partition(" ")[0].rstrip(":")
        where = located(path, tree, [first] if first in others else [])
        raise JobError(f"{where.removesuffix(f': {first}')}: {error}") from error


def job_files(path: PathLike) -> list[Path]:
    """The files that a job file names: profiles, the cluster's, rates.

    Raises:
        JobError: as :func:`load_job`, of what is no job file.
    """
    spec, _ = load_yaml(path, JobSpec, FORMAT)
    named = [*(table.profile for table in spec.tables), spec.cluster, *([] if spec.rates is None else [spec.rates])]
    return [Path(path).parent / name for name in named]


def _constraints(spec: ConstraintsSpec) -> TableConstraints:
    return TableConstraints(**{name: value for name, value in spec.model_dump().items() if value is not None})


def _option(table: Table, spec: CompressSpec) -> TTOption:
    return TTOption(TTShape.choose(table.rows, table.dim, spec.ranks, cores=spec.cores), spec.loss)


def _cluster(folder: Path, name: str) -> Cluster:
    beside = folder / name
    if beside.suffix in {".yaml", ".yml"} or beside.is_file():
        if not beside.exists():
            raise ClusterError(f"{beside}: no such cluster file")
        return Cluster.load(beside)
    return Cluster.resolve(name)


def _table(folder: Path, spec: TableSpec) -> Table:
    # The plan names the profile as the job does, so that it is the same plan from wherever it was made.
    profile = replace(AccessProfile.load(folder / spec.profile), path=spec.profile)
    return Table(
        spec.name,
        profile.num_rows if spec.rows is None else spec.rows,
        spec.dim,
        profile,
        spec.dtype,
        spec.optimizer,
        spec.replication_multiplier,
        tuple(spec.features),
        spec.dedup_factor,
        spec.pooling,
    )


def save_job(
    path: PathLike,
    profiles: Sequence[PathLike],
    *,
    cluster: str,
    batch_size: int,
    dim: int,
    dtype: str = "float32",
    optimizer: str = "rowwise_adagrad",
    budget: str = "neutral",
    tiers: int = 3,
) -> None:
    """Write a job file with one table per profile, all of one shape, to be edited where they differ.

    It is written only if :func:`load_job` takes it.

    Raises:
        ProfileError: a profile that cannot be read.
        JobError: a field that a job cannot have.
        OutputError: the job could not be written.
    """
    folder = Path(path).parent
    tables = []
    for file in profiles:
        profile = AccessProfile.load(file)
        entry = {"name": profile.table or Path(file).name.split(".")[0], "rows": profile.num_rows, "dim": dim}
        tables.append(entry | {"dtype": dtype, "optimizer": optimizer, "profile": os.path.relpath(file, folder)})
    body = {
        "cluster": os.path.relpath(cluster, folder) if Path(cluster).is_file() else cluster,
        "batch_size": batch_size,
        "budget": budget,
        "tiers": tiers,
        "method": "optimal",
        "tables": tables,
    }
    with replacing(path) as draft:
        save_yaml(draft, FORMAT, body)
        try:
            load_job(draft)
        except JobError as error:
            # It is not there for anybody to look into: a line number would send readers to a file that is not.
            message = re.sub(rf"^{re.escape(str(draft))}(:\d+)?: ", "", str(error))
            raise JobError(f"{path} is not written: {message}") from error
