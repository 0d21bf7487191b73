"""Rows sorted by session and time in DuckDB: here in one go, or with Ray file by file and then shard by shard."""

from __future__ import annotations

import glob
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.types as pt

from flexshard import units
from flexshard._internal import ParquetSource, interrupts, sql_name, sql_text
from flexshard.errors import DataError, MissingDependencyError, OutputError
from flexshard.ingestion.sessions.partitions import PARTITION_KEY, partition_sql, stored_width
from flexshard.ingestion.sessions.row_groups import SHARD, write_shards

__all__ = ["RESERVED", "ClusterJob", "Counts", "sort_here", "sort_with_ray"]

_FILE, _ROW = "__flexshard_file", "__flexshard_row"
_PARTITION, _START = "__flexshard_partition", "__flexshard_start"
RESERVED = (
    _FILE,
    _ROW,
    _PARTITION,
    _START,
    SHARD,
    "file_index",
    "file_row_number",
    "filename",
)  # columns that the queries add
_BATCH_ROWS = 1 << 16
_ROWS_HELD = 1 << 13
_THREAD_BYTES = 64 << 20


@dataclass(frozen=True)
class ClusterJob:
    """One clustering, in a form that travels to other processes."""

    session: str
    time: str
    shards: int
    keep: float
    keep_by: Literal["session", "sample"]
    seed: int
    row_group_rows: int
    by_start: bool
    memory_bytes: int | None
    scratch: str


Counts = tuple[int, ...]  # rows and sessions: read, kept by session, kept by sample


def sort_here(
    job: ClusterJob, files: Sequence[str], sources: Sequence[ParquetSource], schema: pa.Schema, outputs: Sequence[str]
) -> list[Counts]:
    """In one DuckDB, which spills what does not fit."""
    with _database(job) as database:
        _check_keys(database, job, files, [source.name for source in sources], schema)
        database.execute(f"CREATE VIEW input AS {_numbered(files, 'file_index', schema)}")
        counts = _count(database, job, "input")
        query = (
            f"SELECT {_columns(schema)}, {_shard_of(job)} AS {SHARD} FROM {_with_starts(database, job, schema)}"
            f" WHERE {_kept(job)} ORDER BY {SHARD}, {_order(job, schema)}"
        )
        write_shards(_batches(database.sql(query)), schema, job.session, job.row_group_rows, outputs)
        return counts


def sort_with_ray(
    job: ClusterJob, files: Sequence[str], sources: Sequence[ParquetSource], schema: pa.Schema, outputs: Sequence[str]
) -> list[Counts]:
    """On a Ray cluster; what comes out is the same."""
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
    results = ray.get(
        [sort.remote(job, [part[number] for part in parts], schema, path) for number, path in enumerate(outputs)]
    )
    return list(results)


def _split(job: ClusterJob, file: str, number: int, name: str, schema: pa.Schema) -> list[str] | str:
    """One file's rows by shard, each with its position; or what is wrong with it."""
    try:
        with _database(job) as database:
            _check_keys(database, job, [file], [name], schema)
            parts = []
            for shard in range(job.shards):
                path = str(Path(job.scratch) / f"split-{number:05d}-{shard:05d}.parquet")
                rows = f"SELECT * FROM ({_numbered([file], str(number), schema)}) WHERE {_shard_of(job)} = {shard}"
                database.execute(f"COPY ({rows}) TO {sql_text(path)} (FORMAT parquet)")
                parts.append(path)
            return parts
    except DataError as error:
        return str(error)


def _sort(job: ClusterJob, parts: Sequence[str], schema: pa.Schema, output: str) -> Counts:
    """One shard's rows, in order."""
    with _database(job) as database:
        database.execute(f"CREATE VIEW input AS SELECT * FROM {_parquet(parts)}")
        (counts,) = _count(database, job, "input")
        query = (
            f"SELECT {_columns(schema)}, 0 AS {SHARD} FROM {_with_starts(database, job, schema)} WHERE {_kept(job)}"
            f" ORDER BY {_order(job, schema)}"
        )
        write_shards(_batches(database.sql(query)), schema, job.session, job.row_group_rows, [output])
        return counts


