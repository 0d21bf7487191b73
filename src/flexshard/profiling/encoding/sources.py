"""Data of any kind as DuckDB reads it: which files, and what a column's values are."""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from flexshard._internal import PathLike, files_below, first_repeated, matching, sql_name, sql_text, there_are
from flexshard.errors import DataError
from flexshard.profiling.count.id_batches import check_once
from flexshard.profiling.encoding.csv_types import as_texts, cause_of, check_lines, header_of, with_numbers
from flexshard.profiling.encoding.json_types import with_texts

__all__ = ["Scan", "Values", "resolved", "scan"]

_KINDS = {
    "parquet": (".parquet", ".pq"),
    "csv": (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".csv.zst", ".tsv.zst"),
    "json": (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".ndjson.gz"),
}
# What types values have, and which columns there are, all rows of all files say, not the first ones.
_READERS = {
    "parquet": ("read_parquet", "union_by_name = true"),
    "csv": ("read_csv", "union_by_name = true, sample_size = -1"),
    "json": ("read_json", "union_by_name = true, sample_size = -1, maximum_sample_files = 1_000_000_000"),
}
_DIGITS = 38  # of a decimal, that DuckDB holds
_EXACT = {"FLOAT": 1 << 24, "DOUBLE": 1 << 53}


@dataclass(frozen=True)
class Scan:
    """Files that are read as one.

    Attributes:
        kind: "parquet", "csv" or "json".
        files: in order of their names.
        table: of the database, that holds their rows; or they are read whenever they are asked for.
    """

    kind: str
    files: tuple[str, ...]
    table: str | None = None

    @property
    def sql(self) -> str:
        """DuckDB's expression for all rows, in the files' order; folders such as ``day=1`` are columns."""
        if self.table is not None:
            return self.table
        listed = ", ".join(sql_text(glob.escape(file)) for file in self.files)
        reader, how = _READERS[self.kind]
        return f"{reader}([{listed}], hive_partitioning = true, {how})"

    @cached_property
    def schemas(self) -> tuple[pa.Schema, ...]:
        """Of Parquet files, in their order; of files of other kinds none."""
        return tuple(pq.read_schema(file) for file in self.files if self.kind == "parquet")

    @property
    def numbered_sql(self) -> str:
        """The same of Parquet files, with ``file_row_number`` and ``file_index``."""
        return self.sql.removesuffix(")") + ", file_row_number = true)"

    def loaded(self, database: Any, texts: Sequence[str], unless_numbers: Sequence[str]) -> Scan:
        """With CSV and JSON read once, whose types take a whole reading to know, and no cast of a query changes.

        Args:
            texts: columns of CSV that are read as texts.
            unless_numbers: those that are so where numbers would not say all that is written.

        Raises:
            DataError: a file that cannot be read; says the line, where one is to blame.
        """
        import duckdb

        if self.kind == "parquet":
            return self
        table = "data_files"
        try:
            if self.kind == "csv":
                read, found = as_texts(database, self.sql, self.files, [*texts, *unless_numbers])
                database.execute(f"CREATE TABLE {table} AS SELECT * FROM {read}")
                with_numbers(database, table, [name for name in unless_numbers if name in found])
            else:
                database.execute(f"CREATE TABLE {table} AS SELECT * FROM {with_texts(database, self.sql)}")
        except (duckdb.OutOfMemoryException, duckdb.InterruptException):
            raise
        except duckdb.Error as error:
            if isinstance(error, duckdb.IOException) and not any(file in str(error) for file in self.files):
                raise  # not reading, but writing what was read
            raise DataError(f"{_blamed(error, self.files)}: cannot be read: {cause_of(error)}") from error
        return replace(self, table=table)

    def columns(self, database: Any) -> dict[str, str]:
        """DuckDB's type of each column, by name.

        Raises:
            DataError: the files cannot be read as one table.
        """
        return {row[0]: row[1] for row in describe(database, f"SELECT * FROM {self.sql}", self.files[0])}


def describe(database: Any, query: str, where: str) -> list[Any]:
    """Names and types of what a query gives; raises DataError where it cannot be read."""
    import duckdb

    try:
        found: list[Any] = database.sql(f"DESCRIBE {query}").fetchall()
    except duckdb.Error as error:
        raise DataError(f"{where}: cannot be read: {cause_of(error)}") from error
    return found


def _blamed(error: Exception, files: Sequence[str]) -> str:
    """The file that DuckDB speaks of, or the first."""
    return next((file for file in files if file in str(error)), files[0])


