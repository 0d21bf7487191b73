"""What was observed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexshard._internal import PathLike, bound, check_finite, check_int, first_repeated, plain_sum
from flexshard.errors import DataError

if TYPE_CHECKING:
    from flexshard.costmodels import StepWork
    from flexshard.planner import Plan

__all__ = ["Observation", "ObservedCall", "ObservedCollective"]


_KINDS = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter")


def _check_kind(kind: str) -> None:
    if kind not in _KINDS:
        raise DataError(f"kind must be one of {', '.join(_KINDS)}, found {kind!r}")


def _check_least_0(value: float, name: str) -> None:
    if check_finite(value, name, DataError) < 0:
        raise DataError(f"{name} must be at least 0, found {value!r}")


@dataclass(frozen=True)
class ObservedCollective:
    """One collective, per step.

    Attributes:
        kind: "all_to_all", "all_reduce", "all_gather" or "reduce_scatter".
        group_size: g of its level; of collectives that are not ours, the size of their process group.
        content: "counts", "ids", "embeddings", "gradients", "replicas", "touched", "touched_rows" or "shared rows";
            "other ids" and "other embeddings" of collectives that are not ours.
        calls, bytes: mean over ranks and steps; bytes of the buffer that is sent.
        fullest_bytes: of the fullest buffer of a step, sent or received, mean over steps.
        seconds: from its start until it was over, of the slowest rank, median over steps.
        exposed_seconds: in which Python stood waiting, mean over ranks and steps.
        bytes_by_step: mean over ranks of each step.
        mean_seconds: as ``seconds``, mean over ranks and steps, as ``exposed_seconds`` is; None of older files.
    """

    kind: str
    group_size: int
    content: str
    calls: float
    bytes: float
    fullest_bytes: float
    seconds: float
    exposed_seconds: float
    bytes_by_step: tuple[float, ...]
    mean_seconds: float | None = None

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        check_int(self.group_size, "group_size", DataError)
        for name in ("calls", "bytes", "fullest_bytes", "seconds", "exposed_seconds"):
            _check_least_0(getattr(self, name), name)
        for nbytes in self.bytes_by_step:
            _check_least_0(nbytes, "bytes_by_step")
        if self.mean_seconds is not None:
            _check_least_0(self.mean_seconds, "mean_seconds")


@dataclass(frozen=True)
class ObservedCall:
    """One collective of one step on one rank.

    Attributes:
        rank: that called it.
        kind, group_size, content: as in :class:`ObservedCollective`.
        bytes: of the buffer that is sent.
        start_seconds: from the beginning of the rank's step; with NCCL from its first collective.
        seconds: until it was over.
        waits: when Python began to wait for it, from the same moment, and how long it did.
    """

    rank: int
    kind: str
    group_size: int
    content: str
    bytes: int
    start_seconds: float
    seconds: float
    waits: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        check_int(self.rank, "rank", DataError, least=0)
        check_int(self.group_size, "group_size", DataError)
        check_finite(self.start_seconds, "start_seconds", DataError)
        _check_least_0(self.seconds, "seconds")


@dataclass(frozen=True)
class Observation:
    """Steps that ran.

    Attributes:
        fingerprint: of the plan that ran; empty where none did.
        world_size: U.
        step_seconds: of each step, the slowest rank's.
        collectives: sorted by kind, group size and content.
        calls: of every rank in the step of median length, in the order in which they started.
    """

    fingerprint: str
    world_size: int
    step_seconds: tuple[float, ...]
    collectives: tuple[ObservedCollective, ...]
    calls: tuple[ObservedCall, ...] = ()

    def __post_init__(self) -> None:
        check_int(self.world_size, "world_size", DataError)
        if not self.step_seconds:
            raise DataError("step_seconds must have at least one step")
        for seconds in self.step_seconds:
            _check_least_0(seconds, "step_seconds")
        keys = [f"{one.kind}@{one.group_size} {one.content}" for one in self.collectives]
        twice = first_repeated(keys)
        if twice is not None:
            raise DataError(f"collectives has {twice!r} twice")
        if any(call.rank >= self.world_size for call in self.calls):
            raise DataError(f"calls has one of rank {max(call.rank for call in self.calls)} of {self.world_size}")

    def of(self, kind: str, group_size: int, *contents: str) -> list[ObservedCollective]:
        """Collectives of a kind and level, of these contents (of any, if none are named)."""
        return [
            c
            for c in self.collectives
            if c.kind == kind and c.group_size == group_size and (not contents or c.content in contents)
        ]

    @property
    def comm_seconds(self) -> float:
        """All collectives of a step, one after the other."""
        return plain_sum(c.seconds for c in self.collectives)

    @property
    def median_step_seconds(self) -> float:
        """Of the slowest rank."""
        return statistics.median(self.step_seconds)

    @property
    def mean_step_seconds(self) -> float:
        """Of the slowest rank."""
        return statistics.fmean(self.step_seconds)

    def step_work(self, plan: Plan) -> StepWork:
        """What a step does besides communicating for its embeddings, as ``Problem(step=...)`` takes it: what is left of
        the mean step without the times in which ranks stood waiting, and without the lookups and updates that the
        plan prices.

        Raises:
            DataError: the observation is of another plan; or ranks did nothing but wait.
        """
        work: StepWork = bound("flexshard.executors", "Observation.step_work")(self, plan)
        return work

    def overlap(self, plan: Plan) -> dict[str, float]:
        """Share of each collective's time in which ranks did not stand waiting for it, as ``Problem(overlap=...)``
        takes it; of those that the plan has, by names such as ``all_to_all@8``.

        Raises:
            DataError: the observation is of another plan.
        """
        shares: dict[str, float] = bound("flexshard.executors", "Observation.overlap")(self, plan)
        return shares

    def document(self) -> dict[str, Any]:
        """As the mapping that its file holds."""
        document: dict[str, Any] = bound("flexshard.executors", "Observation.document")(self)
        return document

    def save(self, path: PathLike) -> None:
        """Write it as JSON.

        Raises:
            OutputError: it could not be written.
        """
        bound("flexshard.executors", "Observation.save")(self, path)

    @classmethod
    def load(cls, path: PathLike) -> Observation:
        """Read what :meth:`save` wrote.

        Raises:
            DataError: not an observation, of another version, or damaged.
        """
        observation: Observation = bound("flexshard.executors", "Observation.load")(path)
        return observation
