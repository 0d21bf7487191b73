"""Columns of a dataset as lists that can be compared: numbers, texts, and lists of them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from flexshard._internal import JaggedArray, ParquetSource, first_repeated, is_list, jagged_of_arrow, one_array
from flexshard.errors import DataError
from flexshard.ingestion.batches import Rows

__all__ = ["listed_features", "lists_of", "located_lists"]


def listed_features(sources: Sequence[ParquetSource], features: Sequence[str] | None) -> list[str]:
    """The features asked for, each once; by default every column of lists."""
    if isinstance(features, str):
        raise DataError(f"features are a list of columns, found {features!r}")
    if features is not None:
        twice = first_repeated(features)
        if twice is not None:
            raise DataError(f"feature {twice!r} is named twice")
        return list(features)
    names = [field.name for field in sources[0].schema if is_list(field.type) and not pt.is_nested(_inner(field.type))]
    if not names:
        raise DataError(f"{sources[0].name}: no columns of lists; name the features")
    return names


def located_lists(batch: Rows, name: str) -> JaggedArray:
    """A column of a batch, with errors that name the row of the file."""
    try:
        return lists_of(batch.table.column(name), name, batch.origin_of(0)[0])
    except DataError:
        for table, where, row in batch.runs():
            if pt.is_integer(_inner(table.schema.field(name).type)):
                jagged_of_arrow(table.column(name), name, where=where, first_row=row)
        raise


def _inner(kind: pa.DataType) -> pa.DataType:
    """Of what a list is, or the type itself."""
    inner = kind.value_type if is_list(kind) else kind
    return inner.value_type if pt.is_dictionary(inner) else inner


def lists_of(column: pa.ChunkedArray | pa.Array, name: str, where: str) -> JaggedArray:
    """A column of numbers or texts, or of lists of them; texts as numbers that tell them apart."""
    kind = column.type
    inner = _inner(kind)
    if pt.is_nested(inner) or isinstance(inner, pa.BaseExtensionType):
        raise DataError(f"{where}: column {name!r} holds {kind}; expected numbers or texts, or lists of them")
    if (pt.is_integer(inner) or pt.is_floating(inner)) and not (is_list(kind) and pt.is_dictionary(kind.value_type)):
        return jagged_of_arrow(column, name, where=where)
    flat = one_array(column) if isinstance(column, pa.ChunkedArray) else column
    if pt.is_dictionary(kind):
        flat, kind = flat.dictionary_decode(), kind.value_type
    if not is_list(kind):
        return jagged_of_arrow(_codes(flat), name, where=where)
    lengths = pc.fill_null(pc.list_value_length(flat), 0).to_numpy(zero_copy_only=False)
    return JaggedArray.of(_codes(flat.flatten()).to_numpy(zero_copy_only=False), lengths)


def _codes(values: pa.Array) -> pa.Array:
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    return pc.fill_null(values.dictionary_encode(null_encoding="encode").indices, -1)
