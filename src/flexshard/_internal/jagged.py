"""Lists of numbers as flat arrays, and which rows of them are the same: exact, compiled or on Arrow's hash tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from flexshard._internal.optional import has_numba
from flexshard._internal.parquet_sources import is_list, one_array
from flexshard.errors import DataError

__all__ = [
    "Distinct",
    "IntArray",
    "JaggedArray",
    "as_unsigned",
    "compiled_kernels",
    "distinct_rows",
    "jagged_of_arrow",
    "joined",
    "joined_range",
]

IntArray = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]
_COMPILED_ROWS = 1024


@dataclass(frozen=True)
class JaggedArray:
    """A list of numbers per row.

    Attributes:
        values: of all rows, one after the other; shape (N,).
        offsets: where each row starts, and the end; shape (rows + 1,), from 0.
        weights: one per value, or None.
    """

    values: AnyArray
    offsets: IntArray
    weights: AnyArray | None = None

    @classmethod
    def of(cls, values: AnyArray, lengths: npt.NDArray[Any], weights: AnyArray | None = None) -> JaggedArray:
        """From the number of values of every row."""
        offsets = np.zeros(lengths.size + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(values, offsets, weights)

    def __len__(self) -> int:
        return self.offsets.size - 1

    @property
    def lengths(self) -> IntArray:
        """Values of every row."""
        return _ones(len(self)) if self.offsets is _unit_offsets(len(self)) else self.offsets[1:] - self.offsets[:-1]

    @classmethod
    def joined(cls, parts: Sequence[JaggedArray]) -> JaggedArray:
        """The rows of one, then of the next, and so on, all with weights or none; without copying where it is one."""
        if len(parts) == 1:
            return parts[0]
        values, lengths, weights = joined(parts)
        is_unit = all(part.offsets is _unit_offsets(len(part)) for part in parts)
        return cls(values, _unit_offsets(lengths.size), weights) if is_unit else cls.of(values, lengths, weights)

    def slice(self, start: int, stop: int) -> JaggedArray:
        """Consecutive rows; views of the values and weights."""
        if self.offsets is _unit_offsets(len(self)):
            first, last, offsets = start, stop, _unit_offsets(stop - start)
        else:
            first, last = int(self.offsets[start]), int(self.offsets[stop])
            offsets = self.offsets[start : stop + 1] - first
        weights = None if self.weights is None else self.weights[first:last]
        return JaggedArray(self.values[first:last], offsets, weights)

    def take(self, rows: IntArray) -> JaggedArray:
        """These rows, in this order."""
        values, lengths, weights = joined([self], rows)
        return JaggedArray.of(values, lengths, weights)


@dataclass(frozen=True)
class Distinct:
    """Which rows are the same.

    Attributes:
        inverse: the distinct row that each row is; shape (rows,).
        first: the row at which each distinct row stands first, ascending; shape (distinct,).
    """

    inverse: IntArray
    first: IntArray


def distinct_rows(*columns: JaggedArray, compiled: bool | None = None) -> Distinct:
    """The distinct rows of one or more columns of lists; rows are the same only if they are in every column.

    Two rows are the same if their bytes are (of weights too), which a hash only suggests and a comparison decides.
    Distinct rows are numbered in order of their first appearance.

    Args:
        columns: of one batch.
        compiled: whether to use compiled loops; by default where numba is installed and rows are enough to pay for
            loading them.

    Raises:
        DataError: no columns, or columns of different numbers of rows.
    """
    if not columns or len({len(column) for column in columns}) > 1:
        raise DataError(f"columns of one batch have as many rows, found {[len(column) for column in columns]}")
    rows, kernels = len(columns[0]), compiled_kernels(len(columns[0]), compiled)
    if kernels is not None:
        parts = [
            (as_unsigned(values), column.offsets)
            for column in columns
            for values in (column.values, column.weights)
            if values is not None
        ]
        same = kernels.first_rows(parts, rows)
        if same is not None:
            is_first = same == np.arange(rows)
            return Distinct((np.cumsum(is_first) - 1)[same], np.flatnonzero(is_first))
    codes: list[npt.NDArray[np.int32]] = []
    for column in columns:
        for values in (column.values, column.weights):
            if values is not None:
                column_codes = _codes(_binary(values, column.offsets))
                # Features that change together have the same codes: nothing to combine.
                if not any(np.array_equal(column_codes, other) for other in codes):
                    codes.append(column_codes)
    both = codes[0]
    for other in codes[1:]:
        both = _codes(pa.array(both.astype(np.int64) << 32 | other))
    newest = np.maximum.accumulate(both) if both.size else both
    first = np.flatnonzero(np.diff(newest, prepend=-1))
    return Distinct(both.astype(np.int64), first)


def compiled_kernels(rows: int, compiled: bool | None = None) -> Any:
    """Compiled loops, where they are wanted; None where they are not, or numba is not installed."""
    wanted = rows >= _COMPILED_ROWS if compiled is None else compiled
    if not wanted or not has_numba():
        return None
    from flexshard._internal import duplicate_kernels

    return duplicate_kernels


@lru_cache(maxsize=4)  # batches of one size have them in common
def _unit_offsets(rows: int) -> IntArray:
    """Offsets of rows of one value each."""
    offsets = np.arange(rows + 1, dtype=np.int64)
    offsets.flags.writeable = False
    return offsets


@lru_cache(maxsize=4)
def _ones(rows: int) -> IntArray:
    ones = np.ones(rows, np.int64)
    ones.flags.writeable = False
    return ones


def as_unsigned(values: AnyArray) -> AnyArray:
    """The values' bits, without copying them."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def _codes(array: pa.Array) -> npt.NDArray[np.int32]:
    """Number of the distinct value at every position, in order of first appearance."""
    return np.asarray(array.dictionary_encode().indices.to_numpy())


