"""Encode columns: number their values by frequency, save the mapping, and write the data with dense ids in them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from flexshard._internal import (
    PathLike,
    check_bytes,
    draft_folder,
    first_repeated,
    interrupts,
    replacing_all,
    sql_name,
    sql_text,
)
from flexshard.errors import DataError, OutputError
from flexshard.profiling.encoding.arrow_types import with_types
from flexshard.profiling.encoding.database import failures, open_database, unchanged
from flexshard.profiling.encoding.encoded_by import METADATA_KEY, encodings
from flexshard.profiling.encoding.encoded_columns import WIDE, ColumnToEncode, EncodedColumn
from flexshard.profiling.encoding.mapping import NULLS, Mapping, load_mapping, mapping_path
from flexshard.profiling.encoding.sources import Scan, check_kept, scan

__all__ = ["EncodedColumn", "encode", "encoded"]

Mappings = dict[str, PathLike]
_UNKNOWN = ("error", "drop")
_ROW, _FILE_ROWS = "__flexshard_row", 1 << 40


def encode(
    paths: PathLike | Sequence[PathLike],
    output: PathLike,
    *,
    columns: Sequence[str],
    mappings: Mappings | None = None,
    separator: str | None = None,
    nulls: str | None = None,
    unknown: str = "error",
    memory: str | float | None = None,
) -> list[EncodedColumn]:
    """Write data with dense ids, 0 for the most frequent value, in place of a column's values, and each mapping.

    DuckDB does the work, and spills what does not fit its memory. Rows keep their order; other columns stay as they
    are, in pandas too (but for the order of categories; of Parquet's types, half floats become floats, and times of
    seconds and milliseconds those of microseconds). Whole numbers that pandas made floats are whole numbers again.

    Args:
        paths: Parquet, CSV or JSON files, globs or folders.
        output: Parquet file to write; mappings that are made are written beside it, as
            ``<output>.<column>.mapping.parquet``, ``o.c.mapping.parquet`` for ``o.parquet``.
        columns: to encode: of any values or lists of values; ``column.field`` is a field of structs.
        mappings: by column, one that an earlier call made, to be used instead of a new one.
        separator: at which texts are cut into lists ("1|2|3").
        nulls: what becomes of ids that are null: "drop" leaves them out, and rows whose only id is null; "keep" gives
            them a row, which a given mapping has or has not, as of other values. There may be none by default. A list
            that is null is an empty one.
        unknown: what becomes of values that a given mapping has not: "error", or "drop" as null ones.
        memory: that DuckDB may take; by default four fifths of the machine's.

    Raises:
        DataError: unreadable data, a missing column, values that are no keys, nulls or unknown values; names file,
            column and number.
        ChangedDataError: a file was replaced, or went, while it was read; nothing is written then.
        OutputError: the output could not be written.
    """
    names = [columns] if isinstance(columns, str) else list(columns)
    if not names:
        raise DataError("which columns are encoded? give one at least (--column)")
    twice = first_repeated(names)
    if twice is not None:
        raise DataError(f"column {twice!r} is given twice")
    if nulls not in (None, *NULLS):
        raise DataError(f"nulls is 'drop' or 'keep', found {nulls!r}")
    if unknown not in _UNKNOWN:
        raise DataError(f"unknown is 'error' or 'drop', found {unknown!r}")
    given = {name: load_mapping(path) for name, path in (mappings or {}).items()}
    stray = next((name for name in given if name not in names), None)
    if stray is not None:
        raise DataError(f"a mapping is given for column {stray!r}, which is not encoded")
    limit = None if memory is None else round(check_bytes(memory, "memory", DataError))
    data, target = scan(paths), Path(output).expanduser()
    _check_outputs(target, [name for name in names if name not in given], [*data.files, *(mappings or {}).values()])
    with (
        interrupts(),
        draft_folder(target) as scratch,
        failures(target, limit),
        closing(open_database(str(scratch), limit)) as database,
    ):
        with unchanged(data.files):
            data = data.loaded(database, *_texts(names, given, separator))
            stored = data.columns(database)
            check_kept(data)
            _check_names(data, stored if data.kind != "parquet" else data.schemas[0].names)
            wide = [name for name, kind in stored.items() if kind in WIDE and name not in names]
            own = [
                ColumnToEncode.of(database, data, name, given.get(name), separator, nulls, unknown, number)
                for number, name in enumerate(names)
            ]
            made: list[tuple[Path, Path]] = []
            for column in own:
                if column.given is None:
                    place = mapping_path(target, column.values.name)
                    draft = scratch / f"mapping-{column.number}.parquet"
                    column.save(database, draft, place)
                    made.append((draft, place))
            query, draft = _query(data, own, wide), scratch / "data.parquet"
            said = {METADATA_KEY: json.dumps(_encodings(data, own))}
            if data.kind == "parquet":
                _write(database, f"SELECT * FROM ({query}) LIMIT 0", draft, {})
                said = with_types(said, pq.read_schema(draft), data.schemas, [column.values.name for column in own])
            _write(database, query, draft, said)
        results = [column.written(database, draft) for column in own]
        made.append((draft, target))
        with replacing_all(place for _, place in made) as free:
            for (source, _), place in zip(made, free, strict=True):
                shutil.move(source, place)
    return results


def _texts(names: Sequence[str], given: dict[str, Mapping], separator: str | None) -> tuple[list[str], list[str]]:
    """Columns that are texts, since they are cut or their mapping is of texts; and those that may be numbers, too."""
    found: tuple[list[str], list[str]] = [], []
    for name in names:
        mapping = given.get(name)
        if separator is not None or (mapping is not None and (mapping.separator is not None or mapping.is_of_texts)):
            found[0].append(name)
        elif mapping is None:
            found[1].append(name)
    return found


@contextmanager
def encoded(
    paths: PathLike | Sequence[PathLike], column: str, mapping: PathLike, *, unknown: str = "error"
) -> Iterator[str]:
    """A Parquet file with a column encoded by a mapping, for as long as the block lasts.

    Raises:
        DataError: as :func:`encode`.
    """
    with tempfile.TemporaryDirectory(prefix="flexshard-") as folder:
        path = str(Path(folder) / "encoded.parquet")
        known = load_mapping(mapping)
        how: dict[str, Any] = {"separator": known.separator, "nulls": known.nulls or "drop", "unknown": unknown}
        encode(paths, path, columns=[column], mappings={column: mapping}, **how)
        try:
            yield path
        except DataError as error:  # which names the file that is gone with the block
            read = paths if isinstance(paths, str | os.PathLike) else ", ".join(map(str, paths))
            raise type(error)(str(error).replace(path, f"{read}, encoded by {mapping}")) from error


def _check_outputs(target: Path, columns: list[str], inputs: Sequence[PathLike]) -> None:
    """Whether nothing that is read, and no mapping of another column, would be lost."""
    places: dict[Path, str] = {}
    for column in columns:
        place = mapping_path(target, column)
        if place in places:
            raise OutputError(
                f"{place} would be the mapping of column {column!r} and of column {places[place]!r}; encode one at a"
                " time, to other outputs"
            )
        places[place] = column
    for place in (target, *places):
        if place.exists() and any("://" not in str(path) and place.samefile(path) for path in inputs):
            raise OutputError(f"{place} is what is read, and would be lost; choose another path with -o")


def _encodings(data: Scan, columns: Sequence[ColumnToEncode]) -> dict[str, str]:
    """Which mappings numbered the columns of what is written: these, and earlier ones where all files say so."""
    before = [encodings(schema) for schema in data.schemas]
    shared = set.intersection(*({*said.items()} for said in before)) if before else set()
    return dict(sorted(shared)) | {column.values.name: column.digest for column in columns}


def _check_names(data: Scan, columns: Iterable[str]) -> None:
    """DuckDB takes names that differ by case for the same; raises DataError."""
    seen: dict[str, str] = {}
    for name in columns:
        other = seen.setdefault(name.lower(), name)
        if other != name or name == _ROW:
            raise DataError(f"{data.files[0]}: columns {other!r} and {name!r} differ by case at most; rename one")


def _write(database: Any, query: str, place: Path, said: dict[str, str]) -> None:
    entries = ", ".join(f"{sql_name(key)}: {sql_text(value)}" for key, value in said.items())
    metadata = f", KV_METADATA {{{entries}}}" if said else ""
    database.execute(f"COPY ({query}) TO {sql_text(str(place))} (FORMAT parquet, COMPRESSION zstd{metadata})")


def _query(data: Scan, columns: Sequence[ColumnToEncode], wide: Sequence[str]) -> str:
    """All rows, with ids in the columns' places, in the order in which they are stored."""
    # Joins keep no order, so rows are numbered: by the file, or where that has no numbers one by one.
    if data.kind == "parquet":
        number, reader = f"file_index * {_FILE_ROWS} + file_row_number", data.numbered_sql
    else:
        number, reader = "row_number() OVER ()", data.sql
    hidden = " EXCLUDE (file_row_number)" if data.kind == "parquet" else ""
    rows = f"SELECT {number} AS {_ROW}, *{hidden} FROM {reader}"
    joins: list[str] = []
    added: list[str] = []
    where: list[str] = []
    replaced = [f"CAST({sql_name(name)} AS DECIMAL(38, 0)) AS {sql_name(name)}" for name in wide]
    for column in columns:
        own, name, sql = f"ids_{column.number}", column.values.name, column.values.sql
        if column.values.is_list:
            each = f"SELECT {_ROW}, unnest({sql}) AS value, generate_subscripts({sql}, 1) AS place FROM stored"
            joins.append(
                f"LEFT JOIN (SELECT e.{_ROW}, list(CAST(m.row AS {column.kind}) ORDER BY e.place) AS ids"
                f" FROM ({each}) e JOIN {column.table} m ON e.value IS NOT DISTINCT FROM m.value"
                f" GROUP BY e.{_ROW}) {own} ON stored.{_ROW} = {own}.{_ROW}"
            )
            ids = f"coalesce({own}.ids, CAST([] AS {column.kind}[]))"
        else:
            joins.append(f"LEFT JOIN {column.table} {own} ON ({sql}) IS NOT DISTINCT FROM {own}.value")
            ids = f"CAST({own}.row AS {column.kind})"
            where.append(f"{own}.row IS NOT NULL")
        (replaced if column.values.is_column else added).append(f"{ids} AS {sql_name(name)}")
    replace_ = f" REPLACE ({', '.join(replaced)})" if replaced else ""
    kept = f" WHERE {' AND '.join(where)}" if where else ""
    chosen = ", ".join([f"stored.* EXCLUDE ({_ROW}){replace_}", *added])
    return f"WITH stored AS ({rows}) SELECT {chosen} FROM stored {' '.join(joins)}{kept} ORDER BY stored.{_ROW}"
