"""Job files: what to plan, as YAML."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field

from flexshard._documents import load_yaml, located
from flexshard._files import replacing
from flexshard._tt_shape import TTShape
from flexshard.costmodels import OverlapLike, Table, TTRates, overlap_of
from flexshard.errors import ClusterError, FlexShardError, JobError
from flexshard.planner._choose import plan_compression
from flexshard.planner._compression import CompressionPlan, TTOption
from flexshard.planner._plan import Plan
from flexshard.planner._solve import parse_budget, solve
from flexshard.profiling import AccessProfile
from flexshard.topologies import Cluster

__all__ = ["Job", "load_job", "save_job"]

FORMAT, VERSION = "flexshard.job", 1

ValueT = TypeVar("ValueT")


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CompressSpec(_Spec):
    """A tensor train that a table may become: one rank for all, or each."""

    ranks: int | list[int]
    cores: int = 3
    loss: float = 0.0


class TableSpec(_Spec):
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


class JobSpec(_Spec):
    """A job file."""

    cluster: str
    batch_size: int = Field(ge=1, lt=1 << 40)
    tables: list[TableSpec]
    budget: str = "neutral"
    tiers: int = Field(default=3, ge=1)
    method: Literal["optimal", "paper"] = "optimal"
    overlap: str | dict[str, float] | None = None
    index_dedup: bool = False
    reduction: Literal["dense", "sparse", "auto"] = "dense"
    translation: Literal["loader", "device"] = "loader"
    loss_limit: float | None = None


@dataclass(frozen=True)
class Job:
    """A planning problem and how to solve it; fields as the arguments of :func:`solve`.

    Attributes:
        options: tensor trains that tables may become, and
        loss_limit: as for :func:`plan_compression`; a plan of tiers alone does not look at them.
    """

    tables: tuple[Table, ...]
    cluster: Cluster
    batch_size: int
    budget: str = "neutral"
    tiers: int = 3
    method: str = "optimal"
    overlap: OverlapLike = None
    index_dedup: bool = False
    reduction: str = "dense"
    translation: str = "loader"
    options: Mapping[str, tuple[TTOption, ...]] = field(default_factory=dict)
    loss_limit: float | None = None

    def solve(self) -> Plan:
        """The plan; raises as :func:`solve`."""
        return solve(
            self.tables,
            self.cluster,
            batch_size=self.batch_size,
            budget=self.budget,
            tiers=self.tiers,
            method=self.method,
            overlap=self.overlap,
            index_dedup=self.index_dedup,
            reduction=self.reduction,
            translation=self.translation,
        )

    def compress(self, rates: TTRates, *, hashed: bool = False) -> CompressionPlan:
        """Which tables to compress; raises as :func:`plan_compression`, and JobError for method "paper"."""
        if self.method != "optimal":
            raise JobError(f"tables are compressed with method 'optimal', the job has {self.method!r}")
        return plan_compression(
            self.tables,
            self.cluster,
            options=self.options,
            rates=rates,
            batch_size=self.batch_size,
            budget=self.budget,
            loss_limit=self.loss_limit,
            hashed=hashed,
            tiers=self.tiers,
            overlap=self.overlap,
            index_dedup=self.index_dedup,
            reduction=self.reduction,
            translation=self.translation,
        )


def load_job(path: str | os.PathLike[str]) -> Job:
    """Read a job file; paths in it are relative to it.

    Raises:
        JobError: unreadable, of another version, or with a field that cannot be used; names file, line and field.
    """
    spec, tree = load_yaml(path, JobSpec, kind=FORMAT, version=VERSION, error_type=JobError)
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
            raise JobError(f"{where}: table {table.name!r} is given twice; tables need distinct names")
        names.add(table.name)
    cluster = at(["cluster"], lambda: _cluster(folder, spec.cluster))
    at(["overlap"], lambda: overlap_of(spec.overlap, cluster))
    at(["budget"], lambda: parse_budget(spec.budget, 0.0, cluster))
    tables = tuple(at(["tables", index], partial(_table, folder, table)) for index, table in enumerate(spec.tables))
    return Job(
        tables,
        cluster,
        spec.batch_size,
        spec.budget,
        spec.tiers,
        spec.method,
        spec.overlap,
        spec.index_dedup,
        spec.reduction,
        spec.translation,
        {
            table.name: tuple(
                at(["tables", index, "compress", place], partial(_option, table, own))
                for place, own in enumerate(spec.tables[index].compress)
            )
            for index, table in enumerate(tables)
            if spec.tables[index].compress
        },
        spec.loss_limit,
    )


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
    )


def save_job(
    path: str | os.PathLike[str],
    profiles: Sequence[str | os.PathLike[str]],
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
    document = {
        "format": FORMAT,
        "version": VERSION,
        "cluster": os.path.relpath(cluster, folder) if Path(cluster).is_file() else cluster,
        "batch_size": batch_size,
        "budget": budget,
        "tiers": tiers,
        "method": "optimal",
        "tables": tables,
    }
    with replacing(path) as draft:
        draft.write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), encoding="utf-8")
        try:
            load_job(draft)
        except JobError as error:
            raise JobError(str(error).replace(str(draft), str(path))) from error
