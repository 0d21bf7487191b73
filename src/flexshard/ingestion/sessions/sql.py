"""Names as DuckDB reads them."""

from __future__ import annotations

__all__ = ["quoted"]


def quoted(column: str) -> str:
    """A column's name, whatever is in it."""
    return '"' + column.replace('"', '""') + '"'
