"""Datasets rewritten so that a session's rows are adjacent and in order of time (RecD paper, section 4.1: O1, O2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from flexshard._internal import (
    ParquetSource,
    PathLike,
    check_bytes,
    check_finite,
    check_int,
    draft_folder,
    expand,
    free_target,
    make_folder,
    put_in_place,
)
from flexshard.errors import DataError
from flexshard.ingestion.sessions.checksums import changed_column, checksums
from flexshard.ingestion.sessions.row_groups import encoded_alike
from flexshard.ingestion.sessions.schema import common_schema
from flexshard.ingestion.sessions.sorting import ClusterJob, sort_here, sort_with_ray

__all__ = ["Clustered", "cluster_sessions"]

# Of a small log some may be empty, as a hash has it; that all but a few are is a mistyped number.
_FEW_SHARDS = 256


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
        bytes_alike: that the input would have in its own order, encoded as the output is; from some of its row groups.
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
    bytes_alike: int

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
        """What the order does: bytes of a row of the input, encoded alike, per byte of one after."""
        return self.bytes_alike / self.bytes_after * (self.rows / self.rows_read) if self.rows else 1.0


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
    partition: str | float | None = None,
    order: Literal["key", "start"] = "key",
    memory: str | float | None = None,
    ray: bool = False,
) -> Clustered:
    """Rewrite a Parquet dataset: rows of a session adjacent and in order of time, sessions in order of their key.

    With ``partition``, each file is in order of time from partition to partition and clustered within each, so that
    training may go on in order of time; a session that goes over the end of one lies in pieces, one per partition.

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
        partition: width of a partition: "1h" where times are timestamps or dates, else a number in their own unit.
        order: of the sessions of a file (of a partition): by their key, or by the time of their first row there.
        memory: that sorting may take, such as "4GiB"; by default what DuckDB takes, 80 % of the machine's.
        ray: spread the work over a Ray cluster, file by file and then shard by shard; the output's folder is on storage
            that all its machines see.

    Raises:
        DataError: a column that is missing, null or of another type in some file; names file and row. Or one whose
            values would not be kept: counts and sums of every column are compared after writing.
        OutputError: ``output`` exists and is not empty, or could not be written.
        MissingDependencyError: Ray was asked for and is not installed.
    """
    shards = check_int(shards, "shards", DataError)
    row_group_rows = check_int(row_group_rows, "row_group_rows", DataError)
    seed = check_int(seed, "seed", DataError, least=0)
    if not 0 < check_finite(keep, "keep", DataError) <= 1:
        raise DataError(f"keep is a share of the data, above 0 and at most 1; found {keep}")
    if keep_by not in ("session", "sample"):
        raise DataError(f"keep_by is 'session' or 'sample', found {keep_by!r}")
    if order not in ("key", "start"):
        raise DataError(f"order is 'key' or 'start', found {order!r}")
    limit = None if memory is None else round(check_bytes(memory, "memory", DataError))
    sources = expand(paths)
    schema = common_schema(sources, session, time, partition)
    rows = sum(source.num_rows for source in sources)
    if shards > max(rows, _FEW_SHARDS):
        raise DataError(f"{shards:,} shards of {rows:,} rows would be empty files; at most one for each row")
    target = free_target(output)
    with draft_folder(target) as draft:
        scratch = make_folder(draft / "scratch")
        how = (shards, keep, keep_by, seed, row_group_rows, order == "start", limit)
        job = ClusterJob(session, time, *how, str(scratch))
        local = [_local(source, number, scratch) for number, source in enumerate(sources)]
        data = make_folder(draft / "data")
        names = [f"part-{number:05d}-of-{shards:05d}.parquet" for number in range(shards)]
        outputs = [str(data / name) for name in names]
        before = sum(_size(path) for path in local)
        alike = round(before * encoded_alike(local, schema))
        sort = sort_with_ray if ray else sort_here
        counts = sort(job, local, sources, schema, outputs)
        after = sum(_size(path) for path in outputs)
        read, seen, *kept = (sum(column) for column in zip(*counts, strict=True))
        kept_by = {"session": (kept[0], kept[1]), "sample": (kept[2], kept[3])}
        written = sum(pq.read_metadata(path).num_rows for path in outputs)
        if written != kept_by[keep_by][0]:
            raise DataError(f"{written:,} rows would be written of {kept_by[keep_by][0]:,}; nothing has been written")
        if not written and read:
            raise DataError(f"keep={keep} leaves none of {read:,} rows; nothing has been written")
        if keep >= 1:
            _check_values(local, outputs, schema.names)
        put_in_place(data, target)
    return Clustered(target, tuple(names), *kept_by[keep_by], read, seen, kept_by, before, after, alike)


def _check_values(read: Sequence[str], written: Sequence[str], columns: Sequence[str]) -> None:
    """Whether every value that was read was written."""
    changed = changed_column(checksums(read, columns), checksums(written, columns))
    if changed is not None:
        raise DataError(
            f"column {changed!r} would not keep its values; nothing has been written: cast it or leave it out"
        )


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
