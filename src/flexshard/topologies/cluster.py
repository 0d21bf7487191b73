"""The cluster as the cost model sees it: levels of ranks, and what a collective costs at each.

docs/files.md: the level of group size g holds the all-to-all inside groups of g consecutive ranks and the
all-reduce across the U/g groups. Level 1 has no all-to-all, level U no all-reduce.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from flexshard import units
from flexshard._internal import bound, check_finite, check_int
from flexshard.errors import ClusterError

__all__ = ["Cluster", "CollectiveRate", "Level", "Source", "problem_of"]

Source = Literal["datasheet", "measured", "fitted"]


@dataclass(frozen=True)
class CollectiveRate:
    """Time of one call of a collective: ``alpha_seconds + bytes / bytes_per_s``.

    Attributes:
        alpha_seconds: latency, paid once per call.
        bytes_per_s: *algorithm* bandwidth as nccl-tests defines it: the whole buffer of one rank, its own part
            included, over the time.
        source: where the two figures come from.
        note: the figures' origin in words (a paper's table, a URL, a command), with its date.
    """

    alpha_seconds: float
    bytes_per_s: float
    source: Source = "measured"
    note: str = ""

    def __post_init__(self) -> None:
        if self.source not in get_args(Source):
            raise ClusterError(f"source must be one of {', '.join(get_args(Source))}, found {self.source!r}")
        object.__setattr__(self, "alpha_seconds", check_finite(self.alpha_seconds, "alpha", ClusterError))
        object.__setattr__(self, "bytes_per_s", check_finite(self.bytes_per_s, "beta", ClusterError))
        if self.alpha_seconds < 0:
            raise ClusterError(f"alpha must be a time of at least 0 s, found {self.alpha_seconds}")
        if self.bytes_per_s <= 0:
            raise ClusterError(f"beta must be a bandwidth above 0 B/s, found {self.bytes_per_s}")

    def seconds(self, nbytes: float) -> float:
        """Time of one call with a buffer of ``nbytes`` per rank."""
        return self.alpha_seconds + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class Level:
    """Groups of ``group_size`` consecutive ranks, and the collectives in and across them.

    Attributes:
        group_size: g.
        all_to_all: inside the groups; of the whole buffer of a rank.
        all_reduce: across them, as all that follow.
        own_all_gather, own_reduce_scatter: where they are known by themselves; of what a rank has gathered, and of what
            it gives to be reduced.
        torchrec_all_to_all: inside the groups, as TorchRec's modules run it, where that takes another time than ours:
            under gloo.
    """

    group_size: int
    all_to_all: CollectiveRate | None = None
    all_reduce: CollectiveRate | None = None
    own_all_gather: CollectiveRate | None = None
    own_reduce_scatter: CollectiveRate | None = None
    torchrec_all_to_all: CollectiveRate | None = None

    @property
    def all_gather(self) -> CollectiveRate | None:
        """Across the groups; where it is not known, derived from the all-reduce: a ring sends each byte of the result
        once, not twice.
        """
        if self.own_all_gather is not None or self.all_reduce is None:
            return self.own_all_gather
        rate = self.all_reduce
        return CollectiveRate(
            rate.alpha_seconds, 2 * rate.bytes_per_s, rate.source, f"twice the all-reduce: {rate.note}"
        )

    @property
    def reduce_scatter(self) -> CollectiveRate | None:
        """Across the groups; where it is not known, like the all-gather: the other half of an all-reduce."""
        return self.all_gather if self.own_reduce_scatter is None else self.own_reduce_scatter

    def __post_init__(self) -> None:
        object.__setattr__(self, "group_size", check_int(self.group_size, "group_size", ClusterError))


@dataclass(frozen=True, repr=False)
class Cluster:
    """A GPU cluster: ranks in nested groups, memory per rank, and what collectives cost.

    Attributes:
        name: what people call it.
        nodes: N.
        ranks_per_node: W.
        hbm_bytes: memory of one rank.
        reserve_bytes: the part of it that embeddings must leave to everything else.
        levels: innermost first; group sizes 1, ..., U, each dividing the next, W among them.
        hbm_bytes_per_s: bandwidth of a rank's memory; None where it is not known.
        ranks_per_link: ranks of a node that share a link to other nodes: the busiest of them has what others leave.
        host_bytes_per_s: bandwidth between a rank and its host's memory, in one direction; None where it is not known.

    Raises:
        ClusterError: the fields contradict each other; the message names the level.
    """

    name: str
    nodes: int
    ranks_per_node: int
    hbm_bytes: float
    reserve_bytes: float
    levels: tuple[Level, ...]
    hbm_bytes_per_s: float | None = None
    ranks_per_link: int = 1
    host_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or not self.name.isprintable():
            raise ClusterError(f"a cluster's name is a text of one line, found {self.name!r}")
        levels = tuple(self.levels) if isinstance(self.levels, Iterable) else (self.levels,)
        for level in levels:
            if not isinstance(level, Level):
                raise ClusterError(f"cluster {self.name!r}: levels are of Level, found {level!r}")
        object.__setattr__(self, "levels", levels)
        for name in ("nodes", "ranks_per_node", "ranks_per_link"):
            object.__setattr__(self, name, check_int(getattr(self, name), name, ClusterError, least=0))
        for name in ("hbm_bytes", "reserve_bytes"):
            object.__setattr__(self, name, check_finite(getattr(self, name), name, ClusterError))
        for name in ("hbm_bytes_per_s", "host_bytes_per_s"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_finite(getattr(self, name), name, ClusterError))
        problem = problem_of(self)
        if problem is not None:
            raise ClusterError(f"cluster {self.name!r}: {problem[1]}")

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.group_sizes))
        return (
            f"Cluster({self.name!r}: {self.nodes} nodes x {self.ranks_per_node} ranks of"
            f" {units.format_bytes(self.hbm_bytes)}, groups of {sizes})"
        )

    @property
    def under_torchrec(self) -> Cluster:
        """The same where all-to-alls take what they take TorchRec's modules."""
        levels = tuple(
            replace(level, all_to_all=level.torchrec_all_to_all or level.all_to_all) for level in self.levels
        )
        return replace(self, levels=levels)

    @property
    def world_size(self) -> int:
        """U = W·N."""
        return self.nodes * self.ranks_per_node

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Group sizes of the levels, innermost (1) first."""
        return tuple(level.group_size for level in self.levels)

    def ranks_on_link(self, group_size: int) -> int:
        """Ranks whose all-to-alls inside groups of this size share a link."""
        return self.ranks_per_link if group_size > self.ranks_per_node else 1

    def level(self, group_size: int) -> Level:
        """The level with this group size.

        Raises:
            ClusterError: there is none.
        """
        for level in self.levels:
            if level.group_size == group_size:
                return level
        raise ClusterError(
            f"cluster {self.name!r} has no level with group size {group_size}; it has {list(self.group_sizes)}"
        )

    @classmethod
    def preset(cls, name: str, nodes: int | None = None) -> Cluster:
        """A shipped cluster, by name, with as many nodes as asked for.

        Raises:
            ClusterError: no such preset, or a number of nodes that it cannot have.
        """
        cluster: Cluster = bound(__package__, "Cluster.preset")(name, nodes)
        return cluster

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Names that :meth:`preset` takes."""
        names: tuple[str, ...] = bound(__package__, "Cluster.presets")()
        return names

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster file (YAML, docs/files.md).

        Raises:
            ClusterError: unreadable, of another version, or contradicting itself; names file, line and field.
        """
        cluster: Cluster = bound(__package__, "Cluster.load")(path)
        return cluster

    @classmethod
    def resolve(cls, name: str | os.PathLike[str]) -> Cluster:
        """A cluster from what a person writes: a file, a preset, or ``preset:nodes``.

        Raises:
            ClusterError: none of the three.
        """
        cluster: Cluster = bound(__package__, "Cluster.resolve")(os.fspath(name))
        return cluster

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a cluster file that :meth:`load` reads back to an equal cluster."""
        bound(__package__, "Cluster.save")(self, path)


