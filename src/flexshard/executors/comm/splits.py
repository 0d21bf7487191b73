"""How many ids go from whom to whom: a receiver has to know beforehand how much will come."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexshard._internal import LevelGroups
from flexshard.costmodels import Layout
from flexshard.executors.comm.collectives import Collectives, Label, PendingCollective

__all__ = ["Splits", "SplitsExchange"]


@dataclass(frozen=True)
class Splits:
    """Ids to send to and to receive from each local rank, by level; and the status of each rank."""

    sent: list[list[int]]
    received: list[list[int]]
    status: list[int]


class SplitsExchange:
    """Exchange of input splits for all levels together, with every rank's word on whether its ids are in order.

    One message per pair of ranks with the count of each level where the two share a group, and a status (0: all is
    well). It goes to all ranks whatever the levels in use, so that all of them stop where one has to. A message of
    fixed size instead would have to be as long as the fullest batch.
    """

    def __init__(
        self,
        layout: Layout,
        groups: dict[int, LevelGroups],
        collectives: Collectives,
        counts: torch.Tensor,
        status: int,
    ) -> None:
        self._layout, self._groups, self._counts, self._status = layout, groups, counts, status
        self._pending: PendingCollective | None = None
        self._levels = [index for index, size in enumerate(layout.group_sizes) if size > 1]
        world = layout.world_size
        if world == 1:
            return
        message = torch.zeros(world, len(self._levels) + 1, dtype=torch.int32, device=counts.device)
        message[:, -1] = status
        for column, level in enumerate(self._levels):
            message[self._peers(level), column] = counts[self._buckets(level)].int()
        self._received = torch.empty_like(message)
        label = Label(world, "counts", layout.tables)
        self._pending = collectives.all_to_all(self._received, message, None, None, groups[world].inside, label)

    def _buckets(self, level: int) -> slice:
        return slice(self._layout.first_bucket[level], self._layout.first_bucket[level + 1])

    def _peers(self, level: int) -> slice:
        """Ranks of this rank's own group of a level."""
        size = self._layout.group_sizes[level]
        first = self._groups[self._layout.world_size].local_rank // size * size
        return slice(first, first + size)

    def wait(self) -> Splits:
        """Until every rank's counts are here."""
        sizes = self._layout.group_sizes
        if self._pending is None:
            return Splits([[int(self._counts.sum())] for _ in sizes], [[] for _ in sizes], [self._status])
        self._pending.wait()
        counts: list[int] = self._counts.tolist()
        messages: list[list[int]] = self._received.tolist()
        sent, received = [], []
        for level, size in enumerate(sizes):
            sent.append(counts[self._buckets(level)])
            column = self._levels.index(level) if size > 1 else None
            received.append([] if column is None else [row[column] for row in messages[self._peers(level)]])
        return Splits(sent, received, [row[-1] for row in messages])
