"""What to plan, as one value: tables, cluster, batch size, budget and options, checked once."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypedDict, cast

import numpy as np

from flexshard import units
from flexshard._internal import check_finite, check_int, first_repeated
from flexshard.costmodels import CollectiveKind, LocalRates, OverlapLike, StepWork, overlap_of
from flexshard.errors import JobError
from flexshard.planner.budget import Budget, BudgetLike, parse_budget
from flexshard.planner.constraints import TableConstraints, check_constraints, check_dedup_factors, is_sharded
from flexshard.planner.methods import METHODS, Method
from flexshard.planner.named import parse
from flexshard.planner.reductions import REDUCTIONS, Reduction
from flexshard.planner.solver.local_work import COUNTS_IN_FULL, LocalShares
from flexshard.planner.translations import TRANSLATIONS, Translation
from flexshard.tables import DATA_TYPES, Table
from flexshard.topologies import Cluster

__all__ = ["FrontierOptions", "PlannerOptions", "Problem", "ProblemOptions", "title_of"]


def title_of(tables: Sequence[str], cluster: Cluster, batch_size: int) -> str:
    """Tables by name, cluster and batch size per rank in a few words."""
    what = tables[0] if len(tables) == 1 else f"{len(tables):,} tables"
    return f"{what} on {cluster.name} ({cluster.nodes} x {cluster.ranks_per_node}), batch {batch_size:,}"


class FrontierOptions(TypedDict, total=False):
    """Options of :class:`Problem` that matter whatever the budget; ``batch_size`` is required."""

    batch_size: int
    tiers: int
    overlap: OverlapLike
    index_dedup: bool | Literal["auto"]
    index_dedup_seconds_per_id: float
    reduction: str | Reduction
    translation: str | Translation
    host_memory: str | float | None


class PlannerOptions(FrontierOptions, total=False):
    """Options of :class:`Problem`, but for its constraints; ``batch_size`` is required."""

    budget: BudgetLike
    method: str | Method
    memory: Literal["mean", "p99.9"]
    sample_order: Literal["file", "shuffled"]
    objective: Literal["communication", "step"] | None
    step: StepWork | None
    timeout_seconds: float
    gap: float


class ProblemOptions(PlannerOptions, total=False):
    """All options of :class:`Problem`; ``batch_size`` is required."""

    constraints: Mapping[str, TableConstraints]


_OPTIONS = tuple(ProblemOptions.__annotations__)
_NOTHING = TableConstraints()


@dataclass(frozen=True, init=False)
class Problem:
    """A planning problem; ``dataclasses.replace`` makes others of it.

    Attributes:
        tables: with their access profiles; of distinct names.
        cluster: to train on; the text of a job will do, such as "dgx-h100:4" or a cluster file's path.
        batch_size: B, samples per rank.
        budget: memory per rank: "neutral" (no more than row-wise needs), a difference to that ("+2GiB", "-500 MB", or a
            number of bytes), or an absolute limit ("40GiB"), of which the cluster's reserve is taken off.
        tiers: most group sizes that a plan may use.
        method: "optimal", or "paper" for the published algorithm with 2 or 3 tiers.
        overlap: what other work hides; see :func:`flexshard.costmodels.overlap_of`.
        index_dedup: send a batch's repeated ids once per rank, and their rows and gradients: of all tables, of none, or
            of those where it takes less time, that of finding them included ("auto"). "neutral" is the memory that
            row-wise needs without.
        index_dedup_seconds_per_id: that time, per lookup; by default a nanosecond, about what GPUs take to sort so many
            ids. CPUs need 20 to 100 times as long.
        reduction: how gradients of copies are brought together: "dense" (all-reduce), "sparse" (all-gather of the rows
            that were touched) or "auto" (for each tier, whichever is predicted to take less: chosen with the tiers, or
            after them with ``host_memory``, whose proof then holds for dense ones).
        translation: where ids are translated to ranks and slots: "loader" (ahead of the model, in host memory) or
            "device" (a location per row in a rank's memory, in every placement and so in the budget too).
        memory: what the budget bounds: "mean" (static memory, and the rows that a batch is expected to need), or
            "p99.9" (what the fullest rank exceeds in one step of a thousand, the buffers of backward included).
            "neutral" is then what row-wise needs so. The proof holds for the fullest rank's mean, which is less.
        sample_order: in which training reads samples, for that quantile: "file", as the profiles were counted, so that
            rows that are hot for a while weigh on the rank that holds them; or "shuffled".
        objective: what is least: "step" (a whole step, in each phase of which links work at once; the default where
            ``step`` is given) or "communication" (all collectives one after the other, the default otherwise).
        step: what else a step does; None where it is not known.
        constraints: what is asked of tables, by name.
        host_memory: bytes of host memory per rank that tables may take ("200GiB"); None for none. Of tables that
            TorchRec shards by its kernels, which run on CUDA alone; where there are none, by rows without copies,
            behind a cache of their owner (docs/lookahead.md).
        timeout_seconds: after which the search for pooled tables' options ends with the best plan so far. Parts of it
            get shares; where none is used up, every process and machine finds the same plan.
        gap: proven, at which that search ends: 0.002 is at most 0.2 % above the optimum.

    Raises:
        JobError: an option that cannot be used, no tables, or two of one name.
    """

    tables: tuple[Table, ...]
    cluster: Cluster
    batch_size: int
    budget: Budget
    tiers: int
    method: Method
    overlap: OverlapLike
    index_dedup: bool | Literal["auto"]
    index_dedup_seconds_per_id: float
    reduction: Reduction
    translation: Translation
    memory: Literal["mean", "p99.9"]
    sample_order: Literal["file", "shuffled"]
    objective: Literal["communication", "step"]
    step: StepWork | None
    constraints: Mapping[str, TableConstraints]
    host_memory: float | None
    timeout_seconds: float
    gap: float

    def __init__(
        self,
        tables: Sequence[Table],
        cluster: Cluster | str | os.PathLike[str],
        batch_size: int,
        budget: BudgetLike = "neutral",
        tiers: int = 3,
        method: str | Method = "optimal",
        overlap: OverlapLike = None,
        index_dedup: bool | Literal["auto"] = "auto",
        reduction: str | Reduction = "dense",
        translation: str | Translation = "loader",
        index_dedup_seconds_per_id: float = 1e-9,
        memory: Literal["mean", "p99.9"] = "mean",
        sample_order: Literal["file", "shuffled"] = "file",
        objective: Literal["communication", "step"] | None = None,
        step: StepWork | None = None,
        constraints: Mapping[str, TableConstraints] | None = None,
        host_memory: str | float | None = None,
        timeout_seconds: float = 60.0,
        gap: float = 0.002,
    ) -> None:
        if isinstance(cluster, str | os.PathLike):
            cluster = Cluster.resolve(cluster)
        chosen = parse(method, METHODS, Method, "method")
        values: dict[str, Any] = {
            "method": chosen,
            "tiers": check_int(tiers, "tiers", JobError),
            "reduction": parse(reduction, REDUCTIONS, Reduction, "reduction"),
            "tables": _tables(tables),
            "cluster": cluster,
            "translation": parse(translation, TRANSLATIONS, Translation, "translation"),
            "overlap": overlap,
            "memory": _one_of(memory, ("mean", "p99.9"), "memory"),
            "sample_order": _one_of(sample_order, ("file", "shuffled"), "sample_order"),
            "step": step,
        }
        if step is not None and not isinstance(step, StepWork):
            raise JobError(f"step must be a StepWork, found {step!r}; StepWork(dense_seconds=...) makes one")
        chosen_by = ("step" if step is not None else "communication") if objective is None else objective
        values["objective"] = _one_of(chosen_by, ("communication", "step"), "objective")
        if chosen_by == "communication" and step is not None:
            raise JobError("step decides nothing where the objective is 'communication'; leave one of them out")
        if not isinstance(cluster, Cluster):
            raise JobError(f"cluster must be a Cluster, found {cluster!r}; Cluster.preset and Cluster.load make one")
        if not isinstance(index_dedup, (bool, np.bool_)) and index_dedup != "auto":
            raise JobError(f"index_dedup must be True, False or 'auto', found {index_dedup!r}")
        values["index_dedup"] = index_dedup if index_dedup == "auto" else bool(index_dedup)
        per_id = check_finite(index_dedup_seconds_per_id, "index_dedup_seconds_per_id", JobError)
        if per_id < 0:
            raise JobError(f"index_dedup_seconds_per_id is a time of at least 0 s, found {per_id}")
        values["index_dedup_seconds_per_id"] = per_id
        values["batch_size"] = check_int(batch_size, "batch_size", JobError)
        check_dedup_factors(values["tables"], values["batch_size"])
        overlap_of(overlap, cluster)
        values["budget"] = parse_budget(budget)
        values["budget"].limit_bytes(0.0, cluster)
        unknown = [table.name for table in values["tables"] if table.profile.lengths is None]
        if memory == "p99.9" and unknown:
            raise JobError(
                f"memory 'p99.9' needs to know how many ids samples have, and the profile of table {unknown[0]!r} does"
                " not say; build it from data, or let the budget bound the mean"
            )
        values |= _of_pooled(values, constraints or {}, host_memory)
        for name, least, given in (("timeout_seconds", 0.0, timeout_seconds), ("gap", 0.0, gap)):
            values[name] = check_finite(given, name, JobError)
            if values[name] < least:
                raise JobError(f"{name} must be at least {least:g}, found {given}")
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls,
        tables: Problem | Sequence[Table],
        cluster: Cluster | None,
        options: ProblemOptions | FrontierOptions,
        *,
        takes: Collection[str] = _OPTIONS,
    ) -> Problem:
        """The problem that a verb was given: itself, or its tables, cluster and options.

        Args:
            tables, cluster, options: the verb's arguments.
            takes: the options that the verb looks at.

        Raises:
            JobError: as the constructor; or a problem and something besides.
            TypeError: an option that the verb does not look at.
        """
        given = cast("Mapping[str, Any]", options)
        if isinstance(tables, Problem):
            if cluster is not None or given:
                more = "cluster" if cluster is not None else next(iter(given))
                raise JobError(
                    f"a Problem says it all, found {more!r} beside it; use dataclasses.replace(problem, ...)"
                )
            return tables
        other = [name for name in given if name in _OPTIONS and name not in takes]
        if other:
            raise TypeError(f"got an option that decides nothing here: {other[0]!r}")
        if "batch_size" not in given:
            raise TypeError("batch_size is required: samples per rank")
        unknown = next((name for name in given if name not in _OPTIONS), None)
        if unknown is not None:
            raise TypeError(f"got an unexpected option: {unknown!r}; there are {', '.join(takes)}")
        return cls(tables, cast("Cluster", cluster), **given)

    @cached_property
    def hidden(self) -> Mapping[tuple[CollectiveKind, int], float]:
        """Share of each collective's time that other work hides, by (kind, group size)."""
        return overlap_of(self.overlap, self.cluster)

    @property
    def in_order(self) -> bool:
        """Whether samples are read in the order that was profiled, so that bursts count."""
        return self.sample_order == "file"

    @property
    def rates(self) -> LocalRates | None:
        """Of lookups and updates, where they count: as given, or as the cluster's memory has them."""
        if self.objective == "communication":
            return None
        if self.step is not None and self.step.rates is not None:
            return self.step.rates
        bandwidth = self.cluster.hbm_bytes_per_s
        return None if bandwidth is None else LocalRates.of_bandwidth(bandwidth)

    @property
    def local_shares(self) -> LocalShares:
        """What counts of lookups and updates: all of it, where links have no weights."""
        return COUNTS_IN_FULL

    @property
    def pooled_tables(self) -> tuple[Table, ...]:
        """Those whose rows are added up where they are looked up."""
        return tuple(table for table in self.tables if table.is_pooled)

    @property
    def sequence_tables(self) -> tuple[Table, ...]:
        """The others."""
        return tuple(table for table in self.tables if not table.is_pooled)

    @property
    def sharded_tables(self) -> tuple[Table, ...]:
        """Those that TorchRec shards: pooled ones, and others that may not have tiers of rows."""
        return tuple(table for table in self.tables if is_sharded(table, self.constraints.get(table.name)))

    @property
    def undecided_tables(self) -> tuple[Table, ...]:
        """Those without pooling that may have tiers of rows or be sharded by TorchRec, as constraints say."""
        asked = {name for name, one in self.constraints.items() if one.torchrec_types and one.allows_tiers()}
        return tuple(table for table in self.tables if table.name in asked)

    @property
    def is_whole_model(self) -> bool:
        """Whether TorchRec shards some of the tables, or may."""
        return bool(self.sharded_tables or self.undecided_tables)

    @property
    def title(self) -> str:
        """Tables, cluster and batch size in a few words, for pictures."""
        return title_of([table.name for table in self.tables], self.cluster, self.batch_size)

    def refusing_sharded(self, what: str) -> Problem:
        """This problem, for what looks at tables in tiers of rows alone.

        Raises:
            JobError: TorchRec shards some, or may; names ``what``.
        """
        for table in (*self.sharded_tables, *self.undecided_tables):
            kind = (
                "is pooled; leave pooled tables out" if table.is_pooled else "may be sharded by TorchRec; leave it out"
            )
            raise JobError(f"{what} is of tables in tiers of rows, and {table.name!r} {kind}")
        return self

    def of_rows(self, tables: Sequence[Table]) -> Problem:
        """The problem of some of the tables, all in tiers of rows."""
        return replace(self, tables=tuple(tables), constraints={}, host_memory=None)

    @property
    def is_deduplicated(self) -> bool:
        """Whether batches of some table are deduplicated."""
        return any(table.dedup_factor > 1 for table in self.tables)

    def without_deduplication(self) -> Problem:
        """The same of whole batches."""
        return replace(self, tables=tuple(replace(table, dedup_factor=1.0) for table in self.tables))


def _of_pooled(
    values: Mapping[str, Any], constraints: Mapping[str, TableConstraints], host_memory: str | float | None
) -> dict[str, Any]:
    """Checked options that concern tables that TorchRec shards."""
    tables, cluster = values["tables"], values["cluster"]
    nbytes = None
    if host_memory is not None:
        given = units.parse_bytes(host_memory) if isinstance(host_memory, str) else host_memory
        nbytes = check_finite(given, "host_memory", JobError)
        if not 0 < nbytes < float("inf"):
            raise JobError(f"host_memory is a number of bytes above 0, found {host_memory!r}")
        if cluster.host_bytes_per_s is None:
            raise JobError(
                f"host_memory needs to know how fast ranks reach it, and cluster {cluster.name!r} does not say; give"
                " the cluster a host_bandwidth"
            )
    check_constraints(constraints, tables, cluster, host_memory=nbytes is not None)
    pooled = [table for table in tables if table.is_pooled or constraints.get(table.name, _NOTHING).torchrec_types]
    if nbytes is not None and not pooled:
        _check_caches(values)
    kind = "is pooled" if pooled and pooled[0].is_pooled else "may be sharded by TorchRec"
    if pooled and values["method"].tiers is not None:
        raise JobError(
            f"method {values['method'].name!r} places rows one by one, and table {pooled[0].name!r} {kind}; plan such"
            " tables with method 'optimal'"
        )
    if pooled and values["memory"] != "mean":
        raise JobError(
            f"memory {values['memory']!r} is not known of tables that TorchRec shards, and {pooled[0].name!r} {kind};"
            " let the budget bound the mean"
        )
    odd = next((table for table in pooled if DATA_TYPES[table.dtype].torchrec is None), None)
    if odd is not None:
        kind = "is pooled" if odd.is_pooled else "may be sharded by TorchRec"
        raise JobError(f"table {odd.name!r} {kind}, and TorchRec has no tables of {odd.dtype}; use float32 or less")
    return {"constraints": dict(constraints), "host_memory": nbytes}


def _check_caches(values: Mapping[str, Any]) -> None:
    """Whether tables without pooling can be planned behind caches.

    Raises:
        JobError: an option that is not known of them.
    """
    wanted = (
        ("method", values["method"].name, "optimal"),
        ("memory", values["memory"], "mean"),
        ("objective", values["objective"], "communication"),
    )
    for name, found, known in wanted:
        if found != known:
            raise JobError(
                f"{name} {found!r} is not known of rows behind caches, which host_memory asks for; take {known!r}, or"
                " leave host_memory out"
            )
    if any(table.dedup_factor > 1 for table in values["tables"]):
        raise JobError("host_memory is not known of deduplicated batches; leave host_memory or dedup_factor out")


def _one_of(value: str, known: tuple[str, str], name: str) -> str:
    if value not in known:
        raise JobError(f"{name} must be {' or '.join(map(repr, known))}, found {value!r}")
    return value


def _tables(tables: Sequence[Table]) -> tuple[Table, ...]:
    if not isinstance(tables, Sequence) or not all(isinstance(table, Table) for table in tables):
        raise JobError("tables must be a list of Table")
    listed = tuple(tables)
    if not listed:
        raise JobError("there are no tables to plan")
    twice = first_repeated(table.name for table in listed)
    if twice is not None:
        raise JobError(f"table {twice!r} is given twice; tables need distinct names")
    return listed