def _binary(values: AnyArray, offsets: IntArray) -> pa.Array:
    """The rows' bytes, without copying them."""
    data = np.ascontiguousarray(values)
    ends = pa.py_buffer(offsets * data.itemsize)
    return pa.Array.from_buffers(pa.large_binary(), offsets.size - 1, [None, ends, pa.py_buffer(data.view(np.uint8))])


def joined(
    columns: Sequence[JaggedArray], rows: IntArray | None = None, *, lengths_type: Any = np.int64
) -> tuple[AnyArray, AnyArray, AnyArray | None]:
    """Values, lengths and weights of these rows (all by default) of the first column, then of the next, and so on.

    The arrays are new ones, which may be written to.
    """
    each = [column.lengths if rows is None else column.lengths[rows] for column in columns]
    weighted = [(column.weights, column.offsets) for column in columns if column.weights is not None]
    values = _joined([(column.values, column.offsets) for column in columns], each, rows)
    return values, _concatenated(each, lengths_type), _joined(weighted, each, rows) if weighted else None


def joined_range(
    columns: Sequence[JaggedArray], start: int, stop: int
) -> tuple[IntArray, npt.NDArray[np.int32], AnyArray | None]:
    """Values in 64 bits, lengths in 32 and weights of consecutive rows of some columns of ids, as of :func:`joined`."""
    unit = _unit_offsets(len(columns[0]))
    if all([column.offsets is unit for column in columns]):  # noqa: C419 (a list takes half as long)
        bounds = [(start, stop)] * len(columns)
        lengths = _buffer((stop - start) * len(columns), np.dtype(np.int32))
        lengths.fill(1)  # takes less than joining arrays of ones
    else:
        bounds = [(int(column.offsets[start]), int(column.offsets[stop])) for column in columns]
        each = [column.offsets[start + 1 : stop + 1] - column.offsets[start:stop] for column in columns]
        lengths = _concatenated(each, np.int32)
    both = list(zip(columns, bounds, strict=True))
    values = _concatenated([column.values[first:last] for column, (first, last) in both], np.int64)
    weights = [column.weights[first:last] for column, (first, last) in both if column.weights is not None]
    return values, lengths, _concatenated(weights) if weights else None


