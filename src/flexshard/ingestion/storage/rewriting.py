"""Datasets rewritten so that jobs read few bytes in few reads (DPP paper, section 4.2)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pyarrow.types as pt

from flexshard._internal import (
    ParquetSource,
    PathLike,
    check_bytes,
    check_finite,
    draft_folder,
    expand,
    first_line,
    first_repeated,
    free_target,
    hidden_part,
    make_folder,
    put_in_place,
    reason_of,
)
from flexshard.errors import DataError, OutputError
from flexshard.ingestion.storage.column_chunks import ColumnChunks
from flexshard.ingestion.storage.column_order import ReadPattern, best_order, rows_per_group
from flexshard.ingestion.storage.flat_maps import loosened, map_columns, map_of, note_of, taken_apart
from flexshard.ingestion.storage.job_reads import job_reads
from flexshard.ingestion.storage.map_keys import key_columns, keys_of
from flexshard.ingestion.storage.merged_reads import Disk, ReadCost
from flexshard.ingestion.storage.popularity import PopularBytes, popular_bytes
from flexshard.ingestion.storage.projections import ProjectionLog
from flexshard.ingestion.stored_rows import StoredRows, check_columns

__all__ = ["Rewritten", "rewrite_dataset"]

FloatArray = npt.NDArray[np.float64]
_SAMPLE_BYTES, _CHUNK_BYTES = 64 << 20, 128 << 20  # of unpacked columns
_SAMPLE_ROWS = 1 << 16
_MOST_GROUP_ROWS = 64 << 20  # Arrow's own limit


@dataclass(frozen=True)
class Rewritten:
    """What rewriting a dataset did.

    Attributes:
        path: its folder.
        files: names of the files in it.
        rows: of all files.
        columns: in the order in which they lie.
        features: that were keys of maps.
        group_rows: most rows of a row group.
        gap: bytes between two columns up to which one read took both, for ``before`` and ``after``.
        bytes_before, bytes_after: of the files.
        before, after: what a run of a job in the log asks of storage for the whole dataset, on average; None without
            a log. What is wanted is counted in the new files in both.
        seconds_before, seconds_after: that this takes the disk.
        popular: which bytes of the new files most reads are of; None without a log.
        unknown: columns that jobs of the log name and that there are not.
    """

    path: Path
    files: tuple[str, ...]
    rows: int
    columns: tuple[str, ...]
    features: int
    group_rows: int
    gap: float
    bytes_before: int
    bytes_after: int
    before: ReadCost | None = None
    after: ReadCost | None = None
    seconds_before: float | None = None
    seconds_after: float | None = None
    popular: PopularBytes | None = None
    unknown: tuple[str, ...] = ()


def rewrite_dataset(
    paths: PathLike | Sequence[PathLike],
    output: PathLike,
    *,
    log: ProjectionLog | None = None,
    maps: Sequence[str] | None = None,
    efficiency: float = 0.9,
    gap: str | float | None = None,
    memory: str | float = "1GiB",
    disk: Disk | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Rewritten:
    """Rewrite a Parquet dataset for reading: each key of a map as a column of its own, columns that are read together
    near each other, row groups large enough for large reads.

    Key ``k`` of the column ``m`` becomes the column ``m/k``, null where a row has not the key, or nothing under it;
    :class:`SessionReader` finds keys by that name before and after. Rows keep their order, files their names.
    ``output`` appears only when it is whole. The same input gives the same files.

    Args:
        paths: files, globs, folders or URLs.
        output: folder to make.
        log: what jobs read: columns that more of them read come first, such as the same jobs read next to each other.
            Without it, columns stay in their order, and keys come in that of their values.
        maps: columns of maps to take apart; by default all whose keys are numbers or texts.
        efficiency: share of the disk's time for bytes that jobs of the log want; row groups get rows until it is
            reached. The rest goes to seeks and to gaps.
        gap: bytes between two columns up to which one read takes both; by default what the disk reads in a seek.
        memory: that a row group may take unpacked, all columns together.
        disk: for which to order columns, by default the paper's.
        progress: called with rows written so far, and all.

    Raises:
        DataError: a column that is missing or of another type in some file; a key that a row has twice; values that
            cannot be read; names file and row.
        OutputError: ``output`` exists and is not empty, or could not be written.
    """
    disk = disk or Disk()
    group_bytes = check_bytes(memory, "memory", DataError)
    if not 0 <= check_finite(efficiency, "efficiency", DataError) <= 1:
        raise DataError(f"efficiency is a share of the disk's time, 0 to 1; found {efficiency}")
    reach = disk.break_even_gap if gap is None else check_bytes(gap, "gap", DataError, least=0)
    sources = expand(paths)
    names = sources[0].schema.names
    _check_alike(sources)
    target, files = free_target(output), _file_names(sources)
    before = StoredRows(sources, names)
    keys = {name: found for name, found in keys_of(sources, _maps(sources[0], maps)).items() if len(found)}
    before.check_unchanged()
    features = [feature for name, found in keys.items() for feature in key_columns(name, found)]
    columns = [name for name in names if name not in keys] + features
    twice = first_repeated(columns)
    if twice is not None:
        raise DataError(f"{sources[0].name}: key {twice!r} of a map would be a second column of that name; rename one")
    stored, layout = before.with_columns(columns), _Layout.of(sources, columns, list(keys))
    sample, column_bytes = _sampled(stored, layout)
    rows = max(1, min(stored.num_rows, _MOST_GROUP_ROWS, int(group_bytes / max(1.0, sample))))
    if log is not None:
        if not log.projections:
            raise DataError("the log has no projections; leave it out, or name what jobs read")
        told = log.in_columns(columns, list(keys))
        pattern = ReadPattern(told.reads(columns), np.array(log.runs, np.float64), column_bytes, float(reach), disk)
        rows = rows_per_group(pattern, best_order(pattern, rows), efficiency, rows)
        columns = [columns[number] for number in best_order(pattern, rows)]
        stored, layout = before.with_columns(columns), _Layout.of(sources, columns, list(keys))
    with draft_folder(target) as draft:
        data = make_folder(draft / "data")
        done = 0
        for number, name in enumerate(files):
            path = data / name
            make_folder(path.parent)
            for written in _write(stored, number, path, layout, rows, max(1, int(_CHUNK_BYTES / max(1.0, sample)))):
                done += written
                if progress is not None:
                    progress(done, stored.num_rows)
        made = expand(data)
        if sum(source.num_rows for source in made) != stored.num_rows or len(made) != len(files):
            raise DataError("rows were lost in writing; nothing has been written: please report this")
        after = StoredRows(made, columns)
        old = [(source.schema, footer) for source, footer in zip(sources, before.footers, strict=True)]
        new = [(source.schema, footer) for source, footer in zip(made, after.footers, strict=True)]
        report = {} if log is None else _reads(old, new, told, columns, reach, disk)
        put_in_place(data, target)
    return Rewritten(
        target,
        tuple(files),
        stored.num_rows,
        tuple(columns),
        len(features),
        max(_even(source.num_rows, rows) for source in sources),
        float(reach),
        before.nbytes,
        after.nbytes,
        **report,
    )


@dataclass(frozen=True)
class _Layout:
    """How files are written."""

    columns: Sequence[str]
    kept: frozenset[str]  # columns that there were before
    schema: pa.Schema

    @classmethod
    def of(cls, sources: Sequence[ParquetSource], columns: Sequence[str], maps: Sequence[str]) -> _Layout:
        """Of these columns, after maps of some files were taken apart."""
        schemas = [source.schema for source in sources]
        kinds = [_wide(kind) for kind in check_columns(sources, columns)[0].types(schemas[0])]
        fields = []
        for name, kind in zip(columns, kinds, strict=True):
            if name in schemas[0].names:
                may_be_null = any(schema.field(name).nullable for schema in schemas)
                fields.append(schemas[0].field(name).with_type(kind).with_nullable(may_be_null))
            else:
                fields.append(pa.field(name, kind))
        # What all files say of themselves; thousands of names are looked up in sets.
        shared = set.intersection(*({*(schema.metadata or {}).items()} for schema in schemas))
        metadata = {key: value for key, value in shared if not (maps and key == b"pandas")}
        apart = {name: loosened(schemas[0].field(name).type.item_type) for name in maps}
        metadata |= note_of(taken_apart(schemas[0]) | apart)
        return cls(columns, frozenset(schemas[0].names), pa.schema(fields, dict(sorted(metadata.items())) or None))

    def table(self, batches: Sequence[pa.RecordBatch]) -> pa.Table:
        """Batches as they are written."""
        return pa.concat_tables(
            pa.Table.from_arrays(
                [_widened(array, kind) for array, kind in zip(batch.columns, self.schema.types, strict=True)],
                schema=self.schema,
            )
            for batch in batches
        )

    def writer(self, where: Any) -> pq.ParquetWriter:
        """Into a file or a buffer."""
        plain = [field.name for field in self.schema if not pt.is_nested(field.type)]
        return pq.ParquetWriter(
            where,
            self.schema,
            filesystem=pafs.LocalFileSystem() if isinstance(where, str) else None,  # no name is taken for a URL
            compression="zstd",
            compression_level=3,
            # Ids in a dictionary hide lists that repeat from zstd (RecD); numbers hardly repeat.
            use_dictionary=[name for name in plain if not pt.is_floating(self.schema.field(name).type)],
            # Of thousands of features, statistics are most of the footer, and nobody filters by them.
            write_statistics=[name for name in plain if name in self.kept],
        )


def _write(stored: StoredRows, number: int, path: Path, layout: _Layout, rows: int, chunk_rows: int) -> Iterator[int]:
    """One file, row group after row group; how many rows each has."""
    first, stop = (int(row) for row in stored.file_starts[number : number + 2])
    rows = _even(stop - first, rows)
    try:
        with layout.writer(str(path.absolute())) as writer:
            waiting: list[pa.RecordBatch] = []
            for piece in stored.chunks(first, stop, min(rows, chunk_rows)) if stop > first else ():
                batch = piece.table
                del piece
                while batch.num_rows:
                    here = batch.slice(0, rows - sum(part.num_rows for part in waiting))
                    waiting.append(here)
                    batch = batch.slice(here.num_rows)
                    held = sum(part.num_rows for part in waiting)
                    if held == rows:
                        writer.write_table(layout.table(waiting), row_group_size=rows)
                        waiting.clear()
                        yield held
            if waiting:
                writer.write_table(layout.table(waiting), row_group_size=rows)
                yield sum(part.num_rows for part in waiting)
    except OSError as error:
        raise OutputError(f"cannot write the new {path.name}: {reason_of(error)}; free some space") from error
    except pa.ArrowException as error:
        raise DataError(f"{stored.sources[number].name}: cannot be rewritten: {first_line(error)}") from error


def _even(rows: int, most: int) -> int:
    """Rows of a row group of a file: as many in each, up to a twentieth above ``most`` rather than a small last one."""
    groups = max(1, math.ceil(rows / most - 0.05))
    return max(1, math.ceil(rows / groups))


def _sampled(stored: StoredRows, layout: _Layout) -> tuple[float, FloatArray]:
    """Bytes per row of all columns in memory; and of each, compressed, shape (columns,). Of the largest row group."""
    sizes = np.diff(stored.group_starts)
    if not stored.num_rows:
        return 0.0, np.zeros(len(layout.columns))
    group = int(np.argmax(sizes))
    rows = max(1, min(int(sizes[group]), _SAMPLE_ROWS, int(_SAMPLE_BYTES / max(1.0, stored.row_bytes))))
    first = int(stored.group_starts[group])
    batch = next(stored.chunks(first, first + rows, rows)).table
    sink = pa.BufferOutputStream()
    try:
        with layout.writer(sink) as writer:
            writer.write_table(layout.table([batch]))
    except pa.ArrowException as error:
        raise DataError(f"{stored.locate(first)[0]}: cannot be rewritten: {first_line(error)}") from error
    metadata = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    chunks = ColumnChunks.of(metadata, layout.schema, layout.columns)
    return batch.nbytes / batch.num_rows, np.bincount(
        chunks.columns, chunks.sizes.sum(0), len(layout.columns)
    ) / batch.num_rows


def _reads(
    before: Sequence[tuple[pa.Schema, Any]],
    after: Sequence[tuple[pa.Schema, Any]],
    log: ProjectionLog,
    columns: Sequence[str],
    gap: float,
    disk: Disk,
) -> dict[str, Any]:
    """What jobs of the log ask of storage, before and after."""
    runs = np.array(log.runs, np.float64)
    new, sizes = job_reads(after, log, columns, gap)
    old, _ = job_reads(before, log, columns, gap)
    old = [ReadCost(cost.reads, now.bytes_wanted, cost.bytes_read) for cost, now in zip(old, new, strict=True)]
    hits = log.hit_rates(columns)
    return {
        "before": _mean(old, runs),
        "after": _mean(new, runs),
        "seconds_before": float(runs @ np.array([cost.seconds(disk) for cost in old]) / runs.sum()),
        "seconds_after": float(runs @ np.array([cost.seconds(disk) for cost in new]) / runs.sum()),
        "popular": popular_bytes(sizes, hits) if (sizes * hits).sum() > 0 else None,
        "unknown": tuple(log.unknown(columns)),
    }


def _mean(costs: Sequence[ReadCost], runs: FloatArray) -> ReadCost:
    table = np.array([(cost.reads, cost.bytes_wanted, cost.bytes_read) for cost in costs])
    return ReadCost(*(round(value) for value in (runs @ table / runs.sum()).tolist()))


def _maps(source: ParquetSource, maps: Sequence[str] | None) -> list[str]:
    """Columns to take apart."""
    there = map_columns(source.schema)
    for name in there:
        longer = [other for other in there if map_of(other, [name]) is not None]
        if longer:
            raise DataError(
                f"{source.name}: keys of the maps {name!r} and {longer[0]!r} would not be told apart; rename one"
            )
    if maps is None:
        return there
    for name in maps:
        if name not in there:
            known = ", ".join(there) or "none"
            raise DataError(f"{source.name}: column {name!r} holds no maps from numbers or texts; such are: {known}")
    return list(dict.fromkeys(maps))


def _check_alike(sources: Sequence[ParquetSource]) -> None:
    """Every file has the columns of the first, of the same types."""
    names = sources[0].schema.names
    check_columns(sources, names)
    for source in sources:
        odd = sorted(set(source.schema.names) - set(names))
        if odd:
            raise DataError(f"{source.name}: column {odd[0]!r} is in this file, but not in {sources[0].name}")


def _wide(kind: pa.DataType) -> pa.DataType:
    """The type of a column of all row groups, whose dictionaries may differ."""
    return pa.dictionary(pa.int32(), kind.value_type) if pt.is_dictionary(kind) else kind


def _widened(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if not pt.is_dictionary(kind):
        return array
    return pa.DictionaryArray.from_arrays(array.indices.cast(pa.int32()), array.dictionary)


def _file_names(sources: Sequence[ParquetSource]) -> list[str]:
    """Where each file goes in the new folder: partitions stay folders."""
    paths = [
        PurePosixPath(os.path.abspath(source.path) if source.is_local else source.path)  # noqa: PTH100 (no link is followed)
        for source in sources
    ]
    base = PurePosixPath(os.path.commonpath([path.parent for path in paths]))
    partition = next((place for place, part in enumerate(base.parts) if "=" in part), len(base.parts))
    base = PurePosixPath(*base.parts[:partition])
    names = [path.relative_to(base) for path in paths]
    for name, source in zip(names, sources, strict=True):
        hidden = hidden_part(str(name))
        if hidden is not None:
            raise DataError(f"{source.name}: in a folder, {hidden!r} is not read as data; rename it")
    found = [str(name if name.suffix == ".parquet" else name.with_name(f"{name.name}.parquet")) for name in names]
    twice = first_repeated(found)
    if twice is not None:
        raise DataError(f"{sources[found.index(twice)].name}: two files would be called {twice}; rename one")
    return found
