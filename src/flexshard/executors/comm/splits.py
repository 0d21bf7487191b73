"""How many ids go from whom to whom: a receiver has to know beforehand how much will come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from flexshard._internal import HostCopy, LevelGroups, to_device
from flexshard.costmodels import STATUS_NUMBERS, Layout
from flexshard.executors.comm.collectives import Collectives, Label, PendingCollective

__all__ = ["Splits", "SplitsExchange", "Status"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Status:
    """A rank's word on its batch.

    Attributes:
        problem: what is wrong with it, as a number that the sender and the receivers know; 0 if nothing is.
        table: of which table, by its index. As many as there are tables: of none, and so there is no problem.
        written: whether somebody wrote to tensors of the rank's ``state_dict``, which have to be taken over first.
    """

    problem: int = 0
    table: int = 0
    written: int = 0

    def on(self, device: torch.device, table: torch.Tensor | None = None) -> torch.Tensor:
        """As it is sent; shape (3,), int32. ``table``, shape (1,), where only the device knows it."""
        words = to_device(np.array([self.problem, self.table, self.written], np.int32), device)
        if table is not None:
            words[1:2] = table
        return words

    @classmethod
    def of(cls, words: Sequence[int], num_tables: int) -> Status:
        """What was sent."""
        problem, table, written = words
        return cls(problem, table, written) if table < num_tables else cls(written=written)


@dataclass(frozen=True)
class Splits:
    """How many ids there are to send and to receive.

    Attributes:
        sent: to each bucket, of each class; shape (buckets, K).
        received: of each level: from each local rank, of each class; shape (g, K) each.
        status: of each rank.
    """

    sent: IntArray
    received: list[IntArray]
    status: list[Status]


class SplitsExchange:
    """Exchange of input splits for all levels and classes together, with every rank's word on whether its ids are in
    order.

    One message per pair of ranks with the counts of each level where the two share a group, and a status. It goes to
    all ranks whatever the levels in use, so that all of them stop where one has to. A message of fixed size instead
    would have to be as long as the fullest batch.
    """

    def __init__(
        self,
        layout: Layout,
        groups: dict[int, LevelGroups],
        collectives: Collectives,
        counts: torch.Tensor,
        status: torch.Tensor,
    ) -> None:
        """Of :meth:`BucketizedIds.counts`, and of :meth:`Status.on`."""
        self._layout, self._groups, self._counts, self._status = layout, groups, counts, status
        self._pending: PendingCollective | None = None
        self._levels = [index for index, size in enumerate(layout.group_sizes) if size > 1]
        self._classes = counts.shape[1]
        world = layout.world_size
        if world == 1:
            return
        width = len(self._levels) * self._classes
        message = torch.zeros(world, width + STATUS_NUMBERS, dtype=torch.int32, device=counts.device)
        message[:, width:] = status
        for column, level in enumerate(self._levels):
            own = counts[layout.first_bucket[level] : layout.first_bucket[level + 1]]
            message[self._peers(level), column * self._classes : (column + 1) * self._classes] = own.int()
        self._received = torch.empty_like(message)
        label = Label(world, "counts", layout.tables)
        self._pending = collectives.all_to_all(self._received, message, None, None, groups[world].inside, label)

    def _peers(self, level: int) -> slice:
        """Ranks of this rank's own group of a level."""
        size = self._layout.group_sizes[level]
        first = self._groups[self._layout.world_size].local_rank // size * size
        return slice(first, first + size)

    def wait(self) -> Splits:
        """Until every rank's counts are here."""
        sizes, shape = self._layout.group_sizes, self._counts.shape
        if self._pending is not None:
            self._pending.wait()
        received_or_own = self._status.view(1, -1) if self._pending is None else self._received
        together = torch.cat([self._counts.view(-1).int(), received_or_own.view(-1)])  # one wait for both
        numbers = HostCopy(together).numbers().astype(np.int64)
        sent = numbers[: shape.numel()].reshape(shape)
        messages = numbers[shape.numel() :].reshape(received_or_own.shape)
        received = []
        for level, size in enumerate(sizes):
            if size == 1:
                received.append(sent[self._layout.first_bucket[level] : self._layout.first_bucket[level + 1]])
                continue
            first = self._levels.index(level) * self._classes
            received.append(messages[self._peers(level), first : first + self._classes])
        number = len(self._layout.tables)
        return Splits(sent, received, [Status.of(row, number) for row in messages[:, -STATUS_NUMBERS:].tolist()])
