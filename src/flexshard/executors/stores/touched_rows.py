"""Gradients of the rows of copies that a batch touched, gathered from all copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from flexshard.executors.comm.collectives import Collectives, Label

__all__ = ["TouchedRows", "sum_by_slot"]

_SLOT_BYTES = 4


class TouchedRows:
    """Gradients of the rows of several stores that any copy touched, gathered from all copies.

    Every copy sends as many entries of each store as the copy that touched most of it, slot and gradient (float32) of a
    row side by side, one store's entries after another's.
    """

    def __init__(
        self,
        touched: Sequence[tuple[torch.Tensor, torch.Tensor]],
        scale: float,
        collectives: Collectives,
        across: dist.ProcessGroup,
        label: Callable[[str], Label],
    ) -> None:
        """Slots and gradients of each store; see :meth:`ReplicaReduction.reduce`."""
        sums = [sum_by_slot(*pair) for pair in touched]
        self._dims = [gradient.shape[1] for _, gradient in sums]
        device = sums[0][0].device
        most = torch.tensor([slots.numel() for slots, _ in sums], dtype=torch.int32, device=device)
        collectives.all_reduce(most, across, label("touched"), dist.ReduceOp.MAX).wait()
        self._rows = most.tolist()
        self._copies = dist.get_world_size(across)
        self._entries = torch.zeros(sum(self._sizes), dtype=torch.uint8, device=device)  # kept until they are sent
        for view, (slots, gradient) in zip(self._views(self._entries), sums, strict=True):
            view[:, :_SLOT_BYTES] = 255  # slot -1: nothing in this entry
            view[: slots.numel(), :_SLOT_BYTES] = slots.int().view(-1, 1).view(torch.uint8)
            view[: slots.numel(), _SLOT_BYTES:] = (gradient * scale).view(torch.uint8)
        self._all = self._entries.new_empty(self._entries.numel() * self._copies)
        self._pending = collectives.all_gather(self._all, self._entries, across, label("touched_rows"))

    @property
    def _sizes(self) -> list[int]:
        return [rows * (_SLOT_BYTES + 4 * dim) for rows, dim in zip(self._rows, self._dims, strict=True)]

    def _views(self, entries: torch.Tensor) -> list[torch.Tensor]:
        """A copy's entries of each store; shape (rows, bytes of one)."""
        widths = [_SLOT_BYTES + 4 * dim for dim in self._dims]
        return [part.view(-1, width) for part, width in zip(entries.split(self._sizes), widths, strict=True)]

    def wait(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Distinct slots of each store, shape (n,), and their summed gradients, shape (n, D); alike on all copies."""
        self._pending.wait()
        copies = [self._views(part) for part in self._all.view(self._copies, -1)]
        return [
            _summed(torch.cat(entries), dim) for entries, dim in zip(zip(*copies, strict=True), self._dims, strict=True)
        ]


def _summed(entries: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    slots = entries[:, :_SLOT_BYTES].contiguous().view(torch.int32).view(-1)
    gradient = entries[:, _SLOT_BYTES:].contiguous().view(torch.float32).view(-1, dim)
    there = slots >= 0
    # In a fixed order, unlike index_add on CUDA: copies must stay equal to the last bit.
    sorted_slots, order = torch.sort(slots[there].long(), stable=True)
    distinct, counts = torch.unique_consecutive(sorted_slots, return_counts=True)
    ordered = gradient[there][order]
    return distinct, torch.segment_reduce(ordered, "sum", lengths=counts) if len(ordered) else ordered


def sum_by_slot(slots: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct slots ascending, and the sum of the gradients of each in float32."""
    distinct, inverse = torch.unique(slots, return_inverse=True)
    sums = torch.zeros(distinct.numel(), gradient.shape[1], dtype=torch.float32, device=gradient.device)
    sums.index_add_(0, inverse, gradient.float())
    return distinct.long(), sums
