"""Gradients of the rows of copies that a batch touched, gathered from all copies."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from flexshard.executors.comm.collectives import Collectives, Label

__all__ = ["TouchedRows", "sum_by_slot"]


class TouchedRows:
    """Gradients of the rows that any copy touched, gathered from all copies.

    Every copy sends as many entries as the copy that touched most, slot and gradient of a row side by side.
    """

    def __init__(
        self,
        slots: torch.Tensor,
        gradient: torch.Tensor,
        scale: float,
        collectives: Collectives,
        across: dist.ProcessGroup,
        label: Callable[[str], Label],
    ) -> None:
        self._dim, self._dtype = gradient.shape[1], gradient.dtype
        distinct, sums = sum_by_slot(slots, gradient)
        most = torch.tensor([distinct.numel()], dtype=torch.int32, device=slots.device)
        collectives.all_reduce(most, across, label("touched"), dist.ReduceOp.MAX).wait()
        rows = int(most.item())
        width = 4 + self._dim * gradient.element_size()
        entries = torch.zeros(rows, width, dtype=torch.uint8, device=slots.device)
        entries[:, :4] = 255  # slot -1: nothing in this entry
        entries[: distinct.numel(), :4] = distinct.int().view(-1, 1).view(torch.uint8)
        entries[: distinct.numel(), 4:] = (sums * scale).to(self._dtype).view(torch.uint8)
        self._all = entries.new_empty(rows * dist.get_world_size(across), width)
        self._entries = entries  # kept until they are sent
        self._pending = collectives.all_gather(self._all, entries, across, label("touched_rows"))

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Distinct slots, shape (n,), and their summed gradients, shape (n, D), float32; the same on every copy."""
        self._pending.wait()
        slots = self._all[:, :4].contiguous().view(torch.int32).view(-1)
        gradient = self._all[:, 4:].contiguous().view(self._dtype).view(-1, self._dim)
        there = slots >= 0
        # In a fixed order, unlike index_add on CUDA: copies must stay equal to the last bit.
        sorted_slots, order = torch.sort(slots[there].long(), stable=True)
        distinct, counts = torch.unique_consecutive(sorted_slots, return_counts=True)
        ordered = gradient[there][order].float()
        return distinct, torch.segment_reduce(ordered, "sum", lengths=counts) if len(ordered) else ordered


def sum_by_slot(slots: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct slots ascending, and the sum of the gradients of each in float32."""
    distinct, inverse = torch.unique(slots, return_inverse=True)
    sums = torch.zeros(distinct.numel(), gradient.shape[1], dtype=torch.float32, device=gradient.device)
    sums.index_add_(0, inverse, gradient.float())
    return distinct.long(), sums
