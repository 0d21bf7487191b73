"""What stands in for the parts of TorchRec's planner while it carries out a plan that is known."""

from __future__ import annotations

import copy
from typing import Any

from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import (
    Enumerator,
    Partitioner,
    PlanLoader,
    Proposer,
    ShardingOption,
    Stats,
    StorageReservation,
)

__all__ = ["AsPlaced", "Loaded", "Only", "Timed", "reserved"]


class Loaded:
    """A plan loader that has loaded already."""

    def __init__(self, loader: PlanLoader, options: Any) -> None:
        self._loader, self._options = loader, options

    def load(self) -> Any:
        """What was loaded."""
        return self._options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class Timed(Stats):  # type: ignore[misc]  # TorchRec has no types
    """Reports that know how long the search took, and the enumerator that was asked."""

    def __init__(self, stats: Stats, seconds: float, enumerator: Enumerator) -> None:
        self._stats, self._seconds, self._enumerator = stats, seconds, enumerator

    def log(self, *args: Any, **kwargs: Any) -> None:
        """As the report that it stands for."""
        if "run_time" in kwargs:
            kwargs["run_time"] += self._seconds
        if "enumerator" in kwargs:
            kwargs["enumerator"] = self._enumerator
        self._stats.log(*args, **kwargs)


def reserved(reservation: StorageReservation, topology: Topology) -> StorageReservation:
    """A reservation that has been made: it is not asked twice."""
    made = copy.copy(reservation)
    vars(made)["reserve"] = lambda *args, **kwargs: topology  # noqa: ARG005 - as it is called
    return made


class Only(Proposer):  # type: ignore[misc]  # TorchRec has no types
    """Proposes one plan."""

    def __init__(self, options: list[ShardingOption]) -> None:
        self._left: list[list[ShardingOption]] = [options]

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Nothing: what is proposed is known."""

    def feedback(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: there is no second proposal."""

    def propose(self) -> list[ShardingOption] | None:
        """The plan, once."""
        return self._left.pop() if self._left else None


class AsPlaced(Partitioner):  # type: ignore[misc]  # TorchRec has no types
    """Leaves shards where they are: what is proposed has ranks."""

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:  # noqa: ARG002 - as of TorchRec
        """The proposal."""
        return proposal
