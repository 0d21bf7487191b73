"""Sums over the values of columns that do not depend on the order of rows: what is rewritten has to have the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from flexshard._internal import is_list
from flexshard.errors import DataError

__all__ = ["changed_column", "checksums"]

Sums = dict[str, int]
_BATCH_ROWS = 1 << 16


def checksums(paths: Iterable[str], columns: Sequence[str]) -> dict[str, Sums]:
    """Of every column of Parquet files: sums of its parts, by the part's name. Reads with Arrow, batch by batch."""
    totals: dict[str, Sums] = {name: {} for name in columns}
    for path in paths:
        with pq.ParquetFile(path, pre_buffer=False) as file:  # its buffer would hold all that was read of the file
            try:
                for group in range(file.num_row_groups):  # Arrow has no batch over two dictionaries within lists
                    for batch in file.iter_batches(_BATCH_ROWS, [group], columns=list(columns)):
                        for name in columns:
                            _add(totals[name], name, batch.column(batch.schema.get_field_index(name)))
            except pa.ArrowException as error:
                raise DataError(f"{path}: values cannot be compared with what would be written: {error}") from error
    return totals


def changed_column(before: dict[str, Sums], after: dict[str, Sums]) -> str | None:
    """A column whose values are not the same, if there is one."""
    return next((name for name, sums in before.items() if after.get(name) != sums), None)


def _add(sums: Sums, part: str, values: Any) -> None:
    """Take an array into the sums of a part and of what is nested in it."""

    def count(what: str, number: int) -> None:
        key = f"{part} {what}"
        sums[key] = (sums.get(key, 0) + number) & (2**64 - 1)

    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    kind = values.type
    if pt.is_dictionary(kind):
        values = values.dictionary_decode()
        kind = values.type
    if pt.is_string_view(kind) or pt.is_binary_view(kind):
        values = values.cast(pa.large_binary() if pt.is_binary_view(kind) else pa.large_string())
        kind = values.type
    count("rows", len(values))
    count("nulls", values.null_count)
    if pt.is_struct(kind):
        for index, child in enumerate(values.flatten()):  # null where the struct is
            _add(sums, f"{part}.{index}", child)
    elif pt.is_map(kind):
        entries = pa.struct([kind.key_field, kind.item_field])
        _add(sums, part, values.cast(pa.list_(entries)))
    elif is_list(kind):
        lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
        count("lengths", _sum_of(lengths.astype(np.uint64)))
        _add(sums, f"{part}[]", values.flatten())
    elif not pt.is_null(kind):
        count("values", _sum_of_leaf(values.drop_null(), kind))


def _sum_of(words: npt.NDArray[np.uint64]) -> int:
    """Of words, each mixed by splitmix64's last steps, so that changes do not cancel out; modulo 2^64."""
    mixed = words + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


def _sum_of_leaf(values: Any, kind: Any) -> int:
    if not len(values):
        return 0
    if pt.is_boolean(kind):
        return _sum_of(values.cast(pa.uint8()).to_numpy(zero_copy_only=False).astype(np.uint64))
    if pt.is_date64(kind):
        values = values.cast(pa.date32())  # DuckDB knows days alone
        kind = values.type
    if pt.is_fixed_size_binary(kind) or pt.is_decimal(kind):
        width = kind.byte_width
        raw = np.frombuffer(values.buffers()[1], np.uint8)[
            values.offset * width : (values.offset + len(values)) * width
        ]
        return _sum_of_bytes(raw, np.arange(raw.size) % width)
    if pt.is_primitive(kind):
        bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[kind.bit_width // 8]
        raw = np.frombuffer(values.buffers()[1], bits)[values.offset : values.offset + len(values)]
        return _sum_of(raw.astype(np.uint64))
    texts = values.cast(pa.large_binary())
    offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]
    held = texts.buffers()[2]
    raw = np.frombuffer(held, np.uint8)[offsets[0] : offsets[-1]] if held is not None else np.zeros(0, np.uint8)
    lengths = np.diff(offsets)
    inside = np.arange(raw.size) - np.repeat(offsets[:-1] - offsets[0], lengths)
    return (_sum_of_bytes(raw, inside) + _sum_of(lengths.astype(np.uint64))) & (2**64 - 1)


def _sum_of_bytes(raw: npt.NDArray[np.uint8], inside: npt.NDArray[np.int64]) -> int:
    """Of bytes, each with its position in its value."""
    return _sum_of(raw.astype(np.uint64) | inside.astype(np.uint64) << np.uint64(8))
