"""How much of each collective's time other work hides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flexshard.costmodels.cost import KINDS, CollectiveKind
from flexshard.errors import JobError
from flexshard.topologies import Cluster

__all__ = ["Overlap", "OverlapLike", "hidden_share", "overlap_names", "overlap_of"]

# By kind and group size; or where the contents of these differ, by content as well.
Overlap = Mapping[tuple[CollectiveKind, int], float] | Mapping[tuple[CollectiveKind, int, str], float]
OverlapLike = str | Mapping[str, float] | None  # as people write it


def hidden_share(overlap: Overlap | None, kind: CollectiveKind, group_size: int, content: str) -> float:
    """Share of a collective's time that is hidden. Without one of its own, as much of an all-gather as of an
    all-reduce, and of a reduce-scatter as of an all-gather.
    """
    if kind == "reduce_scatter":
        kind = "all_gather"
    hidden: Mapping[Any, float] = {} if overlap is None else overlap
    own = hidden.get((kind, group_size, content), hidden.get((kind, group_size)))
    if own is None:
        return hidden_share(overlap, "all_reduce", group_size, content) if kind == "all_gather" else 0.0
    return own


def overlap_names(cluster: Cluster) -> dict[str, tuple[CollectiveKind, int]]:
    """Collectives whose overlap people may give, by name such as ``all_to_all@8``."""
    return {
        f"{kind}@{level.group_size}": (kind, level.group_size)
        for level in cluster.levels
        for kind in KINDS
        if getattr(level, kind) is not None
    }


def overlap_of(overlap: OverlapLike, cluster: Cluster) -> dict[tuple[CollectiveKind, int], float]:
    """Overlap fractions by (kind, group size) from what people write.

    Args:
        overlap: None (nothing is hidden), "paper" (the intra-node all-to-all and the cross-node all-reduce are hidden
            whole, FlexShard paper Table 6), or fractions by name such as ``{"all_to_all@8": 0.9}``.

    Raises:
        JobError: an unknown name, or a fraction outside [0, 1].
    """
    if overlap is None:
        return {}
    if overlap == "paper":
        inner = cluster.ranks_per_node
        if inner in (1, cluster.world_size):
            return {}
        return {("all_to_all", inner): 1.0, ("all_reduce", inner): 1.0}
    if not isinstance(overlap, Mapping):
        raise JobError(f"overlap must be 'paper' or fractions such as {{'all_to_all@8': 0.9}}, found {overlap!r}")
    known = overlap_names(cluster)
    result: dict[tuple[CollectiveKind, int], float] = {}
    for name, share in overlap.items():
        if name not in known:
            raise JobError(f"overlap names {name!r}, which the cluster does not have; it has {', '.join(known)}")
        if isinstance(share, bool) or not isinstance(share, (int, float, np.number)) or not 0 <= share <= 1:
            raise JobError(f"overlap of {name!r} is a share of its time between 0 and 1, found {share!r}")
        result[known[name]] = float(share)
    return result
