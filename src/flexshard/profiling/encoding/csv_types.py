"""CSV as DuckDB reads it: which columns are texts whatever they look like, and what is wrong with a file."""

from __future__ import annotations

import csv
import glob
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flexshard._internal import sql_name, sql_text
from flexshard.errors import DataError

__all__ = ["as_texts", "cause_of", "check_lines", "header_of", "with_numbers"]

_SEPARATORS = ",;\t|"
# Whole numbers as they are written; other bases, signs and zeros before a number; and zeros behind a fraction.
_WHOLE, _NO_FLOAT, _ZEROS_BEHIND = r"-?(0|[1-9][0-9]*)", r"^\+|^-?0[0-9xXbB]|_", r"\.[0-9]*[1-9]0+$"


def as_texts(database: Any, reader: str, files: Sequence[str], columns: Iterable[str]) -> tuple[str, list[str]]:
    """DuckDB's expression that reads CSV with these columns as texts, and those of them that are in the files."""
    there = {name for file in files for name in header_of(database, file)}
    found = [name for name in columns if name in there]
    types = ", ".join(f"{sql_text(name)}: 'VARCHAR'" for name in found)
    return (f"{reader.removesuffix(')')}, types = {{{types}}})" if found else reader), found


def header_of(database: Any, file: str) -> list[str]:
    """A file's first line."""
    first = f"read_csv({sql_text(glob.escape(file))}, header = false, all_varchar = true)"
    return [name for line in database.sql(f"SELECT * FROM {first} LIMIT 1").fetchall() for name in line]


def with_numbers(database: Any, table: str, columns: Iterable[str]) -> None:
    """Let columns of texts be of numbers, or booleans, where these say all that is written; as pandas reads them.

    Texts stay what they are where two of them would be one number (1.1 and 1.10, 0x10 and 16; but not 1 and 1.0, which
    pandas writes of one column with nulls and without), and dates: two spellings of a date are two values.
    """
    for name in columns:
        kind = _kind(database, table, name)
        if kind is not None:
            text = f"nullif(trim({sql_name(name)}), '')"
            database.execute(
                f"ALTER TABLE {table} ALTER COLUMN {sql_name(name)} TYPE {kind} USING CAST({text} AS {kind})"
            )


def _kind(database: Any, table: str, name: str) -> str | None:
    """The type of numbers that a column of texts holds, if it does."""
    number = "TRY_CAST(text AS DOUBLE)"
    large = f"isfinite({number}) AND abs({number}) >= {1 << 53} AND {number} = floor({number})"
    fewer = f"count(DISTINCT regexp_replace(text, '\\.0+$', '')) > count(DISTINCT {number})"
    tests = [
        "count(text) > 0",
        *(f"bool_and(TRY_CAST(text AS {kind}) IS NOT NULL)" for kind in ("BIGINT", "UBIGINT", "HUGEINT", "DOUBLE")),
        f"bool_and(regexp_full_match(text, '{_WHOLE}'))",
        "bool_and(lower(text) IN ('true', 'false'))",
        f"bool_or(regexp_matches(text, '{_NO_FLOAT}') OR ({large}))",
        f"bool_or(regexp_matches(text, '{_ZEROS_BEHIND}')) AND {fewer}",
    ]
    each = f"SELECT nullif(trim({sql_name(name)}), '') AS text FROM {table}"
    any_, big, unsigned, huge, float_, whole, boolean, no_float, merged = database.sql(
        f"SELECT {', '.join(tests)} FROM ({each}) WHERE text IS NOT NULL"
    ).fetchall()[0]
    if not any_:
        return None
    if whole:
        return next((kind for kind, fits in (("BIGINT", big), ("UBIGINT", unsigned), ("HUGEINT", huge)) if fits), None)
    if float_ and not (no_float or merged):
        return "DOUBLE"
    return "BOOLEAN" if boolean else None


def cause_of(error: Exception) -> str:
    """What DuckDB says, in a line; of CSV it says where, then the line itself, then what is wrong with it."""
    lines = str(error).splitlines()
    place = re.search(r"CSV Error on (Line: \d+)", lines[0])
    if place is None or len(lines) < 3:
        return lines[0]
    what = "it is not utf-8; convert the file, as with iconv" if "not utf-8" in str(error) else lines[2] or lines[1]
    return f"{place[1].lower().replace(':', '')}: {what}"


def check_lines(database: Any, files: Sequence[str], columns: Iterable[str]) -> None:
    """Whether DuckDB took other columns from CSV files than their headers have, since some line has more fields, or
    fewer.

    Raises:
        DataError: the line, or that there is none.
    """
    import duckdb

    if not any(Path(file).stat().st_size for file in files):
        raise DataError(f"{files[0]}: is empty")
    for file in files:
        read = f"read_csv({sql_text(glob.escape(file))}, auto_detect = false, "
        try:
            first = f"{read} header = false, delim = '\x1f', quote = '', columns = {{'line': 'VARCHAR'}})"
            lines = database.sql(f"SELECT * FROM {first} LIMIT 1").fetchall()
            line = lines[0][0] if lines else ""
            separator = max(_SEPARATORS, key=line.count)
            fields = next(csv.reader([line], delimiter=separator))
            if list(columns)[: len(fields)] == fields:
                continue  # the header is what DuckDB went by
            typed = ", ".join(f"'{number}': 'VARCHAR'" for number in range(len(fields)))
            how = f"header = true, delim = {sql_text(separator)}, quote = '\"', columns = {{{typed}}}"
            database.sql(f"SELECT count(COLUMNS(*)) FROM {read} {how})").fetchall()
        except duckdb.Error as error:
            raise DataError(f"{file}: cannot be read: {cause_of(error)}") from error
