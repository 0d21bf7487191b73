"""From paths to Arrow columns: files, globs, folders and URLs, opened with errors that name them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pyarrow.types as pt

from flexshard._internal.checks import first_repeated
from flexshard._internal.data_paths import first_line, is_glob, match_local, match_url
from flexshard._internal.file_stamps import FileStamp, changed_data, on_this_machine, stamp_of
from flexshard._internal.files import PathLike, checked_path
from flexshard.errors import DataError

__all__ = [
    "Chunk",
    "ParquetSource",
    "expand",
    "is_list",
    "one_array",
    "read_chunks",
]

# A row group whose columns unpack to more than this is streamed in batches instead of read at once.
_WHOLE_GROUP_BYTES = 64 << 20
_BATCH_ROWS = 1 << 20


@dataclass(frozen=True)
class ParquetSource:
    """One Parquet file: where it is, and what its footer says."""

    name: str
    path: str
    filesystem: pafs.FileSystem | None
    schema: pa.Schema
    num_rows: int
    group_rows: tuple[int, ...]
    group_bytes: tuple[int, ...]
    stamp: FileStamp = field(compare=False)

    @property
    def is_local(self) -> bool:
        """Whether asking for the file's size takes no time to speak of."""
        return on_this_machine(self.filesystem)

    def check_unchanged(self) -> None:
        """Check that the file still is what it was.

        Raises:
            ChangedDataError: it is not.
            DataError: it cannot be asked for.
        """
        if stamp_of(self.name, self.path, self.filesystem) != self.stamp:
            raise changed_data(self.name)

    def open(self) -> pq.ParquetFile:
        """A handle of its own for each reader, because handles are not shared between threads."""
        return pq.ParquetFile(self.path, filesystem=self.filesystem, memory_map=False, page_checksum_verification=True)

    @classmethod
    def probe(cls, name: str, path: str, filesystem: pafs.FileSystem | None) -> ParquetSource:
        """Read a file's footer.

        Raises:
            DataError: missing, unreadable, not Parquet, or cut off.
        """
        try:
            stamp = FileStamp.of(path, filesystem)
            with pq.ParquetFile(path, filesystem=filesystem) as file:
                metadata = file.metadata
                groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
                if metadata.num_rows != sum(group.num_rows for group in groups):
                    raise ValueError("its row groups have other rows than it says")
                return cls(
                    name,
                    path,
                    filesystem,
                    file.schema_arrow,
                    metadata.num_rows,
                    tuple(group.num_rows for group in groups),
                    tuple(group.total_byte_size for group in groups),
                    stamp,
                )
        except FileNotFoundError as error:
            raise DataError(f"{name}: no such file") from error
        except OSError as error:
            if Path(name).is_fifo():
                raise DataError(f"{name}: a pipe cannot be read as Parquet; write it to a file first") from error
            raise DataError(f"{name}: cannot be read: {first_line(error)}") from error
        except Exception as error:  # Arrow raises many kinds on damaged footers
            raise DataError(f"{name}: not a Parquet file, or cut off: {first_line(error)}") from error


@dataclass(frozen=True)
class Chunk:
    """Some columns of consecutive rows of a file."""

    source: ParquetSource
    first_row: int
    table: pa.Table


