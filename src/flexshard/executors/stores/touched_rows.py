"""Gradients of the rows of copies that a batch touched, gathered from all copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flexshard._internal import NO_SLOT, host_waits_for, runs_of, sum_by_slot
from flexshard.executors.comm.collectives import Collectives, Label, PendingCollective

__all__ = ["TouchedCounts", "TouchedRows", "TouchedSlots"]

_SLOT_BYTES = 4


@dataclass(frozen=True)
class TouchedSlots:
    """Distinct slots among lookups.

    Attributes:
        slots: ascending, then :data:`NO_SLOT`; shape (n,), int64.
        index: of each lookup among them; shape (lookups,).
    """

    slots: torch.Tensor
    index: torch.Tensor

    @classmethod
    def of(cls, slots: torch.Tensor) -> TouchedSlots:
        """Of lookups' slots, :data:`NO_SLOT` for those that do not count; shape (lookups,)."""
        if host_waits_for(slots.device):
            return cls(*runs_of(slots, NO_SLOT))
        return cls(*torch.unique(slots, return_inverse=True))

    @property
    def number(self) -> torch.Tensor:
        """How many slots there are; shape (1,), int32."""
        return (self.slots != NO_SLOT).sum(dtype=torch.int32).view(1)


class TouchedCounts:
    """How many rows of each store a batch touches, and the most that any copy does: counted when ids are known, so that
    backward need not wait for it.

    Attributes:
        slots: of each store.
    """

    def __init__(
        self, slots: Sequence[torch.Tensor], collectives: Collectives, across: dist.ProcessGroup, label: Label
    ) -> None:
        """Slots of each store's lookups, as for :meth:`TouchedSlots.of`."""
        self.slots = [TouchedSlots.of(of_store) for of_store in slots]
        self._most = torch.cat([touched.number for touched in self.slots])
        self._pending: PendingCollective = collectives.all_reduce(self._most, across, label, dist.ReduceOp.MAX)

    def most(self) -> torch.Tensor:
        """Of each store; shape (stores,), int32."""
        self._pending.wait()
        return self._most


class TouchedRows:
    """Gradients of the rows of several stores that any copy touched, gathered from all copies.

    Every copy sends as many entries of each store as the copy that touched most of it, slot and gradient (float32) of a
    row side by side, one store's entries after another's.
    """

    def __init__(
        self,
        touched: Sequence[tuple[TouchedSlots, int]],
        gradients: Sequence[torch.Tensor],
        scale: float,
        collectives: Collectives,
        across: dist.ProcessGroup,
        label: Callable[[str], Label],
    ) -> None:
        """Of each store: slots, the most that any copy has, and gradients of the lookups, shape (lookups, D)."""
        self._rows = [most for _, most in touched]
        self._dims = [gradient.shape[1] for gradient in gradients]
        self._copies = dist.get_world_size(across)
        device = gradients[0].device
        self._entries = torch.zeros(sum(self._sizes), dtype=torch.uint8, device=device)  # kept until they are sent
        for view, (own, most), gradient in zip(self._views(self._entries), touched, gradients, strict=True):
            number = min(most, len(own.slots))
            slots = torch.full((most,), NO_SLOT, dtype=torch.int32, device=device)
            slots[:number] = own.slots[:number]
            sums = torch.zeros(len(own.slots), gradient.shape[1], dtype=torch.float32, device=device)
            sums.index_add_(0, own.index, gradient, alpha=scale)
            view[:, :_SLOT_BYTES] = slots.view(-1, 1).view(torch.uint8)
            view[:number, _SLOT_BYTES:] = sums[:number].view(torch.uint8)
        self._all = self._entries.new_empty(self._entries.numel() * self._copies)
        self._pending = collectives.all_gather(self._all, self._entries, across, label("touched_rows"))

    @property
    def _sizes(self) -> list[int]:
        return [rows * (_SLOT_BYTES + 4 * dim) for rows, dim in zip(self._rows, self._dims, strict=True)]

    def _views(self, entries: torch.Tensor) -> list[torch.Tensor]:
        """A copy's entries of each store; shape (rows, bytes of one)."""
        widths = [_SLOT_BYTES + 4 * dim for dim in self._dims]
        return [part.view(-1, width) for part, width in zip(entries.split(self._sizes), widths, strict=True)]

    def wait(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Of each store as :func:`sum_by_slot` gives it; alike on all copies."""
        self._pending.wait()
        copies = [self._views(part) for part in self._all.view(self._copies, -1)]
        together = [torch.cat(entries) for entries in zip(*copies, strict=True)]
        return [
            sum_by_slot(
                entries[:, :_SLOT_BYTES].contiguous().view(torch.int32).view(-1).long(),
                entries[:, _SLOT_BYTES:].contiguous().view(torch.float32).view(-1, dim),
            )
            for entries, dim in zip(together, self._dims, strict=True)
        ]
