"""FlexShard: where the embedding tables of a recommendation model live on a GPU cluster, decided row by row.

The rooms are packages, floor by floor: ``_internal``; ``topologies`` and ``profiling``; ``tables``; ``costmodels`` and
``embeddings``; ``calibration``, ``planner`` and ``ingestion``; ``executors``; ``plots`` and ``report``; ``cli``. A room
imports those on floors below it, and through their ``__init__`` alone.
"""

from typing import TYPE_CHECKING

from flexshard._internal.lazy import lazy_exports, version_of

if TYPE_CHECKING:
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

__getattr__, __dir__, __all__ = lazy_exports(
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

__version__ = version_of("flexshard")
