"""Rows by key from rank to rank, outside of training steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flexshard.executors.comm.collectives import Collectives, Label, PendingCollective

__all__ = ["RowTransfer"]


@dataclass(frozen=True)
class RowTransfer:
    """How rows travel.

    Attributes:
        collectives: what carries them.
        process_group: between these ranks.
        label: what they are, for messages.
    """

    collectives: Collectives
    process_group: dist.ProcessGroup
    label: Label

    def ask(
        self, keys: torch.Tensor, ranks: torch.Tensor, answer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Ask ranks for rows by key; ``answer`` gives those that others ask this rank for.

        Args:
            keys, ranks: shape (n,).

        Returns:
            the rows in the keys' order; shape (n, width).
        """
        order, out, back = self._announce(ranks)
        asked = keys.new_empty(sum(back))
        self._all_to_all(asked, keys[order].contiguous(), back, out).wait()
        held = answer(asked).contiguous()
        got = held.new_empty(keys.numel(), held.shape[1])
        self._all_to_all(got, held, out, back).wait()
        result = torch.empty_like(got)
        result[order] = got
        return result

    def _all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, back: list[int] | None, out: list[int] | None
    ) -> PendingCollective:
        return self.collectives.all_to_all(received, sent, back, out, self.process_group, self.label)

    def _announce(self, ranks: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        """The order that sorts entries by the rank that each goes to, how many go to each, and how many will come."""
        sent = torch.bincount(ranks, minlength=dist.get_world_size(self.process_group))
        received = torch.empty_like(sent)
        self._all_to_all(received, sent, None, None).wait()
        return torch.argsort(ranks, stable=True), sent.tolist(), received.tolist()
