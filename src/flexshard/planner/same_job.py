"""Whether a plan was made from a job, and with which options beside it."""

from __future__ import annotations

from dataclasses import fields

from flexshard.errors import PlanError
from flexshard.planner.deciding import settings_of
from flexshard.planner.digest import job_digest
from flexshard.planner.plan import Plan, Settings
from flexshard.planner.problem import Problem

__all__ = ["options_beside"]

# What ``flexshard plan`` may be given beside a job's own words.
_OPTIONS = {"budget", "tiers", "method", "objective", "dense_seconds", "overlap", "rates"}
_LONG = {"overlap", "rates"}


def options_beside(plan: Plan, problem: Problem) -> list[str]:
    """Settings of a plan that its job has otherwise, such as "budget +200MiB, and not neutral"; none for its job alone.

    Raises:
        PlanError: the plan was made from other tables, profiles, or for another cluster or batch.
    """
    own, asked = plan.settings, settings_of(problem, plan.settings.budget_bytes)
    differ = [one.name for one in fields(Settings) if getattr(own, one.name) != getattr(asked, one.name)]
    wrong = [f"its {_words(name)} is another" for name in differ if name not in _OPTIONS]
    if not wrong and job_digest(problem.tables, problem.cluster, own) != plan.job_digest:
        wrong = ["its tables, their profiles or its cluster are others"]
    if wrong:
        raise PlanError(f"the job is not the one that the plan was made from: {wrong[0]}; give that one")
    return [
        f"{_words(name)} of its own"
        if name in _LONG
        else f"{_words(name)} {getattr(own, name)}, and not {getattr(asked, name)}"
        for name in differ
    ]


def _words(field: str) -> str:
    return field.replace("_", " ")
