"""Rows of batches from stored rows, in an epoch's order: what is shuffled together is held, the rest is streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flexshard.ingestion.order import EpochOrder
from flexshard.ingestion.pieces import Piece, joined_pieces
from flexshard.ingestion.storage.merged_reads import ReadCost
from flexshard.ingestion.stored_rows import RowStreams, StoredRows

__all__ = ["BatchRows", "Rows", "batches_in_order"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """A batch as it is stored.

    Attributes:
        pieces: its rows, in two pieces at most.
        number: gives the rows' numbers in the dataset; shape (B,).
        stored: the dataset.
        cost: of the row groups that were begun for this batch.
        seconds: that reading took.
    """

    pieces: Sequence[Piece]
    number: Callable[[], IntArray]
    stored: StoredRows
    cost: ReadCost
    seconds: float

    def __len__(self) -> int:
        return sum([len(piece) for piece in self.pieces])

    @cached_property
    def table(self) -> pa.RecordBatch:
        """Its rows in one."""
        return joined_pieces(self.pieces).table

    def runs(self) -> Iterator[tuple[pa.RecordBatch, str, int]]:
        """The rows in runs that follow each other in a file; with the file, and the row of it at which they start."""
        for places, where, row in self.stored.runs(self.number()):
            yield self.table.take(pa.array(places)), where, row

    def origin_of(self, row: int) -> tuple[str, int]:
        """File, and row of it, of a row of the batch."""
        return self.stored.locate(int(self.number()[row]))


def batches_in_order(stored: StoredRows, batch_size: int) -> Iterator[Rows]:
    """Batches in the order of the files; the last may be smaller.

    Raises:
        DataError: what cannot be read; names file and row.
    """
    streams = RowStreams(stored, chunk_rows=batch_size)
    for first in range(0, stored.num_rows, batch_size):
        start, stop = perf_counter(), min(stored.num_rows, first + batch_size)
        pieces = _few(streams.take(first, stop, stored.num_rows))
        numbers = partial(np.arange, first, stop)
        yield Rows(pieces, numbers, stored, streams.cost(), perf_counter() - start)


class BatchRows:
    """Reads the rows at positions of an epoch; positions asked for in order are read once."""

    def __init__(self, stored: StoredRows, order: EpochOrder, *, lanes: int) -> None:
        """Read batches of up to ``lanes`` lanes in turn."""
        self._stored, self._order = stored, order
        self._streams = RowStreams(stored, chunk_rows=order.settings.batch_size, keep=lanes + 1)
        self._windows: dict[int, tuple[pa.RecordBatch, IntArray]] = {}  # the last used last
        self._held = lanes

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, of a reader that is pickled, begins to read by itself."""
        return partial(BatchRows, lanes=self._held), (self._stored, self._order)

    def read(self, ranges: Sequence[tuple[int, int]]) -> Rows:
        """Rows at some ranges of positions.

        Raises:
            DataError: what cannot be read; names file and row.
        """
        read = self._ordered if self._order.settings.shuffle is None else self._shuffled
        start = perf_counter()
        pieces = _few([piece for first, stop in ranges for piece in read(first, stop)])
        cost = self._streams.cost()
        return Rows(pieces, partial(self._numbers, ranges), self._stored, cost, perf_counter() - start)

    def _numbers(self, ranges: Sequence[tuple[int, int]]) -> IntArray:
        return np.concatenate([self._order.rows(first, stop) for first, stop in ranges])

    def _ordered(self, first: int, stop: int) -> Sequence[Piece]:
        return self._streams.take(first, stop, self._order.lane_stop(first))

    def _shuffled(self, first: int, stop: int) -> Iterator[Piece]:
        while first < stop:
            window = self._order.window_of(first)
            begin, end = (int(bound) for bound in self._order.windows[window : window + 2])
            table, places = self._window(window)
            span = slice(first - begin, min(stop, end) - begin)
            yield Piece.whole(table.take(pa.array(places[span])))
            first = min(stop, end)

    def _window(self, window: int) -> tuple[pa.RecordBatch, IntArray]:
        """A window's rows in the order of the files, and where each is there."""
        found = self._windows.pop(window, None)
        if found is None:
            held = self._order.window(window)
            while len(self._windows) >= self._held:
                self._windows.pop(next(iter(self._windows)))
            pieces = [
                piece
                for first, size in zip(held.firsts.tolist(), held.sizes.tolist(), strict=True)
                for piece in self._streams.take(first, first + size)
            ]
            found = joined_pieces(pieces).table, held.places
        self._windows[window] = found
        return found


def _few(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """The same rows in two pieces at most; more, of small row groups, are better looked into as one."""
    return pieces if len(pieces) <= 2 else [joined_pieces(pieces)]