def expand(paths: PathLike | Sequence[PathLike]) -> list[ParquetSource]:
    """Every Parquet file that files, globs, folders and URLs name, in order of their names.

    Raises:
        DataError: nothing matches, or a file is not readable as Parquet.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    if not isinstance(paths, Iterable):
        raise DataError(f"data files are paths, found {paths!r}")
    listed = list(paths)
    if not listed:
        raise DataError("no data files were given")
    sources: list[ParquetSource] = []
    for entry in listed:
        text = checked_path(entry, DataError)
        if not text:
            raise DataError("a data file has no name: the path is empty; write . for this folder")
        filesystem, matches = match_url(text) if "://" in text else (None, match_local(text))
        if not matches:
            raise DataError(f"{text}: {_nothing(text)}")
        sources += [ParquetSource.probe(_display(text, match), match, filesystem) for match in sorted(matches)]
    places = [os.path.realpath(source.path) if source.is_local else source.name for source in sources]
    twice = first_repeated(places)
    if twice is not None:
        raise DataError(f"{sources[places.index(twice)].name}: is given twice, and would be counted twice")
    return sources


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array; without copying where it is one already."""
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds lists."""
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def _nothing(text: str) -> str:
    if is_glob(text):
        return "no file matches"
    return "no Parquet files in this folder" if "://" not in text and Path(text).is_dir() else "no such file"


def _display(entry: str, match: str) -> str:
    return match if "://" not in entry else f"{entry.split('://')[0]}://{match}"


def read_chunks(
    sources: Sequence[ParquetSource],
    columns: Sequence[str],
    workers: int,
    *,
    whole_group_bytes: int = _WHOLE_GROUP_BYTES,
    batch_rows: int = _BATCH_ROWS,
) -> Iterator[Chunk]:
    """Columns of all files, in order, with up to ``workers`` row groups being decoded ahead.

    Args:
        sources, columns, workers: what to read.
        whole_group_bytes: a row group of more is streamed in batches
        batch_rows: of so many rows.

    Raises:
        DataError: a page that cannot be decoded; names file and row.
        ChangedDataError: a file is not what it was.
    """
    pending: deque[Future[Chunk]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for source in sources:
            first_row = 0
            for group, (rows, size) in enumerate(zip(source.group_rows, source.group_bytes, strict=True)):
                if size <= whole_group_bytes:
                    pending.append(pool.submit(_read_group, source, group, first_row, columns))
                else:
                    while pending:
                        yield pending.popleft().result()
                    yield from _stream_group(source, group, first_row, columns, batch_rows)
                first_row += rows
                while len(pending) > workers:
                    yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _read_group(source: ParquetSource, group: int, first_row: int, columns: Sequence[str]) -> Chunk:
    """Columns of one row group, which starts at ``first_row``.

    Raises:
        DataError: a page that cannot be decoded; names file and row.
    """
    try:
        with source.open() as file:
            table = file.read_row_group(group, columns=list(columns), use_threads=False)
    except Exception as error:  # Arrow raises many kinds on damaged pages
        raise _broken(source, first_row, error) from error
    _check_read(source, group, first_row, table.num_rows)
    return Chunk(source, first_row, table)


def _stream_group(
    source: ParquetSource, group: int, first_row: int, columns: Sequence[str], batch_rows: int
) -> Iterator[Chunk]:
    """Batches of a large row group, the next being decoded while one is counted."""
    start = first_row
    try:
        with source.open() as file, ThreadPoolExecutor(1) as pool:
            batches = file.iter_batches(batch_rows, row_groups=[group], columns=list(columns), use_threads=False)
            ahead = pool.submit(next, batches, None)
            while (batch := ahead.result()) is not None:
                ahead = pool.submit(next, batches, None)
                yield Chunk(source, first_row, pa.Table.from_batches([batch]))
                first_row += batch.num_rows
    except Exception as error:  # Arrow raises many kinds on damaged pages
        raise _broken(source, first_row, error) from error
    _check_read(source, group, start, first_row - start)


def _check_read(source: ParquetSource, group: int, first_row: int, rows: int) -> None:
    """Whether what was read is all of a row group of the file that was found; other machines are asked once a file."""
    if source.is_local or group + 1 == len(source.group_rows):
        source.check_unchanged()
    if rows != source.group_rows[group]:  # Arrow reads some nested pages short, without a word
        short = ValueError(f"row group {group} decodes to {rows:,} of {source.group_rows[group]:,} rows")
        raise _broken(source, first_row, short)


def _broken(source: ParquetSource, row: int, error: Exception) -> DataError:
    try:
        source.check_unchanged()
    except DataError as changed:
        return changed
    return DataError(f"{source.name}: broken at or after row {row}: {first_line(error)}; write the file again")
