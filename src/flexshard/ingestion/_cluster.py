"""Datasets rewritten so that a session's rows are adjacent and in order of time (RecD paper, section 4.1: O1, O2)."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pyarrow.types as pt

from flexshard import units
from flexshard._files import make_folder
from flexshard._sources import ParquetSource, expand, one_array
from flexshard._values import finite, whole
from flexshard.errors import DataError, MissingDependencyError, OutputError, UnitError
from flexshard.ingestion._sql import quoted

__all__ = ["SESSION_KEY", "TIME_KEY", "Clustered", "cluster_sessions"]

PathLike = str | os.PathLike[str]
SESSION_KEY, TIME_KEY = b"flexshard.session", b"flexshard.time"
_FILE, _ROW, _SHARD = "__flexshard_file", "__flexshard_row", "__flexshard_shard"
_BATCH_ROWS = 1 << 16
_THREAD_BYTES = 64 << 20


@dataclass(frozen=True)
class Clustered:
    """What clustering a dataset did.

    Attributes:
        path: its folder.
        files: names of the files in it.
        rows, sessions: kept.
        rows_read, sessions_read: of the input; more where the data were downsampled.
        kept_by: rows and sessions that downsampling by "session" and by "sample" would keep, whichever was done.
        bytes_before, bytes_after: of the files.
    """

    path: Path
    files: tuple[str, ...]
    rows: int
    sessions: int
    rows_read: int
    sessions_read: int
    kept_by: Mapping[str, tuple[int, int]]
    bytes_before: int
    bytes_after: int

    @property
    def samples_per_session(self) -> float:
        """S of what was kept."""
        return self.rows / self.sessions if self.sessions else 0.0

    @property
    def samples_per_session_read(self) -> float:
        """S of the input."""
        return self.rows_read / self.sessions_read if self.sessions_read else 0.0

    @property
    def storage_ratio(self) -> float:
        """Bytes before per byte after; of as many rows, unless the data were downsampled."""
        return self.bytes_before / self.bytes_after if self.bytes_after else 1.0


@dataclass(frozen=True)
class _Job:
    """One clustering, in a form that travels to other processes."""

    session: str
    time: str
    shards: int
    keep: float
    keep_by: Literal["session", "sample"]
    seed: int
    row_group_rows: int
    memory_bytes: int | None
    scratch: str


def cluster_sessions(
    paths: PathLike | Sequence[PathLike],
    output: PathLike,
    *,
    session: str,
    time: str,
    shards: int = 1,
    keep: float = 1.0,
    keep_by: Literal["session", "sample"] = "session",
    seed: int = 0,
    row_group_rows: int = 1 << 16,
    memory: str | float | None = None,
    ray: bool = False,
) -> Clustered:
    """Rewrite a Parquet dataset: rows of a session adjacent and in order of time, sessions in order of their key.

    DuckDB sorts, and spills what does not fit its memory beside the output. Rows of equal session and time keep the
    order of the files' names and of the rows in them. The same input gives the same files, with Ray or without, and
    ``output`` appears only when it is whole.

    Args:
        paths: files, globs, folders or URLs, as for :meth:`AccessProfile.from_parquet`; remote files are copied first.
        output: folder to make.
        session: column whose distinct values are the sessions.
        time: column to order a session's rows by.
        shards: files to write; a session lies in the one that a hash of its key says (log sharding).
        keep: share of the data to keep.
        keep_by: whether sessions are kept whole, which leaves S as it is (section 7), or samples one by one.
        seed: of what is kept.
        row_group_rows: most rows of a row group; it is cut between sessions unless one alone is larger.
        memory: that sorting may take, such as "4GiB"; by default what DuckDB takes, 80 % of the machine's.
        ray: spread the work over a Ray cluster, file by file and then shard by shard; the output's folder is on storage
            that all its machines see.

    Raises:
        DataError: a column that is missing, null or of another type in some file; names file and row.
        OutputError: ``output`` exists and is not empty, or could not be written.
        MissingDependencyError: Ray was asked for and is not installed.
    """
    shards = whole(shards, "shards", DataError)
    row_group_rows = whole(row_group_rows, "row_group_rows", DataError)
    seed = whole(seed, "seed", DataError, least=0)
    if not 0 < finite(keep, "keep", DataError) <= 1:
        raise DataError(f"keep is a share of the data, above 0 and at most 1; found {keep}")
    if keep_by not in ("session", "sample"):
        raise DataError(f"keep_by is 'session' or 'sample', found {keep_by!r}")
    limit = None if memory is None else _memory(memory)
    sources = expand(paths)
    schema = _common_schema(sources, session, time)
    target = Path(output)
    _check_free(target)
    with _draft(target) as draft:
        scratch = make_folder(draft / "scratch")
        job = _Job(session, time, shards, keep, keep_by, seed, row_group_rows, limit, str(scratch))
        local = [_local(source, number, scratch) for number, source in enumerate(sources)]
        data = make_folder(draft / "data")
        names = [f"part-{number:05d}-of-{shards:05d}.parquet" for number in range(shards)]
        outputs = [str(data / name) for name in names]
        before = sum(_size(path) for path in local)
        counts = _with_ray(job, local, sources, schema, outputs) if ray else _here(job, local, sources, schema, outputs)
        after = sum(_size(path) for path in outputs)
        try:
            with suppress(FileNotFoundError):
                target.rmdir()  # an empty folder may stand there
            data.replace(target)
        except OSError as error:
            raise OutputError(f"cannot write {output}: {error.strerror}; choose another path with -o") from error
    read, seen, *kept = (sum(column) for column in zip(*counts, strict=True))
    kept_by = {"session": (kept[0], kept[1]), "sample": (kept[2], kept[3])}
    return Clustered(target, tuple(names), *kept_by[keep_by], read, seen, kept_by, before, after)


def _memory(memory: str | float) -> int:
    try:
        found = units.parse_bytes(memory) if isinstance(memory, str) else finite(memory, "memory", DataError)
    except UnitError as error:
        raise DataError(f"memory: {error}") from error
    if found <= 0:
        raise DataError(f"memory must be more than nothing, found {memory}")
    return round(found)


def _common_schema(sources: Sequence[ParquetSource], session: str, time: str) -> pa.Schema:
    """The schema that all files share."""
    first = sources[0]
    for source in sources:
        _check_names(source)
        for column in (session, time):
            if source.schema.names.count(column) != 1:
                raise DataError(f"{source.name}: no column {column!r}; there are {', '.join(source.schema.names)}")
        if set(source.schema.names) != set(first.schema.names):
            odd = sorted(set(source.schema.names) ^ set(first.schema.names))[0]
            raise DataError(f"{source.name}: column {odd!r} is in this file or in {first.name}, but not in both")
        for field in source.schema:
            other = first.schema.field(field.name).type
            if field.type != other:
                raise DataError(
                    f"{source.name}: column {field.name!r} holds {field.type}, but {other} in {first.name}; write them"
                    " alike"
                )
    kind = first.schema.field(session).type
    if pt.is_nested(kind) or pt.is_floating(kind):
        raise DataError(f"{first.name}: session column {session!r} holds {kind}; expected one key per row")
    kind = first.schema.field(time).type
    if not (pt.is_integer(kind) or pt.is_floating(kind) or pt.is_temporal(kind)):
        raise DataError(f"{first.name}: time column {time!r} holds {kind}; expected numbers or timestamps")
    kept = dict(first.schema.metadata or {})
    kept.pop(b"pandas", None)  # describes an index that sorting breaks
    return first.schema.with_metadata(kept | {SESSION_KEY: session.encode(), TIME_KEY: time.encode()})


def _check_names(source: ParquetSource) -> None:
    """Check that DuckDB tells the columns apart and keeps their values."""
    seen: dict[str, str] = {}
    for field in source.schema:
        other = seen.setdefault(field.name.lower(), field.name)
        if other is not field.name and (other != field.name or source.schema.names.count(field.name) > 1):
            raise DataError(f"{source.name}: columns {other!r} and {field.name!r} differ by case at most; rename one")
        if not field.name or field.name.lower() in (_FILE, _ROW, _SHARD, "file_row_number"):
            raise DataError(f"{source.name}: a column cannot be called {field.name!r} here; rename it")
        if _lossy(field.type):
            raise DataError(
                f"{source.name}: column {field.name!r} holds {field.type}, which DuckDB changes; cast it before"
            )


def _lossy(kind: pa.DataType) -> bool:
    if pt.is_nested(kind):
        return any(_lossy(kind.field(number).type) for number in range(kind.num_fields))
    return pt.is_decimal256(kind) or isinstance(kind, pa.BaseExtensionType)


def _check_free(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OutputError(f"cannot write {target}: it exists and is not an empty folder; choose another path with -o")


@contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """A folder beside the target, gone when the block ends; what an interrupted run left there is removed first."""
    make_folder(target.parent)
    prefix = f".{target.name}.draft-"
    for left in target.parent.glob(f"{glob.escape(prefix)}*"):
        if not _is_running(left.name.removeprefix(prefix).partition("-")[0]):
            shutil.rmtree(left, ignore_errors=True)
    try:
        draft = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=target.parent))
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror}; choose another path with -o") from error
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _local(source: ParquetSource, number: int, scratch: Path) -> str:
    """A path that DuckDB reads: remote files are copied."""
    if source.filesystem is None:
        return str(Path(source.path).resolve())
    copy = scratch / f"input-{number:05d}.parquet"
    try:
        pafs.copy_files(source.path, str(copy), source_filesystem=source.filesystem)
    except OSError as error:
        raise DataError(f"{source.name}: cannot be read: {str(error).splitlines()[0]}") from error
    return str(copy)


def _size(path: str) -> int:
    return Path(path).stat().st_size


# Sorting: here in one go, or file by file and shard by shard.

_Counts = tuple[int, ...]  # rows and sessions: read, kept by session, kept by sample


def _here(
    job: _Job, files: Sequence[str], sources: Sequence[ParquetSource], schema: pa.Schema, outputs: Sequence[str]
) -> list[_Counts]:
    with _database(job) as database:
        _check_keys(database, job, files, [source.name for source in sources])
        database.execute(f"CREATE VIEW input AS {_numbered(files, range(len(files)), schema)}")
        counts = _count(database, job, "input")
        query = (
            f"SELECT {_columns(schema)}, {_shard_of(job)} AS {_SHARD} FROM input WHERE {_kept(job)}"
            f" ORDER BY {_SHARD}, {_order(job)}"
        )
        _write_all(_batches(database.sql(query)), schema, job, outputs)
        return counts


def _with_ray(
    job: _Job, files: Sequence[str], sources: Sequence[ParquetSource], schema: pa.Schema, outputs: Sequence[str]
) -> list[_Counts]:
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError("clustering on Ray needs Ray; pip install 'flexshard[ray]'") from error
    split, sort = ray.remote(_split), ray.remote(_sort)
    names = [source.name for source in sources]
    parts = ray.get([split.remote(job, file, number, names[number], schema) for number, file in enumerate(files)])
    for part in parts:
        if isinstance(part, str):
            raise DataError(part)
    found = ray.get(
        [sort.remote(job, [part[number] for part in parts], schema, path) for number, path in enumerate(outputs)]
    )
    return list(found)


def _split(job: _Job, file: str, number: int, name: str, schema: pa.Schema) -> list[str] | str:
    """One file's rows by shard, each with its place; or what is wrong with it."""
    try:
        with _database(job) as database:
            _check_keys(database, job, [file], [name])
            parts = []
            for shard in range(job.shards):
                path = str(Path(job.scratch) / f"split-{number:05d}-{shard:05d}.parquet")
                rows = f"SELECT * FROM ({_numbered([file], [number], schema)}) WHERE {_shard_of(job)} = {shard}"
                database.execute(f"COPY ({rows}) TO {_text(path)} (FORMAT parquet)")
                parts.append(path)
            return parts
    except DataError as error:
        return str(error)


