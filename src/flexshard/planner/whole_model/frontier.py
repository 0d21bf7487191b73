"""The frontier of a whole model, of tables that may be behind caches, or whose copies may be gathered: plans within
budgets between the least that fits and the most that helps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace

import numpy as np

from flexshard.errors import BudgetError
from flexshard.planner.budget import Limit, Neutral
from flexshard.planner.frontier_points import ParetoCurve, ParetoPoint, with_bounds
from flexshard.planner.methods import Optimal
from flexshard.planner.plan import Plan
from flexshard.planner.problem import Problem
from flexshard.planner.solver.deadline import ended_at

__all__ = ["whole_frontier"]

_POINTS, _HALVINGS = 10, 5  # budgets between the ends, and steps to find the lower one
_ROUNDED = 1e-9
_WORK_OF_POINT = 1_000_000.0  # microseconds that may go into making one of them exact; the neutral one is the plan
_BASELINES = {"row_wise": "row_wise", "data_parallel": "full_replication", "table_wise": "table_wise"}


def whole_frontier(problem: Problem, plan_of: Callable[[Problem], Plan]) -> ParetoCurve:
    """Plans of least communication within mean memory; a problem's budget, what it bounds and its method are not looked
    at, and its time is that of all plans together.

    Args:
        problem: of which everything else counts.
        plan_of: what plans it.

    Raises:
        BudgetError: nothing fits the cluster's memory.
    """
    cluster = problem.cluster
    seconds = problem.timeout_seconds / (_POINTS + _HALVINGS + len(_BASELINES) + 3)
    each = replace(
        problem, objective="communication", step=None, timeout_seconds=seconds, memory="mean", method=Optimal()
    )

    def within(nbytes: float) -> Plan:
        with nullcontext() if problem.is_whole_model else ended_at(np.inf, _WORK_OF_POINT):
            return plan_of(replace(each, budget=Limit(nbytes + cluster.reserve_bytes)))

    roomy = within(cluster.hbm_bytes - cluster.reserve_bytes)
    plans = [roomy]
    most, low = roomy.predicted.memory_bytes, 0.0
    with suppress(BudgetError):  # of a cluster that row-wise does not fit
        plans.append(plan_of(replace(each, budget=Neutral())))
    high = min(plan.predicted.memory_bytes for plan in plans)
    least = 0.0
    for _ in range(_HALVINGS):
        # What is said to be the least that fits is tried once, and is mostly that.
        middle, least = least if low < least < high else (low + high) / 2, 0.0
        try:
            plans.append(within(middle))
            high = min(high, plans[-1].predicted.memory_bytes)
        except BudgetError as error:
            low, least = middle, error.least_bytes * (1 + _ROUNDED)
    budgets = np.geomspace(high, most, _POINTS + 2)[1:-1].tolist() if most > high else []
    budgets += [  # so that no baseline is below what is found
        roomy.baselines[name].memory_bytes
        for name in ("data_parallel", "table_wise")  # row-wise's memory was the neutral plan's
        if name in roomy.baselines and high < roomy.baselines[name].memory_bytes < most
    ]
    plans += [within(budget) for budget in budgets]
    neutral = roomy.baselines["row_wise"].memory_bytes
    at_budgets = [(plan.settings.budget_bytes, plan.lower_bound_seconds) for plan in plans]
    points, bounds = with_bounds(_frontier(plans), at_budgets)
    fitting = [point for point in points if point.memory_bytes <= neutral * (1 + 1e-12)]
    marked = [replace(points[0], name="greatest_memory_saving"), replace(points[-1], name="communication_neutral")]
    marked += [replace(fitting[-1], name="memory_neutral")] if fitting else []
    sizes = cluster.group_sizes
    marked += [_baseline(roomy, name, mark) for name, mark in _BASELINES.items() if name in roomy.baselines]
    return ParetoCurve(sizes, points, tuple(marked), neutral, problem.title, bounds)


def _point(plan: Plan) -> ParetoPoint:
    tiers = [tier for table in plan.tables.values() for tier in table.tiers]
    rows = [sum(tier.rows for tier in tiers if tier.group_size == size) for size in plan.cluster.group_sizes]
    kinds = Counter(table.sharding_type for table in plan.pooled.values())
    return ParetoPoint(
        "",
        plan.predicted.memory_bytes,
        plan.predicted.exposed_seconds,
        tuple(rows),
        pooled=tuple(sorted(kinds.items())),
    )


def _baseline(plan: Plan, name: str, mark: str) -> ParetoPoint:
    """All tables alike, but for tables of means, which are not cut by rows, and rows in tiers, which are not whole."""
    size = 1 if name == "data_parallel" else plan.cluster.world_size
    rows = sum(table.rows for table in plan.tables.values())
    whole = (one.pooling == "mean" and name == "row_wise" for one in plan.pooled.values())
    kinds = Counter("table_wise" if kept else name for kept in whole)
    return ParetoPoint(
        mark,
        plan.baselines[name].memory_bytes,
        plan.baselines[name].exposed_seconds,
        tuple(rows if one == size else 0 for one in plan.cluster.group_sizes),
        pooled=tuple(sorted(kinds.items())),
    )


def _frontier(plans: list[Plan]) -> list[ParetoPoint]:
    """Those that no other one beats."""
    kept: list[ParetoPoint] = []
    for point in sorted(map(_point, plans), key=lambda one: (one.memory_bytes, one.exposed_seconds)):
        if not kept or point.exposed_seconds < kept[-1].exposed_seconds:
            kept.append(point)
    return kept
