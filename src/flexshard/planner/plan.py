"""The plan: where every row lives, why, and what it is predicted to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from flexshard._internal import PathLike, bound, deprecated_attribute, plain_sum, renamed_parameters
from flexshard.costmodels import Cost, LocalRates, Phase, StepWork, step_phases
from flexshard.errors import PlanError
from flexshard.planner.gaps import relative_gap
from flexshard.planner.pooled_plan import PooledTablePlan
from flexshard.tables import DATA_TYPES
from flexshard.topologies import Cluster

__all__ = ["Alternative", "Plan", "Settings", "TableCache", "TablePlan", "Tier"]


@dataclass(frozen=True)
class Settings:
    """What was asked for.

    Attributes:
        batch_size: B, samples per rank.
        budget: as it was written.
        budget_bytes: what it came to, per rank.
        tiers: most group sizes of a plan.
        method: "optimal" or "paper".
        index_dedup: whether repeated ids of a batch were to be sent once: of all tables, none, or those where it pays
            ("auto").
        overlap: hidden share of time by collective, such as ("all_to_all@8", 0.9).
        reduction: how gradients of copies may be brought together: "dense", "sparse" or "auto".
        translation: where ids are translated: "loader" (host memory) or "device" (counted as static memory).
        index_dedup_seconds_per_id: what finding distinct ids was taken to need, per lookup.
        memory: what the budget bounds: "mean" or "p99.9".
        sample_order: order in which training was taken to read samples: "file" or "shuffled".
        objective: what is least: "communication" or "step".
        dense_seconds: of a step besides its embeddings; None where it is not known.
        rates: of lookups and updates, where they were given.
        host_memory: bytes of host memory per rank that tables might take.
        gap: proven, that was asked for where TorchRec shards tables, or may.
        constraints: what was asked of tables, in words.
    """

    batch_size: int
    budget: str
    budget_bytes: float
    tiers: int
    method: str
    index_dedup: bool | Literal["auto"]
    overlap: tuple[tuple[str, float], ...]
    reduction: str = "dense"
    translation: str = "loader"
    index_dedup_seconds_per_id: float = 1e-9
    memory: str = "mean"
    sample_order: str = "file"
    objective: str = "communication"
    dense_seconds: float | None = None
    rates: LocalRates | None = None
    host_memory: float | None = None
    gap: float = 0.002
    constraints: tuple[str, ...] = ()


@renamed_parameters(first_rank="first_position")
@dataclass(frozen=True)
class Tier:
    """Rows of a table that share one group size: a range of its rows in descending p.

    Attributes:
        strategy: "data_parallel", "flex" or "row_wise".
        group_size: g; rows are split over g consecutive ranks and copied U/g times.
        rows: how many.
        first_position: of its hottest row in the table's order of popularity, from 0 (``first_rank`` in files).
        covered: share of the table's accesses.
        covered_held_out: that share in samples that the profile has not seen; None where none were held out.
        reads: R, expected reads of its rows per rank and iteration; distinct ones where the table's ids are sent once.
        hottest_p, coldest_p: expected appearances in one sample of its first and last row.
        reduction: how gradients of its copies are brought together: "dense" (all-reduce of all its rows) or "sparse"
            (all-gather of those that were touched).
        coldest_c: share of samples that contain its last row; None where samples do not repeat it, so that it is p.
        first_holder: local rank that holds its first row, those of the next ones following in turn: in order of
            popularity, or of id where the rows have no copies and come last. It differs between tables, lest one rank
            hold the hottest rows of all.
    """

    strategy: str
    group_size: int
    rows: int
    first_position: int
    covered: float
    covered_held_out: float | None
    reads: float
    hottest_p: float
    coldest_p: float
    reduction: str = "dense"
    coldest_c: float | None = None
    first_holder: int = 0

    first_rank = deprecated_attribute("first_rank", "first_position")


@dataclass(frozen=True)
class Alternative:
    """Another choice of group sizes for one table, all others as planned.

    Attributes:
        group_sizes: g's that it would use.
        exposed_seconds: what it adds to the plan's exposed communication.
        memory_bytes: what it adds to the plan's memory per rank.
        priced_seconds: both together at the plan's price of memory; where the step is what is shortened, its
            communication weighed by the links that the step waits for, with lookups and updates where they are known.
            Below 0 only where the budget rules it out, because it would spare a collective altogether.
        fits: whether the budget allows it.
    """

    group_sizes: tuple[int, ...]
    exposed_seconds: float
    memory_bytes: float
    priced_seconds: float
    fits: bool


@dataclass(frozen=True)
class TableCache:
    """What a rank holds of a table's rows without copies, which are in its host's memory.

    Attributes:
        load_factor: places for rows, as a share of those rows.
        batches: for which a row stays in expectation, that which reads it included.
        rows: places on each rank.
        fetched: rows that come from the host in a step, per rank, in expectation; as many go back.
        held_scale, fetched_scale: by how much what it holds and fetches differs from what popularity alone says, as the
            order of the profile's samples has it.
    """

    load_factor: float
    batches: int
    rows: float
    fetched: float
    held_scale: float = 1.0
    fetched_scale: float = 1.0


@dataclass(frozen=True)
class TablePlan:
    """One table of a plan.

    Attributes:
        name, rows, dim, dtype, optimizer, features: as in :class:`Table`.
        kappa_replicated, kappa_sharded: κ below U and at U.
        profile_digest: of the access profile that it was planned with.
        profile_path: file whose column ``row`` lists the rows, hottest first, as the job names it (relative to the job
            file); None where the profile was not read from a file.
        num_samples, avg_length: of the profile.
        tiers: hottest first; only those that hold rows.
        alternatives: next best choices, cheapest first; empty for method "paper".
        dedup_factor: as in :class:`Table`.
        index_dedup: whether a batch's repeated ids are sent once per rank.
        cache: of its rows without copies, where these are in the host's memory.
        undeduplicated: (group size, rows) of the tiers that the table would have without deduplication, hottest first;
            empty where no table of the plan is deduplicated.
    """

    name: str
    rows: int
    dim: int
    dtype: str
    optimizer: str
    features: tuple[str, ...]
    kappa_replicated: float
    kappa_sharded: float
    profile_digest: str
    profile_path: str | None
    num_samples: int
    avg_length: float
    tiers: tuple[Tier, ...]
    alternatives: tuple[Alternative, ...] = ()
    dedup_factor: float = 1.0
    undeduplicated: tuple[tuple[int, int], ...] = ()
    index_dedup: bool = False
    cache: TableCache | None = None

    @property
    def row_bytes(self) -> int:
        """D·s: bytes of one row's weights."""
        return self.dim * DATA_TYPES[self.dtype].nbytes

    def tier(self, group_size: int) -> Tier | None:
        """The tier of this group size, if it holds any rows."""
        return next((tier for tier in self.tiers if tier.group_size == group_size), None)


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A placement of every row of every table, its predicted cost and its proof.

    Attributes:
        cluster: what it is for.
        settings: what was asked for.
        tables: by name, in the order given.
        predicted: the plan's six metrics per rank and iteration.
        baselines: those of "row_wise", "data_parallel", "paper_2_tier" and "paper_3_tier", of those that ``compare``
            added, and of the same job "without_deduplication" where some table is deduplicated. "once_per_node" is of
            this placement if ids that are sent once a rank were sent once a node, which is priced and not run.
        lower_bound_seconds: no plan within the budget has less exposed communication, or a shorter step, whichever the
            objective is.
        memory_price_seconds_per_gib: exposed time that a little more memory would save, as of a GiB.
        next_gib_seconds: the same of the best plan with one GiB more; None for method "paper".
        job_digest: SHA-256 of the tables, profiles, cluster and settings that the plan was made from.
        pooled: tables that TorchRec shards by name, in the order given: pooled ones, and others that constraints or the
            search took out of the tiers of rows; ``tables`` has the rest.
        pooled_predicted: the part of ``predicted`` that is theirs; None where there are none.
    """

    cluster: Cluster
    settings: Settings
    tables: Mapping[str, TablePlan]
    predicted: Cost
    baselines: Mapping[str, Cost]
    lower_bound_seconds: float
    memory_price_seconds_per_gib: float
    next_gib_seconds: float | None
    job_digest: str
    pooled: Mapping[str, PooledTablePlan] = field(default_factory=dict)
    pooled_predicted: Cost | None = None

    @property
    def costs(self) -> dict[str, Cost]:
        """Of "this plan" and of the baselines, of those that can run."""
        baselines = {name: cost for name, cost in self.baselines.items() if name != "once_per_node"}
        return {"this plan": self.predicted, **baselines}

    def table(self, name: str) -> TablePlan:
        """One table.

        Raises:
            PlanError: the plan has no table of this name; lists those it has.
        """
        if not isinstance(name, str) or name not in self.tables:
            known = list(self.tables) if isinstance(name, str) and name in self.pooled else [*self.tables, *self.pooled]
            shown = ", ".join(known[:20]) + (f", ... ({len(known)} in all)" if len(known) > 20 else "")
            if isinstance(name, str) and name in self.pooled:
                kind = "sharded by TorchRec" if self.pooled[name].pooling == "none" else "pooled"
                raise PlanError(f"table {name!r} of the plan is {kind}; in tiers of rows it has {shown or 'none'}")
            raise PlanError(f"the plan has no table {name!r}; it has {shown}")
        return self.tables[name]

    def refusing_sharded(self, what: str) -> Plan:
        """This plan, for what looks at tables in tiers of rows alone.

        Raises:
            PlanError: TorchRec shards some; names ``what``.
        """
        for name, table in self.pooled.items():
            kind = "is sharded by TorchRec" if table.pooling == "none" else "is pooled"
            raise PlanError(f"{what} is of tables in tiers of rows, and the plan has {name!r}, which {kind}")
        return self

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What a step is predicted to do, one after the other."""
        return self.phases_of(self.predicted)

    def phases_of(self, cost: Cost) -> tuple[Phase, ...]:
        """The same of another placement of these tables, such as a baseline."""
        return step_phases(cost, self.cluster.world_size, StepWork(self.settings.dense_seconds or 0.0))

    def objective_seconds(self, cost: Cost) -> float:
        """What was to be least, of the plan or a baseline: exposed communication, or a whole step."""
        if self.settings.objective == "communication":
            return cost.exposed_seconds
        return plain_sum(phase.seconds for phase in self.phases_of(cost))

    @property
    def proven_gap(self) -> float:
        """By what part of the lower bound the plan's objective may exceed the least there is; infinite over 0."""
        return relative_gap(self.objective_seconds(self.predicted), self.lower_bound_seconds)

    def bounded_bytes(self, cost: Cost) -> float:
        """Memory per rank as far as the budget bounds it, of the plan or a baseline: expected, or what the fullest rank
        stays below in 999 of 1,000 steps.
        """
        p999 = cost.dynamic_memory_p999_bytes if self.settings.memory == "p99.9" else None
        return cost.static_memory_bytes + (cost.dynamic_memory_bytes if p999 is None else p999)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that the plan says, in hexadecimal: equal on every rank, or the plans differ."""
        fingerprint: str = bound("flexshard.planner", "Plan.fingerprint")(self)
        return fingerprint

    def save(self, path: PathLike) -> None:
        """Write the plan as JSON: the same plan gives the same bytes.

        Raises:
            OutputError: it could not be written.
        """
        bound("flexshard.planner", "Plan.save")(self, path)

    @classmethod
    def load(cls, path: PathLike) -> Plan:
        """Read a plan that :meth:`save` wrote.

        Raises:
            PlanError: not a plan, of another version, or changed since it was written.
        """
        plan: Plan = bound("flexshard.planner", "Plan.load")(path)
        return plan

    def to_frame(self) -> Any:
        """An Arrow table with a row per tier of each table, and one per shard of TorchRec's: ``table``,
        ``strategy``, ``group_size``, ``rows``, ``first_row``, ``covered`` and ``rank``, null where they do not apply;
        ``.to_pandas()`` makes a pandas one.
        """
        return bound("flexshard.planner", "Plan.to_frame")(self)

    def __eq__(self, other: object) -> bool:
        return self.fingerprint == other.fingerprint if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __str__(self) -> str:
        text: str = bound("flexshard.planner", "Plan.__str__")(self)
        return text

    def __repr__(self) -> str:
        tables = len(self.tables) + len(self.pooled)
        return (
            f"Plan({tables} table{'s' if tables != 1 else ''} on {self.cluster.name} x {self.cluster.world_size} ranks,"
            f" fingerprint={self.fingerprint[:16]!r})"
        )

    def _repr_html_(self) -> str:
        """What notebooks show."""
        page: str = bound("flexshard.planner", "Plan._repr_html_")(self)
        return page
