"""Cluster files: the YAML that people write, and its translation to and from :class:`Cluster`."""

from __future__ import annotations

from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator

from flexshard import units
from flexshard._internal import DocumentFormat, PathLike, StrictModel, load_yaml, located, save_yaml
from flexshard.errors import ClusterError
from flexshard.topologies.cluster import Cluster, CollectiveRate, Level, Source, problem_of

__all__ = [
    "Bandwidth",
    "Bytes",
    "ClusterSpec",
    "LevelSpec",
    "Seconds",
    "cluster_document",
    "load_cluster",
    "save_cluster",
]

FORMAT = DocumentFormat(
    "flexshard.cluster",
    1,
    "a cluster",
    "flexshard.cluster",
    ClusterError,
    "see docs/files.md, or measure the cluster again",
)

Bytes = Annotated[float, BeforeValidator(units.parse_bytes)]
Bandwidth = Annotated[float, BeforeValidator(units.parse_bandwidth)]
Seconds = Annotated[float, BeforeValidator(units.parse_seconds)]


class RateSpec(StrictModel):
    """alpha and beta of one collective at one level."""

    alpha: Seconds
    beta: Bandwidth
    source: Source
    note: str = ""

    def rate(self) -> CollectiveRate:
        return CollectiveRate(self.alpha, self.beta, self.source, self.note)


class LevelSpec(StrictModel):
    """One level of a cluster file."""

    group_size: int
    all_to_all: RateSpec | None = None
    all_reduce: RateSpec | None = None
    all_gather: RateSpec | None = None
    reduce_scatter: RateSpec | None = None
    torchrec_all_to_all: RateSpec | None = None

    def level(self) -> Level:
        """The level that it says."""
        rates = self.all_to_all, self.all_reduce, self.all_gather, self.reduce_scatter, self.torchrec_all_to_all
        return Level(self.group_size, *(one.rate() if one else None for one in rates))


class ClusterSpec(StrictModel):
    """A cluster file."""

    name: str
    nodes: int
    ranks_per_node: int
    memory: Bytes
    reserve: Bytes
    memory_bandwidth: Bandwidth | None = None
    ranks_per_link: int = 1
    host_bandwidth: Bandwidth | None = None
    levels: list[LevelSpec]


def load_cluster(path: PathLike) -> Cluster:
    """Read a cluster file; see :meth:`Cluster.load`."""
    spec, tree = load_yaml(path, ClusterSpec, FORMAT)
    fields = (spec.name, spec.nodes, spec.ranks_per_node, spec.memory, spec.reserve)
    levels = tuple(_level(path, tree, index, level) for index, level in enumerate(spec.levels))
    values = (*fields, levels, spec.memory_bandwidth, spec.ranks_per_link, spec.host_bandwidth)
    try:
        return Cluster(*values)
    except ClusterError as error:
        # Check again without the constructor, to know which field to point at.
        draft = object.__new__(Cluster)
        for field, value in zip(Cluster.__dataclass_fields__, values, strict=True):
            object.__setattr__(draft, field, value)
        where, what = problem_of(draft) or (("name",), str(error))
        raise ClusterError(f"{located(path, tree, where)}: {what}") from None


def _level(path: PathLike, tree: yaml.Node, index: int, spec: LevelSpec) -> Level:
    try:
        return spec.level()
    except ClusterError as error:
        raise ClusterError(f"{located(path, tree, ['levels', index])}: {error}") from None


def save_cluster(cluster: Cluster, path: PathLike) -> None:
    """Write a cluster file; see :meth:`Cluster.save`."""
    save_yaml(path, FORMAT, _body(cluster))


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """A cluster as the mapping that its file holds."""
    return FORMAT.stamped(_body(cluster))


def _body(cluster: Cluster) -> dict[str, Any]:
    """Numbers are exact, so that reading gives the same cluster."""
    return {
        "name": cluster.name,
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "memory": f"{cluster.hbm_bytes!r} B",
        "reserve": f"{cluster.reserve_bytes!r} B",
        **({} if cluster.hbm_bytes_per_s is None else {"memory_bandwidth": f"{cluster.hbm_bytes_per_s!r} B/s"}),
        **({} if cluster.ranks_per_link == 1 else {"ranks_per_link": cluster.ranks_per_link}),
        **({} if cluster.host_bytes_per_s is None else {"host_bandwidth": f"{cluster.host_bytes_per_s!r} B/s"}),
        "levels": [
            {"group_size": level.group_size}
            | {
                kind: {
                    "alpha": f"{rate.alpha_seconds!r} s",
                    "beta": f"{rate.bytes_per_s!r} B/s",
                    "source": rate.source,
                    "note": rate.note,
                }
                for kind, rate in (
                    ("all_to_all", level.all_to_all),
                    ("all_reduce", level.all_reduce),
                    ("all_gather", level.own_all_gather),
                    ("reduce_scatter", level.own_reduce_scatter),
                    ("torchrec_all_to_all", level.torchrec_all_to_all),
                )
                if rate is not None
            }
            for level in cluster.levels
        ],
    }
