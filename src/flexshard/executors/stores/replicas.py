"""Gradients of rows that U/g ranks hold copies of, brought together so that every copy is updated alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from flexshard._internal import NO_SLOT, continued_on, current_stream
from flexshard.costmodels import Layout
from flexshard.executors.comm.collectives import Collectives, Label, PendingCollective
from flexshard.executors.stores.base import RowStore, at_moments
from flexshard.executors.stores.touched_rows import TouchedCounts, TouchedRows, TouchedSlots

__all__ = ["CopiedRows", "ReplicaReduction"]

_MANY_ROWS = 4096


class CopiedRows:
    """Rows of one level (of group size g) in one store, and where the gradients of those that are reduced whole lie in
    a buffer.

    Attributes:
        store: that holds them.
        whole: how many are reduced whole.
        some_sparse: whether there are others.
        width: numbers of a row in the buffer: its gradient, and how often it was read where that matters.
        first: slot of the layout where the store begins.
    """

    def __init__(self, layout: Layout, group_size: int, tables: range, store: RowStore) -> None:
        self.store, self.first = store, int(layout.table_slots[tables.start])
        self.width = store.dim + store.spec.moves_at_zero
        levels = [level for level, size in enumerate(layout.group_sizes) if size == group_size]  # one, or none
        which = np.ix_(tables, levels)
        depth, sparse = layout.depth[which].ravel(), layout.sparse[which].ravel()
        starts = layout.first_slot[which].ravel() - self.first
        held = np.flatnonzero(depth)
        depth, sparse, starts = depth[held], sparse[held], starts[held]
        rows = np.where(sparse, 0, depth)
        self.whole, self.some_sparse = int(rows.sum()), bool(sparse.any())
        buffer = np.cumsum(rows) - rows
        self._ranges = [
            (slice(start, start + n), slice(at, at + n))
            for start, at, n in zip(starts.tolist(), buffer.tolist(), rows.tolist(), strict=True)
            if n
        ]
        device = store.values.device
        self._ends = torch.from_numpy(starts + depth).to(device)
        self._shift = torch.from_numpy(buffer - starts).to(device)  # from a slot to its row in the buffer
        self._sparse = torch.from_numpy(sparse).to(device)
        small = self.whole < _MANY_ROWS * len(self._ranges)
        slots = [np.arange(slots.start, slots.stop) for slots, _ in self._ranges]
        self._slots = torch.from_numpy(np.concatenate(slots)).to(device) if small and len(slots) > 1 else None

    def _tiers(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.bucketize(slots, self._ends, right=True)

    def add(self, buffer: torch.Tensor, slots: torch.Tensor, gradient: torch.Tensor, scale: float) -> None:
        """Sum the gradients of rows that are reduced whole in a buffer of theirs."""
        shift, dim = self._shift, self.store.dim
        counted: torch.Tensor | float = 1.0
        if len(self._ends) > 1:
            tiers = self._tiers(slots)
            shift = shift[tiers]
            if self.some_sparse:  # a row of zeros for the others
                sparse = self._sparse[tiers]
                shift, gradient = torch.where(sparse, -slots, shift), gradient.masked_fill(sparse.view(-1, 1), 0.0)
                counted = (~sparse).float()
        rows = slots + shift
        buffer[:, :dim].index_add_(0, rows, gradient, alpha=scale)
        if self.width > dim:
            buffer[:, dim].index_add_(0, rows, torch.ones_like(gradient[:, 0]).mul_(counted))

    def sparse(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots of sparse tiers, :data:`NO_SLOT` for others."""
        if not self.whole:
            return slots
        if not self.some_sparse:
            return torch.full_like(slots, NO_SLOT)
        return slots.masked_fill(~self._sparse[self._tiers(slots)], NO_SLOT)

    def update(self, buffer: torch.Tensor, *, seed: int) -> None:
        """Update the rows that are reduced whole, from the buffer of their sums; shape (whole, width)."""
        dim = self.store.dim
        ranges: Sequence[tuple[Any, slice]] = self._ranges
        if self._slots is not None:  # many small tables: one update of their rows together
            ranges = [(self._slots, slice(None))]
        for where, rows in ranges:
            read = buffer[rows, dim] if self.width > dim else None
            self.store.update_copies(where, buffer[rows, :dim], seed=seed, read=read)