def scan(paths: PathLike | Sequence[PathLike]) -> Scan:
    """The files that files, globs and folders name, all of one kind, by their names.

    Raises:
        DataError: nothing matches, files of different kinds, or of a kind that is not read.
    """
    listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files: list[str] = []
    for entry in listed:
        given = os.fspath(entry)
        if given.startswith("file:///"):
            given = unquote(given.removeprefix("file://"))
        if "://" in given:
            raise DataError(f"{given}: values are encoded from local files; copy them here first")
        files += sorted(_matches(given))
    if not files:
        raise DataError("no data files were given")
    places = [os.path.realpath(file) for file in files]
    twice = first_repeated(places)
    if twice is not None:
        raise DataError(f"{files[places.index(twice)]}: is given twice, and would be written twice")
    kinds = {_kind(file): file for file in reversed(files)}
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise DataError(f"{first} is {one}, but {second} {other}; give files of one kind")
    kind, unique = next(iter(kinds)), tuple(files)
    if kind != "parquet" and len(unique) > 1:
        full = tuple(file for file in unique if Path(file).stat().st_size)
        for file in unique if full else ():
            if file not in full:
                warnings.warn(f"{file} is empty, and left out", stacklevel=3)
        unique = full or unique
    return Scan(kind, unique)


def _matches(given: str) -> list[str]:
    path = Path(given).expanduser()
    if path.is_dir():
        try:
            every = [str(file) for file in files_below(path)]
        except OSError as error:
            raise DataError(f"{given}: not a path that can be read: {error.strerror}: {error.filename}") from error
        found = [file for file in every if _kind_or_none(file)]
        if not found:
            raise DataError(f"{given}: no Parquet, CSV or JSON files in this folder")
        return found
    if path.exists():
        return [str(path)]
    found = matching(path)
    if not found:
        raise DataError(f"{given}: no such file" if not glob.has_magic(given) else f"{given}: no file matches")
    return found


def _kind_or_none(file: str) -> str | None:
    lower = file.lower()
    return next((kind for kind, endings in _KINDS.items() if lower.endswith(endings)), None)


def _kind(file: str) -> str:
    kind = _kind_or_none(file)
    if kind is None:
        endings = ", ".join(sorted(ending for each in _KINDS.values() for ending in each if ending.count(".") == 1))
        raise DataError(f"{file}: of no kind that is read, which its name tells; {endings}")
    return kind


@dataclass(frozen=True)
class Values:
    """What a column holds.

    Attributes:
        name: as it was asked for: a column, or ``column.field``.
        sql: DuckDB's expression for it, in the rows of a scan: a value, or a list of values.
        is_list: which of them.
        kind: DuckDB's type of a value.
        is_column: whether it is a column, not a field within one.
    """

    name: str
    sql: str
    is_list: bool
    kind: str
    is_column: bool

    def each(self, data: Scan) -> str:
        """A query for the values of all rows, one by one."""
        return f"SELECT {f'unnest({self.sql})' if self.is_list else self.sql} AS value FROM {data.sql}"


def resolved(database: Any, data: Scan, name: str, separator: str | None) -> Values:
    """A column, a field of structs (``event.item_id``), lists of lists as one list, texts cut at a separator.

    Raises:
        DataError: no such column or field (names the nearest), or values that are no key.
    """
    columns = data.columns(database)
    is_column = name in columns
    head, fields = (name, []) if is_column else _split(database, name, columns, data)
    _check_once(database, data, head)
    sql, kind = sql_name(head), columns[head]
    for field in fields:
        sql, kind = _field(database, data, sql, kind, field, name)
    while kind.endswith("]") and kind[: kind.rindex("[")].endswith("]"):
        sql, kind = f"flatten({sql})", kind[: kind.rindex("[")]
    is_list = kind.endswith("]")
    inner = kind[: kind.rindex("[")] if is_list else kind
    if separator is not None:
        if is_list or inner != "VARCHAR":
            raise DataError(f"{data.files[0]}: column {name!r} holds {kind}; a separator goes with texts")
        cut = f"list_transform(string_split({sql}, {sql_text(separator)}), lambda part: trim(part))"
        return Values(name, f"list_filter({cut}, lambda part: part <> '')", True, inner, is_column)
    if inner == "JSON":
        raise DataError(
            f"{data.files[0]}: column {name!r} holds values of more than one type; write them as one, or name one of"
            f" their fields, as {name}.FIELD"
        )
    if inner.startswith("MAP"):
        raise DataError(f"{data.files[0]}: column {name!r} holds {kind}; write its keys or its values as lists")
    if inner.startswith(("STRUCT", "UNION")):
        raise DataError(f"{data.files[0]}: column {name!r} holds {kind}; name one of its fields, as {name}.FIELD")
    if inner.startswith("ENUM"):
        as_text = "VARCHAR[]" if is_list else "VARCHAR"
        return Values(name, f"CAST({sql} AS {as_text})", is_list, "VARCHAR", is_column)
    return Values(name, sql, is_list, inner, is_column)


