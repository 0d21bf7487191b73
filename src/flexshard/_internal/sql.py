"""Names and texts as DuckDB reads them."""

from __future__ import annotations

__all__ = ["sql_name", "sql_text"]


def sql_name(column: str) -> str:
    """A column's name, whatever is in it."""
    return '"' + column.replace('"', '""') + '"'


def sql_text(value: str) -> str:
    """A text."""
    return "'" + value.replace("'", "''") + "'"
