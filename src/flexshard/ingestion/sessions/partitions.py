"""Partitions of time, within which sessions are clustered, as in RecD's hourly ones (RecD paper, section 4.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from flexshard import units
from flexshard._internal import check_finite, sql_name
from flexshard.errors import DataError

__all__ = [
    "PARTITION_KEY",
    "SESSION_KEY",
    "TIME_KEY",
    "partition_numbers",
    "partition_sql",
    "partition_width",
    "stored_width",
]

SESSION_KEY, TIME_KEY, PARTITION_KEY = b"flexshard.session", b"flexshard.time", b"flexshard.partition"
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def partition_width(kind: pa.DataType, partition: str | float, column: str) -> float:
    """Width of a partition, in the numbers that a time column stores.

    Args:
        kind: of the column.
        partition: "6h" for timestamps and dates, a number in the column's own unit for numbers.
        column: its name, for messages.

    Raises:
        DataError: a width that is none, or that the column's unit does not divide.
    """
    if pt.is_timestamp(kind) or pt.is_date(kind):
        if not isinstance(partition, str):
            raise DataError(f"time column {column!r} holds {kind}; give partitions a unit, such as '1h'")
        seconds = units.parse_seconds(partition)
        width = seconds * _PER_SECOND[kind.unit] if pt.is_timestamp(kind) else seconds / 86_400
        width = width * 86_400_000 if pt.is_date64(kind) else width
        if not width >= 1 or abs(width - round(width)) > 1e-9 * width:
            raise DataError(f"partitions of {partition} are no whole number of the units of {column!r}, {kind}")
        return _within_numbers(round(width), partition)
    if not (pt.is_integer(kind) or pt.is_floating(kind)):
        raise DataError(f"time column {column!r} holds {kind}, which has no partitions; expected dates or numbers")
    if isinstance(partition, str):
        raise DataError(f"time column {column!r} holds {kind}; give partitions as a number in its own unit")
    value = check_finite(partition, "partition", DataError)
    if not value > 0 or (pt.is_integer(kind) and value != round(value)):
        raise DataError(f"partition is the width of partitions, a positive number as {column!r} has; found {partition}")
    return _within_numbers(round(value), partition) if pt.is_integer(kind) else value


def _within_numbers(width: int, partition: str | float) -> int:
    """A width that is less than what numbers of 64 bits span."""
    if width >= 1 << 64:
        raise DataError(f"a partition of {partition} holds all times that there are; leave partitions out")
    return width


def stored_width(text: bytes) -> float:
    """A width as files say it: of numbers with a point where times have one, else whole."""
    return float(text) if b"." in text or b"e" in text else int(text)


def partition_sql(kind: pa.DataType, column: str, width: float) -> str:
    """DuckDB's expression for the partition of a row, as :func:`partition_numbers` counts them."""
    stored = sql_name(column)
    if pt.is_floating(kind):
        number = f"floor(CAST({stored} AS DOUBLE) / CAST({width!r} AS DOUBLE))"
        return f"CASE WHEN {number} = 0 THEN 0.0 ELSE {number} END"  # not -0.0, which is another text
    if pt.is_timestamp(kind):
        stored = f"epoch_ns({stored})" if kind.unit == "ns" else f"epoch_us({stored})"
        width *= {"s": 10**6, "ms": 10**3, "us": 1, "ns": 1}[kind.unit]
    elif pt.is_date(kind):
        stored = f"epoch_us(CAST({stored} AS TIMESTAMP))"
        width *= 1000 if pt.is_date64(kind) else 86_400 * 10**6
    # Division cuts off towards zero: numbers below zero would share a partition with those above.
    stored = f"CAST({stored} AS HUGEINT)"
    return f"(({stored} - (({stored} % {width}) + {width}) % {width}) // {width})"


def partition_numbers(times: npt.NDArray[Any], width: float) -> npt.NDArray[Any]:
    """The partition of each time, counted from zero."""
    if times.dtype.kind == "f":
        return np.floor(times.astype(np.float64) / width)
    # A partition may be wider than what a narrow type holds.
    wide = times.astype(np.uint64 if times.dtype == np.uint64 else np.int64)
    return wide // wide.dtype.type(min(int(width), np.iinfo(wide.dtype).max))
