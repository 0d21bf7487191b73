"""Rows of Parquet files as one sequence: reading ranges of it, and whether the files still are what they were."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from flexshard._internal import ParquetSource, changed_data, first_line
from flexshard.errors import DataError
from flexshard.ingestion.pieces import Chunk, Piece
from flexshard.ingestion.storage.column_chunks import ColumnChunks
from flexshard.ingestion.storage.flat_maps import Projection
from flexshard.ingestion.storage.merged_file import MergedFile
from flexshard.ingestion.storage.merged_reads import ReadCost

__all__ = ["RowStreams", "StoredRows", "check_columns"]

IntArray = npt.NDArray[np.int64]
# Of a row group's decoded columns, up to which it is decoded at once, which takes least time.
_WHOLE_BYTES, _WHOLE_ROWS = 32 << 20, 1 << 18
_CHUNK_BYTES = 6 << 20  # of those of a larger one; less, much more, and powers of two take longer per row (measured)
LOCAL_GAP, REMOTE_GAP = 8 << 10, 1 << 20


class StoredRows:
    """Some columns of Parquet files, whose rows are numbered through, file after file.

    Attributes:
        sources: the files.
        columns: that are read; ``map/key`` is a key of a column of maps.
        file_starts: row at which each file starts, and the end.
        group_starts: row at which each row group starts, and the end.
        row_bytes: of the columns, unpacked, per row on average.
        footers: of the files, as Arrow has them.
    """

    def __init__(self, sources: Sequence[ParquetSource], columns: Sequence[str], *, gap: float | None = None) -> None:
        """Take the files as they are now.

        Args:
            sources, columns: what is read.
            gap: bytes between two columns up to which one read takes both; by default 8 KiB of local files, and
                1 MiB of others.

        Raises:
            DataError: a file without one of the columns, or with another type of it.
        """
        self.sources = list(sources)
        self.file_starts = _ends([source.num_rows for source in sources])
        self._group_files = np.repeat(np.arange(len(sources)), [len(source.group_rows) for source in sources])
        self._first_groups = _ends([len(source.group_rows) for source in sources])
        self.group_starts = _ends([rows for source in sources for rows in source.group_rows])
        self._gaps = [gap if gap is not None else LOCAL_GAP if source.is_local else REMOTE_GAP for source in sources]
        self.footers: list[Any] = [None] * len(sources)
        check_columns(sources, columns)
        digest = hashlib.blake2b(digest_size=16)
        for number, source in enumerate(sources):
            digest.update(_footer_of(source))
            with self._opened(number) as (_, file):
                self.footers[number] = file.metadata
        self.fingerprint = digest.hexdigest()
        self._set_columns(columns)

    def with_columns(self, columns: Sequence[str]) -> StoredRows:
        """Other columns of the same files, as they were when this was made; raises DataError."""
        made = copy(self)
        made._set_columns(columns)
        return made

    def _set_columns(self, columns: Sequence[str]) -> None:
        self.columns, self._projections = list(columns), check_columns(self.sources, columns)
        files = zip(self.footers, self.sources, self._projections, strict=True)
        self._stretches = [_chunks_of(footer, source, wanted.stored) for footer, source, wanted in files]
        self.row_bytes = sum(int(stretches.unpacked.sum()) for stretches in self._stretches) / max(1, self.num_rows)

    def check_unchanged(self) -> None:
        """Check that all files still are what they were; raises ChangedDataError."""
        for source in self.sources:
            source.check_unchanged()

    @property
    def nbytes(self) -> int:
        """Of the files, when they were found."""
        return sum(source.stamp.size for source in self.sources)

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

    def chunks(self, first: int, stop: int, chunk_rows: int, whole_bytes: int = 0) -> Iterator[Chunk]:
        """Rows of the row groups that have a range of rows of one file, so many at once; all at once of row groups that
        unpack to up to ``whole_bytes``, unless they are of very many rows.

        Raises:
            DataError: a page that cannot be decoded, or a file that has changed or gone; names file and row.
        """
        groups = range(self.group_of(first), self.group_of(stop - 1) + 1)
        number = int(self._group_files[groups[0]])
        source, row = self.sources[number], int(self.group_starts[groups[0]])
        before = int(self._first_groups[number])
        with self._opened(number) as (storage, file):
            for group in groups:
                cost = self._load(number, storage, group - before, row)
                rows = source.group_rows[group - before]
                is_whole = rows <= _WHOLE_ROWS and self._stretches[number].unpacked[group - before] <= whole_bytes
                batches = file.iter_batches(
                    max(1, rows) if is_whole else chunk_rows,
                    row_groups=[group - before],
                    columns=self._projections[number].stored,
                    use_threads=False,
                )
                while True:
                    try:
                        batch = next(batches, None)
                    except Exception as error:  # Arrow raises many kinds on damaged pages
                        raise self._broken(number, group - before, row, error) from error
                    if source.is_local:
                        source.check_unchanged()
                    if batch is None:
                        break
                    start, row = row, row + batch.num_rows
                    batch = self._projections[number].of_batch(
                        batch, source.name, start - int(self.file_starts[number])
                    )
                    chunk, cost = Chunk(batch, start, cost), ReadCost()
                    del batch
                    yield chunk
                    del chunk
                if row != int(self.group_starts[group + 1]):  # Arrow reads some nested pages short, without a word
                    short = ValueError(f"it decodes to {row - int(self.group_starts[group]):,} rows")
                    raise self._broken(number, group - before, row, short)

    def _load(self, number: int, storage: MergedFile, group: int, row: int) -> ReadCost:
        """Read the columns of a row group of a file, which starts at a row, and what that took."""
        stretches = self._stretches[number]
        starts, sizes = stretches.starts[group], stretches.sizes[group]
        try:
            reads, nbytes = storage.load(starts, sizes, self._gaps[number])
        except Exception as error:  # file systems have errors of their own
            raise self._broken(number, group, row, error) from error
        self.sources[number].check_unchanged()  # all that will be decoded of the row group has been read
        return ReadCost(reads, int(sizes.sum()), nbytes)

    def _broken(self, number: int, group: int, row: int, error: Exception) -> DataError:
        """What cannot be read of a row group, from a row on; that the file changed, where it did."""
        self.sources[number].check_unchanged()
        return DataError(
            f"{self.sources[number].name}: row group {group} is broken at or after row"
            f" {row - int(self.file_starts[number]):,}: {first_line(error)}; write the file again"
        )

    def end_of_file(self, row: int) -> int:
        """The row at which the file ends that has a row."""
        return int(self.file_starts[np.searchsorted(self.file_starts, row, side="right")])

    @contextmanager
    def _opened(self, number: int) -> Iterator[tuple[MergedFile, pq.ParquetFile]]:
        source = self.sources[number]
        source.check_unchanged()
        try:
            storage = MergedFile(source.path, source.filesystem)
            file = pq.ParquetFile(
                storage,
                metadata=self.footers[number],
                pre_buffer=False,
                page_checksum_verification=True,  # of pages that were written with one
            )
        except Exception as error:
            source.check_unchanged()
            raise DataError(f"{source.name}: cannot be read: {first_line(error)}") from error
        with storage, file:
            rows = tuple(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
            if rows != source.group_rows:
                raise changed_data(source.name)
            yield storage, file


def check_columns(sources: Sequence[ParquetSource], columns: Sequence[str]) -> list[Projection]:
    """Check that every file has each column once, of one type; where each file has them.

    Raises:
        DataError: one has not; names the file and lists what is there.
    """
    found = [Projection.of(source.schema, columns) for source in sources]
    for source, projection in zip(sources, found, strict=True):
        names = source.schema.names
        there = Counter(names)
        for column in projection.stored:
            if there[column] != 1:
                raise DataError(f"{source.name}: no column {column!r}; there are {_listed(names)}")
        types, first = projection.types(source.schema), found[0].types(sources[0].schema)
        for column, kind, other in zip(columns, types, first, strict=True):
            if kind != other:
                raise DataError(
                    f"{source.name}: column {column!r} holds {kind}, but {other} in {sources[0].name}; write them alike"
                )
    return found


def _listed(names: Sequence[str], most: int = 50) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


@dataclass
class _Stream:
    """Row groups that are being read, and the chunk that was read last."""

    chunks: Iterator[Chunk]
    stop: int
    row: int  # the first that was not yet read
    given: int  # the first that was not yet given out; those before may have been written to since
    last: Chunk | None = None

    def read_on(self) -> ReadCost:
        """The next chunk; what was read of storage for it."""
        self.last = None  # so that the next one may take its memory
        self.last = next(self.chunks)
        self.row += self.last.table.num_rows
        return self.last.cost


def _chunks_of(footer: Any, source: ParquetSource, columns: Sequence[str]) -> ColumnChunks:
    try:
        return ColumnChunks.of(footer, source.schema, columns)
    except Exception as error:  # Arrow raises many kinds on damaged footers
        raise DataError(f"{source.name}: not a Parquet file, or cut off: {first_line(error)}") from error


class RowStreams:
    """Reads ranges of rows; row groups that were read in part are read on from there."""

    def __init__(self, rows: StoredRows, *, chunk_rows: int = 1, keep: int = 2) -> None:
        """Read small row groups at once, others by chunks of a multiple of ``chunk_rows``; keep ``keep`` files open."""
        self._rows, self._keep = rows, keep
        self._chunk_rows = -(-max(1024, int(_CHUNK_BYTES / max(1.0, rows.row_bytes))) // chunk_rows) * chunk_rows
        self._open: list[_Stream] = []  # the last used last
        self._cost = ReadCost()

    def cost(self) -> ReadCost:
        """Of row groups that were begun since this was last asked."""
        found, self._cost = self._cost, ReadCost()
        return found

    def take(self, first: int, stop: int, until: int | None = None) -> list[Piece]:
        """Rows ``first`` to ``stop``, in pieces; those up to ``until`` (of the row group) will be wanted next.

        Raises:
            DataError: as :meth:`StoredRows.chunks`.
        """
        until = until or int(self._rows.group_starts[self._rows.group_of(stop - 1) + 1])
        pieces, row = [], first
        while row < stop:
            chunk = self._chunk_with(row, max(stop, until))
            start = row - chunk.first_row
            pieces.append(Piece(chunk, start, min(start + stop - row, chunk.table.num_rows)))
            row += len(pieces[-1])
            self._open[-1].given = row
            if row >= max(self._open[-1].row, self._open[-1].stop):
                self._open.pop()
        return pieces

    def _chunk_with(self, row: int, until: int) -> Chunk:
        stream = self._stream_at(row)
        if stream is None:
            last = self._rows.group_of(min(until, self._rows.end_of_file(row)) - 1)
            stop = int(self._rows.group_starts[last + 1])  # decoding goes on to there, should more be wanted
            group = int(self._rows.group_starts[self._rows.group_of(row)])
            stream = _Stream(self._rows.chunks(row, stop, self._chunk_rows, _WHOLE_BYTES), stop, group, row)
        while stream.last is None or stream.row <= row:
            self._cost += stream.read_on()
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
