"""Cluster files: the YAML that people write, and its translation to and from :class:`Cluster`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict

from flexshard import units
from flexshard._documents import load_yaml, located
from flexshard._files import write_text
from flexshard.errors import ClusterError
from flexshard.topologies._cluster import Cluster, CollectiveRate, Level, Source, _problem

__all__ = ["Bandwidth", "Bytes", "ClusterSpec", "Seconds", "StrictModel", "load_cluster", "save_cluster"]

FORMAT, VERSION = "flexshard.cluster", 1

Bytes = Annotated[float, BeforeValidator(units.parse_bytes)]
Bandwidth = Annotated[float, BeforeValidator(units.parse_bandwidth)]
Seconds = Annotated[float, BeforeValidator(units.parse_seconds)]


class StrictModel(BaseModel):
    """A mapping in which an unknown field is an error, not a silent default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


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

    def level(self) -> Level:
        return Level(
            self.group_size,
            self.all_to_all.rate() if self.all_to_all else None,
            self.all_reduce.rate() if self.all_reduce else None,
        )


class ClusterSpec(StrictModel):
    """A cluster file."""

    name: str
    nodes: int
    ranks_per_node: int
    memory: Bytes
    reserve: Bytes
    levels: list[LevelSpec]


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read a cluster file; see :meth:`Cluster.load`."""
    spec, tree = load_yaml(path, ClusterSpec, kind=FORMAT, version=VERSION, error_type=ClusterError)
    fields = (spec.name, spec.nodes, spec.ranks_per_node, spec.memory, spec.reserve)
    levels = tuple(_level(path, tree, index, level) for index, level in enumerate(spec.levels))
    try:
        return Cluster(*fields, levels)
    except ClusterError:
        # Check again without the constructor, to know which field to point at.
        draft = object.__new__(Cluster)
        for field, value in zip(Cluster.__dataclass_fields__, (*fields, levels), strict=True):
            object.__setattr__(draft, field, value)
        problem = _problem(draft)
        assert problem is not None
        raise ClusterError(f"{located(path, tree, problem[0])}: {problem[1]}") from None


def _level(path: str | os.PathLike[str], tree: yaml.Node, index: int, spec: LevelSpec) -> Level:
    try:
        return spec.level()
    except ClusterError as error:
        raise ClusterError(f"{located(path, tree, ['levels', index])}: {error}") from None


def save_cluster(cluster: Cluster, path: str | os.PathLike[str]) -> None:
    """Write a cluster file; see :meth:`Cluster.save`."""
    write_text(Path(path), yaml.safe_dump(cluster_document(cluster), sort_keys=False, allow_unicode=True))


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """A cluster as the mapping that its file holds; numbers are exact, so that reading gives the same cluster."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": cluster.name,
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "memory": f"{cluster.hbm_bytes!r} B",
        "reserve": f"{cluster.reserve_bytes!r} B",
        "levels": [
            {"group_size": level.group_size}
            | {
                kind: {
                    "alpha": f"{rate.alpha_seconds!r} s",
                    "beta": f"{rate.bytes_per_s!r} B/s",
                    "source": rate.source,
                    "note": rate.note,
                }
                for kind, rate in (("all_to_all", level.all_to_all), ("all_reduce", level.all_reduce))
                if rate is not None
            }
            for level in cluster.levels
        ],
    }
