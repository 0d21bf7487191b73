"""Which tables to compress, to which rank: the least predicted step within a budget.

A mixed-integer program chooses (:mod:`flexshard.planner.compression.program`); the tables that stay are then planned
exactly, row by row; a Lagrangian bound says how far any choice could be below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np
import numpy.typing as npt

from flexshard import units
from flexshard._internal import check_finite
from flexshard.costmodels import TTRates
from flexshard.errors import JobError, SolverError
from flexshard.planner.budget import Difference
from flexshard.planner.compression.bound import dual_bound, price_of
from flexshard.planner.compression.decision import CompressionPlan, TableChoice, TableOption, TTOption
from flexshard.planner.compression.menu import ChoiceProblem, choice_problem, feasible_subsets
from flexshard.planner.compression.program import Choice, best_choice
from flexshard.planner.compression.whole_model import compress_whole
from flexshard.planner.deciding import limit_of
from flexshard.planner.methods import Optimal
from flexshard.planner.plan import Plan
from flexshard.planner.problem import Problem, ProblemOptions
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solving import solve
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["plan_compression"]

IntArray = npt.NDArray[np.int64]


def plan_compression(
    tables: Problem | Sequence[Table],
    cluster: Cluster | None = None,
    *,
    options: Mapping[str, Sequence[TTOption]],
    rates: TTRates,
    loss_limit: float | None = None,
    hashed: bool = False,
    time_limit_seconds: float = 60.0,
    **how: Unpack[ProblemOptions],
) -> CompressionPlan:
    """Choose which tables become tensor trains, so that the model fits a budget at the least predicted step time.

    A step is the lookups of all tables, with backward and update, and exposed communication. Where options of a table
    differ in rank alone, the least rank is the fastest and the smallest: offer ranks that you accept, or give their
    losses and a limit. Where TorchRec shards tables, or the objective is "step", how each is sharded and the others'
    tiers come from the same problem, for the shortest step.

    Args:
        tables, cluster, how: a :class:`Problem`, or the tables, cluster and options of one, as for :func:`solve`.
            "neutral" is what row-wise needs without compression. Where no table is pooled,
            repeated ids are sent once only with ``index_dedup=True``.
        options: tensor trains by table; tables that are not named stay as they are.
        rates: of the machine, from ``flexshard calibrate``.
        loss_limit: most that the losses of all chosen options may add up to.
        hashed: rows of compressed tables are in arbitrary order; by default in order of how often they are read.
        time_limit_seconds: for each program; in a whole model the problem's ``timeout_seconds`` counts.

    Raises:
        JobError: an option of a table that is not there, or of another shape than its table; a method other than
            "optimal", a budget of another memory than the mean; or as :func:`solve`.
        BudgetError: no choice fits; its ``least_bytes`` would.
        SolverError: no choice keeps the losses within their limit, or none was found in time.
    """
    problem = Problem.of(tables, cluster, how)
    if problem.method != Optimal.name:
        raise JobError(f"tables are compressed with method 'optimal', the job has {problem.method.name!r}")
    if problem.memory != "mean":
        raise JobError(f"tables are compressed within a budget of the mean memory, the job bounds {problem.memory!r}")
    if check_finite(time_limit_seconds, "time_limit_seconds", JobError) <= 0:
        raise JobError(f"time_limit_seconds must be above 0, found {time_limit_seconds}")
    if loss_limit is not None:
        loss_limit = check_finite(loss_limit, "loss_limit", JobError)
        if loss_limit < 0:
            raise JobError(f"loss_limit must be at least 0, found {loss_limit}")
    if problem.is_whole_model or problem.objective == "step":
        return compress_whole(problem, options, rates, loss_limit, hashed=hashed)
    if problem.index_dedup == "auto":
        problem = replace(problem, index_dedup=False)
    instance = Variants(problem).fixed
    menu = choice_problem(instance, options, rates, hashed, limit_of(problem, instance), loss_limit)
    subsets = feasible_subsets(menu, problem.tiers)
    choices = {best_choice(menu, levels, time_limit_seconds) for levels in subsets}

    def settled(choice: Choice) -> tuple[float, float, Plan | None]:
        """Seconds, memory and the plan of the tables that stay."""
        taken = np.array([c for c in choice if c >= 0], np.int64)
        stay = [t for t, c in enumerate(choice) if c < 0]
        seconds = float(menu.options.seconds[taken].sum() + menu.lookups[stay].sum())
        seconds += menu.latency if taken.size else 0.0
        memory, plan = float(menu.options.memory[taken].sum()), None
        if stay:
            left = menu.limit - memory - float(menu.row_wise_bytes[stay].sum())
            plan = solve(replace(problem, tables=tuple(instance.tables[t] for t in stay), budget=Difference(left)))
            seconds += plan.predicted.exposed_seconds
            memory += plan.predicted.memory_bytes
        return seconds, memory, plan

    ends = {choice: settled(choice) for choice in sorted(c for c in choices if c is not None)}
    if not ends:
        raise SolverError(
            f"no choice keeps the losses within {loss_limit} and memory within {units.format_bytes(menu.limit)};"
            " raise one of them, or offer other ranks"
        )
    choice = min(ends, key=lambda c: (ends[c][0], c))
    seconds, memory, plan = ends[choice]
    bounds = [dual_bound(menu, levels) for levels in subsets]
    price, levels = price_of(menu, subsets, bounds, plan)
    return CompressionPlan(
        tables=_choices(menu, options, choice, price, levels, plan),
        plan=plan,
        budget_bytes=menu.limit,
        memory_bytes=memory,
        step_seconds=seconds,
        lower_bound_seconds=min(seconds, *(bound for bound, _ in bounds)),
        memory_price_seconds_per_gib=price * units.GIB,
        loss=float(menu.options.loss[[c for c in choice if c >= 0]].sum()),
        loss_limit=loss_limit,
    )


def _choices(
    problem: ChoiceProblem,
    offered: Mapping[str, Sequence[TTOption]],
    choice: Choice,
    price: float,
    levels: IntArray,
    plan: Plan | None,
) -> dict[str, TableChoice]:
    """What every table's options cost: tiers of rows as planned, or as they would be at the price of memory."""
    instance, options = problem.instance, problem.options
    seconds, memory = problem.tiers(levels, price if price > 0 else 1e-30)
    if plan is not None:
        planned = np.zeros((len(instance.tables), instance.group_sizes.size), np.int64)
        for t, table in enumerate(instance.tables):
            for tier in plan.tables[table.name].tiers if table.name in plan.tables else ():
                planned[t, instance.group_sizes == tier.group_size] = tier.rows
        own_seconds, own_memory = problem.placed(planned)
        stays = planned.any(axis=1)
        seconds, memory = np.where(stays, own_seconds, seconds), np.where(stays, own_memory, memory)
    choices = {}
    for t, table in enumerate(instance.tables):
        of_table = np.flatnonzero(options.table == t)
        lookups = float(problem.lookups[t])
        rows = TableOption(
            None, float(memory[t]), lookups, float(seconds[t]) - lookups, 0.0, float(seconds[t] + price * memory[t])
        )
        trains = [
            TableOption(
                option.shape,
                float(options.memory[n]),
                float(options.compute[n]),
                float(options.comm[n]),
                option.loss,
                float(options.seconds[n] + price * options.memory[n]),
            )
            for n, option in zip(of_table, offered.get(table.name, ()), strict=True)
        ]
        index = 0 if choice[t] < 0 else 1 + int(np.flatnonzero(of_table == choice[t])[0])
        choices[table.name] = TableChoice(table.name, table.rows, table.dim, (rows, *trains), index)
    return choices
