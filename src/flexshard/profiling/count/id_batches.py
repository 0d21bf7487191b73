"""From an Arrow column to ids and lengths, with errors that name file and row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from flexshard._internal import Chunk, JaggedArray, ParquetSource, distinct_rows, is_list, there_are
from flexshard.errors import DataError
from flexshard.profiling.moments import LengthMoments

__all__ = ["DistinctBatches", "IdBatch", "arrow_ids", "check_column", "check_once", "key_array", "key_kind", "read_ids"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class IdBatch:
    """Ids of consecutive samples of one file.

    Attributes:
        ids: row ids or raw ids, shape (accesses,).
        lengths: ids of each sample, shape (samples,); None where every sample has one.
        name: the file, for messages.
        first_row: row of the file at which the batch starts.
        rows: which of the rows from there on the ids are of, where not all; shape (accesses,).
    """

    ids: npt.NDArray[Any]
    lengths: IntArray | None
    name: str
    first_row: int
    rows: IntArray | None = None

    @property
    def num_samples(self) -> int:
        """Samples in the batch."""
        return int(self.ids.size if self.lengths is None else self.lengths.size)

    def distinct(self, batch_size: int) -> IdBatch:
        """Every distinct list once per ``batch_size`` rows; its other samples have none."""
        jagged = JaggedArray.of(self.ids, self._lengths())
        lengths = jagged.lengths
        kept = []
        for begin in range(0, len(jagged), batch_size):
            ends = jagged.offsets[begin : min(begin + batch_size, len(jagged)) + 1]
            part = JaggedArray(jagged.values[ends[0] : ends[-1]], ends - ends[0])
            kept.append(distinct_rows(part).first + begin)
        first = np.concatenate(kept) if kept else np.zeros(0, np.int64)
        repeated = np.zeros_like(lengths)
        repeated[first] = lengths[first]
        return replace(self, ids=jagged.take(first).values, lengths=repeated)

    def cut(self, rows: int) -> tuple[IdBatch, IdBatch]:
        """The first rows, and the others."""
        lengths = self._lengths()
        end = int(lengths[:rows].sum())
        return (
            replace(self, ids=self.ids[:end], lengths=lengths[:rows]),
            replace(self, ids=self.ids[end:], lengths=lengths[rows:], first_row=self.first_row + rows),
        )

    def followed_by(self, other: IdBatch) -> IdBatch:
        """Both; the other follows in the file."""
        lengths = np.concatenate([self._lengths(), other._lengths()])
        return replace(self, ids=np.concatenate([self.ids, other.ids]), lengths=lengths)

    def _lengths(self) -> IntArray:
        return np.ones(self.ids.size, np.int64) if self.lengths is None else self.lengths

    def sample_of_ids(self) -> IntArray | None:
        """Index of each id's sample in the batch; None where no sample has more than one."""
        if self.lengths is None or self.lengths.max(initial=0) < 2:
            return None
        return np.repeat(np.arange(self.lengths.size), self.lengths)

    def moments(self, where: npt.NDArray[np.bool_] | None = None) -> LengthMoments:
        """Moments of the samples' lengths (of those ``where`` it is true)."""
        if self.lengths is None:
            ones = self.num_samples if where is None else int(np.count_nonzero(where))
            return LengthMoments(ones, ones, ones, min(ones, 1))
        return LengthMoments.of(self.lengths if where is None else self.lengths[where])

    def row_of(self, position: int) -> int:
        """Row of the file that holds the id at this position."""
        if self.rows is not None:
            return self.first_row + int(self.rows[position])
        if self.lengths is None:
            return self.first_row + position
        return self.first_row + int(np.searchsorted(np.cumsum(self.lengths), position, side="right"))


