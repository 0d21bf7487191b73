"""CSV as DuckDB reads it: which columns are texts whatever they look like, and what is wrong with a file."""

from __future__ import annotations

import csv
import glob
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flexshard._internal import sql_text
from flexshard.errors import DataError

__all__ = ["cause_of", "check_lines", "reader_of_texts", "texts_among"]

_SEPARATORS = ",;\t|"


def texts_among(types: dict[str, str], columns: Iterable[str], *, separated: bool) -> list[str]:
    """Columns to read as texts: two spellings of a date are two values, and so are what a separator cuts.

    Args:
        types: DuckDB's, as it finds them, by column.
        columns: that are encoded.
        separated: whether their texts are cut at a separator.
    """
    found = []
    for name in columns:
        kind = types.get(name, "VARCHAR")
        if kind != "VARCHAR" and (separated or kind.startswith(("DATE", "TIME"))):
            found.append(name)
    return found


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
