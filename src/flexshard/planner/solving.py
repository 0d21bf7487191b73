"""``solve``: from a problem to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Unpack

from flexshard import units
from flexshard.errors import BudgetError
from flexshard.planner.caching import plan_with_caches
from flexshard.planner.deciding import decide
from flexshard.planner.digest import job_digest
from flexshard.planner.plan import Plan, TablePlan
from flexshard.planner.problem import Problem, ProblemOptions
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.whole_model.assembly import plan_whole
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["solve"]


def solve(tables: Problem | Sequence[Table], cluster: Cluster | None = None, **options: Unpack[ProblemOptions]) -> Plan:
    """Decide where every row of every table lives, so that training communicates least within a memory budget.

    Args:
        tables: a :class:`Problem`; or the tables of one.
        cluster: to train on, with tables.
        options: ``batch_size``, and ``budget="neutral"``, ``tiers=3``, ``method="optimal"``, ``overlap=None``,
            ``index_dedup="auto"``, ``reduction="dense"``, ``translation="loader"``, ``memory="mean"``,
            ``sample_order="file"``, ``objective``, ``step``: see :class:`Problem`.

    Raises:
        JobError: an argument that cannot be used.
        BudgetError: no placement fits; its ``least_bytes`` would.
    """
    problem = Problem.of(tables, cluster, options)
    if problem.is_whole_model:
        return plan_whole(problem)
    if problem.host_memory is not None:
        cached = plan_with_caches(problem)
        return cached if problem.reduction.name == "dense" else _gathered(problem, problem.host_memory, cached)
    decision = decide(problem)
    placed, baselines = decision.table_plans(), decision.baselines()
    if problem.is_deduplicated:
        with suppress(BudgetError):  # whole batches may not fit where deduplicated ones do
            whole_batches = decide(problem.without_deduplication())
            baselines["without_deduplication"] = whole_batches.predicted
            placed = _beside(placed, whole_batches.table_plans())
    placement, settings = decision.placement, decision.settings()
    return Plan(
        cluster=problem.cluster,
        settings=settings,
        tables=placed,
        predicted=decision.predicted,
        baselines=baselines,
        # Two orders of one sum may differ in the last bit; a bound above the cost would read as a contradiction.
        lower_bound_seconds=min(placement.lower_bound_seconds + decision.dense_seconds, decision.seconds),
        memory_price_seconds_per_gib=placement.price * units.GIB,
        next_gib_seconds=(
            None if placement.next_gib_seconds is None else placement.next_gib_seconds + decision.dense_seconds
        ),
        job_digest=job_digest(decision.variants.plain.tables, problem.cluster, settings),
    )


def _gathered(problem: Problem, host_memory: float, cached: Plan) -> Plan:
    """The plan, or the one without caches where that takes less, of a problem whose gradients may be gathered, which
    caches are not chosen for; with a bound that holds for all: no tiers take less behind caches than they do without
    any in as much more memory.
    """
    without, limit = replace(problem, host_memory=None), cached.settings.budget_bytes
    best = cached
    with suppress(BudgetError):
        plain = solve(without)
        if plain.predicted.exposed_seconds < cached.predicted.exposed_seconds:
            best = replace(plain, settings=cached.settings, job_digest=cached.job_digest)
    roomy = problem.method.place(Variants(without), limit + host_memory, problem.tiers)
    return replace(best, lower_bound_seconds=min(roomy.lower_bound_seconds, best.predicted.exposed_seconds))


def _beside(placed: Mapping[str, TablePlan], undeduplicated: Mapping[str, TablePlan]) -> dict[str, TablePlan]:
    """Tables with the tiers that they would have without deduplication."""
    return {
        name: replace(table, undeduplicated=tuple((tier.group_size, tier.rows) for tier in undeduplicated[name].tiers))
        for name, table in placed.items()
    }