class DistinctBatches:
    """Every distinct list once per so many rows of a file, whatever its row groups."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._waiting: IdBatch | None = None

    def add(self, batch: IdBatch) -> Iterator[IdBatch]:
        """What is whole by now."""
        if self._waiting is not None and self._waiting.name != batch.name:
            yield from self.rest()
        whole = batch if self._waiting is None else self._waiting.followed_by(batch)
        ready, self._waiting = whole.cut(whole.num_samples // self._batch_size * self._batch_size)
        if ready.num_samples:
            yield ready.distinct(self._batch_size)

    def rest(self) -> Iterator[IdBatch]:
        """What is left of the last file."""
        if self._waiting is not None and self._waiting.num_samples:
            yield self._waiting.distinct(self._batch_size)
        self._waiting = None


def check_once(where: str, names: Sequence[str], column: str) -> None:
    """Check that a column's name is that of no other.

    Raises:
        DataError: several have it.
    """
    if list(names).count(column) > 1:
        raise DataError(f"{where}: has several columns called {column!r}; rename them")


def check_column(source: ParquetSource, column: str, *, role: str = "ids") -> None:
    """Check that a file has a column of integers or lists of integers (of anything but nothing, for keys). Where there
    are no values, as pandas writes a day without samples, or one whose lists are all empty, types say nothing.

    Raises:
        DataError: the column is missing (lists those that are there) or of another type.
    """
    check_once(source.name, source.schema.names, column)
    if column not in source.schema.names:
        folder = any(part.startswith(f"{column}=") for part in PurePath(source.name).parent.parts)
        hint = "; it is a folder of the path, of which 'flexshard encode' makes a column" if folder else ""
        raise DataError(f"{source.name}: no column {column!r}; {there_are(source.schema.names)}{hint}")
    if role != "ids":
        return
    column_type = source.schema.field(column).type
    inner = column_type.value_type if is_list(column_type) or pt.is_dictionary(column_type) else column_type
    if not (pt.is_integer(inner) or pt.is_null(inner) or not source.num_rows):
        raise DataError(
            f"{source.name}: column {column!r} holds {column_type}, not ids (integers, or lists of them); number its"
            f" values first: flexshard encode {source.name} --column {column} -o encoded.parquet"
        )


def read_ids(chunk: Chunk, column: str) -> IdBatch:
    """Ids and lengths of a chunk.

    Raises:
        DataError: a null where an id belongs; names file and row.
    """
    return arrow_ids(chunk.table.column(column), chunk.source.name, column, chunk.first_row)


def arrow_ids(data: pa.ChunkedArray, name: str, column: str, first_row: int) -> IdBatch:
    """As :func:`read_ids`, of a column of any table."""
    lengths: IntArray | None = None
    values = data
    if is_list(data.type):
        lengths = np.asarray(pc.fill_null(pc.list_value_length(data), 0).to_numpy()).astype(np.int64)
        values = pa.chunked_array([part.flatten() for part in data.chunks], type=data.type.value_type)
    elif pt.is_dictionary(data.type):
        values = data.cast(data.type.value_type)
    if values.null_count:
        nulls = np.flatnonzero(pc.is_null(values).to_numpy())
        row = IdBatch(nulls, lengths, name, first_row).row_of(int(nulls[0]))
        raise DataError(
            f"{name}: column {column!r} has {nulls.size:,} null ids in the rows from {first_row:,} on,"
            f" the first in row {row:,}; drop or fill them"
        )
    if pt.is_null(values.type):
        values = values.cast(pa.int64())
    ids = values.chunk(0).to_numpy() if values.num_chunks == 1 else values.to_numpy()
    return IdBatch(ids, lengths, name, first_row)


def key_array(chunk: Chunk, column: str, what: str = "sample key") -> pa.ChunkedArray:
    """The keys of a chunk, as integers or as bytes; ``what`` they are is for messages.

    Raises:
        DataError: a null key; names file and row.
    """
    keys = chunk.table.column(column)
    if keys.null_count:
        row = chunk.first_row + int(np.flatnonzero(pc.is_null(keys).to_numpy())[0])
        raise DataError(f"{chunk.source.name}: {what} {column!r} is null in row {row:,}; drop or fill such rows")
    if pt.is_dictionary(keys.type):
        keys = keys.cast(keys.type.value_type)
    if isinstance(keys.type, pa.BaseExtensionType):
        keys = pa.chunked_array([part.storage for part in keys.chunks], keys.type.storage_type)
    if pt.is_fixed_size_binary(keys.type):
        keys = keys.cast(pa.binary())
    if pt.is_uint64(keys.type):
        return keys
    if pt.is_integer(keys.type) or pt.is_boolean(keys.type):
        return keys.cast(pa.int64())
    if pt.is_binary(keys.type) or pt.is_large_binary(keys.type):
        return keys.cast(pa.large_binary())
    if pt.is_floating(keys.type):
        keys = pc.add(keys.cast(pa.float64()), 0.0)  # -0.0 is 0.0
    return keys.cast(pa.large_string()).cast(pa.large_binary())


def key_kind(source: ParquetSource, column: str) -> str | None:
    """What kind of keys a file's column holds; files that are counted together must agree, since keys that are neither
    integers nor texts are told apart by how they are printed. None where there are no keys, whose type says nothing.
    """
    column_type = source.schema.field(column).type
    if pt.is_dictionary(column_type):
        column_type = column_type.value_type
    if isinstance(column_type, pa.BaseExtensionType):
        column_type = column_type.storage_type
    if pt.is_null(column_type):
        return None
    if pt.is_nested(column_type):
        raise DataError(f"{source.name}: column {column!r} holds {column_type}; expected one key per row")
    if pt.is_uint64(column_type):
        return "unsigned integers"
    if pt.is_integer(column_type) or pt.is_boolean(column_type):
        return "integers"
    of_bytes = pt.is_binary(column_type) or pt.is_large_binary(column_type) or pt.is_fixed_size_binary(column_type)
    if of_bytes:
        return "binary"
    of_text = pt.is_string(column_type) or pt.is_large_string(column_type) or pt.is_string_view(column_type)
    return "texts" if of_text else str(column_type)
