"""Clusters: nodes, ranks, memory, bandwidths; presets with their sources, cluster files, the graph of links.

May import: errors, units, _internal. No torch.
"""

from typing import TYPE_CHECKING

from flexshard._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from flexshard.topologies.cluster import Cluster as Cluster, CollectiveRate as CollectiveRate, Level as Level
    from flexshard.topologies.cluster_file import cluster_document as cluster_document
    from flexshard.topologies.links import (
        Hardware as Hardware,
        bandwidth_bytes_per_s as bandwidth_bytes_per_s,
        link_graph as link_graph,
        link_loads as link_loads,
    )
    from flexshard.topologies.preset_catalog import (
        Preset as Preset,
        load_preset as load_preset,
        preset_names as preset_names,
        resolve_cluster as resolve_cluster,
    )

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "cluster": ["Cluster", "CollectiveRate", "Level"],
        "cluster_file": ["cluster_document"],
        "links": ["Hardware", "bandwidth_bytes_per_s", "link_graph", "link_loads"],
        "preset_catalog": ["Preset", "load_preset", "preset_names", "resolve_cluster"],
    },
    deprecated={
        "Fit": "flexshard.calibration:Fit",
        "LevelGroups": "flexshard._internal:LevelGroups",
        "fit_rate": "flexshard.calibration:fit_rate",
        "level_groups": "flexshard._internal:level_groups",
        "measure_cluster": "flexshard.calibration:measure_cluster",
    },
)

# Methods of values whose bodies stand in files that know the value.
VALUE_METHODS = {
    "Cluster.preset": "preset_catalog:preset_cluster",
    "Cluster.presets": "preset_catalog:preset_names",
    "Cluster.resolve": "preset_catalog:resolve_cluster",
    "Cluster.load": "cluster_file:load_cluster",
    "Cluster.save": "cluster_file:save_cluster",
}
