"""The frontier of memory against communication (FlexShard paper, section 4.3 and Figure 5), for any number of tiers.

At every price of memory the solver's allocation is a vertex of the frontier of one subset of levels; the frontier of
all is their lower envelope. Between the prices at which a count changes its tier nothing changes, so visiting those
prices visits every vertex; where there are very many, an even selection of counts is taken, and every point is still
an optimal plan of its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Unpack

import numpy as np
import numpy.typing as npt

from flexshard._internal import check_int
from flexshard.errors import JobError
from flexshard.planner.frontier_points import ParetoCurve, ParetoPoint, with_bounds
from flexshard.planner.problem import FrontierOptions, Problem
from flexshard.planner.reductions import Dense
from flexshard.planner.solver.deadline import ended_at
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solver.dual_search import solve_instance
from flexshard.planner.solver.instance import Allocation, Instance, memory_limit
from flexshard.planner.solver.published import solve_published
from flexshard.planner.solver.thresholds import crossing_prices
from flexshard.planner.solver.vertices import vertices_at
from flexshard.planner.solving import solve
from flexshard.planner.whole_model.frontier import whole_frontier
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["pareto"]

FloatArray = npt.NDArray[np.float64]

_EVEN, _MOST_VERTICES, _CHOICES, _NOTHING = 24, 40, 16, 1e-6
_ROUNDED = 1e-4  # above a bound, as the last row that does not fit may leave a plan
_WORK_OF_POINT, _WORK_OF_CHOICE = 100_000.0, 1_000_000.0  # microseconds that may go into making one of them exact


def pareto(
    tables: Problem | Sequence[Table],
    cluster: Cluster | None = None,
    *,
    prices: int = 500,
    **options: Unpack[FrontierOptions],
) -> ParetoCurve:
    """The frontier of memory per rank against exposed communication; a problem's budget and method are not looked at.
    Memory is the mean, whatever the budget bounds.

    With ``index_dedup="auto"`` the tables whose repeated ids are sent once are all, none, or those of plans at some
    budgets, and points have bounds: between these budgets other choices may be a little better. Where tables are
    pooled, or may take the host's memory, or gradients of copies may be gathered (``reduction``), the points are plans
    at a dozen budgets, each with its bound; of pooled tables each gets an equal part of ``timeout_seconds``, and
    however little that is, the seconds that a first plan takes.

    Args:
        tables: a :class:`Problem`; or the tables of one.
        cluster, options: with tables: ``batch_size``, and ``tiers``, ``overlap``, ``index_dedup``, ``reduction`` and
            ``translation`` as for :func:`solve`.
        prices: most prices of memory to visit per pair of levels.

    Raises:
        JobError: as :func:`solve`.
        BudgetError: pooled tables do not fit the cluster's memory.
    """
    problem = Problem.of(tables, cluster, options, takes=FrontierOptions.__annotations__)
    if problem.is_whole_model or problem.host_memory is not None or problem.reduction.name != Dense.name:
        return whole_frontier(problem, solve)
    tiers, world = problem.tiers, problem.cluster.world_size
    prices = check_int(prices, "prices", JobError)
    variants = Variants(replace(problem, objective="communication", step=None))
    instance = variants.fixed
    neutral = _point(variants.plain, variants.plain.uniform(world), "row_wise")
    replicated = _point(instance, instance.uniform(1), "full_replication")
    points: list[ParetoPoint] = []
    for one in variants.sides:
        points += _best(one, _envelope(one, tiers, prices), (neutral, replicated), tiers)
    frontier, bounds = tuple(_frontier(points)), tuple[tuple[float, float], ...]()
    if variants.are_chosen and len(problem.tables) > 1:  # one table's ids are all sent once, or none are
        others, at_budgets = _of_choices(variants, frontier, neutral, tiers, prices)
        frontier, bounds = with_bounds(_frontier([*points, *others]), at_budgets)
    neutral_plan = max((p for p in frontier if p.memory_bytes <= memory_limit(neutral.memory_bytes)), key=_memory)
    return ParetoCurve(
        tuple(int(size) for size in instance.group_sizes),
        frontier,
        tuple(_marked(variants.plain, frontier, neutral, replicated, neutral_plan)),
        neutral.memory_bytes,
        problem.title,
        bounds,
    )


def _of_choices(
    variants: Variants, frontier: Sequence[ParetoPoint], neutral: ParetoPoint, tiers: int, prices: int
) -> tuple[list[ParetoPoint], list[tuple[float, float]]]:
    """Plans at some budgets, and the vertices of the tables that these deduplicate; the budgets, and bounds there."""
    points, bounds, known = list[ParetoPoint](), [], {one.deduplicated.tobytes() for one in variants.sides}
    memory, seconds = (np.array([getattr(p, of) for p in frontier]) for of in ("memory_bytes", "exposed_seconds"))
    drops = np.argsort(np.diff(seconds), kind="stable")[: _CHOICES // 2] + 1  # what is just not enough for them
    budgets = {
        *np.geomspace(memory[0], memory[-1], _CHOICES // 2).tolist(),
        *np.maximum(memory[drops] - 1, memory[0]).tolist(),
    }
    price = None
    enough = _point(variants.plain, variants.plain.uniform(1)).memory_bytes + neutral.memory_bytes  # for any plan
    for budget in sorted({*budgets, enough, max(neutral.memory_bytes, float(memory[0]))}):
        with nullcontext() if budget == neutral.memory_bytes else ended_at(np.inf, _WORK_OF_CHOICE):
            instance, found = variants.solve(budget, tiers, start_price=price)
        price = found.price or None
        points.append(_point(instance, found.allocation))
        bounds.append((budget, found.lower_bound_seconds))
        if (choice := instance.deduplicated.tobytes()) not in known:
            known.add(choice)
            points += [point for point in _envelope(instance, tiers, prices) if not _waits(point)]
    return points, bounds


def _best(
    instance: Instance, vertices: Sequence[ParetoPoint], others: Sequence[ParetoPoint], tiers: int
) -> list[ParetoPoint]:
    """The vertices that are the best plans of their memory, and the best plans of the memory of those that may not be
    (ranks wait for the owner of a hot row), of ``others``, and of budgets between.
    """
    points = [p for p in vertices if not _waits(p)]
    waiting = sorted({p.memory_bytes for p in vertices if _waits(p)})
    if waiting:
        chosen = np.unique(np.linspace(0, len(waiting) - 1, min(len(waiting), _MOST_VERTICES)).astype(np.int64))
        waiting = [waiting[index] for index in chosen.tolist()]
    least = min(p.memory_bytes for p in vertices)
    known = np.array(sorted({p.memory_bytes for p in (*points, *others)} | {*waiting, least}))
    apart = np.linspace(least, known[-1], _EVEN)
    gaps = np.diff(known, prepend=known[0])[np.minimum(np.searchsorted(known, apart), known.size - 1)]
    budgets = {*waiting, *(p.memory_bytes for p in others), *apart[gaps > (known[-1] - least) / _EVEN].tolist()}
    price = None
    for budget in sorted(budget for budget in budgets if budget >= least):
        with ended_at(np.inf, _WORK_OF_POINT):
            found = solve_instance(instance, budget, tiers, start_price=price)
        bound = found.lower_bound_seconds
        optimal = found.seconds <= bound * (1 + _ROUNDED)
        points.append(replace(_point(instance, found.allocation), lower_bound_seconds=None if optimal else bound))
        price = found.price or None
    return points


def _waits(point: ParetoPoint) -> bool:
    """Whether ranks wait for the owner of a hot row, so that there may be a better plan of its memory."""
    return point.waits_seconds > _NOTHING * point.exposed_seconds


def _envelope(instance: Instance, tiers: int, prices: int) -> list[ParetoPoint]:
    """The vertices of each subset's frontier that no mixture of another's neighbours beats at their memory.

    Between two vertices of one subset rows move one by one along a straight line, at the latency of the whole subset.
    """
    subsets = instance.level_subsets(tiers)
    curves = [_vertices(instance, levels, crossing_prices(instance, levels, prices)) for levels in subsets]
    lines = []
    for levels, curve in zip(subsets, curves, strict=True):
        latency = instance.latency_seconds(levels)
        spent = sorted({(p.memory_bytes, p.exposed_seconds - _latency(instance, p) + latency) for p in curve})
        lines.append(np.array(spent).T)
    kept = []
    for curve in curves:
        memory = np.array([point.memory_bytes for point in curve])
        least = np.min([np.interp(memory, x, y, left=np.inf) for x, y in lines], axis=0)
        kept += [p for p, other in zip(curve, least, strict=True) if p.exposed_seconds <= other * (1 + 1e-9)]
    return kept


def _latency(instance: Instance, point: ParetoPoint) -> float:
    return instance.latency_seconds(np.array(point.rows) > 0)


def _memory(point: ParetoPoint) -> float:
    return point.memory_bytes


def _point(instance: Instance, allocation: Allocation, name: str = "") -> ParetoPoint:
    rows = tuple(int(n) for n in allocation.sum(axis=0))
    seconds, waits = instance.exposed_seconds(allocation), float(instance.excess_seconds(allocation).sum())
    return ParetoPoint(name, instance.memory_bytes(allocation), seconds, rows, waits)


def _vertices(instance: Instance, levels: npt.NDArray[np.int64], prices: FloatArray) -> list[ParetoPoint]:
    found = vertices_at(instance, levels, prices)
    each = (one.tolist() for one in (found.memory_bytes, found.exposed_seconds, found.rows, found.waits_seconds))
    return [
        ParetoPoint("", memory, seconds, tuple(rows), waits) for memory, seconds, rows, waits in zip(*each, strict=True)
    ]


def _frontier(points: Sequence[ParetoPoint]) -> list[ParetoPoint]:
    kept: list[ParetoPoint] = []
    for point in sorted(points, key=lambda p: (p.memory_bytes, p.exposed_seconds, p.rows)):
        if not kept or point.exposed_seconds < kept[-1].exposed_seconds:
            kept.append(point)
    return kept


def _marked(
    instance: Instance,
    frontier: Sequence[ParetoPoint],
    neutral: ParetoPoint,
    replicated: ParetoPoint,
    neutral_plan: ParetoPoint,
) -> list[ParetoPoint]:
    marked = [
        replace(frontier[0], name="greatest_memory_saving"),
        replace(neutral_plan, name="memory_neutral"),
        replace(frontier[-1], name="communication_neutral"),
        replicated,
        neutral,
    ]
    marked += [_point(instance, solve_published(instance, neutral.memory_bytes, n), f"paper_{n}_tier") for n in (2, 3)]
    return marked