def problem_of(cluster: Cluster) -> tuple[tuple[str | int, ...], str] | None:
    """What is wrong with a cluster, as (field, sentence), or None."""
    if cluster.nodes < 1:
        return ("nodes",), f"nodes must be at least 1, found {cluster.nodes}"
    if cluster.ranks_per_node < 1:
        return ("ranks_per_node",), f"ranks_per_node must be at least 1, found {cluster.ranks_per_node}"
    if cluster.hbm_bytes <= 0:
        return ("memory",), f"memory must be above 0 bytes, found {cluster.hbm_bytes}"
    if not 1 <= cluster.ranks_per_link <= cluster.ranks_per_node:
        of_node = f"the {cluster.ranks_per_node} of a node"
        return ("ranks_per_link",), f"ranks_per_link must be 1 to {of_node}, found {cluster.ranks_per_link}"
    if cluster.hbm_bytes_per_s is not None and cluster.hbm_bytes_per_s <= 0:
        return ("memory_bandwidth",), f"memory_bandwidth must be above 0 B/s, found {cluster.hbm_bytes_per_s}"
    if cluster.host_bytes_per_s is not None and cluster.host_bytes_per_s <= 0:
        return ("host_bandwidth",), f"host_bandwidth must be above 0 B/s, found {cluster.host_bytes_per_s}"
    if not 0 <= cluster.reserve_bytes < cluster.hbm_bytes:
        return ("reserve",), f"reserve must be at least 0 and below memory, found {cluster.reserve_bytes:.0f} bytes"
    return _level_problem(cluster)


