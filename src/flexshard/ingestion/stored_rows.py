"""Rows of Parquet files as one sequence: reading ranges of it, and whether the files still are what they were."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from flexshard._internal import ParquetSource, first_line
from flexshard.errors import ChangedDataError, DataError

__all__ = ["Piece", "RowStreams", "StoredRows", "check_columns"]

IntArray = npt.NDArray[np.int64]
_CHUNK_BYTES = 8 << 20  # of decoded columns; smaller ones take longer per row (measured)


@dataclass(frozen=True)
class Piece:
    """Consecutive rows.

    Attributes:
        table: them.
        first_row: of the dataset at which they start.
    """

    table: pa.RecordBatch
    first_row: int


class _BrokenError(DataError):
    """A page that cannot be decoded."""


@dataclass(frozen=True)
class _Stamp:
    """Size in bytes and time of the last change in nanoseconds, as the file system has them."""

    size: int
    changed: int


class StoredRows:
    """Some columns of Parquet files, whose rows are numbered through, file after file.

    Attributes:
        sources: the files.
        columns: that are read.
        file_starts: row at which each file starts, and the end.
        group_starts: row at which each row group starts, and the end.
        row_bytes: of the columns, unpacked, per row on average.
    """

    def __init__(self, sources: Sequence[ParquetSource], columns: Sequence[str]) -> None:
        """Take the files as they are now.

        Raises:
            DataError: a file without one of the columns, or with another type of it.
        """
        check_columns(sources, columns)
        self.sources, self.columns = list(sources), list(columns)
        self.file_starts = _ends([source.num_rows for source in sources])
        self._group_files = np.repeat(np.arange(len(sources)), [len(source.group_rows) for source in sources])
        self._first_groups = _ends([len(source.group_rows) for source in sources])
        self.group_starts = _ends([rows for source in sources for rows in source.group_rows])
        self._stamps = [_stamp_of(source) for source in sources]
        self._metadata: list[Any] = [None] * len(sources)
        each: list[IntArray] = []
        digest, unpacked = hashlib.blake2b(digest_size=16), 0
        for number, source in enumerate(sources):
            digest.update(_footer_of(source))
            with self._opened(number) as file:
                self._metadata[number] = file.metadata
                compressed, decoded = _column_bytes(file.metadata, self.columns)
            each.append(compressed)
            unpacked += decoded
        self._compressed = np.concatenate([np.zeros(0, np.int64), *each])
        self.fingerprint = digest.hexdigest()
        self.row_bytes = unpacked / max(1, self.num_rows)

    @property
    def num_rows(self) -> int:
        """Of all files."""
        return int(self.file_starts[-1])

    def locate(self, row: int) -> tuple[str, int]:
        """The file that has a row, and its number there."""
        file = int(np.searchsorted(self.file_starts, row, side="right")) - 1
        return self.sources[file].name, row - int(self.file_starts[file])

    def group_of(self, row: int) -> int:
        """The row group, of all files, that has a row."""
        return int(np.searchsorted(self.group_starts, row, side="right")) - 1

    def runs(self, rows: IntArray) -> Iterator[tuple[IntArray, str, int]]:
        """Places, in ``rows``, of consecutive rows of a file; with the file, and the row of it where they start."""
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        files = np.searchsorted(self.file_starts, ascending, side="right")
        breaks = np.flatnonzero((np.diff(ascending) != 1) | (np.diff(files) != 0)) + 1
        for places in np.split(order, breaks):
            where, row = self.locate(int(rows[places[0]]))
            yield places, where, row

    def compressed_bytes(self, row: int, stop: int) -> int:
        """Of the columns, in the row groups that start in a range of rows."""
        first, last = np.searchsorted(self.group_starts[:-1], [row, stop])
        return int(self._compressed[first:last].sum())

    def chunks(self, first: int, stop: int, chunk_rows: int) -> Iterator[Piece]:
        """Rows of the row groups that have a range of rows of one file, so many at once.

        Raises:
            DataError: a page that cannot be decoded, or a file that has changed or gone; names file and row.
        """
        groups = range(self.group_of(first), self.group_of(stop - 1) + 1)
        try:
            row = int(self.group_starts[groups[0]])
            for piece in self._chunks(groups, chunk_rows):
                row = piece.first_row + piece.table.num_rows
                yield piece
                del piece  # so that the next chunk may take its memory
        except _BrokenError:
            # Up to the row group that is broken: what is before it is good.
            for group in range(self.group_of(row), groups[-1] + 1):
                for piece in self._chunks(range(group, group + 1), chunk_rows):
                    skipped = max(0, row - piece.first_row)
                    if skipped < piece.table.num_rows:
                        yield Piece(piece.table.slice(skipped), piece.first_row + skipped)

    def _chunks(self, groups: range, chunk_rows: int) -> Iterator[Piece]:
        number = int(self._group_files[groups[0]])
        source, row = self.sources[number], int(self.group_starts[groups[0]])
        before = int(self._first_groups[number])
        own = range(groups[0] - before, groups[-1] + 1 - before)
        with self._opened(number) as file:
            batches = file.iter_batches(chunk_rows, row_groups=own, columns=self.columns, use_threads=False)
            while True:
                try:
                    batch = next(batches, None)
                except Exception as error:  # Arrow raises many kinds on damaged pages
                    self._check_unchanged(number)
                    raise _BrokenError(
                        f"{source.name}: row group {own[0]} is broken at or after row"
                        f" {row - int(self.file_starts[number]):,}: {first_line(error)}; write the file again"
                    ) from error
                if batch is None or self._is_local(number):
                    self._check_unchanged(number)
                if batch is None:
                    return
                start, row = row, row + batch.num_rows
                piece = Piece(batch, start)
                del batch
                yield piece
                del piece

    def end_of_file(self, row: int) -> int:
        """The row at which the file ends that has a row."""
        return int(self.file_starts[np.searchsorted(self.file_starts, row, side="right")])

    def _is_local(self, number: int) -> bool:
        """Whether asking for a file's size takes no time to speak of."""
        return isinstance(self.sources[number].filesystem, pafs.LocalFileSystem | None)

    def _opened(self, number: int) -> pq.ParquetFile:
        source = self.sources[number]
        self._check_unchanged(number)
        try:
            file = pq.ParquetFile(
                source.path,
                filesystem=source.filesystem,
                metadata=self._metadata[number],
                page_checksum_verification=True,  # of pages that were written with one
            )
        except Exception as error:
            self._check_unchanged(number)
            raise DataError(f"{source.name}: cannot be read: {first_line(error)}") from error
        metadata = file.metadata
        rows = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        if rows != source.group_rows:
            file.close()
            raise ChangedDataError(_changed(source.name))
        return file

    def _check_unchanged(self, number: int) -> None:
        source = self.sources[number]
        if _stamp_of(source) != self._stamps[number]:
            raise ChangedDataError(_changed(source.name))


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


