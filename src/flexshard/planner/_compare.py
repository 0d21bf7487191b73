"""A plan beside every baseline, the slow ones included."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from flexshard.planner._job import Job
from flexshard.planner._plan import Plan
from flexshard.planner._whole_table import whole_table_cost

__all__ = ["compare", "torchrec_installed"]


def torchrec_installed() -> bool:
    """Whether TorchRec's planner can be asked."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "torchrec"))


def compare(job: Job, *, torchrec: bool | None = None, time_limit_seconds: float = 60.0) -> Plan:
    """The job's plan, with the baselines "whole_table" and, where it is installed, "torchrec" added.

    Args:
        job: what to plan.
        torchrec: whether to ask TorchRec's own planner and price its plan by our cost model; by default if installed.
        time_limit_seconds: for the mixed-integer program.

    Raises:
        MissingDependencyError: ``torchrec`` is asked for and not installed.
        BudgetError, SolverError: as :func:`solve` and :func:`whole_table_cost`.
    """
    plan = job.solve()
    added = {
        "whole_table": whole_table_cost(
            job.tables,
            job.cluster,
            batch_size=job.batch_size,
            budget=job.budget,
            overlap=job.overlap,
            index_dedup=job.index_dedup,
            time_limit_seconds=time_limit_seconds,
        )
    }
    if torchrec or (torchrec is None and torchrec_installed()):
        from flexshard.planner._torchrec import torchrec_cost

        added["torchrec"] = torchrec_cost(
            job.tables,
            job.cluster,
            batch_size=job.batch_size,
            overlap=job.overlap,
            index_dedup=job.index_dedup,
        )
    return replace(plan, baselines={**plan.baselines, **added})
