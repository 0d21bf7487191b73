"""Types of JSON's values: texts are texts, also where they look like dates, times or UUIDs."""

from __future__ import annotations

import re
from typing import Any

from flexshard._internal import sql_text

__all__ = ["with_texts"]

# Which DuckDB makes of texts alone.
_OF_TEXTS = ("date", "time", "uuid")


def with_texts(database: Any, reader: str) -> str:
    """DuckDB's expression that reads JSON, with the columns' types: those that it finds in all rows, but for texts.

    Two spellings of a date are two texts, and would be one value. Where keys differ by case, of which it renames all
    but one, types are as it finds them: renamed columns could not be asked for.

    Args:
        database: a connection.
        reader: the expression that finds types by itself, of which nothing else changes.
    """
    found = database.sql(f"SELECT * FROM {reader}")
    names = {name.lower() for name in found.columns}
    renamed = any(re.sub(r"_\d+$", "", name.lower()) in names - {name.lower()} for name in found.columns)
    if renamed or all(_as_text(kind) == kind for kind in found.types):
        return reader
    types = ", ".join(
        f"{sql_text(name)}: {sql_text(str(_as_text(kind)))}"
        for name, kind in zip(found.columns, found.types, strict=True)
    )
    return f"{reader.removesuffix(')')}, columns = {{{types}}})"


def _as_text(kind: Any) -> Any:
    import duckdb

    if kind.id == "struct":
        return duckdb.struct_type({name: _as_text(inner) for name, inner in kind.children})
    if kind.id == "list":
        return duckdb.list_type(_as_text(kind.children[0][1]))
    if kind.id == "map":
        return duckdb.map_type(*(_as_text(inner) for _, inner in kind.children))
    return duckdb.type("VARCHAR") if kind.id.startswith(_OF_TEXTS) else kind
