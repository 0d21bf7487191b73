"""Names and texts as DuckDB reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["interrupts", "sql_name", "sql_text"]


def sql_name(column: str) -> str:
    """A column's name, whatever is in it."""
    return '"' + column.replace('"', '""') + '"'


def sql_text(value: str) -> str:
    """A text."""
    return "'" + value.replace("'", "''") + "'"


@contextmanager
def interrupts() -> Iterator[None]:
    """Ctrl-C while DuckDB works is a KeyboardInterrupt, as it is elsewhere."""
    try:
        yield
    except Exception as error:
        if "Query interrupted" not in str(error):
            raise
        raise KeyboardInterrupt from error