@contextmanager
def _database(job: ClusterJob) -> Iterator[Any]:
    import duckdb

    settings: dict[str, Any] = {"temp_directory": str(Path(job.scratch) / "spill"), "preserve_insertion_order": False}
    if job.memory_bytes is not None:
        settings["memory_limit"] = f"{job.memory_bytes // 1000}KB"
        # Each thread holds blocks that it cannot give back while it sorts.
        settings["threads"] = max(1, min(os.cpu_count() or 1, job.memory_bytes // _THREAD_BYTES))
    with interrupts(), closing(duckdb.connect(config=settings)) as database, _failing_as(job):
        yield database


@contextmanager
def _failing_as(job: ClusterJob) -> Iterator[None]:
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


def _numbered(files: Sequence[str], number: str, schema: pa.Schema) -> str:
    """All rows, with the number of their file and their position in it.

    One scan of all files, whose threads are those of the database: a union of scans has buffers for each.
    """
    return f"SELECT {_columns(schema)}, {number} AS {_FILE}, file_row_number AS {_ROW} FROM {_parquet(files)}"


def _parquet(files: Sequence[str]) -> str:
    """These very files: DuckDB would take brackets for a pattern, and folders such as ``day=1`` for columns."""
    listed = ", ".join(sql_text(glob.escape(file)) for file in files)
    return f"read_parquet([{listed}], file_row_number = true, hive_partitioning = false)"


def _columns(schema: pa.Schema) -> str:
    return ", ".join(sql_name(name) for name in schema.names)


def _order(job: ClusterJob, schema: pa.Schema) -> str:
    before = [_partition(job, schema)] if PARTITION_KEY in schema.metadata else []
    before += [_START] if job.by_start else []
    return ", ".join([*before, sql_name(job.session), sql_name(job.time), _FILE, _ROW])


def _partition(job: ClusterJob, schema: pa.Schema) -> str:
    """The partition of a row; the same for all, where there are none. It may be wider than what Parquet has: DuckDB
    writes such numbers as floating point ones, so that they are written as text.
    """
    if PARTITION_KEY not in schema.metadata:
        return "0"
    return partition_sql(schema.field(job.time).type, job.time, stored_width(schema.metadata[PARTITION_KEY]))


def _with_starts(database: Any, job: ClusterJob, schema: pa.Schema) -> str:
    """The input, with the time of the first row that its session has in its partition where that is asked for.

    Step by step, through files: one query for all wants the memory of a grouping, a join and a sort at once.
    """
    if not job.by_start:
        return "input"
    own = Path(job.scratch) / f"{os.getpid()}-{threading.get_ident()}"
    starts, joined = str(own.with_suffix(".starts.parquet")), str(own.with_suffix(".joined.parquet"))
    session = sql_name(job.session)
    partition = f"CAST({_partition(job, schema)} AS VARCHAR) AS {_PARTITION}"
    keys = f"{partition}, {session}"
    query = f"SELECT {keys}, min({sql_name(job.time)}) AS {_START} FROM input WHERE {_kept(job)} GROUP BY ALL"
    database.execute(f"COPY ({query}) TO {sql_text(starts)} (FORMAT parquet)")
    rows = f"SELECT *, {partition} FROM input"
    query = f"SELECT * FROM ({rows}) JOIN read_parquet({sql_text(starts)}) USING ({_PARTITION}, {session})"
    # Row groups are held until they are whole.
    database.execute(f"COPY ({query}) TO {sql_text(joined)} (FORMAT parquet, ROW_GROUP_SIZE {_ROWS_HELD})")
    return f"read_parquet({sql_text(joined)})"


def _hash(expression: str) -> str:
    # MD5 is the same in every version and on every machine, which DuckDB's own hash does not promise to be.
    return f"md5_number_lower({expression})"


def _key(job: ClusterJob) -> str:
    return f"CAST({sql_name(job.session)} AS VARCHAR)"


def _shard_of(job: ClusterJob) -> str:
    return f"CAST({_hash(_key(job))} % {job.shards} AS INTEGER)"


def _kept(job: ClusterJob, by: str | None = None) -> str:
    if job.keep >= 1:
        return "true"
    salt = hashlib.md5(str(job.seed).encode(), usedforsecurity=False).hexdigest()[:8]
    unit = f"concat('{salt}|', {_key(job)})"
    if (by or job.keep_by) == "sample":
        unit = f"concat('{salt}|', {_FILE}, '|', {_ROW})"
    return f"{_hash(unit)} < {int(job.keep * float(1 << 64))}::UHUGEINT"


def _check_keys(database: Any, job: ClusterJob, files: Sequence[str], names: Sequence[str], schema: pa.Schema) -> None:
    """Check that every row has a session and a time, and that the files can be read; raises DataError."""
    session, time = sql_name(job.session), sql_name(job.time)
    wrong = [(job.session, "session", "nulls", f"{session} IS NULL"), (job.time, "time", "nulls", f"{time} IS NULL")]
    if pt.is_floating(schema.field(job.time).type):
        # Through a list, since Parquet's statistics leave NaN out and DuckDB asks them first.
        wrong.append((job.time, "time", "numbers that are not finite", f"NOT isfinite(list_value({time})[1])"))
    for column, role, what, condition in wrong:
        query = (
            f"SELECT file_index, count(*), min(file_row_number) FROM {_parquet(files)} WHERE {condition}"
            " GROUP BY file_index ORDER BY file_index LIMIT 1"
        )
        try:
            found = database.sql(query).fetchall()
        except Exception as error:  # a damaged page
            if len(files) == 1 and "Out of Memory" not in str(error):
                raise DataError(f"{names[0]}: cannot be read: {str(error).splitlines()[0]}") from error
            for file, name in zip(files, names, strict=True) if len(files) > 1 else ():
                _check_keys(database, job, [file], [name], schema)  # to name it
            raise
        if found:
            index, nulls, row = found[0]
            raise DataError(
                f"{names[index]}: {role} column {column!r} has {nulls:,} {what}, the first in row {row:,}; drop or fill"
                " them"
            )


def _count(database: Any, job: ClusterJob, view: str) -> list[Counts]:
    wanted = []
    for where in ("true", _kept(job, "session"), _kept(job, "sample")):
        wanted += [f"count(*) FILTER ({where})", f"count(DISTINCT {sql_name(job.session)}) FILTER ({where})"]
    return [database.sql(f"SELECT {', '.join(wanted)} FROM {view}").fetchall()[0]]


def _batches(relation: Any) -> Iterator[pa.RecordBatch]:
    # DuckDB 1.4 renamed what gives a reader.
    to_reader: Callable[[int], Any] = getattr(relation, "to_arrow_reader", None) or relation.fetch_record_batch
    yield from to_reader(_BATCH_ROWS)
