"""What a replay counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Replay", "Traffic"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Traffic:
    """One collective over the steps of a replay.

    Attributes:
        kind: "all_to_all", "all_reduce" or "all_gather".
        group_size: g of its level.
        content: what it carries, as :class:`flexshard.executors.Observer` names it.
        calls: per step.
        sent, received: bytes of each rank's buffers; shape (steps, U).
    """

    kind: str
    group_size: int
    content: str
    calls: int
    sent: IntArray
    received: IntArray

    @property
    def mean_bytes(self) -> float:
        """Per rank and step."""
        return float(self.sent.mean())

    @property
    def imbalance(self) -> float:
        """Fullest buffer of a step over the mean one, on average over the steps; 1 is even."""
        fullest = np.maximum(self.sent.max(axis=1), self.received.max(axis=1))
        mean = self.sent.mean(axis=1)
        return float((fullest[mean > 0] / mean[mean > 0]).mean()) if (mean > 0).any() else 1.0


@dataclass(frozen=True)
class Replay:
    """A plan's traffic and memory for given batches.

    Attributes:
        world_size, ranks_per_node: U and W.
        steps: how many.
        traffic: every collective.
        rows_served: rows that each rank reads for all; shape (steps, U).
        all_to_all_scale_up_bytes: bytes that each rank sends to others of its node in all all-to-alls of ids, rows and
            gradients; shape (steps, U).
        all_to_all_scale_out_bytes: the same to other nodes; shape (steps, U). What reductions send over which link is
            up to the library's algorithm; ``traffic`` has their buffers.
        static_memory_bytes: of a rank: rows, their replicas' gradients and buckets, optimizer state, and the
            translation of ids if the plan has it on the device.
        dynamic_memory_bytes: rows looked up and served; shape (steps, U).
        fullest_memory_bytes: the most that these, their copies, gradients and ids take at once; shape (steps, U).
    """

    world_size: int
    ranks_per_node: int
    steps: int
    traffic: tuple[Traffic, ...]
    rows_served: IntArray
    all_to_all_scale_up_bytes: IntArray
    all_to_all_scale_out_bytes: IntArray
    static_memory_bytes: float
    dynamic_memory_bytes: IntArray
    fullest_memory_bytes: IntArray

    @property
    def peak_memory_bytes(self) -> float:
        """Of the fullest rank in its fullest step, with the buffers of backward."""
        return self.static_memory_bytes + float(self.fullest_memory_bytes.max(initial=0))

    def fullest_quantile(self, share: float) -> float:
        """Dynamic memory of the fullest rank in this share of the steps, at most."""
        return float(np.quantile(self.fullest_memory_bytes.max(axis=1), share, method="higher"))

    def find(self, content: str, group_size: int) -> Traffic | None:
        """One collective."""
        return next((t for t in self.traffic if t.content == content and t.group_size == group_size), None)
