"""What Parquet itself does not know of columns: Arrow writes their types, pandas its own, into a file's metadata."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Sequence
from typing import Any

import pyarrow as pa

__all__ = ["with_types"]

_PANDAS = b"pandas"


def with_types(
    said: dict[str, str], written: pa.Schema, read: Sequence[pa.Schema], encoded: Collection[str]
) -> dict[str, str]:
    """A Parquet file's metadata, with entries by which columns that were copied have the types that they had.

    Args:
        said: other entries.
        written: what the file's columns are without this.
        read: of the files that were copied.
        encoded: columns that have other values now.
    """
    if read and all(_PANDAS in (schema.metadata or {}) for schema in read):
        said = said | {"pandas": json.dumps(_pandas(json.loads(read[0].metadata[_PANDAS]), written, encoded))}
    fields = [
        field if field.name in encoded else field.with_type(_as_it_was(field.type, _shared_type(field.name, read)))
        for field in written
    ]
    # Readers of the schema look for the other entries in it, others among the file's own.
    schema = pa.schema(fields, metadata=dict(said)).serialize()
    return said | {"ARROW:schema": base64.b64encode(schema).decode()}


def _shared_type(name: str, schemas: Sequence[pa.Schema]) -> pa.DataType | None:
    """A column's, if it is the same in all files."""
    types = [schema.field(name).type for schema in schemas if name in schema.names]
    return types[0] if types and all(kind == types[0] for kind in types) else None


def _as_it_was(written: pa.DataType, before: pa.DataType | None) -> pa.DataType:
    """The type of before, as far as readers take it for what is written: Parquet keeps time zones as UTC, and has one
    kind of text, of bytes and of list.
    """
    if before is None or written == before:
        return written
    if pa.types.is_dictionary(before):
        values = _as_it_was(written, before.value_type)
        return pa.dictionary(pa.int32(), values, before.ordered) if _is_text(values) else written
    if _is_text(written) and _is_text(before) and pa.types.is_string(written) == _is_string(before):
        return before
    if pa.types.is_timestamp(written) and pa.types.is_timestamp(before) and written.tz and before.tz:
        return pa.timestamp(written.unit, before.tz)
    if pa.types.is_list(written) and _is_list(before):
        item = written.value_field.with_type(_as_it_was(written.value_type, before.value_type))
        if pa.types.is_fixed_size_list(before):
            return pa.list_(item, before.list_size)
        return pa.large_list(item) if pa.types.is_large_list(before) else pa.list_(item)
    if pa.types.is_struct(written) and pa.types.is_struct(before):
        was = {field.name: field.type for field in before}
        return pa.struct([field.with_type(_as_it_was(field.type, was.get(field.name))) for field in written])
    return written


def _is_string(kind: pa.DataType) -> bool:
    return any(of(kind) for of in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _is_text(kind: pa.DataType) -> bool:
    """Of letters or bytes of any length."""
    of_bytes = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return _is_string(kind) or any(of(kind) for of in of_bytes)


def _is_list(kind: pa.DataType) -> bool:
    return any(of(kind) for of in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _pandas(said: dict[str, Any], written: pa.Schema, encoded: Collection[str]) -> dict[str, Any]:
    """What pandas said of its columns and index, with ids in place of what was encoded."""

    def of_ids(column: dict[str, Any]) -> dict[str, Any]:
        kind = written.field(column["field_name"]).type
        is_list = pa.types.is_list(kind)
        name = f"list[{kind.value_type}]" if is_list else str(kind)
        return column | {"pandas_type": name, "numpy_type": "object" if is_list else name, "metadata": None}

    columns = said.get("columns", [])
    return said | {"columns": [of_ids(one) if one.get("field_name") in encoded else one for one in columns]}
