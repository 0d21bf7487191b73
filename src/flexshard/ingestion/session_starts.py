"""Where sessions start in a dataset, and whether each is in one piece and in order of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from flexshard._internal import JaggedArray, ParquetSource, distinct_rows, one_array
from flexshard.errors import DataError
from flexshard.ingestion.sessions.partitions import (
    PARTITION_KEY,
    SESSION_KEY,
    TIME_KEY,
    partition_numbers,
    stored_width,
)
from flexshard.ingestion.stored_rows import RowStreams, StoredRows

__all__ = ["check_session_columns", "scanned_sessions", "session_starts"]

IntArray = npt.NDArray[np.int64]
_SCAN_ROWS = 1 << 20


def scanned_sessions(stored: StoredRows, session: str, time: str | None) -> IntArray:
    """Rows at which sessions start in the files of some rows, as :func:`session_starts` finds them."""
    partition = _partition_of(stored.sources, session)
    columns = [session, *([] if time is None else [time]), *([] if partition is None else [partition[0]])]
    rows = stored.with_columns(list(dict.fromkeys(columns)))
    check_session_columns(stored.sources[0], session, time)
    return session_starts(rows, session, time, partition)


def _partition_of(sources: Sequence[ParquetSource], session: str) -> tuple[str, float] | None:
    """Column and width of the partitions of time in which files were clustered by this session, all of them alike."""
    said = [source.schema.metadata or {} for source in sources]
    found = {(held.get(SESSION_KEY), held.get(TIME_KEY), held.get(PARTITION_KEY)) for held in said}
    by, column, width = found.pop()
    if found or width is None or column is None or by != session.encode():
        return None
    return column.decode(), stored_width(width)


def check_session_columns(source: ParquetSource, session: str | None, time: str | None) -> None:
    """Check the types of both columns.

    Raises:
        DataError: one that cannot be a key, or a time; names file and column.
    """
    for column in (session, time):
        if column is not None and column not in source.schema.names:
            raise DataError(f"{source.name}: {column!r} is no column of its own, as sessions and times are")
    if session is not None:
        kind = source.schema.field(session).type
        if pt.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
            raise DataError(f"{source.name}: session column {session!r} holds {kind}; expected one key per row")
    if time is not None:
        kind = source.schema.field(time).type
        if not (pt.is_integer(kind) or pt.is_floating(kind) or pt.is_temporal(kind)):
            raise DataError(f"{source.name}: time column {time!r} holds {kind}; expected numbers or timestamps")


def session_starts(
    rows: StoredRows, session: str, time: str | None, partition: tuple[str, float] | None = None
) -> IntArray:
    """Rows at which sessions start, from a scan of two columns; memory for a key and a number per session.

    Args:
        rows: of which ``session`` and ``time`` are the columns.
        session: column with a key per row.
        time: column with the time of every row, where it is checked.
        partition: column and width of partitions of time: what a session has in one is a session here.

    Returns:
        ascending, from 0; shape (sessions,).

    Raises:
        DataError: a session that starts again after another one, or time that goes back within one, wherever in the
            dataset; nulls. Names file and row.
    """
    streams = RowStreams(rows, chunk_rows=_SCAN_ROWS)
    starts: list[IntArray] = []
    keys: list[pa.Array] = []
    parts: list[npt.NDArray[Any]] = []
    last_key: pa.Scalar | None = None
    last_time: Any = None
    last_part: Any = None
    for first in range(0, rows.num_rows, _SCAN_ROWS):
        for piece in streams.take(first, min(rows.num_rows, first + _SCAN_ROWS), rows.num_rows):
            where, row = rows.locate(piece.first_row)
            flat = _whole(piece.table, session, f"{where}: session column", row)
            is_start = _differs(flat)
            is_start[0] = last_key is None or not _is_same(last_key, flat[0])
            if partition is not None:
                column, width = partition
                numbers = _numbers(_whole(piece.table, column, f"{where}: time column", row))
                part = partition_numbers(numbers, width)
                is_start |= np.diff(part, prepend=part[0] if last_part is None else last_part) != 0
                last_part = part[-1]
                parts.append(part[is_start])
            if time is not None:
                times = _numbers(_whole(piece.table, time, f"{where}: time column", row))
                before = np.concatenate([times[:1] if is_start[0] else last_time, times[:-1]])
                back = (times < before) & ~is_start
                if back.any():
                    at = int(np.argmax(back))
                    raise DataError(
                        f"{where}: column {time!r} goes back in row {row + at:,}, within session {_shown(flat[at])};"
                        " cluster the data with 'flexshard cluster-sessions'"
                    )
                last_time = times[-1:]
            found = np.flatnonzero(is_start)
            starts.append(found + piece.first_row)
            keys.append(flat.take(pa.array(found)))
            last_key = flat[len(flat) - 1]
    every = np.concatenate(starts) if starts else np.zeros(0, np.int64)
    _check_once(rows, session, every, keys, parts)
    return every


def _check_once(
    rows: StoredRows, session: str, starts: IntArray, keys: list[pa.Array], parts: list[npt.NDArray[Any]]
) -> None:
    if not keys:
        return
    column = one_array(pa.chunked_array(keys))
    codes = column.dictionary_encode().indices.to_numpy()  # in order of first appearance
    if parts:
        both = JaggedArray.of(
            np.stack([codes.astype(np.int64), np.unique(np.concatenate(parts), return_inverse=True)[1]], 1).reshape(-1),
            np.full(codes.size, 2),
        )
        codes = distinct_rows(both).inverse
    again = np.flatnonzero(codes != np.arange(codes.size))
    if not again.size:
        return
    at = int(again[0])
    where, row = rows.locate(int(starts[at]))
    raise DataError(
        f"{where}: session {_shown(column[at])} of column {session!r} starts again in row {row:,};"
        " cluster the data with 'flexshard cluster-sessions'"
    )


def _differs(flat: pa.Array) -> npt.NDArray[np.bool_]:
    """Whether each key is another one than that before; nans are one key."""
    found = np.ones(len(flat), bool)
    if pt.is_floating(flat.type):
        found[1:] = np.diff(flat.dictionary_encode().indices.to_numpy()) != 0
    else:
        found[1:] = pc.not_equal(flat.slice(1), flat.slice(0, len(flat) - 1)).to_numpy(zero_copy_only=False)
    return found


def _numbers(flat: pa.Array) -> npt.NDArray[Any]:
    if pt.is_temporal(flat.type):
        flat = flat.cast(pa.int32() if flat.type.bit_width == 32 else pa.int64())
    return np.asarray(flat.to_numpy(zero_copy_only=False))


def _is_same(one: pa.Scalar, other: pa.Scalar) -> bool:
    """Nans are one key here as well."""
    return bool(one.equals(other)) or (pt.is_floating(one.type) and one.as_py() != one.as_py() and _is_nan(other))


def _is_nan(key: pa.Scalar) -> bool:
    return bool(key.as_py() != key.as_py())


def _whole(table: pa.RecordBatch, name: str, what: str, first: int) -> pa.Array:
    flat = table.column(table.schema.get_field_index(name))
    if flat.null_count:
        row = first + int(np.flatnonzero(pc.is_null(flat).to_numpy(zero_copy_only=False))[0])
        raise DataError(f"{what} {name!r} is null in row {row:,}; drop or fill such rows")
    if pt.is_dictionary(flat.type):
        flat = flat.dictionary_decode()
    if pt.is_floating(flat.type) and what.endswith("time column"):
        missing = np.isnan(flat.to_numpy(zero_copy_only=False))
        if missing.any():
            raise DataError(f"{what} {name!r} is nan in row {first + int(np.argmax(missing)):,}; drop such rows")
    # Texts of all sessions together may take more than 2 GiB.
    if pt.is_string(flat.type) or pt.is_string_view(flat.type):
        return flat.cast(pa.large_string())
    if pt.is_binary(flat.type) or pt.is_binary_view(flat.type):
        return flat.cast(pa.large_binary())
    return flat


def _shown(key: pa.Scalar) -> str:
    try:
        return repr(key.as_py())
    except (ValueError, TypeError):  # nanoseconds, which Python's own times do not have
        return str(key.cast(pa.string()).as_py())
