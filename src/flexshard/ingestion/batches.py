"""Batches of rows from row groups, in order: RecD's reader fills them (RecD paper, section 2.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import pyarrow as pa

from flexshard._internal import ParquetSource, read_group
from flexshard.errors import DataError

__all__ = ["RowGroup", "Rows", "check_columns", "fill_batches", "row_groups"]


@dataclass(frozen=True)
class RowGroup:
    """One row group of a file.

    Attributes:
        source: its file.
        number: in it.
        first_row: of the file at which it starts.
        num_rows: in it.
        compressed_bytes: of the columns that will be read.
    """

    source: ParquetSource
    number: int
    first_row: int
    num_rows: int
    compressed_bytes: int


@dataclass(frozen=True)
class Rows:
    """Consecutive rows: a batch.

    Attributes:
        table: them.
        origins: where runs of them come from: row of the batch, file, row of the file; in order.
        bytes_read: compressed, of the row groups that were opened for this batch.
        seconds: that reading took.
    """

    table: pa.Table
    origins: tuple[tuple[int, str, int], ...]
    bytes_read: int
    seconds: float

    def runs(self) -> Iterator[tuple[pa.Table, str, int]]:
        """Rows of one row group each, with the file and the row of it at which they start."""
        ends = [start for start, _, _ in self.origins[1:]] + [self.table.num_rows]
        for (start, where, row), end in zip(self.origins, ends, strict=True):
            yield self.table.slice(start, end - start), where, row

    def origin_of(self, row: int) -> tuple[str, int]:
        """File, and row of it, of a row of the batch."""
        start, where, first = max(origin for origin in self.origins if origin[0] <= row)
        return where, first + row - start


def row_groups(sources: Sequence[ParquetSource], columns: Sequence[str]) -> list[RowGroup]:
    """All row groups, in order, of which some columns will be read."""
    groups = []
    for source in sources:
        first = 0
        with source.open() as file:
            for number, rows in enumerate(source.group_rows):
                nbytes = _compressed_bytes(file.metadata.row_group(number), columns)
                groups.append(RowGroup(source, number, first, rows, nbytes))
                first += rows
    return groups


def check_columns(sources: Sequence[ParquetSource], columns: Sequence[str]) -> None:
    """Check that every file has each column once, of one type.

    Raises:
        DataError: one has not; names the file and lists what is there.
    """
    for source in sources:
        for column in columns:
            if source.schema.names.count(column) != 1:
                raise DataError(f"{source.name}: no column {column!r}; there are {', '.join(source.schema.names)}")
            kind, other = source.schema.field(column).type, sources[0].schema.field(column).type
            if kind != other:
                raise DataError(
                    f"{source.name}: column {column!r} holds {kind}, but {other} in {sources[0].name}; write them alike"
                )


def fill_batches(
    groups: Sequence[RowGroup], columns: Sequence[str], batch_size: int, *, drop_last: bool = False
) -> Iterator[Rows]:
    """Batches of ``batch_size`` rows across row groups; the last may be smaller, or is left out.

    Raises:
        DataError: a page that cannot be decoded; names file and row.
    """
    waiting: list[pa.Table] = []
    origins: list[tuple[int, str, int]] = []  # of the rows that wait
    ready, nbytes, seconds = 0, 0, 0.0
    for group in groups:
        start = perf_counter()
        table = read_group(group.source, group.number, group.first_row, columns).table
        seconds += perf_counter() - start
        nbytes += group.compressed_bytes
        if table.num_rows:
            origins.append((ready, group.source.name, group.first_row))
        waiting.append(table)
        ready += table.num_rows
        begin = 0
        whole = pa.concat_tables(waiting) if ready >= batch_size else None
        while whole is not None and ready - begin >= batch_size:
            yield Rows(whole.slice(begin, batch_size), _within(origins, begin, begin + batch_size), nbytes, seconds)
            nbytes, seconds = 0, 0.0
            begin += batch_size
        if whole is not None:
            waiting, origins = [whole.slice(begin)], list(_within(origins, begin, ready))
            ready -= begin
    if ready and not drop_last:
        yield Rows(pa.concat_tables(waiting), tuple(origins), nbytes, seconds)


def _within(origins: Sequence[tuple[int, str, int]], begin: int, end: int) -> tuple[tuple[int, str, int], ...]:
    """Origins of rows ``begin`` to ``end``, counted from ``begin``."""
    pieces = []
    ends = [start for start, _, _ in origins[1:]] + [end]
    for (start, where, row), stop in zip(origins, ends, strict=True):
        first = max(start, begin)
        if first < min(stop, end):
            pieces.append((first - begin, where, row + first - start))
    return tuple(pieces)


def _compressed_bytes(group: Any, columns: Sequence[str]) -> int:
    chunks = (group.column(number) for number in range(group.num_columns))
    return sum(
        chunk.total_compressed_size
        for chunk in chunks
        if any(chunk.path_in_schema == name or chunk.path_in_schema.startswith(f"{name}.") for name in columns)
    )
