"""A plan beside every baseline, the slow ones included."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from flexshard._internal import check_above_0, renamed_parameters
from flexshard.errors import BudgetError, JobError, SolverError
from flexshard.planner.baselines.torchrec_choices import torchrec_cost
from flexshard.planner.baselines.whole_tables import whole_table_cost
from flexshard.planner.plan import Plan
from flexshard.planner.problem import Problem, ProblemOptions
from flexshard.planner.solving import solve
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["compare", "torchrec_installed"]


def torchrec_installed() -> bool:
    """Whether TorchRec's planner can be asked."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "torchrec"))


@renamed_parameters(job="tables")
def compare(
    tables: Problem | Sequence[Table],
    cluster: Cluster | None = None,
    *,
    torchrec: bool | None = None,
    time_limit_seconds: float = 60.0,
    **options: Unpack[ProblemOptions],
) -> Plan:
    """The plan of a problem, with the baselines "whole_table", where no table is pooled, and, where it is installed,
    "torchrec" added; whole tables that do not fit are left out, with a warning.

    Args:
        tables: a :class:`Problem`, such as a job; or the tables of one.
        cluster, options: with tables, as for :func:`solve`.
        torchrec: whether to ask TorchRec's own planner, and price its plan by our cost model; by default if it is
            installed, with a warning where it finds none.
        time_limit_seconds: for the mixed-integer program.

    Raises:
        JobError: a time limit that is not above 0.
        MissingDependencyError: ``torchrec`` is asked for and not installed.
        BudgetError, SolverError: as :func:`solve` and :func:`whole_table_cost`.
    """
    seconds = check_above_0(time_limit_seconds, "time_limit_seconds", JobError)
    problem = Problem.of(tables, cluster, options)
    plan = solve(problem)
    added = {}
    if not problem.is_whole_model:  # whose plan is one of whole tables
        try:
            added["whole_table"] = whole_table_cost(problem, time_limit_seconds=seconds)
        except BudgetError as error:
            warnings.warn(f"left out: {error}", UserWarning, stacklevel=2)
    if torchrec or (torchrec is None and torchrec_installed()):
        try:
            added["torchrec"] = torchrec_cost(problem)
        except SolverError as error:
            if torchrec:
                raise
            warnings.warn(f"left out: {error}", UserWarning, stacklevel=2)
    return replace(plan, baselines={**plan.baselines, **added})
