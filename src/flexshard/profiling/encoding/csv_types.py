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

__all__ = ["cause_of", "check_lines", "reader_of_texts", "texts_among"]

_SEPARATORS = ",;\t|"


def texts_among(database: Any, reader: str, types: dict[str, str], columns: Iterable[str]) -> list[str]:
    """Columns to read as texts, since their type does not tell apart, or not give back, what is written: two spellings
    of a date are two values, as 1.1 and 1.10 are, and 0x10 is not 16.

    Args:
        database: a connection.
        reader: DuckDB's expression that reads the files.
        types: DuckDB's, as it finds them, by column.
        columns: that are encoded.
    """
    others = {name: types[name] for name in columns if types.get(name, "VARCHAR") != "VARCHAR"}
    found = [name for name, kind in others.items() if kind.startswith(("DATE", "TIME"))]
    asked = [name for name in others if name not in found]
    if not asked:
        return found
    tests = []
    for name in asked:
        text, kind = f"trim({sql_name(name)})", others[name]
        if kind in ("DOUBLE", "FLOAT", "BOOLEAN"):
            tests.append(f"count(DISTINCT {text}) > count(DISTINCT TRY_CAST({text} AS {kind}))")
        else:
            tests.append(f"bool_or({text} <> CAST(TRY_CAST({text} AS {kind}) AS VARCHAR))")
    differ = database.sql(f"SELECT {', '.join(tests)} FROM {reader_of_texts(reader, asked)}").fetchall()[0]
    return found + [name for name, differs in zip(asked, differ, strict=True) if differs]


def reader_of_texts(reader: str, columns: Iterable[str]) -> str:
    """DuckDB's expression that reads CSV, with these columns as texts."""
    types = ", ".join(f"{sql_text(name)}: 'VARCHAR'" for name in columns)
    return f"{reader.removesuffix(')')}, types = {{{types}}})"


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
