"""Sorted rows to files: shard by shard, row groups cut between sessions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from flexshard._internal import one_array

__all__ = ["SHARD", "encoded_alike", "write_shards"]

_SAMPLED_BYTES = 64 << 20
SHARD = "__flexshard_shard"


def write_shards(
    batches: Iterator[pa.RecordBatch], schema: pa.Schema, session: str, row_group_rows: int, outputs: Sequence[str]
) -> None:
    """Batches, in order of shard, to the file of their shard; every shard has one, if an empty one.

    Args:
        batches: with a column :data:`SHARD`, ascending.
        schema: of the files.
        session: column between whose values row groups are cut.
        row_group_rows: most rows of a row group.
        outputs: file of each shard.
    """
    ahead = next(batches, None)
    for shard, path in enumerate(outputs):
        with pq.ParquetWriter(path, schema, **_encoding(schema)) as writer:
            groups = _RowGroups(writer, schema, session, row_group_rows)
            while ahead is not None:
                numbers = ahead.column(SHARD).to_numpy()
                end = int(np.searchsorted(numbers, shard, side="right"))
                if end:
                    groups.add(ahead.slice(0, end))
                if end < ahead.num_rows:
                    ahead = ahead.slice(end)
                    break
                ahead = next(batches, None)
            groups.finish()


def _encoding(schema: pa.Schema) -> dict[str, Any]:
    # Numbers in a dictionary are packed into bits, where a repeated list starts at another bit each time and zstd does
    # not see that it repeats; as they are, it does.
    flat = [field.name for field in schema if not pt.is_nested(field.type)]
    return {"compression": "zstd", "compression_level": 3, "use_dictionary": flat}


def encoded_alike(paths: Sequence[str], schema: pa.Schema) -> float:
    """Bytes that Parquet files would have, encoded as :func:`write_shards` does, per byte that they have.

    From row groups evenly spread over the files, of 64 MiB in all at most (or one).
    """
    groups: list[tuple[str, int, int]] = []
    for path in paths:
        with pq.ParquetFile(path) as file:
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                size = sum(group.column(index).total_compressed_size for index in range(group.num_columns))
                groups.append((path, number, size))
    total = sum(size for _, _, size in groups)
    step = max(1, -(-total // _SAMPLED_BYTES))
    before = after = 0
    for path, number, size in groups[min(step // 2, max(len(groups) - 1, 0)) :: step]:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            sink = pa.BufferOutputStream()
            pq.write_table(file.read_row_group(number, columns=schema.names), sink, **_encoding(schema))
        before += size
        after += sink.tell()
    return after / before if before else 1.0


class _RowGroups:
    """Cuts what is written between sessions."""

    def __init__(self, writer: Any, schema: pa.Schema, session: str, most_rows: int) -> None:
        self._writer, self._schema, self._session, self._most_rows = writer, schema, session, most_rows
        self._waiting: list[pa.Table] = []
        self._rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        columns = [batch.column(name).cast(self._schema.field(name).type) for name in self._schema.names]
        self._waiting.append(pa.Table.from_arrays(columns, schema=self._schema))
        self._rows += batch.num_rows
        if self._rows > 2 * self._most_rows:
            self._write(everything=False)

    def finish(self) -> None:
        self._write(everything=True)

    def _write(self, *, everything: bool) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        starts = _session_starts(table.column(self._session))
        most, begin = self._most_rows, 0
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
    index = int(np.searchsorted(starts, limit, side="right")) - 1
    if index >= 0 and starts[index] > begin:
        return int(starts[index])
    return limit


def _session_starts(sessions: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Rows at which another session than the row before stands."""
    if len(sessions) < 2:
        return np.zeros(min(len(sessions), 1), np.int64)
    whole_column = one_array(sessions)
    changed = pc.not_equal(whole_column.slice(1), whole_column.slice(0, len(whole_column) - 1))
    return np.concatenate([[0], np.flatnonzero(changed.to_numpy(zero_copy_only=False)) + 1])
