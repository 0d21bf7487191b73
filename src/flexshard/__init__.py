"""FlexShard: where the embedding tables of a recommendation model live on a GPU cluster, decided row by row.

The rooms are packages, floor by floor: ``_internal``; ``topologies`` and ``profiling``; ``tables``; ``costmodels`` and
``embeddings``; ``calibration``, ``planner`` and ``ingestion``; ``executors``; ``plots`` and ``report``; ``cli``. A room
imports those on floors below it, and through their ``__init__`` alone.
"""

from flexshard._internal.lazy import lazy_exports

# As typing's, whose import takes twenty times as long as all of this: a command can be interrupted from here on.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from flexshard.costmodels import Cost as Cost
    from flexshard.errors import FlexShardError as FlexShardError
    from flexshard.executors import (
        FlexShardEmbeddingBagCollectionSharder as FlexShardEmbeddingBagCollectionSharder,
        FlexShardEmbeddingCollectionSharder as FlexShardEmbeddingCollectionSharder,
    )
    from flexshard.planner import (
        FlexShardPlanner as FlexShardPlanner,
        Job as Job,
        OptimalShardingPlanner as OptimalShardingPlanner,
        ParetoCurve as ParetoCurve,
        Plan as Plan,
        Problem as Problem,
        TableConstraints as TableConstraints,
        compare as compare,
        diff as diff,
        explain as explain,
        load_job as load_job,
        pareto as pareto,
        solve as solve,
    )
    from flexshard.plots import plot_pareto as plot_pareto
    from flexshard.profiling import AccessProfile as AccessProfile
    from flexshard.tables import Table as Table
    from flexshard.topologies import Cluster as Cluster

    __version__: str

_exported, __dir__, _names = lazy_exports(
    __name__,
    {
        "costmodels": ["Cost"],
        "errors": ["FlexShardError"],
        "executors": ["FlexShardEmbeddingBagCollectionSharder", "FlexShardEmbeddingCollectionSharder"],
        "planner": [
            "FlexShardPlanner",
            "Job",
            "OptimalShardingPlanner",
            "ParetoCurve",
            "Plan",
            "Problem",
            "TableConstraints",
            "compare",
            "diff",
            "explain",
            "load_job",
            "pareto",
            "solve",
        ],
        "plots": ["plot_pareto"],
        "profiling": ["AccessProfile"],
        "tables": ["Table"],
        "topologies": ["Cluster"],
    },
    submodules=(
        *("errors", "units", "topologies", "profiling", "tables", "costmodels", "embeddings"),
        *("calibration", "planner", "ingestion", "executors", "plots", "report", "cli"),
    ),
)


# Modules and planners of TorchRec's kind, which cannot be imported without torch.
_WITH_TORCH = {
    "FlexShardEmbeddingBagCollectionSharder",
    "FlexShardEmbeddingCollectionSharder",
    "FlexShardPlanner",
    "OptimalShardingPlanner",
}


def __getattr__(name: str) -> "Any":
    if name == "__all__":  # of what there is, so that ``from flexshard import *`` works without torch
        from importlib.util import find_spec

        return _names if find_spec("torch") else [one for one in _names if one not in _WITH_TORCH]
    if name != "__version__":
        return _exported(name)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(__name__)
    except PackageNotFoundError:  # a source tree that is not installed
        return "0.0.0"
