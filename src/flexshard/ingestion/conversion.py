"""From rows to tensors: lists of ids by feature, distinct ones once, and columns of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
import torch

from flexshard._internal import is_list
from flexshard.embeddings import InverseKeyedJaggedTensor, JaggedArray, arrow_columns
from flexshard.errors import DataError
from flexshard.ingestion.batch import BatchPosition, ReaderPhases, SessionBatch
from flexshard.ingestion.batches import Rows
from flexshard.ingestion.pieces import Piece

__all__ = ["BatchMaker", "dense_tensor", "features_of"]

_Origin = Callable[[int], tuple[str, int]]  # file, and row of it, of a row


@dataclass(frozen=True)
class _Columns:
    """Columns of rows, looked into and checked; what is dense may be written to."""

    features: dict[str, JaggedArray]
    dense: dict[str, npt.NDArray[Any]]

    @classmethod
    def joined(cls, parts: Sequence[tuple[_Columns, Piece]]) -> _Columns:
        """The rows of pieces of chunks; raises ValueError where lists of dense columns are not of one length."""
        features = {
            name: JaggedArray.joined([found.features[name].slice(piece.start, piece.stop) for found, piece in parts])
            for name in parts[0][0].features
        }
        dense = {
            name: np.concatenate([found.dense[name][piece.start : piece.stop] for found, piece in parts])
            for name in parts[0][0].dense
        }
        return cls(features, dense)


@dataclass(frozen=True)
class BatchMaker:
    """What becomes of rows: arguments as of :class:`SessionReader`."""

    features: Sequence[str]
    groups: Sequence[Sequence[str]]
    sharing: Mapping[str, Any]  # partial, newest and max_shift
    weights: Mapping[str, str]
    dense: Sequence[str]
    nulls_as_nan: bool
    transform: Callable[[InverseKeyedJaggedTensor], InverseKeyedJaggedTensor] | None
    preprocess: Sequence[Callable[[SessionBatch], SessionBatch]]

    def __call__(self, rows: Rows, position: BatchPosition) -> SessionBatch:
        """The batch of some rows; raises DataError as its parts."""
        start = perf_counter()
        features, dense = self._converted(rows)
        converted = perf_counter()
        if self.transform is not None:
            features = self.transform(features)
        if self.preprocess:
            batch = SessionBatch(features, dense, ReaderPhases(), position)
            for change in self.preprocess:
                batch = change(batch)
            features, dense = batch.features, batch.dense
        phases = ReaderPhases(
            len(rows),
            rows.seconds,
            converted - start,
            perf_counter() - converted,
            rows.cost.bytes_read,
            features.nbytes() + sum([tensor.nbytes for tensor in dense.values()]),
            rows.cost.bytes_wanted,
            rows.cost.reads,
        )
        return SessionBatch(features, dense, phases, position)

    def _converted(self, rows: Rows) -> tuple[InverseKeyedJaggedTensor, dict[str, torch.Tensor]]:
        try:
            parts = [(piece.chunk.once(self._columns), piece) for piece in rows.pieces]
            columns, start, stop = parts[0][0], parts[0][1].start, parts[0][1].stop
            if len(parts) > 1:
                columns, start, stop = _Columns.joined(parts), 0, len(rows)
            features = InverseKeyedJaggedTensor.from_columns(
                columns.features, self.groups, rows=(start, stop), **self.sharing
            )
        except (DataError, ValueError):  # of some row of the chunks, perhaps of another batch
            features = features_of(rows, self.features, self.groups, self.weights, self.sharing)
            return features, {name: dense_tensor(rows, name, nulls_as_nan=self.nulls_as_nan) for name in self.dense}
        # Not slices of tensors, which are saved, and sent to other processes, with all that they are slices of.
        return features, {name: torch.from_numpy(column[start:stop]) for name, column in columns.dense.items()}

    def _columns(self, table: pa.RecordBatch) -> _Columns:
        dense = {name: _dense(table, name, lambda row: ("", row), self.nulls_as_nan).numpy() for name in self.dense}
        return _Columns(arrow_columns(table, self.features, self.weights), dense)


def features_of(
    rows: Rows,
    features: Sequence[str],
    groups: Sequence[Sequence[str]],
    weights: Mapping[str, str],
    sharing: Mapping[str, Any],
) -> InverseKeyedJaggedTensor:
    """Features of a batch, each group's distinct rows once; what is partially deduplicated, by its runs.

    Raises:
        DataError: values that are not ids; names file, row and column.
    """
    how: dict[str, Any] = {"keys": features, "weights": weights, **sharing}
    try:
        return InverseKeyedJaggedTensor.from_arrow(rows.table, groups, **how)
    except DataError:
        for table, where, row in rows.runs():  # again, to name the file and its row
            InverseKeyedJaggedTensor.from_arrow(table, groups, where=where, first_row=row, **how)
        raise


def dense_tensor(rows: Rows, name: str, *, nulls_as_nan: bool = False) -> torch.Tensor:
    """A column of numbers, shape (B,), or of lists of as many numbers in every row, shape (B, D).

    Args:
        rows: with the column.
        name: of the column.
        nulls_as_nan: take nulls among floats for NaN, which transforms may fill.

    Raises:
        DataError: other types, nulls, or lists of different lengths; names file, row and column.
    """
    return _dense(rows.table, name, rows.origin_of, nulls_as_nan)


def _dense(table: pa.RecordBatch, name: str, origin_of: _Origin, nulls_as_nan: bool) -> torch.Tensor:
    column = table.column(name)
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if not is_list(column.type):
        if nulls_as_nan and pt.is_floating(column.type):
            column = pc.fill_null(column, float("nan"))
        return _flat(origin_of, name, column)
    inner = column.type.value_type
    if not _is_number(inner):
        raise DataError(f"{origin_of(0)[0]}: column {name!r} holds {column.type}, not numbers or lists of numbers")
    _check_no_nulls(origin_of, name, column)
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    width = int(lengths[0]) if lengths.size else 0
    other = np.flatnonzero(lengths != width)
    if other.size:
        where, row = origin_of(int(other[0]))
        raise DataError(
            f"{where}: column {name!r} has {lengths[other[0]]} numbers in row {row:,}, and {width} in others; a dense"
            " column has as many in every row (read lists of ids as features)"
        )
    values = column.flatten()
    if nulls_as_nan and pt.is_floating(values.type):
        values = pc.fill_null(values, float("nan"))
    if values.null_count:
        where, row = origin_of(int(np.flatnonzero(pc.is_null(values).to_numpy(zero_copy_only=False))[0]) // width)
        raise DataError(f"{where}: column {name!r} has a null in row {row:,}; drop or fill such rows")
    return _tensor(values).reshape(len(column), width)


def _flat(origin_of: _Origin, name: str, column: pa.Array) -> torch.Tensor:
    if pt.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not _is_number(column.type):
        raise DataError(f"{origin_of(0)[0]}: column {name!r} holds {column.type}, not a number per row")
    _check_no_nulls(origin_of, name, column)
    return _tensor(column)


def _check_no_nulls(origin_of: _Origin, name: str, column: pa.Array) -> None:
    if column.null_count:
        where, row = origin_of(int(np.flatnonzero(pc.is_null(column).to_numpy(zero_copy_only=False))[0]))
        raise DataError(f"{where}: column {name!r} is null in row {row:,}; drop or fill such rows")


def _is_number(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind))


def _tensor(values: pa.Array) -> torch.Tensor:
    """Numbers where Arrow holds them, but for bits, which torch does not have."""
    if pt.is_boolean(values.type) or not len(values):
        return torch.from_numpy(np.array(values.to_numpy(zero_copy_only=False)))
    return torch.from_dlpack(values)
