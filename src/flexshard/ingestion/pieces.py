"""Rows as they come out of files: chunks that are decoded at once, and the pieces of them that batches are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa

from flexshard.errors import DataError
from flexshard.ingestion.storage.merged_reads import ReadCost

__all__ = ["Chunk", "Piece", "joined_pieces"]

T = TypeVar("T")


@dataclass(eq=False)
class Chunk:
    """Consecutive rows, decoded at once.

    Attributes:
        table: them.
        first_row: of the dataset at which they start.
        cost: of reading their row group, where they are the first that come of it.
    """

    table: pa.RecordBatch
    first_row: int = 0
    cost: ReadCost = field(default_factory=ReadCost)
    _made: Any = None

    def once(self, make: Callable[[pa.RecordBatch], T]) -> T:
        """What is made of all its rows, the first time that it is asked for; by the one who takes the chunk's pieces.

        Arrow's arrays take long to look into, so batches look into them once a chunk, and slice what they found.
        """
        if self._made is None:
            try:
                self._made = make(self.table)
            except (DataError, ValueError) as error:  # which is not found again for every batch
                self._made = error
        if isinstance(self._made, Exception):
            raise self._made.with_traceback(None)
        return self._made


@dataclass(frozen=True)
class Piece:
    """Rows of a chunk, from one place in it to another."""

    chunk: Chunk
    start: int
    stop: int

    @classmethod
    def whole(cls, table: pa.RecordBatch) -> Piece:
        """Of rows that are no chunk of a file."""
        return cls(Chunk(table), 0, table.num_rows)

    @property
    def table(self) -> pa.RecordBatch:
        """The rows, where they are."""
        return self.chunk.table.slice(self.start, self.stop - self.start)

    @property
    def first_row(self) -> int:
        """Of the dataset at which they start."""
        return self.chunk.first_row + self.start

    def __len__(self) -> int:
        return self.stop - self.start


def joined_pieces(pieces: Sequence[Piece]) -> Piece:
    """The rows of all; without copying, where it is one."""
    return pieces[0] if len(pieces) == 1 else Piece.whole(pa.concat_batches([piece.table for piece in pieces]))