def _sort(job: _Job, parts: Sequence[str], schema: pa.Schema, output: str) -> _Counts:
    """One shard's rows, in order."""
    with _database(job) as database:
        database.execute(f"CREATE VIEW input AS SELECT * FROM {_parquet(parts)}")
        (counts,) = _count(database, job, "input")
        query = f"SELECT {_columns(schema)}, 0 AS {_SHARD} FROM input WHERE {_kept(job)} ORDER BY {_order(job)}"
        _write_all(_batches(database.sql(query)), schema, job, [output])
        return counts


@contextmanager
def _database(job: _Job) -> Iterator[Any]:
    import duckdb

    settings: dict[str, Any] = {"temp_directory": str(Path(job.scratch) / "spill"), "preserve_insertion_order": False}
    if job.memory_bytes is not None:
        settings["memory_limit"] = f"{job.memory_bytes // 1000}KB"
        # Each thread holds blocks that it cannot give back while it sorts.
        settings["threads"] = max(1, min(os.cpu_count() or 1, job.memory_bytes // _THREAD_BYTES))
    with closing(duckdb.connect(config=settings)) as database, _failing_as(job):
        yield database


@contextmanager
def _failing_as(job: _Job) -> Iterator[None]:
    """What DuckDB raises when it runs out of room, in one line."""
    import duckdb

    try:
        yield
    except OutputError:
        raise
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        if "Out of Memory" in reason:  # through Arrow's reader, its own type is lost
            limit = "DuckDB's default" if job.memory_bytes is None else units.format_bytes(job.memory_bytes)
            raise OutputError(
                f"sorting needs more memory than {limit}: {reason}; give it more with --memory"
            ) from error
        if isinstance(error, duckdb.IOException) or not isinstance(error, (duckdb.Error, pa.ArrowException)):
            raise OutputError(
                f"cannot write the sorted data: {reason}; free some space or choose another path"
            ) from error
        raise DataError(f"the data cannot be sorted: {reason}") from error


def _numbered(files: Sequence[str], numbers: Sequence[int], schema: pa.Schema) -> str:
    """All rows, with the number of their file and their place in it."""
    parts = [
        f"SELECT {_columns(schema)}, {number} AS {_FILE}, file_row_number AS {_ROW} FROM {_parquet([file])}"
        for file, number in zip(files, numbers, strict=True)
    ]
    return " UNION ALL ".join(parts)


def _parquet(files: Sequence[str]) -> str:
    """These very files: DuckDB would take brackets for a pattern, and folders such as ``day=1`` for columns."""
    listed = ", ".join(_text(glob.escape(file)) for file in files)
    return f"read_parquet([{listed}], file_row_number = true, hive_partitioning = false)"


def _columns(schema: pa.Schema) -> str:
    return ", ".join(quoted(name) for name in schema.names)


def _order(job: _Job) -> str:
    return f"{quoted(job.session)}, {quoted(job.time)}, {_FILE}, {_ROW}"


def _hash(expression: str) -> str:
    # MD5 is the same in every version and on every machine, which DuckDB's own hash does not promise to be.
    return f"md5_number_lower({expression})"


def _key(job: _Job) -> str:
    return f"CAST({quoted(job.session)} AS VARCHAR)"


def _shard_of(job: _Job) -> str:
    return f"CAST({_hash(_key(job))} % {job.shards} AS INTEGER)"


def _kept(job: _Job, by: str | None = None) -> str:
    if job.keep >= 1:
        return "true"
    salt = hashlib.md5(str(job.seed).encode(), usedforsecurity=False).hexdigest()[:8]
    unit = f"concat('{salt}|', {_key(job)})"
    if (by or job.keep_by) == "sample":
        unit = f"concat('{salt}|', {_FILE}, '|', {_ROW})"
    return f"{_hash(unit)} < {int(job.keep * float(1 << 64))}::UHUGEINT"


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _check_keys(database: Any, job: _Job, files: Sequence[str], names: Sequence[str]) -> None:
    for file, name in zip(files, names, strict=True):
        for column, role in ((job.session, "session"), (job.time, "time")):
            query = f"SELECT count(*), min(file_row_number) FROM {_parquet([file])} WHERE {quoted(column)} IS NULL"
            try:
                nulls, row = database.sql(query).fetchall()[0]
            except Exception as error:  # a damaged page
                if "Out of Memory" in str(error):
                    raise
                raise DataError(f"{name}: cannot be read: {str(error).splitlines()[0]}") from error
            if nulls:
                raise DataError(
                    f"{name}: {role} column {column!r} has {nulls:,} nulls, the first in row {row:,}; drop or fill them"
                )


def _count(database: Any, job: _Job, view: str) -> list[_Counts]:
    wanted = []
    for where in ("true", _kept(job, "session"), _kept(job, "sample")):
        wanted += [f"count(*) FILTER ({where})", f"count(DISTINCT {quoted(job.session)}) FILTER ({where})"]
    return [database.sql(f"SELECT {', '.join(wanted)} FROM {view}").fetchall()[0]]


def _batches(relation: Any) -> Iterator[pa.RecordBatch]:
    # DuckDB 1.4 renamed what gives a reader.
    to_reader: Callable[[int], Any] = getattr(relation, "to_arrow_reader", None) or relation.fetch_record_batch
    yield from to_reader(_BATCH_ROWS)


def _write_all(batches: Iterator[pa.RecordBatch], schema: pa.Schema, job: _Job, outputs: Sequence[str]) -> None:
    """Batches, in order of shard, to the file of their shard; every shard has one, if an empty one."""
    ahead = next(batches, None)
    # Numbers in a dictionary are packed into bits, where a repeated list starts at another bit each time and zstd does
    # not see that it repeats; as they are, it does.
    flat = [field.name for field in schema if not pt.is_nested(field.type)]
    for shard, path in enumerate(outputs):
        with pq.ParquetWriter(path, schema, compression="zstd", compression_level=3, use_dictionary=flat) as writer:
            groups = _RowGroups(writer, schema, job)
            while ahead is not None:
                numbers = ahead.column(_SHARD).to_numpy()
                end = int(np.searchsorted(numbers, shard, side="right"))
                if end:
                    groups.add(ahead.slice(0, end))
                if end < ahead.num_rows:
                    ahead = ahead.slice(end)
                    break
                ahead = next(batches, None)
            groups.finish()


class _RowGroups:
    """Cuts what is written between sessions."""

    def __init__(self, writer: Any, schema: pa.Schema, job: _Job) -> None:
        self._writer, self._schema, self._job = writer, schema, job
        self._waiting: list[pa.Table] = []
        self._rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        columns = [batch.column(name).cast(self._schema.field(name).type) for name in self._schema.names]
        self._waiting.append(pa.Table.from_arrays(columns, schema=self._schema))
        self._rows += batch.num_rows
        if self._rows > 2 * self._job.row_group_rows:
            self._write(everything=False)

    def finish(self) -> None:
        self._write(everything=True)

    def _write(self, *, everything: bool) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        starts = _session_starts(table.column(self._job.session))
        most, begin = self._job.row_group_rows, 0
        while begin < table.num_rows and (everything or table.num_rows - begin > most):
            end = _cut(starts, begin, min(begin + most, table.num_rows), table.num_rows)
            self._writer.write_table(table.slice(begin, end - begin), row_group_size=most)
            begin = end
        self._waiting = [table.slice(begin)] if begin < table.num_rows else []
        self._rows = table.num_rows - begin


def _cut(starts: npt.NDArray[np.int64], begin: int, limit: int, rows: int) -> int:
    """Where to cut at or before ``limit``: where a session starts, or in the middle of one that is larger alone."""
    if limit == rows:
        return rows
    place = int(np.searchsorted(starts, limit, side="right")) - 1
    if place >= 0 and starts[place] > begin:
        return int(starts[place])
    return limit


def _session_starts(sessions: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Rows at which another session than the row before stands."""
    if len(sessions) < 2:
        return np.zeros(min(len(sessions), 1), np.int64)
    whole_column = one_array(sessions)
    changed = pc.not_equal(whole_column.slice(1), whole_column.slice(0, len(whole_column) - 1))
    return np.concatenate([[0], np.flatnonzero(changed.to_numpy(zero_copy_only=False)) + 1])
