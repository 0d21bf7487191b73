"""Rows of several classes in one buffer of bytes, as they travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from flexshard._internal import host_waits_for, spread_on
from flexshard.costmodels import Frame, class_runs
from flexshard.executors.comm.collectives import PendingCollective
from flexshard.executors.comm.wire import Wire

__all__ = ["Arrival", "RowsBuffer", "buffer_of", "of_classes", "send_rows"]

IntArray = npt.NDArray[np.int64]
# So many runs are copied one by one on CPUs, which is faster than row by row by their places.
_FEW_RUNS = 16


def of_classes(values: torch.Tensor, counts: IntArray) -> list[torch.Tensor]:
    """What belongs to each class, of values that stand segment after segment and class after class; ``counts`` of each
    segment and class, shape (S, K).
    """
    if counts.shape[1] == 1:
        return [values]
    first = (np.cumsum(counts.ravel()) - counts.ravel()).reshape(counts.shape)
    if _are_few(counts, values.device):
        return [_joined(values, *runs) for runs in class_runs(first, counts)]
    return list(values.index_select(0, spread_on(first.T, counts.T, values.device)).split(_totals(counts)))


def _are_few(counts: IntArray, device: torch.device) -> bool:
    """Whether each class's runs, one a segment, are better copied one by one."""
    return len(counts) <= _FEW_RUNS and not host_waits_for(device)


def _joined(values: torch.Tensor, starts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Runs one after the other, not copied where there is one alone."""
    runs = [values[start : start + length] for start, length in zip(starts, lengths, strict=True) if length]
    if len(runs) < 2:
        return runs[0] if runs else values[:0]
    return torch.cat(runs)


def _totals(counts: IntArray) -> list[int]:
    totals: list[int] = counts.sum(axis=0).tolist()
    return totals


@dataclass
class RowsBuffer:
    """Rows of a bundle's classes in one buffer of bytes.

    Attributes:
        frame: where they lie.
        wire: their types.
        classes: which.
        buffer: shape (bytes,).
    """

    frame: Frame
    wire: Wire
    classes: tuple[int, ...]
    buffer: torch.Tensor

    @classmethod
    def make(
        cls, wire: Wire, classes: tuple[int, ...], counts: IntArray, device: torch.device, *, zero: bool = False
    ) -> RowsBuffer:
        """Room for so many rows of each segment and class (of all K)."""
        frame = wire.frame(counts[:, classes], classes)
        new = torch.zeros if zero else torch.empty
        return cls(frame, wire, classes, new(frame.nbytes, dtype=torch.uint8, device=device))

    def room(self, wire: Wire) -> RowsBuffer:
        """Room for as many rows in another form."""
        frame = wire.frame(self.frame.counts, self.classes)
        return RowsBuffer(frame, wire, self.classes, self.buffer.new_empty(frame.nbytes))

    def part(self, segments: slice) -> RowsBuffer:
        """Of some segments, sharing memory: each begins where its offsets do not depend on those before it."""
        frame, start = self.frame.part(segments), int(self.frame.ends[segments.start])
        return RowsBuffer(frame, self.wire, self.classes, self.buffer[start : start + frame.nbytes])

    def view(self, index: int) -> torch.Tensor:
        """All of the buffer as rows of a class."""
        width, dtype = self.wire.row_bytes[index], self.wire.sent_dtype(index)
        rows = self.buffer[: self.buffer.numel() // width * width].view(dtype)
        return rows.view(-1, width // dtype.itemsize)

    def get(self, index: int) -> torch.Tensor:
        """Rows of a class, segment after segment; of the buffer itself where they lie so in it."""
        view = self.view(index)
        if self.frame.packed:
            return view
        if self._are_few:
            return _joined(view, *self._runs(index))
        return view.index_select(0, self._positions(index))

    def put(self, index: int, rows: torch.Tensor) -> None:
        """Set rows of a class, segment after segment."""
        if self.frame.packed:
            self.view(index).copy_(rows)
        elif self._are_few:
            view, (starts, lengths) = self.view(index), self._runs(index)
            for start, run in zip(starts, rows.split(lengths), strict=True):
                view[start : start + len(run)].copy_(run)
        else:
            self.view(index).index_copy_(0, self._positions(index), rows)

    def places(self, index: int, which: torch.Tensor) -> torch.Tensor:
        """Of some rows of a class (numbers of :meth:`get`'s) in :meth:`view`."""
        return which if self.frame.packed else self._positions(index).index_select(0, which)

    @property
    def _are_few(self) -> bool:
        return _are_few(self.frame.counts, self.buffer.device)

    def _runs(self, index: int) -> tuple[list[int], list[int]]:
        return self.frame.runs[self.classes.index(index)]

    def _positions(self, index: int) -> torch.Tensor:
        return self._all_positions[self.classes.index(index)]

    @cached_property
    def _all_positions(self) -> Sequence[torch.Tensor]:
        """Of each class, where its rows lie in its view."""
        counts = self.frame.counts
        return spread_on(self.frame.first_rows.T, counts.T, self.buffer.device).split(_totals(counts))


@dataclass
class Arrival:
    """Rows that come from other ranks: ``take`` puts them where they belong, once ``pending`` is over."""

    pending: PendingCollective
    coded: RowsBuffer
    target: RowsBuffer

    def take(self) -> None:
        """Wait for them."""
        self.pending.wait()
        if self.coded is not self.target:
            for index in self.target.classes:
                self.target.put(index, self.coded.wire.decode(self.coded.get(index), index))


def send_rows(
    wire: Wire,
    held: RowsBuffer,
    target: RowsBuffer,
    send: Callable[[torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]], PendingCollective],
) -> Arrival:
    """Send rows, in the wire's form, to where ``target`` is filled with them; ``send`` takes what is received and what
    is sent, and the bytes from and to each rank.
    """
    coded, arrived = held, target
    if wire.codec is not None:
        coded, arrived = held.room(wire), target.room(wire)
        for index in held.classes:
            coded.put(index, wire.encode(held.get(index), index))
    return Arrival(send(arrived.buffer, coded.buffer, arrived.frame.splits, coded.frame.splits), arrived, target)


def buffer_of(wire: Wire, classes: tuple[int, ...], counts: IntArray, rows: Sequence[torch.Tensor]) -> RowsBuffer:
    """Rows of each class (of all K) in one buffer; without a copy where there is one class alone."""
    device = rows[classes[0]].device
    if len(classes) == 1:
        frame = wire.frame(counts[:, classes], classes)
        return RowsBuffer(frame, wire, classes, rows[classes[0]].contiguous().view(-1).view(torch.uint8))
    result = RowsBuffer.make(wire, classes, counts, device)
    for index in classes:
        result.put(index, rows[index])
    return result