def check_kept(data: Scan) -> None:
    """Whether DuckDB reads all columns of Parquet files as what they are.

    Raises:
        DataError: decimals of more than 38 digits, which it reads as floats; durations, as whole numbers.
    """
    if data.kind != "parquet":
        return
    for file, schema in zip(data.files, data.schemas, strict=True):
        for field in schema:
            for kind in _types_of(field.type):
                if pa.types.is_decimal256(kind) and kind.precision > _DIGITS:
                    lost = f"would lose digits as they are read; write them with at most {_DIGITS} digits, or as texts"
                elif pa.types.is_duration(kind):
                    lost = "would be written as plain whole numbers; write them as these, or leave the column out"
                else:
                    continue
                raise DataError(f"{file}: column {field.name!r} holds {field.type}, which {lost}")


def _types_of(kind: pa.DataType) -> Iterator[pa.DataType]:
    """A type and those within it."""
    yield kind
    if pa.types.is_dictionary(kind):
        yield from _types_of(kind.value_type)
    for index in range(kind.num_fields):
        yield from _types_of(kind.field(index).type)


def check_types(database: Any, data: Scan, values: Values, separator: str | None) -> None:
    """Whether what is read as one type tells apart what the files tell apart.

    Raises:
        DataError: texts in one file and no texts in another, lists in one only, or whole numbers so large that floats,
            which others have, do not tell them apart.
    """
    first: dict[tuple[bool, str], str] = {}
    limit = _EXACT.get(values.kind)
    by_type: dict[str, list[str]] = {}
    if data.kind == "parquet" and len(data.files) > 1:
        for file, schema in zip(data.files, data.schemas, strict=True):
            by_type.setdefault(str(schema.remove_metadata()), []).append(file)
    for files in by_type.values():
        own = Scan(data.kind, tuple(files))
        one = resolved(database, own, values.name, separator)
        if one.kind == '"NULL"':
            continue
        first.setdefault((one.is_list, one.kind), files[0])
        if limit is not None and one.kind not in _EXACT:
            _check_exact(database, own, one, limit, "and floats in another file; write both as one type")
    kinds = {("list of " if is_list else "") + kind: file for (is_list, kind), file in first.items()}
    for what in ("list of ", "VARCHAR"):
        have = {what in kind: (kind, file) for kind, file in kinds.items()}
        if len(have) == 2:
            raise DataError(
                f"{have[True][1]}: column {values.name!r} holds {have[True][0]}, but {have[False][0]} in"
                f" {have[False][1]}; write both as one type"
            )
    if limit is not None and data.kind != "parquet":
        # One more than the largest may have been read as the largest.
        _check_exact(database, data, values, limit - 1, "which are read as floats; write them as texts")


def _check_exact(database: Any, data: Scan, values: Values, limit: int, why: str) -> None:
    """Whether floats hold a column's whole numbers; raises DataError."""
    found = database.sql(
        f"SELECT any_value(value)::VARCHAR FROM ({values.each(data)})"
        f" WHERE isfinite(value::DOUBLE) AND (value > {limit} OR value < -{limit}) AND value = floor(value)"
    ).fetchall()[0][0]
    if found is not None:
        raise DataError(
            f"{data.files[0]}: column {values.name!r} has whole numbers above {limit:,}, such as {found}, {why}"
        )


def _split(database: Any, name: str, columns: dict[str, str], data: Scan) -> tuple[str, list[str]]:
    parts = name.split(".")
    for size in range(len(parts) - 1, 0, -1):
        head = ".".join(parts[:size])
        if head in columns:
            return head, parts[size:]
    if data.kind == "csv":
        check_lines(database, data.files, columns)
    near = get_close_matches(name, columns, 1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; {there_are(columns)}"
    raise DataError(f"{data.files[0]}: no column {name!r}{hint}")


def _check_once(database: Any, data: Scan, column: str) -> None:
    """Whether one column alone has this name: DuckDB gives others of the same name new ones.

    Raises:
        DataError: several have it.
    """
    for number, file in enumerate(data.files):
        if data.kind == "parquet":
            names = data.schemas[number].names
        elif data.kind == "csv":
            names = header_of(database, file)
        else:
            return
        check_once(file, names, column)


def _field(database: Any, data: Scan, sql: str, kind: str, field: str, name: str) -> tuple[str, str]:
    """A field of a struct, or of every struct of a list."""
    is_list = kind.endswith("[]")
    inner = f"list_transform({sql}, lambda each: each.{sql_name(field)})" if is_list else f"{sql}.{sql_name(field)}"
    if not kind.removesuffix("[]").startswith("STRUCT"):
        raise DataError(f"{data.files[0]}: {name!r}: {kind} has no field {field!r}")
    try:
        rows = describe(database, f"SELECT {inner} FROM {data.sql}", data.files[0])
    except DataError as error:
        raise DataError(f"{data.files[0]}: {name!r}: no field {field!r} in {kind}") from error
    return inner, rows[0][1]
