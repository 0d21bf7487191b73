"""Clusters: nodes, ranks, memory, bandwidths; presets, YAML, link graph."""

from flexshard.topologies._cluster import Cluster, CollectiveRate, Level
from flexshard.topologies._groups import LevelGroups, level_groups
from flexshard.topologies._links import Hardware, bandwidth_bytes_per_s, link_graph, link_loads
from flexshard.topologies._measure import Fit, fit_rate, measure_cluster
from flexshard.topologies._presets import Preset, load_preset, preset_names, resolve_cluster
from flexshard.topologies._spec import cluster_document

__all__ = [
    "Cluster",
    "CollectiveRate",
    "Fit",
    "Hardware",
    "Level",
    "LevelGroups",
    "Preset",
    "bandwidth_bytes_per_s",
    "cluster_document",
    "fit_rate",
    "level_groups",
    "link_graph",
    "link_loads",
    "load_preset",
    "measure_cluster",
    "preset_names",
    "resolve_cluster",
]