@dataclass
class _Stream:
    """Row groups that are being read, and the chunk that was read last."""

    chunks: Iterator[Piece]
    stop: int
    row: int  # the first that was not yet read
    given: int  # the first that was not yet given out; those before may have been written to since
    last: Piece | None = None

    def read_on(self) -> None:
        """The next chunk."""
        self.last = None  # so that the next one may take its memory
        self.last = next(self.chunks)
        self.row += self.last.table.num_rows


class RowStreams:
    """Reads ranges of rows; row groups that were read in part are read on from there."""

    def __init__(self, rows: StoredRows, *, chunk_rows: int = 1, keep: int = 2) -> None:
        """Read rows by chunks of a multiple of ``chunk_rows``, and keep ``keep`` files open."""
        self._rows, self._keep = rows, keep
        self._chunk_rows = -(-max(1024, int(_CHUNK_BYTES / max(1.0, rows.row_bytes))) // chunk_rows) * chunk_rows
        self._open: list[_Stream] = []  # the last used last
        self._bytes = 0

    def bytes_read(self) -> int:
        """Compressed, of row groups that were begun since this was last asked."""
        found, self._bytes = self._bytes, 0
        return found

    def take(self, first: int, stop: int, until: int | None = None) -> list[Piece]:
        """Rows ``first`` to ``stop``, in pieces; those up to ``until`` (of the row group) will be wanted next.

        Raises:
            DataError: as :meth:`StoredRows.chunks`.
        """
        until = until or int(self._rows.group_starts[self._rows.group_of(stop - 1) + 1])
        pieces, row = [], first
        while row < stop:
            piece = self._piece_with(row, max(stop, until))
            number = min(stop, piece.first_row + piece.table.num_rows) - row
            pieces.append(Piece(piece.table.slice(row - piece.first_row, number), row))
            row += number
            self._open[-1].given = row
            if row >= max(self._open[-1].row, self._open[-1].stop):
                self._open.pop()
        return pieces

    def _piece_with(self, row: int, until: int) -> Piece:
        stream = self._stream_at(row)
        if stream is None:
            stop = min(until, self._rows.end_of_file(row))
            group = int(self._rows.group_starts[self._rows.group_of(row)])
            stream = _Stream(self._rows.chunks(row, stop, self._chunk_rows), stop, group, row)
        while stream.last is None or stream.row <= row:
            before = stream.row
            stream.read_on()
            self._bytes += self._rows.compressed_bytes(before, stream.row)
        self._open.append(stream)
        del self._open[: -self._keep]
        return stream.last

    def _stream_at(self, row: int) -> _Stream | None:
        """The stream that has read a row last, or comes to it in the row group in which it stands or at its end."""
        for number, stream in enumerate(self._open):
            inside = stream.last is not None and max(stream.given, stream.last.first_row) <= row < stream.row
            ahead = stream.row <= row < stream.stop
            if inside or (ahead and (row == stream.row or self._rows.group_of(row) == self._rows.group_of(stream.row))):
                return self._open.pop(number)
        return None


def _ends(sizes: Sequence[int]) -> IntArray:
    ends: IntArray = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    return ends


def _stamp_of(source: ParquetSource) -> _Stamp:
    try:
        if source.filesystem is None or isinstance(source.filesystem, pafs.LocalFileSystem):
            found = os.stat(source.path)  # noqa: PTH116 (a Path for every chunk takes longer than asking)
            return _Stamp(found.st_size, found.st_mtime_ns)
        info = source.filesystem.get_file_info(source.path)
    except FileNotFoundError as error:
        raise ChangedDataError(_gone(source.name)) from error
    except OSError as error:
        raise DataError(f"{source.name}: cannot be read: {first_line(error)}") from error
    if info.type != pafs.FileType.File:
        raise ChangedDataError(_gone(source.name))
    return _Stamp(int(info.size or 0), int(info.mtime_ns or 0))


def _gone(name: str) -> str:
    return f"{name}: is no longer there; put it back, or start on the files that there are"


def _changed(name: str) -> str:
    return f"{name}: has changed since reading began; start again, on files that stay as they are"


def _footer_of(source: ParquetSource) -> bytes:
    """The file's own account of itself, statistics of its values among it, and its size."""
    filesystem = source.filesystem or pafs.LocalFileSystem()
    try:
        with filesystem.open_input_file(source.path) as file:
            size = file.size()
            file.seek(size - 8)
            length = int.from_bytes(file.read(4), "little")
            file.seek(max(0, size - 8 - length))
            return size.to_bytes(8, "little") + bytes(file.read(length))
    except OSError as error:
        raise DataError(f"{source.name}: cannot be read: {first_line(error)}") from error


def _column_bytes(metadata: Any, columns: Sequence[str]) -> tuple[IntArray, int]:
    """Compressed bytes of some columns in every row group, and unpacked ones in all."""
    compressed: IntArray = np.zeros(metadata.num_row_groups, np.int64)
    if not metadata.num_row_groups:
        return compressed, 0
    first, wanted = metadata.row_group(0), set(columns)
    numbers = [number for number in range(first.num_columns) if _is_of(first.column(number).path_in_schema, wanted)]
    unpacked = 0
    for group in range(metadata.num_row_groups):
        found = metadata.row_group(group)
        chunks = [found.column(number) for number in numbers]
        compressed[group] = sum(chunk.total_compressed_size for chunk in chunks)
        unpacked += sum(_unpacked_bytes(chunk) for chunk in chunks)
    return compressed, unpacked


def _unpacked_bytes(chunk: Any) -> int:
    """Of one column of a row group, once decoded."""
    width = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8}.get(chunk.physical_type)
    return int(chunk.total_uncompressed_size if width is None else width * chunk.num_values)


def _is_of(path: str, columns: set[str]) -> bool:
    """Whether a path within the schema belongs to one of the columns, whose own names may have dots."""
    parts = path.split(".")
    return any(".".join(parts[:length]) in columns for length in range(1, len(parts) + 1))
