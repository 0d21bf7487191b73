"""Which tables to compress, to which rank: the least predicted step within a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from flexshard._internal import check_above_0, check_finite
from flexshard.costmodels import TTRates
from flexshard.errors import JobError
from flexshard.planner.compression.decision import CompressionPlan, TTOption
from flexshard.planner.compression.whole_model import compress_whole
from flexshard.planner.methods import Optimal
from flexshard.planner.problem import Problem, ProblemOptions
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["checked_loss_limit", "plan_compression"]


def plan_compression(
    tables: Problem | Sequence[Table],
    cluster: Cluster | None = None,
    *,
    options: Mapping[str, Sequence[TTOption]],
    rates: TTRates,
    loss_limit: float | None = None,
    hashed: bool = False,
    time_limit_seconds: float | None = None,
    **how: Unpack[ProblemOptions],
) -> CompressionPlan:
    """Choose which tables become tensor trains, so that the model fits a budget in the shortest step: its lookups,
    backward, updates and exposed communication. How TorchRec shards tables, and the others' tiers, come from the same
    problem.

    Where options of a table differ in rank alone, the least rank is the fastest and the smallest: offer ranks that you
    accept, or give their losses and a limit.

    Args:
        tables, cluster, how: a :class:`Problem`, or the tables, cluster and options of one, as for :func:`solve`; the
            objective is always "step". "neutral" is what row-wise needs without compression.
        options: tensor trains by table; tables that are not named stay as they are.
        rates: of the machine, from ``flexshard calibrate``.
        loss_limit: most that the losses of all chosen options may add up to.
        hashed: rows of compressed tables are in arbitrary order; by default in order of how often they are read.
        time_limit_seconds: after which the search ends with the best choice so far; the problem's ``timeout_seconds``
            by default.

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
    if time_limit_seconds is not None:
        seconds = check_above_0(time_limit_seconds, "time_limit_seconds", JobError)
        problem = replace(problem, timeout_seconds=seconds)
    return compress_whole(problem, options, rates, checked_loss_limit(loss_limit), hashed=hashed)


def checked_loss_limit(loss_limit: float | None) -> float | None:
    """Most that losses may add up to, None for any; raises JobError for what is no number, or below 0."""
    if loss_limit is None:
        return None
    limit = check_finite(loss_limit, "loss_limit", JobError)
    if limit < 0:
        raise JobError(f"loss_limit must be at least 0, found {limit}")
    return limit
