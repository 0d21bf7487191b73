"""What a placement costs per rank and training iteration: six metrics that add."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

from flexshard._internal import plain_sum

__all__ = ["KINDS", "QUANTILE", "Collective", "CollectiveKind", "Cost"]

CollectiveKind = Literal["all_to_all", "all_reduce", "all_gather", "reduce_scatter", "host"]
KINDS: tuple[CollectiveKind, ...] = ("all_to_all", "all_reduce", "all_gather")  # that have overlaps of their own

QUANTILE = 0.999
_Z = NormalDist().inv_cdf(QUANTILE)


@dataclass(frozen=True)
class Collective:
    """One collective of an iteration.

    Attributes:
        kind: "all_to_all" (inside groups of ``group_size``), "all_reduce", "all_gather" or "reduce_scatter" (across
            them); or "host", between a rank and its host's memory, which is no collective and takes time all the same.
        group_size: g of its level.
        calls: per iteration.
        nbytes: buffer of one rank and call, on average over ranks and calls.
        alpha_seconds, bytes_per_s: of one call.
        overlap: share of its time that other work hides.
        content: what it carries, as :class:`StepCollective` names it; empty where a plan of format 1 put embeddings and
            gradients together.
        excess_bytes: by which the fullest buffer of a call exceeds the mean one: the collective ends with its rank.
    """

    kind: CollectiveKind
    group_size: int
    calls: int
    nbytes: float
    alpha_seconds: float
    bytes_per_s: float
    overlap: float = 0.0
    content: str = ""
    excess_bytes: float = 0.0

    @property
    def name(self) -> str:
        """``all_to_all@32``."""
        return f"{self.kind}@{self.group_size}"

    @property
    def key(self) -> tuple[CollectiveKind, int, str]:
        """Kind, group size and content: what tells the collectives of a step apart."""
        return self.kind, self.group_size, self.content

    @property
    def seconds(self) -> float:
        """Time of all calls: α is paid once per call, whatever the rows (docs/model.md)."""
        return self.calls * (self.alpha_seconds + (self.nbytes + self.excess_bytes) / self.bytes_per_s)

    @property
    def moves_lookups(self) -> bool:
        """Whether it carries what a batch looks up, not gradients of copies."""
        return self.kind in ("all_to_all", "host") or (
            self.content.startswith(("pooled ", "sequence ")) and not self.content.endswith(" replicas")
        )

    def link(self, world_size: int) -> int:
        """Group size of the level whose links it crosses: an all-to-all inside groups stays on those of its level, all
        else is on the outermost ones.
        """
        return self.group_size if self.kind == "all_to_all" else world_size

    def scaled(self, factor: float) -> Collective:
        """With so many times the bytes."""
        return replace(self, nbytes=factor * self.nbytes, excess_bytes=factor * self.excess_bytes)

    @property
    def exposed_seconds(self) -> float:
        """The part of it that nothing hides."""
        return (1.0 - self.overlap) * self.seconds


@dataclass(frozen=True)
class Cost:
    """The six metrics of FlexShard paper section 3.2, per rank and iteration, and what follows from them.

    Costs add: bytes of the same collective are sent together, so its α is paid once.

    Attributes:
        static_memory_bytes: weights, and gradients, buckets and optimizer state where there are copies.
        dynamic_memory_bytes: embeddings that the lookups of one batch materialise, expected.
        input_ids: ids sent to other ranks.
        rows_read: rows read from memory (of ``dim``/U elements for column-wise).
        collectives: in order of kind, level and content.
        dynamic_memory_sigma_bytes: standard deviation of ``dynamic_memory_bytes`` from batch to batch; None where
            lengths are not known. Adds as if all features grew together, which never understates the sum.
        index_dedup_seconds: time to find the distinct ids of a batch, where repeated ones are sent once.
        fullest_dynamic_bytes: dynamic memory, with the buffers of backward, that the fullest rank exceeds in one step
            of a thousand (:func:`flexshard.costmodels.fullest_bytes`); None where it was not asked for or is not known.
            Does not add.
        look_up_seconds: of the rank that serves most, for all calls and for rows that are not counted as overlapped; 0
            where no rates are known.
        update_seconds: the same; of rows in tiers, what calls and copies take whatever is read.
        host_memory_bytes: of host memory.
        overlapped_look_up_seconds: to look up rows in tiers that are not row-wise, while row-wise ones travel.
        overlapped_update_seconds: to add up their gradients, while those of row-wise ones travel.
        row_wise_update_seconds: to update row-wise rows, while copies' gradients travel.
    """

    static_memory_bytes: float = 0.0
    dynamic_memory_bytes: float = 0.0
    input_ids: float = 0.0
    rows_read: float = 0.0
    collectives: tuple[Collective, ...] = ()
    dynamic_memory_sigma_bytes: float | None = 0.0
    index_dedup_seconds: float = 0.0
    fullest_dynamic_bytes: float | None = None
    look_up_seconds: float = 0.0
    update_seconds: float = 0.0
    host_memory_bytes: float = 0.0
    overlapped_look_up_seconds: float = 0.0
    overlapped_update_seconds: float = 0.0
    row_wise_update_seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        merged = {c.key: c for c in self.collectives}
        for c in other.collectives:
            mine = merged.get(c.key)
            merged[c.key] = c if mine is None else _together(mine, c)
        sigma, more = self.dynamic_memory_sigma_bytes, other.dynamic_memory_sigma_bytes
        return Cost(
            self.static_memory_bytes + other.static_memory_bytes,
            self.dynamic_memory_bytes + other.dynamic_memory_bytes,
            self.input_ids + other.input_ids,
            self.rows_read + other.rows_read,
            tuple(merged[key] for key in sorted(merged)),
            None if sigma is None or more is None else sigma + more,
            self.index_dedup_seconds + other.index_dedup_seconds,
            None,
            self.look_up_seconds + other.look_up_seconds,
            self.update_seconds + other.update_seconds,
            self.host_memory_bytes + other.host_memory_bytes,
            self.overlapped_look_up_seconds + other.overlapped_look_up_seconds,
            self.overlapped_update_seconds + other.overlapped_update_seconds,
            self.row_wise_update_seconds + other.row_wise_update_seconds,
        )

    @property
    def memory_bytes(self) -> float:
        """Static and expected dynamic memory together: what a budget bounds."""
        return self.static_memory_bytes + self.dynamic_memory_bytes

    @property
    def dynamic_memory_p999_bytes(self) -> float | None:
        """Dynamic memory that the fullest rank stays below in 999 of 1,000 steps; None if not known. In plans of
        earlier releases what the average rank does, by lengths alone.
        """
        if self.fullest_dynamic_bytes is not None:
            return self.fullest_dynamic_bytes
        if self.dynamic_memory_sigma_bytes is None:
            return None
        return self.dynamic_memory_bytes + _Z * self.dynamic_memory_sigma_bytes

    @property
    def dynamic_comm_seconds(self) -> float:
        """Time of the all-to-alls, forward and backward, and of what pooled tables move for a batch besides."""
        return plain_sum(c.seconds for c in self.collectives if c.moves_lookups)

    @property
    def static_comm_seconds(self) -> float:
        """Time of the all-reduces and all-gathers of copies, backward only."""
        return plain_sum(c.seconds for c in self.collectives if not c.moves_lookups)

    @property
    def comm_seconds(self) -> float:
        """Time of all collectives, one after the other."""
        return plain_sum(c.seconds for c in self.collectives)

    @property
    def local_seconds(self) -> float:
        """Time of what a rank does by itself, one after the other: find distinct ids, look up, update."""
        look_up = self.look_up_seconds + self.overlapped_look_up_seconds
        update = self.update_seconds + self.overlapped_update_seconds + self.row_wise_update_seconds
        return self.index_dedup_seconds + look_up + update

    @property
    def exposed_seconds(self) -> float:
        """Time of all collectives that other work does not hide, and of finding distinct ids for them."""
        return plain_sum(c.exposed_seconds for c in self.collectives) + self.index_dedup_seconds

    def bottleneck_seconds(self, world_size: int) -> float:
        """Time of all collectives if those that cross different links run at once: of the links that take longest.

        An all-to-all inside groups of g < U stays on the links of its level; all else crosses the outermost ones. The
        sharded module starts every level's collectives together, so this is what a step waits for at least.
        """
        links: dict[int, float] = {}
        for c in self.collectives:
            links[c.link(world_size)] = links.get(c.link(world_size), 0.0) + c.seconds
        return max(links.values(), default=0.0)


def _together(a: Collective, b: Collective) -> Collective:
    """Both in the calls of the one that has more; the rank that is busiest with one is taken to be with the other."""
    assert (a.alpha_seconds, a.bytes_per_s, a.overlap) == (b.alpha_seconds, b.bytes_per_s, b.overlap)
    calls = max(a.calls, b.calls)
    nbytes, excess = (
        plain_sum(one.calls * getattr(one, name) for one in (a, b)) / calls for name in ("nbytes", "excess_bytes")
    )
    return replace(a, calls=calls, nbytes=nbytes, excess_bytes=excess)
