"""Work that one process does by itself: stretches of a rank's steps that read rows next to each other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flexshard.ingestion.order import EpochOrder

__all__ = ["Split", "splits_of"]


@dataclass(frozen=True)
class Split:
    """Some batches of one rank, a function of the dataset, the seed and this.

    Attributes:
        epoch: they belong to.
        consumed: batches of the epoch, of all ranks, before which the steps are counted.
        rank, world_size: who takes them.
        steps: every which of the rank's steps they are.
        lanes, window: of the order that they are in.
        dataset: fingerprint of the files that they are of.
    """

    epoch: int
    consumed: int
    rank: int
    world_size: int
    steps: range
    lanes: int
    window: int
    dataset: str


def splits_of(
    order: EpochOrder,
    epoch: int,
    consumed: int,
    rank: int,
    world_size: int,
    *,
    drop_last: bool,
    batches: int,
    dataset: str,
) -> list[Split]:
    """A rank's steps after ``consumed`` batches, in stretches of up to ``batches`` of one lane.

    Stretches start where windows do, and come in the order in which their first batches are trained.
    """
    steps = order.steps(world_size, drop_last=drop_last, consumed=consumed)
    lanes = order.settings.lanes
    apart = lanes // math.gcd(lanes, world_size)  # steps from one batch of a lane to the next
    number = consumed + rank + np.arange(steps) * world_size
    in_lanes = order.batches_in_lanes
    lane = np.where(number < in_lanes, number % lanes, lanes)
    block = np.where(number < in_lanes, number // lanes, number - in_lanes) // batches
    found = []
    _, group = np.unique(np.stack([lane, block]), axis=1, return_inverse=True)
    group = group.reshape(-1)
    first = np.full(int(group.max()) + 1 if steps else 0, steps, np.int64)
    np.minimum.at(first, group, np.arange(steps))
    counts = np.bincount(group, minlength=first.size)
    is_last = lane == lanes
    for index in np.argsort(first).tolist():
        start = int(first[index])
        stride = 1 if is_last[start] else apart
        chosen = range(start, start + stride * int(counts[index]), stride)
        found.append(Split(epoch, consumed, rank, world_size, chosen, lanes, order.settings.window, dataset))
    return found
