"""The frontier of memory against communication (FlexShard paper, section 4.3 and Figure 5), for any number of tiers.

At every price of memory the solver's allocation is a vertex of the frontier of one subset of levels; the frontier of
all is their lower envelope. Between the prices at which a count changes its tier nothing changes, so visiting those
prices visits every vertex; where there are very many, an even selection of counts is taken, and every point is still
an optimal plan of its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import numpy as np
import numpy.typing as npt

from flexshard._internal import check_int
from flexshard.errors import JobError
from flexshard.planner.problem import FrontierOptions, Problem
from flexshard.planner.solver.build import build_instance
from flexshard.planner.solver.dual_search import solve_instance
from flexshard.planner.solver.instance import Allocation, Instance
from flexshard.planner.solver.published import solve_published
from flexshard.planner.solver.thresholds import allocate, crossing_prices
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["ParetoCurve", "ParetoPoint", "pareto"]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ParetoPoint:
    """A plan on or beside the frontier.

    Attributes:
        name: "greatest_memory_saving", "memory_neutral", "communication_neutral", "full_replication" and "row_wise"
            (FlexShard paper, Figure 5), "paper_2_tier", "paper_3_tier"; "" for the others.
        memory_bytes: per rank.
        exposed_seconds: per iteration.
        rows: rows per group size, in the order of the curve's ``group_sizes``.
    """

    name: str
    memory_bytes: float
    exposed_seconds: float
    rows: tuple[int, ...]


@dataclass(frozen=True)
class ParetoCurve:
    """The frontier, and points to compare with.

    Attributes:
        group_sizes: g per entry of the points' ``rows``.
        points: the frontier in order of memory; each takes less time than the one before.
        marked: named points. The first four lie on the frontier.
        neutral_bytes: memory of row-wise.
    """

    group_sizes: tuple[int, ...]
    points: tuple[ParetoPoint, ...]
    marked: tuple[ParetoPoint, ...]
    neutral_bytes: float

    def mark(self, name: str) -> ParetoPoint:
        """A marked point by name; KeyError if there is none."""
        for point in self.marked:
            if point.name == name:
                return point
        raise KeyError(name)


def pareto(
    tables: Problem | Sequence[Table],
    cluster: Cluster | None = None,
    *,
    prices: int = 500,
    **options: Unpack[FrontierOptions],
) -> ParetoCurve:
    """The frontier of memory per rank against exposed communication; a problem's budget and method are not looked at.

    Args:
        tables: a :class:`Problem`; or the tables of one.
        cluster, options: with tables: ``batch_size``, and ``tiers``, ``overlap``, ``index_dedup`` and ``translation``
            as for :func:`solve`.
        prices: most prices of memory to visit per pair of levels.

    Raises:
        JobError: as :func:`solve`.
    """
    problem = Problem.of(tables, cluster, options, takes=FrontierOptions.__annotations__)
    tiers, world = problem.tiers, problem.cluster.world_size
    prices = check_int(prices, "prices", JobError)
    instance = build_instance(problem)
    subsets = instance.level_subsets(tiers)
    curves = [
        [_point(instance, allocate(instance, levels, price)[0]) for price in crossing_prices(instance, levels, prices)]
        for levels in subsets
    ]
    neutral = _point(instance, instance.uniform(world), "row_wise")
    neutral_plan = solve_instance(instance, instance.cost(instance.uniform(world)).memory_bytes, tiers)
    points = [*_envelope(instance, subsets, curves), _point(instance, neutral_plan.allocation)]
    frontier = _frontier([*points, *_between(instance, _frontier(points), tiers)])
    return ParetoCurve(
        tuple(int(size) for size in instance.group_sizes),
        tuple(frontier),
        tuple(_marked(instance, frontier, neutral, neutral_plan.allocation)),
        neutral.memory_bytes,
    )


def _envelope(
    instance: Instance, subsets: Sequence[npt.NDArray[np.int64]], curves: Sequence[Sequence[ParetoPoint]]
) -> list[ParetoPoint]:
    """The vertices of each subset's frontier that no mixture of another's neighbours beats at their memory.

    Between two vertices of one subset rows move one by one along a straight line, at the latency of the whole subset.
    """
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


def _between(instance: Instance, frontier: Sequence[ParetoPoint], tiers: int, steps: int = 60) -> list[ParetoPoint]:
    """Optimal plans of the budgets at which the vertices leave a gap."""
    memory = np.array([point.memory_bytes for point in frontier])
    budgets = np.linspace(memory[0], memory[-1], steps)
    after = np.searchsorted(memory, budgets[1:-1])
    wide = memory[after] - memory[after - 1] > (memory[-1] - memory[0]) / steps
    return [_point(instance, solve_instance(instance, b, tiers).allocation) for b in budgets[1:-1][wide].tolist()]


def _point(instance: Instance, allocation: Allocation, name: str = "") -> ParetoPoint:
    reads = instance.tier_reads(allocation)
    seconds = instance.variable_seconds(allocation, reads) + instance.latency_seconds(np.any(allocation, axis=0))
    rows = tuple(int(n) for n in allocation.sum(axis=0))
    return ParetoPoint(name, instance.memory_bytes(allocation, reads), seconds, rows)


def _frontier(points: Sequence[ParetoPoint]) -> list[ParetoPoint]:
    kept: list[ParetoPoint] = []
    for point in sorted(points, key=lambda p: (p.memory_bytes, p.exposed_seconds, p.rows)):
        if not kept or point.exposed_seconds < kept[-1].exposed_seconds:
            kept.append(point)
    return kept


def _marked(
    instance: Instance, frontier: Sequence[ParetoPoint], neutral: ParetoPoint, best: Allocation
) -> list[ParetoPoint]:
    marked = [
        replace(frontier[0], name="greatest_memory_saving"),
        _point(instance, best, "memory_neutral"),
        replace(frontier[-1], name="communication_neutral"),
    ]
    marked.append(_point(instance, instance.uniform(1), "full_replication"))
    marked.append(neutral)
    marked += [_point(instance, solve_published(instance, neutral.memory_bytes, n), f"paper_{n}_tier") for n in (2, 3)]
    return marked
