"""FlexShard: where the embedding tables of a recommendation model live on a GPU cluster, decided row by row."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from flexshard.costmodels import Cost, Table
from flexshard.errors import FlexShardError
from flexshard.planner import Job, ParetoCurve, Plan, compare, diff, explain, load_job, pareto, solve
from flexshard.profiling import AccessProfile
from flexshard.topologies import Cluster

if TYPE_CHECKING:
    from flexshard.plots import plot_pareto

__all__ = [
    "AccessProfile",
    "Cluster",
    "Cost",
    "FlexShardError",
    "Job",
    "ParetoCurve",
    "Plan",
    "Table",
    "compare",
    "diff",
    "explain",
    "load_job",
    "pareto",
    "plot_pareto",
    "solve",
]

try:
    __version__ = version("flexshard")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    # matplotlib takes longer to import than everything else; only those who draw should wait for it.
    if name == "plot_pareto":
        from flexshard.plots import plot_pareto

        return plot_pareto
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
