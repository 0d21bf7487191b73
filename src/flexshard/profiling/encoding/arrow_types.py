"""What Parquet itself does not know of columns: Arrow writes their types, pandas its own, into a file's metadata."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Sequence
from typing import Any

import pyarrow as pa

from flexshard._internal import is_list

__all__ = ["with_types"]

_PANDAS = b"pandas"


def with_types(
    said: dict[str, str], written: pa.Schema, read: Sequence[pa.Schema], encoded: Collection[str]
) -> dict[str, str]:
    """A Parquet file's metadata, with entries by which columns that were copied have the types that they had.

    Categories are those that rows have, in no order: a file has them no longer where they were listed.

    Args:
        said: other entries.
        written: what the file's columns are without this.
        read: of the files that were copied.
        encoded: columns that have other values now.
    """
    told = [json.loads((schema.metadata or {}).get(_PANDAS, b"{}")) for schema in read]
    if told and all(told):
        said = said | {"pandas": json.dumps(_pandas(told, written, encoded))}
    fields = [
        field if field.name in encoded else field.with_type(_as_it_was(field.type, _shared_type(field.name, read)))
        for field in written
    ]
    # Readers of the schema look for the other entries in it, others among the file's own.
    schema = pa.schema(fields, metadata=dict(said)).serialize()
    return said | {"ARROW:schema": base64.b64encode(schema).decode()}


def _shared_type(name: str, schemas: Sequence[pa.Schema]) -> pa.DataType | None:
    """A column's, if it is the same in all files."""
    places = [(schema, schema.get_field_index(name)) for schema in schemas if name in schema.names]
    types = [schema.field(at).type for schema, at in places if at >= 0]  # a name may be there twice
    return types[0] if len(types) == len(places) > 0 and all(kind == types[0] for kind in types) else None


def _as_it_was(written: pa.DataType, before: pa.DataType | None) -> pa.DataType:
    """The type of before, as far as readers take it for what is written: Parquet keeps time zones as UTC, and has one
    kind of text, of bytes and of list.
    """
    if before is None or written == before:
        return written
    if pa.types.is_dictionary(before):
        values = _as_it_was(written, before.value_type)
        return pa.dictionary(pa.int32(), values) if _is_text(values) else written  # in the order of their values now
    if _is_text(written) and _is_text(before) and pa.types.is_string(written) == _is_string(before):
        return before
    if pa.types.is_timestamp(written) and pa.types.is_timestamp(before) and written.tz and before.tz:
        return pa.timestamp(written.unit, before.tz)
    if pa.types.is_list(written) and is_list(before):
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


def _pandas(told: Sequence[dict[str, Any]], written: pa.Schema, encoded: Collection[str]) -> dict[str, Any]:
    """What pandas said of columns and index in all files alike, with ids in place of what was encoded."""
    others = [{one.get("field_name"): one for one in said.get("columns", [])} for said in told[1:]]
    columns = []
    for column in told[0].get("columns", []):
        name = column.get("field_name")
        if name in encoded:
            columns.append(column | _of_ids(written.field(name).type))
        elif all(_kind_of(other.get(name)) == _kind_of(column) for other in others):
            unordered = {"metadata": column["metadata"] | {"ordered": False}} if _is_category(column) else {}
            columns.append(column | unordered)
    alike = all(said.get("index_columns") == told[0].get("index_columns") for said in told)
    return told[0] | {"columns": columns} | ({} if alike else {"index_columns": []})


def _of_ids(kind: pa.DataType) -> dict[str, Any]:
    several = is_list(kind)
    name = f"list[{kind.value_type}]" if several else str(kind)
    return {"pandas_type": name, "numpy_type": "object" if several else name, "metadata": None}


def _kind_of(column: dict[str, Any] | None) -> tuple[Any, ...]:
    return () if column is None else (column.get("pandas_type"), column.get("numpy_type"))


def _is_category(column: dict[str, Any]) -> bool:
    return column.get("pandas_type") == "categorical" and isinstance(column.get("metadata"), dict)
