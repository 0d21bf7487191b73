"""The choice between tensor trains and tiers of rows as a mixed-integer program (PuLP, HiGHS).

Every table is one of its tensor trains, or tiers of rows. What tiers of rows cost at different prices of memory are
the corners of a convex curve, so a table's share of them is linear between two corners and the program needs integers
for tensor trains alone. Latencies are paid per level that is used, so each subset of levels is a program of its own,
as in :mod:`flexshard.planner.solver.dual_search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard.errors import SolverError
from flexshard.planner.compression.menu import ChoiceProblem
from flexshard.planner.programs import solve_program, weighted_sum
from flexshard.planner.solver.instance import memory_limit
from flexshard.planner.solver.thresholds import crossing_prices

__all__ = ["PRICES", "Choice", "best_choice"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Choice = tuple[int, ...]  # of each table: an index among all options, or -1

PRICES = 32  # of memory, per pair of levels: corners of a table's curve
_CUTS = 50  # choices that fit the solver's tolerance only, before giving up


@dataclass(frozen=True, eq=False)
class _Program:
    """The mixed-integer program of one subset of levels.

    Attributes:
        model: PuLP's.
        taken: whether each tensor train is; shape (n,).
        shares: of each table, how much of it is at each corner of its curve.
        least: memory that each table needs as tiers of rows; shape (T,).
    """

    model: Any
    taken: Sequence[Any]
    shares: Sequence[Sequence[Any]]
    least: FloatArray


def _program(problem: ChoiceProblem, levels: IntArray | None) -> _Program:
    """The program where tiers of rows may use some levels; None where every table is compressed."""
    import pulp  # takes longer to import than everything else of the planner

    instance, options = problem.instance, problem.options
    count = len(instance.tables)
    corners: list[FloatArray] = [np.empty((0, 2))] * count
    latency, least = 0.0, np.zeros(count)
    if levels is not None:
        prices = crossing_prices(instance, levels, PRICES)
        curves = np.stack([np.stack(problem.tiers(levels, price), axis=1) for price in prices])  # (prices, T, 2)
        corners = [_lower_hull(curves[:, t]) for t in range(count)]
        latency, least = instance.latency_seconds(levels), curves[:, :, 1].min(axis=0)
    # The solver's tolerances are absolute: work in shares of one step, of the limit, and of the loss allowed.
    scale = float(sum(c[:, 0].max(initial=0.0) for c in corners) + options.seconds.sum()) or 1.0
    memory_scale = max(abs(problem.limit), 1.0)
    model = pulp.LpProblem("compression", pulp.LpMinimize)
    taken = [model.add_variable(f"x_{n}", cat="Binary") for n in range(options.table.size)]
    some = model.add_variable("z", lowBound=0, upBound=1)
    shares = [[model.add_variable(f"w_{t}_{v}", lowBound=0) for v in range(len(c))] for t, c in enumerate(corners)]
    time = [(x, s / scale) for x, s in zip(taken, options.seconds.tolist(), strict=True)]
    memory = [(x, m / memory_scale) for x, m in zip(taken, options.memory.tolist(), strict=True)]
    for table_shares, corner in zip(shares, corners, strict=True):
        time += [(w, s / scale) for w, s in zip(table_shares, corner[:, 0].tolist(), strict=True)]
        memory += [(w, m / memory_scale) for w, m in zip(table_shares, corner[:, 1].tolist(), strict=True)]
    model += weighted_sum([*time, (some, problem.latency / scale)]) + latency / scale
    model += weighted_sum(memory) <= memory_limit(problem.limit) / memory_scale
    if np.isfinite(problem.loss_limit):
        loss_scale = problem.loss_limit or 1.0
        lost = [(x, v / loss_scale) for x, v in zip(taken, options.loss.tolist(), strict=True)]
        model += weighted_sum(lost) <= problem.loss_limit / loss_scale
        for n in np.flatnonzero(options.loss > problem.loss_limit).tolist():
            model += taken[n] <= 0
    for t in range(count):
        mine = [taken[n] for n in np.flatnonzero(options.table == t).tolist()]
        model += pulp.lpSum([*mine, *shares[t]]) == 1
        for x in mine:
            model += x <= some
    return _Program(model, taken, shares, least)


def best_choice(problem: ChoiceProblem, levels: IntArray | None, time_limit_seconds: float) -> Choice | None:
    """For each table its tensor train (an index among all options), or -1; None if nothing fits."""
    import pulp

    options, program = problem.options, _program(problem, levels)
    model, taken = program.model, program.taken
    for _ in range(_CUTS):
        outcome = solve_program(model, gap=1e-7, time_limit_seconds=time_limit_seconds)
        if outcome == "infeasible":
            return None
        values = np.array([x.value() or 0.0 for x in taken])
        sums = np.array([sum(w.value() or 0.0 for w in table_shares) for table_shares in program.shares])
        np.add.at(sums, options.table, values)
        one_each = np.abs(values - values.round()).max(initial=0) < 1e-4 and np.allclose(sums, 1.0, atol=1e-4)
        if outcome == "nothing" or not one_each:
            raise SolverError(f"HiGHS found no choice of tables in {time_limit_seconds:g} s; raise the time limit")
        picked = np.flatnonzero(values > 0.5)
        choice = np.full(program.least.size, -1, np.int64)
        choice[options.table[picked]] = picked
        memory = float(options.memory[picked].sum() + program.least[choice < 0].sum())
        if memory <= memory_limit(problem.limit) and options.loss[picked].sum() <= problem.loss_limit * (1 + 1e-12):
            return tuple(choice.tolist())
        # Within the solver's tolerance, but not within the limit: any choice but this one.
        others = [taken[n] for n in np.flatnonzero(values <= 0.5).tolist()]
        model += pulp.lpSum([1 - taken[n] for n in picked.tolist()]) + pulp.lpSum(others) >= 1
    return None


def _lower_hull(points: FloatArray) -> FloatArray:
    """Corners of the lower left of (seconds, memory) points, least memory first; shape (n, 2)."""
    kept: list[FloatArray] = []
    for point in points[np.lexsort((points[:, 0], points[:, 1]))]:
        if kept and point[0] >= kept[-1][0]:
            continue
        while len(kept) > 1:
            (s0, m0), (s1, m1) = kept[-2], kept[-1]
            if (s1 - s0) * (point[1] - m0) >= (point[0] - s0) * (m1 - m0):
                kept.pop()  # not below the line from the one before to the new one
            else:
                break
        kept.append(point)
    return np.array(kept)
