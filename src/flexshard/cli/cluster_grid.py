"""A cluster as a table that a person reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexshard import units
from flexshard._internal import new_grid

if TYPE_CHECKING:
    from flexshard._internal import Grid
    from flexshard.topologies import Cluster

__all__ = ["cluster_grid"]


def cluster_grid(cluster: Cluster) -> Grid:
    """Levels of a cluster, and what their collectives cost."""
    title = (
        f"{cluster.name}: {cluster.nodes} nodes x {cluster.ranks_per_node} ranks,"
        f" {units.format_bytes(cluster.hbm_bytes)} per rank, {units.format_bytes(cluster.reserve_bytes)} reserved"
    )
    kinds = {"all_to_all": "all-to-all inside groups", "all_reduce": "all-reduce across groups"}
    own = {"own_all_gather": "all-gather across groups", "own_reduce_scatter": "reduce-scatter across groups"}
    own["torchrec_all_to_all"] = "TorchRec's all-to-all"
    kinds |= {kind: heading for kind, heading in own.items() if any(getattr(one, kind) for one in cluster.levels)}
    grid = new_grid(title, ["group size", *kinds.values(), "from"])
    for level in cluster.levels:
        rates = [getattr(level, kind) for kind in kinds]
        cells = [
            "-" if r is None else f"{units.format_seconds(r.alpha_seconds)} + {units.format_bandwidth(r.bytes_per_s)}"
            for r in rates
        ]
        grid.add_row(str(level.group_size), *cells, ", ".join(dict.fromkeys(r.source for r in rates if r is not None)))
    return grid
