"""From paths to Arrow columns: files, globs, folders and URLs, opened with errors that name them."""

from __future__ import annotations

import glob
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pyarrow.types as pt

from flexshard._internal.checks import first_repeated
from flexshard._internal.file_stamps import FileStamp, changed_data, gone_data, on_this_machine
from flexshard._internal.files import PathLike, checked_path
from flexshard.errors import DataError, MissingDependencyError

__all__ = [
    "Chunk",
    "ParquetSource",
    "expand",
    "files_below",
    "first_line",
    "hidden_part",
    "is_list",
    "matching",
    "one_array",
    "read_chunks",
]

# A row group whose columns unpack to more than this is streamed in batches instead of read at once.
_WHOLE_GROUP_BYTES = 64 << 20
_BATCH_ROWS = 1 << 20
_NATIVE_SCHEMES = ("s3", "gs", "gcs", "hdfs", "file")


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
        try:
            stamp = FileStamp.of(self.path, self.filesystem)
        except FileNotFoundError as error:
            raise gone_data(self.name) from error
        except OSError as error:
            raise DataError(f"{self.name}: cannot be read: {first_line(error)}") from error
        if stamp != self.stamp:
            raise changed_data(self.name)

    def open(self) -> pq.ParquetFile:
        """A handle of its own for each reader, because handles are not shared between threads."""
        return pq.ParquetFile(self.path, filesystem=self.filesystem, memory_map=False)

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
        filesystem, matches = _match_url(text) if "://" in text else (None, _match_local(text))
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
    if _is_glob(text):
        return "no file matches"
    return "no Parquet files in this folder" if "://" not in text and Path(text).is_dir() else "no such file"


def first_line(error: BaseException) -> str:
    """What an error says, in one line without a full stop; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _display(entry: str, match: str) -> str:
    return match if "://" not in entry else f"{entry.split('://')[0]}://{match}"


def _is_glob(text: str) -> bool:
    return any(mark in text for mark in "*?[")


def _match_local(text: str) -> list[str]:
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            return [str(file) for file in files_below(path) if file.suffix == ".parquet"]
        if path.exists() or not _is_glob(text):
            return [str(path)]
        return [file for file in matching(path) if Path(file).is_file()]
    except DataError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{text}: not a path that can be read: {first_line(error)}") from error


def _is_data(path: str) -> bool:
    """Whether a file below a folder is data.

    Spark and others leave notes, and what they have not finished, under names that start with a dot or an underscore;
    a partition's folder has an equals sign in its name.
    """
    return path.endswith(".parquet") and hidden_part(path) is None


def matching(pattern: Path) -> list[str]:
    """The files and folders of this machine that a pattern fits.

    Raises:
        DataError: a link to nothing, whose rows would be missing.
    """
    found = glob.glob(str(pattern), recursive=True)
    for path in found:
        _check_leads_somewhere(path)
    return found


def files_below(folder: Path) -> list[Path]:
    """The files of a folder and those in it, through links too, but for those that are hidden (:func:`hidden_part`); a
    folder that has several names is read by one, its own before a link's.

    Raises:
        DataError: a link to nothing, whose rows would be missing.
    """
    found: list[Path] = []
    seen: set[str] = set()
    waiting = [folder]
    links: list[Path] = []
    while waiting or links:
        here = waiting.pop() if waiting else links.pop(0)
        real = os.path.realpath(here)
        if real in seen:
            continue
        seen.add(real)
        for entry in sorted(os.scandir(here), key=lambda entry: entry.name):
            if hidden_part(entry.name) is not None:
                continue
            if entry.is_dir():
                (links if entry.is_symlink() else waiting).append(Path(entry.path))
            elif entry.is_file():
                found.append(Path(entry.path))
            else:
                _check_leads_somewhere(entry.path)
    return found


def _check_leads_somewhere(path: str) -> None:
    link = Path(path)
    if link.is_symlink() and not link.exists():
        raise DataError(f"{path}: a link to {link.readlink()}, which is not there; mend it, or remove it")


def hidden_part(path: str) -> str | None:
    """The first name in a path below a folder for which it is not read as data, if there is one."""
    return next((part for part in path.split("/") if part.startswith((".", "_")) and "=" not in part), None)


def _match_url(url: str) -> tuple[pafs.FileSystem, list[str]]:
    scheme = url.split("://")[0]
    try:
        if scheme in _NATIVE_SCHEMES:
            base = url if not _is_glob(url) else url[: url.rindex("/", 0, _first_mark(url))]
            filesystem, path = pafs.FileSystem.from_uri(base)
            pattern = path if base == url else path + url[len(base) :]
        else:
            filesystem, pattern = _fsspec(url)
            path = pattern if not _is_glob(pattern) else pattern[: pattern.rindex("/", 0, _first_mark(pattern))]
        if pattern != path:
            selector = pafs.FileSelector(path, recursive=True)
            files = [info.path for info in filesystem.get_file_info(selector) if info.is_file]
            return filesystem, [file for file in files if _fits(file.split("/"), pattern.split("/"))]
        info = filesystem.get_file_info(path)
        if info.type == pafs.FileType.Directory:
            entries = filesystem.get_file_info(pafs.FileSelector(path, recursive=True))
            root = path.rstrip("/") + "/"
            return filesystem, [
                entry.path for entry in entries if entry.is_file and _is_data(entry.path.removeprefix(root))
            ]
        return filesystem, [path] if info.type == pafs.FileType.File else []
    except (OSError, pa.ArrowException, ValueError) as error:
        raise DataError(f"{url}: cannot be read: {str(error).splitlines()[0]}") from error


def _fits(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether folders and a file are what a pattern says, name by name, as :func:`glob.glob` has it: ``**`` is any
    number of names, and no wildcard is a name that starts with a dot.
    """
    if not pattern:
        return not names
    if pattern[0] == "**":
        skipped = takewhile(lambda end: end == 0 or not names[end - 1].startswith("."), range(len(names) + 1))
        return any(_fits(names[end:], pattern[1:]) for end in skipped)
    if not names or (names[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatchcase(names[0], pattern[0]) and _fits(names[1:], pattern[1:])


def _first_mark(text: str) -> int:
    return min(text.index(mark) for mark in "*?[" if mark in text)


def _fsspec(url: str) -> tuple[pafs.FileSystem, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingDependencyError(f"{url}: this kind of URL needs fsspec; pip install 'flexshard[cloud]'") from error
    try:
        filesystem, path = url_to_fs(url)
    except ImportError as error:
        raise MissingDependencyError(f"{url}: this kind of URL needs another package: {error}") from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), path


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