def _joined(
    columns: Sequence[tuple[AnyArray, IntArray]], lengths: Sequence[IntArray], rows: IntArray | None
) -> AnyArray:
    if rows is None:
        return _concatenated([values for values, _ in columns])
    kernels, kind = compiled_kernels(rows.size), columns[0][0].dtype
    if kernels is None or any(values.dtype != kind for values, _ in columns):
        return np.concatenate([_taken(values, offsets, rows) for values, offsets in columns])
    sizes = [int(each.sum()) for each in lengths]
    buffer = _buffer(sum(sizes), kind)
    start = 0
    for (values, offsets), size in zip(columns, sizes, strict=True):
        kernels.gather(as_unsigned(values), offsets, rows, as_unsigned(buffer[start : start + size]))
        start += size
    return buffer


def _concatenated(parts: Sequence[AnyArray], kind: Any = None) -> AnyArray:
    kinds = {part.dtype for part in parts} if kind is None else {np.dtype(kind)}
    kind = kinds.pop() if len(kinds) == 1 else np.result_type(*kinds)
    return np.concatenate(parts, out=_buffer(sum(part.size for part in parts), kind), casting="same_kind")


def _buffer(size: int, kind: np.dtype[Any]) -> AnyArray:
    # Arrow keeps the pages of buffers that are given back; NumPy would fault new ones in for every batch.
    return np.frombuffer(pa.allocate_buffer(size * kind.itemsize), kind)


def _taken(values: AnyArray, offsets: IntArray, rows: IntArray) -> AnyArray:
    taken = _binary(values, offsets).take(pa.array(rows))
    count = np.frombuffer(taken.buffers()[1], np.int64, rows.size + 1)[-1] // values.itemsize
    return np.frombuffer(taken.buffers()[2], values.dtype, count) if count else np.zeros(0, values.dtype)


def jagged_of_arrow(
    column: pa.Array | pa.ChunkedArray, name: str, *, where: str = "the batch", first_row: int = 0
) -> JaggedArray:
    """A column of integers or of lists of integers (or of floats, for weights); without copying where it is one chunk.

    A null list is an empty one.

    Args:
        column: to read.
        name: of the column, for messages.
        where: the file, for messages.
        first_row: row of the file at which the column starts, for messages.

    Raises:
        DataError: another type, or a null within a list; names column and row.
    """
    if isinstance(column, pa.ChunkedArray):
        column = one_array(column)
    if pt.is_signed_integer(column.type) and not column.null_count:  # the most common one, and quickly done
        return JaggedArray(column.to_numpy(), _unit_offsets(len(column)))
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pt.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_list(column.type):
        values = column.flatten()
        if column.null_count or pt.is_fixed_size_list(column.type):
            lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        else:
            offsets = column.offsets.to_numpy().astype(np.int64)
            offsets -= offsets[0]
    else:
        values, offsets = column, _unit_offsets(len(column))
    if not (pt.is_integer(values.type) or pt.is_floating(values.type)):
        raise DataError(
            f"{where}: column {name!r} holds {column.type}, not numbers; expected integers or lists of integers"
            " (encode texts before)"
        )
    if values.null_count:
        position = int(np.flatnonzero(pc.is_null(values).to_numpy(zero_copy_only=False))[0])
        row = int(np.searchsorted(offsets, position, side="right")) - 1
        raise DataError(f"{where}: column {name!r} has a null id in row {first_row + row:,}; drop or fill it")
    flat = values.to_numpy(zero_copy_only=False)
    if flat.dtype.kind != "u":
        return JaggedArray(flat, offsets)
    signed = flat.astype(np.int64)
    if flat.dtype.itemsize == 8 and signed.size and signed.min() < 0:
        position = int(np.flatnonzero(signed < 0)[0])
        row = int(np.searchsorted(offsets, position, side="right")) - 1
        raise DataError(
            f"{where}: column {name!r} has {flat[position]} in row {first_row + row:,}, more than ids of 63 bits hold;"
            " hash or encode it before"
        )
    return JaggedArray(signed, offsets)