class ReplicaReduction:
    """Sums gradients of one level's rows over its copies during backward, and updates every copy alike before backward
    ends: as a fused optimizer does it.

    Tiers marked dense reduce all their rows (one all-reduce for all tables); tiers marked sparse gather those that were
    touched (one all-gather of slots with gradients, after one all-reduce of how many). Gradients are float32 whatever
    the weights: sums of 16-bit numbers lose what is small.
    """

    def __init__(
        self,
        group_size: int,
        tables: tuple[str, ...],
        copied: Sequence[CopiedRows],
        across: dist.ProcessGroup,
        collectives: Collectives,
    ) -> None:
        self._size, self._tables = group_size, tables
        self._copied, self._across, self._collectives = copied, across, collectives
        self._buffer: torch.Tensor | None = None
        self._open: tuple[PendingCollective | None, TouchedRows | None, list[tuple[int, float]]] | None = None
        self._stream: torch.cuda.Stream | None = None

    def _label(self, content: str) -> Label:
        return Label(self._size, content, self._tables)

    @property
    def buffer_bytes(self) -> int:
        """Of the gradients that are reduced whole."""
        return 4 * sum(part.whole * part.width for part in self._copied)

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Each store's gradients in the buffer."""
        sizes = [part.whole * part.width for part in self._copied]
        return [view.view(-1, part.width) for view, part in zip(buffer.split(sizes), self._copied, strict=True)]

    @property
    def gathers(self) -> bool:
        """Whether there are sparse tiers."""
        return any(part.some_sparse for part in self._copied)

    def count_touched(self, slots: Sequence[torch.Tensor]) -> TouchedCounts:
        """Start counting the rows of sparse tiers that a batch touches, as :meth:`reduce` needs them.

        Args:
            slots: of each store, from 0; shape (R,), int64.
        """
        own = [part.sparse(at) for part, at in zip(self._copied, slots, strict=True)]
        return TouchedCounts(own, self._collectives, self._across, self._label("touched"))

    def reduce(
        self,
        slots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        scale: float,
        touched: Sequence[tuple[TouchedSlots, int]] | None,
    ) -> None:
        """Start bringing the copies' gradients together; the update follows when backward ends, as one of now.

        Args:
            slots: of each store, from 0; shape (R,), int64.
            gradients: theirs, to be multiplied by ``scale``; shape (R, D), float32.
            touched: of each store, with the most of any copy, if there are sparse tiers.
        """
        self.finish()  # a model that looks up twice updates twice, as with FBGEMM
        dense, gathered = None, None
        if any(part.whole for part in self._copied):
            dense = self._reduce_whole(slots, gradients, scale)
        if touched is not None:
            gathered = TouchedRows(touched, gradients, scale, self._collectives, self._across, self._label)
        # Where rows are looked up: a pipeline may look the next batch up there before backward's caller goes on.
        self._stream = current_stream(slots[0].device)
        self._open = dense, gathered, [part.store.moment for part in self._copied]
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def _reduce_whole(
        self, slots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], scale: float
    ) -> PendingCollective:
        if self._buffer is None:
            self._buffer = torch.zeros(self.buffer_bytes // 4, dtype=torch.float32, device=slots[0].device)
        for part, view, at, gradient in zip(self._copied, self._views(self._buffer), slots, gradients, strict=True):
            if part.whole:
                part.add(view, at, gradient, scale)
        return self._collectives.all_reduce(self._buffer, self._across, self._label("replicas"))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the copies' gradients and update the rows."""
        if self._open is None:
            return
        (dense, touched, moments), self._open = self._open, None
        with continued_on(self._stream), at_moments([part.store for part in self._copied], moments):
            self._update(dense, touched)

    def _update(self, dense: PendingCollective | None, touched: TouchedRows | None) -> None:
        if dense is not None:
            assert self._buffer is not None
            dense.wait()
            for part, view in zip(self._copied, self._views(self._buffer), strict=True):
                if part.whole:
                    part.update(view, seed=self._size)
            self._buffer.zero_()
        if touched is not None:
            for part, (slots, gradient, here) in zip(self._copied, touched.wait(), strict=True):
                if part.some_sparse:
                    part.store.update_rows(slots, gradient, seed=self._size, read=here)
