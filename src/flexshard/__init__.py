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
    from flexshard.executors import FlexShardEmbeddingCollectionSharder
    from flexshard.planner import FlexShardPlanner
    from flexshard.plots import plot_pareto

__all__ = [
    "AccessProfile",
    "Cluster",
    "Cost",
    "FlexShardEmbeddingCollectionSharder",
    "FlexShardError",
    "FlexShardPlanner",
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
    # matplotlib takes longer to import than everything else, and TorchRec need not be there at all; only those who draw
    # or train should wait for them.
    if name == "plot_pareto":
        from flexshard.plots import plot_pareto

        return plot_pareto
    if name == "FlexShardPlanner":
        from flexshard import planner

        return planner.FlexShardPlanner
    if name == "FlexShardEmbeddingCollectionSharder":
        from flexshard import executors

        return executors.FlexShardEmbeddingCollectionSharder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
