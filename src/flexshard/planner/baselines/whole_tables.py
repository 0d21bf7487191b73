"""The best choice of one strategy per whole table, by a mixed-integer program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np

from flexshard import units
from flexshard._internal import check_above_0
from flexshard.costmodels import Cost
from flexshard.errors import BudgetError, JobError, SolverError
from flexshard.planner.assembly import with_fullest_rank
from flexshard.planner.deciding import limit_of
from flexshard.planner.problem import Problem, ProblemOptions
from flexshard.planner.programs import solve_program
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solver.instance import Allocation, Instance, memory_limit
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["solve_whole_tables", "whole_table_cost"]


def whole_table_cost(
    tables: Problem | Sequence[Table],
    cluster: Cluster | None = None,
    *,
    time_limit_seconds: float = 60.0,
    **options: Unpack[ProblemOptions],
) -> Cost:
    """Cost of the best plan that gives every table one group size; arguments as for :func:`solve`. Its mean memory is
    bounded, whatever the budget is to bound.

    Raises:
        JobError: a time limit that is not above 0.
        BudgetError: no such plan fits.
        SolverError: the solver found none in the time limit.
    """
    seconds = check_above_0(time_limit_seconds, "time_limit_seconds", JobError)
    problem = Problem.of(tables, cluster, options).refusing_sharded("the best plan of whole tables")
    instance, of_mean = Variants(problem).fixed, replace(problem, memory="mean")
    allocation = solve_whole_tables(instance, limit_of(of_mean, instance), seconds)
    return with_fullest_rank(instance.cost(allocation), instance, allocation, in_order=problem.in_order)


def solve_whole_tables(instance: Instance, limit_bytes: float, time_limit_seconds: float = 60.0) -> Allocation:
    """Whole tables to group sizes by a mixed-integer program (PuLP, HiGHS).

    Column-wise is not among the choices: it costs what row-wise does, and sends more ids.
    """
    import pulp  # takes longer to import than everything else of the planner

    tables, tiers = range(len(instance.tables)), range(instance.group_sizes.size)
    total_reads = instance.total_reads
    whole = instance.num_rows[:, None] * np.ones(len(tiers))
    seconds = instance.row_bytes[:, None] * (
        whole * instance.table_comm_fixed + total_reads[:, None] * instance.table_comm_per_read
    )
    memory = instance.row_bytes[:, None] * (
        whole * instance.table_memory_fixed + np.outer(total_reads, instance.memory_per_read)
    )
    least = float(memory.min(axis=1).sum()) + instance.held_bytes
    if least > memory_limit(limit_bytes):
        raise BudgetError(
            f"no choice of whole tables fits {units.format_bytes(limit_bytes)} per rank; the least is"
            f" {units.format_bytes(least)} ({np.ceil(least):,.0f} bytes)",
            least,
        )
    # The solver's tolerances are absolute: work in shares of the row-wise time and of the limit.
    row_wise = seconds[:, instance.group_sizes == instance.cluster.world_size].sum()
    left_bytes = limit_bytes - instance.held_bytes
    time_scale, memory_scale = float(row_wise) or float(seconds.max()) or 1.0, max(abs(left_bytes), 1.0)
    program = pulp.LpProblem("whole_tables", pulp.LpMinimize)
    chosen = {(t, g): program.add_variable(f"x_{t}_{g}", cat="Binary") for t in tables for g in tiers}
    used = {g: program.add_variable(f"y_{g}", cat="Binary") for g in tiers}
    # The rank that holds the hottest row of a level makes it wait.
    excess = {g: program.add_variable(f"z_{g}", lowBound=0) for g in tiers}
    program += pulp.lpSum(
        [chosen[t, g] * (seconds[t, g] / time_scale) for t in tables for g in tiers]
        + [used[g] * (instance.alpha_seconds[g] / time_scale) for g in tiers]
        + list(excess.values())
    )
    hot = instance.hot_seconds_per_read * instance.reads[instance.starts[:-1], None] / time_scale
    program += (
        pulp.lpSum(chosen[t, g] * (memory[t, g] / memory_scale) for t in tables for g in tiers)
        <= left_bytes / memory_scale + 1e-9
    )
    for t in tables:
        program += pulp.lpSum(chosen[t, g] for g in tiers) == 1
        for g in tiers:
            program += chosen[t, g] <= used[g]
            program += hot[t, g] * chosen[t, g] <= excess[g]
    outcome = solve_program(program, gap=1e-6, time_limit_seconds=time_limit_seconds)
    values = np.array([[chosen[t, g].value() or 0.0 for g in tiers] for t in tables])
    if outcome != "solution" or not np.allclose(values.sum(axis=1), 1.0):
        raise SolverError(f"HiGHS found no choice of whole tables in {time_limit_seconds:g} s; raise the time limit")
    picked = values.argmax(axis=1)
    return np.where(np.arange(len(tiers)) == picked[:, None], instance.num_rows[:, None], 0)
