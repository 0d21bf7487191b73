"""``solve``: from a problem to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import numpy as np
import numpy.typing as npt

from flexshard import units
from flexshard.costmodels import Cost
from flexshard.errors import BudgetError, JobError
from flexshard.planner.assembly import closed_form_baselines, table_plans
from flexshard.planner.digest import job_digest
from flexshard.planner.methods import Placement
from flexshard.planner.plan import Plan, Settings, TablePlan
from flexshard.planner.problem import Problem, ProblemOptions
from flexshard.planner.reductions import cost_with_reductions
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solver.instance import Instance, memory_limit
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["Decision", "decide", "limit_of", "solve"]


def solve(tables: Problem | Sequence[Table], cluster: Cluster | None = None, **options: Unpack[ProblemOptions]) -> Plan:
    """Decide where every row of every table lives, so that training communicates least within a memory budget.

    Args:
        tables: a :class:`Problem`; or the tables of one.
        cluster: to train on, with tables.
        options: ``batch_size``, and ``budget="neutral"``, ``tiers=3``, ``method="optimal"``, ``overlap=None``,
            ``index_dedup="auto"``, ``reduction="dense"``, ``translation="loader"``: see :class:`Problem`.

    Raises:
        JobError: an argument that cannot be used.
        BudgetError: no placement fits; its ``least_bytes`` would.
    """
    problem = Problem.of(tables, cluster, options)
    decision = decide(problem)
    placed, baselines = decision.table_plans(), closed_form_baselines(decision.variants, decision.limit_bytes)
    if problem.is_deduplicated:
        whole_batches = decide(problem.without_deduplication())
        baselines["without_deduplication"] = whole_batches.predicted
        placed = _beside(placed, whole_batches.table_plans())
    placement, settings = decision.placement, decision.settings(problem)
    return Plan(
        cluster=problem.cluster,
        settings=settings,
        tables=placed,
        predicted=decision.predicted,
        baselines=baselines,
        # Two orders of one sum may differ in the last bit; a bound above the cost would read as a contradiction.
        lower_bound_seconds=min(placement.lower_bound_seconds, decision.predicted.exposed_seconds),
        memory_price_seconds_per_gib=placement.price * units.GIB,
        next_gib_seconds=placement.next_gib_seconds,
        job_digest=job_digest(decision.variants.plain, settings),
    )


def limit_of(problem: Problem, instance: Instance) -> float:
    """Bytes per rank that a problem's budget comes to.

    Raises:
        BudgetError: more than a rank of the cluster has.
    """
    cluster = problem.cluster
    neutral = instance.cost(instance.uniform(cluster.world_size)).memory_bytes
    limit = problem.budget.limit_bytes(neutral, cluster)
    available = cluster.hbm_bytes - cluster.reserve_bytes
    if limit > memory_limit(available):
        show = units.format_bytes
        raise BudgetError(
            f"budget {problem.budget.name!r} comes to {show(limit)} per rank (row-wise needs {show(neutral)}); a rank"
            f" of cluster {cluster.name!r} has but {show(available)} ({show(cluster.hbm_bytes)} less a reserve of"
            f" {show(cluster.reserve_bytes)}); take a larger cluster, or a limit within its memory",
            neutral,
        )
    return limit


@dataclass(frozen=True, eq=False)
class Decision:
    """Where rows go, and what that costs.

    Attributes:
        variants: the problem as arrays, deduplicated or not.
        limit_bytes: what its budget comes to, per rank.
        placement: what the method found.
        sparse: tiers whose gradients are gathered; shape (T, G).
        predicted: the six metrics.
    """

    variants: Variants
    limit_bytes: float
    placement: Placement
    sparse: npt.NDArray[np.bool_]
    predicted: Cost

    def table_plans(self) -> dict[str, TablePlan]:
        """Tiers of every table."""
        return table_plans(self.placement.instance, self.placement.allocation, self.sparse, self.placement.alternatives)

    def settings(self, problem: Problem) -> Settings:
        """What was asked for, as a plan keeps it."""
        return Settings(
            batch_size=problem.batch_size,
            budget=problem.budget.name,
            budget_bytes=self.limit_bytes,
            tiers=problem.tiers,
            method=problem.method.name,
            index_dedup=problem.index_dedup,
            overlap=tuple((f"{kind}@{size}", share) for (kind, size), share in sorted(problem.hidden.items())),
            reduction=problem.reduction.name,
            translation=problem.translation.name,
            index_dedup_seconds_per_id=problem.index_dedup_seconds_per_id,
        )


def decide(problem: Problem) -> Decision:
    """Place the rows of a problem; raises as :func:`solve`."""
    possible = problem.method.tiers
    if possible is not None and problem.tiers not in possible:
        text = " or ".join(map(str, possible))
        raise JobError(f"tiers must be {text} for method {problem.method.name!r}, found {problem.tiers}")
    variants = Variants(problem)
    limit = limit_of(problem, variants.plain)
    placement = problem.method.place(variants, limit, problem.tiers)
    sparse = problem.reduction.sparse_tiers(placement.instance, placement.allocation)
    predicted = cost_with_reductions(placement.instance, placement.allocation, sparse)
    return Decision(variants, limit, placement, sparse, predicted)


def _beside(placed: Mapping[str, TablePlan], undeduplicated: Mapping[str, TablePlan]) -> dict[str, TablePlan]:
    """Tables with the tiers that they would have without deduplication."""
    return {
        name: replace(table, undeduplicated=tuple((tier.group_size, tier.rows) for tier in undeduplicated[name].tiers))
        for name, table in placed.items()
    }