def _level_problem(cluster: Cluster) -> tuple[tuple[str | int, ...], str] | None:
    world, sizes = cluster.world_size, cluster.group_sizes
    if not sizes or sizes[0] != 1 or sizes[-1] != world:
        ends = f"levels must start with group size 1 and end with all {world} ranks (nodes x ranks_per_node)"
        return ("levels",), f"{ends}, found group sizes {list(sizes)}"
    for index, level in enumerate(cluster.levels):
        size, where = level.group_size, ("levels", index)
        inner = sizes[index - 1] if index else 1
        if index and size <= inner:
            return where, f"group sizes must grow from level to level, found {size} after {inner}"
        if size % inner:
            return where, f"group size {size} is not a multiple of the inner level's {inner}"
        if world % size:
            return where, f"group size {size} does not divide the {world} ranks"
        for kind, rate, needed in (
            ("all_to_all", level.all_to_all, size > 1),
            ("all_reduce", level.all_reduce, size < world),
        ):
            if needed and rate is None:
                return where, f"the level of group size {size} needs {kind} (alpha and beta)"
            if rate is not None and not needed:
                reason = "has nobody to exchange with" if size == 1 else "has nobody to reduce with"
                return (*where, kind), f"the level of group size {size} {reason}; remove its {kind}"
        for kind, rate in (("all_gather", level.own_all_gather), ("reduce_scatter", level.own_reduce_scatter)):
            if rate is not None and size == world:
                return (*where, kind), f"the level of group size {size} has no other groups; remove its {kind}"
        if level.torchrec_all_to_all is not None and size == 1:
            kind = "torchrec_all_to_all"
            return (*where, kind), f"the level of group size 1 has nobody to exchange with; remove its {kind}"
    if cluster.ranks_per_node not in sizes:
        return (
            ("levels",),
            f"levels must include the node, group size {cluster.ranks_per_node}, found group sizes {list(sizes)}",
        )
    return None
