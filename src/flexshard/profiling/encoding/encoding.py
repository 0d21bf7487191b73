"""Encode columns: number their values by frequency, save the mapping, and write the data with dense ids in them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from flexshard import units
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
from flexshard.profiling.encoding.encoded_by import METADATA_KEY, check_not_yet_encoded, digest_of, encodings
from flexshard.profiling.encoding.mapping import NULLS, Mapping, load_mapping, mapping_path
from flexshard.profiling.encoding.sources import Scan, Values, check_kept, check_types, resolved, scan

__all__ = ["EncodedColumn", "encode", "encoded"]

Mappings = dict[str, PathLike]
_UNKNOWN = ("error", "drop")
_FEW_ROWS = (1 << 31) - 1
_ROW, _FILE_ROWS = "__flexshard_row", 1 << 40
_WIDE = ("HUGEINT", "UHUGEINT")


@dataclass(frozen=True)
class EncodedColumn:
    """What became of a column.

    Attributes:
        mapping: how its values are numbered.
        ids: that were written.
        dropped: ids that were left out: null ones, or those that the mapping has not.
        is_list: whether a row has a list of ids.
    """

    mapping: Mapping
    ids: int
    dropped: int
    is_list: bool


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
            them a row. There may be none by default. A list that is null is an empty one.
        unknown: what becomes of values that a given mapping has not: "error", or "drop" as null ones.
        memory: that DuckDB may take; by default four fifths of the machine's.

    Raises:
        DataError: unreadable data, a missing column, values that are no keys, nulls or unknown values; names file,
            column and number.
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
        closing(_database(str(scratch), limit)) as database,
        _failures(target, limit),
    ):
        data = data.loaded(database)
        stored = data.columns(database)
        check_kept(data)
        _check_names(data, stored if data.kind != "parquet" else data.schemas[0].names)
        wide = [name for name, kind in stored.items() if kind in _WIDE and name not in names]
        own = [
            _Column.of(database, data, name, given.get(name), separator, nulls, unknown, number)
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
        made.append((draft, target))
        with replacing_all(place for _, place in made) as free:
            for (source, _), place in zip(made, free, strict=True):
                shutil.move(source, place)
    return [column.result for column in own]


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


def _database(scratch: str, limit: int | None) -> Any:
    import duckdb

    settings: dict[str, Any] = {"temp_directory": str(Path(scratch) / "spill")}
    if limit is not None:
        settings["memory_limit"] = f"{limit // 1000}KB"
    return duckdb.connect(str(Path(scratch) / "work.duckdb"), config=settings)


@contextmanager
def _failures(target: Path, limit: int | None) -> Iterator[None]:
    import duckdb

    try:
        yield
    except duckdb.OutOfMemoryException as error:
        most = "DuckDB's default" if limit is None else units.format_bytes(limit)
        raise OutputError(f"encoding needs more memory than {most}; give it more with --memory") from error
    except duckdb.Error as error:
        if "No space left" in str(error):
            raise OutputError(f"cannot write {target}: its disk is full; free some space, or choose another") from error
        if isinstance(error, duckdb.IOException):
            raise OutputError(f"cannot write {target}: {str(error).splitlines()[0]}") from error
        raise DataError(f"the data cannot be encoded: {str(error).splitlines()[0]}") from error


@dataclass
class _Column:
    """A column under way; its mapping is the table ``mapping_<number>``."""

    number: int
    values: Values
    given: Mapping | None
    result: EncodedColumn
    digest: str = ""

    @property
    def table(self) -> str:
        return f"mapping_{self.number}"

    @classmethod
    def of(
        cls,
        database: Any,
        data: Scan,
        name: str,
        given: Mapping | None,
        separator: str | None,
        nulls: str | None,
        unknown: str,
        number: int,
    ) -> _Column:
        separator = separator if given is None else given.separator
        values = resolved(database, data, name, separator)
        check_types(database, data, values, separator)
        each = values.each(data)
        if values.kind in ("FLOAT", "DOUBLE"):
            values, each = _whole(database, data, values, each)
        if values.kind in _WIDE:  # which Parquet has not: 64 bits, or texts
            low, high = database.sql(f"SELECT min(value), max(value) FROM ({each})").fetchall()[0]
            kind = "UBIGINT" if low is None or (low >= 0 and high < 1 << 64) else "VARCHAR"
            sql = f"CAST({values.sql} AS {kind}{'[]' if values.is_list else ''})"
            values, each = replace(values, sql=sql, kind=kind), f"SELECT CAST(value AS {kind}) AS value FROM ({each})"
        database.execute(
            f"CREATE TABLE counts_{number} AS SELECT value, count(*) AS count FROM ({each}) GROUP BY value"
        )
        ids, missing = database.sql(
            f"SELECT coalesce(sum(count), 0)::BIGINT, coalesce(sum(count) FILTER (value IS NULL), 0)::BIGINT"
            f" FROM counts_{number}"
        ).fetchall()[0]
        if missing and nulls is None:
            raise DataError(
                f"{data.files[0]}: column {name!r} has {missing:,} null ids in {len(data.files)} file(s); say what"
                " becomes of them: drop (--nulls drop) or keep, in a row of their own (--nulls keep)"
            )
        column = cls(number, values, given, EncodedColumn(Mapping("", name, 0, None, None), 0, 0, values.is_list))
        if given is None:
            where = "" if nulls == "keep" else "WHERE value IS NOT NULL"
            database.execute(
                f"CREATE TABLE {column.table} AS SELECT value,"
                f" row_number() OVER (ORDER BY count DESC, value NULLS LAST) - 1 AS row, count"
                f" FROM counts_{number} {where}"
            )
            (rows,) = database.sql(f"SELECT count(*) FROM {column.table}").fetchall()[0]
            if not rows:
                raise DataError(f"{data.files[0]}: column {name!r} has no values to encode")
            dropped = missing if nulls != "keep" else 0
            about = Mapping("", name, rows, nulls if missing else None, separator)
        else:
            column._take(database, given)
            column.digest = digest_of(given.path)
            lost = database.sql(
                "SELECT coalesce(sum(c.count), 0)::BIGINT, any_value(c.value)::VARCHAR, count(*)"
                f" FROM counts_{number} c LEFT JOIN {column.table} m ON c.value IS NOT DISTINCT FROM m.value"
                " WHERE m.row IS NULL AND c.value IS NOT NULL"
            ).fetchall()[0]
            check_not_yet_encoded(zip(data.files, data.schemas, strict=False), name, given.path, column.digest)
            if lost[0] and unknown == "error":
                raise DataError(
                    f"{data.files[0]}: column {name!r} has {lost[2]:,} values that {given.path} has not, {lost[1]!r}"
                    " among them; leave them out (--unknown drop), or encode anew"
                )
            kept = missing if nulls == "keep" and given.nulls == "keep" else 0
            dropped, about = lost[0] + missing - kept, given
        column.result = EncodedColumn(about, ids - dropped, dropped, values.is_list)
        return column

    def _take(self, database: Any, given: Mapping) -> None:
        """Bring in a mapping that was made before; its values as this data have them."""
        path = sql_text(given.path)
        kind = database.sql(f"DESCRIBE SELECT value FROM read_parquet({path})").fetchall()[0][1]
        own = f"CAST({self.values.sql} AS {kind}{'[]' if self.values.is_list else ''})"
        if kind != self.values.kind:
            there_and_back = f"TRY_CAST(TRY_CAST(value AS {kind}) AS {self.values.kind})"
            other = database.sql(
                f"SELECT any_value(value)::VARCHAR FROM counts_{self.number} WHERE {there_and_back} <> value"
                f" OR ({there_and_back} IS NULL AND value IS NOT NULL)"
            ).fetchall()[0][0]
            if other is not None:
                raise DataError(
                    f"{given.path}: its values are {kind}, and column {self.values.name!r} holds {self.values.kind},"
                    f" such as {other!r}; write the column as {kind}, or encode anew"
                )
            self.values = replace(self.values, sql=own, kind=kind)
            database.execute(f"ALTER TABLE counts_{self.number} ALTER value TYPE {kind}")
        database.execute(f"CREATE TABLE {self.table} AS SELECT * FROM read_parquet({path})")

    def save(self, database: Any, draft: Path, place: Path) -> None:
        """Write the mapping."""
        about = replace(self.result.mapping, path=str(place))
        self.result = replace(self.result, mapping=about)
        database.execute(
            f"COPY (SELECT value, row, count FROM {self.table} ORDER BY row) TO {sql_text(str(draft))}"
            f" (FORMAT parquet, KV_METADATA {{flexshard: {sql_text(about.metadata)}}})"
        )
        self.digest = digest_of(draft)

    @property
    def kind(self) -> str:
        return "INTEGER" if self.result.mapping.rows <= _FEW_ROWS else "BIGINT"


def _whole(database: Any, data: Scan, values: Values, each: str) -> tuple[Values, str]:
    """Floats without NaN; whole numbers where all of them are, as before a null made pandas widen them."""
    finite, whole = database.sql(
        f"SELECT bool_and(isfinite(list_value(value)[1]) OR isnan(list_value(value)[1])), bool_and(value = floor(value)"
        f" AND abs(value) <= 9007199254740992) FILTER (NOT isnan(list_value(value)[1])) FROM ({each})"
    ).fetchall()[0]
    if finite is False:
        raise DataError(f"{data.files[0]}: column {values.name!r} has numbers that are infinite; drop or fill them")
    kind = "BIGINT" if whole else values.kind
    # NaN through a list, since Parquet's statistics leave it out and DuckDB asks them first.
    clean = "TRY_CAST({0} AS BIGINT)" if whole else "CASE WHEN isnan(list_value({0})[1]) THEN NULL ELSE {0} END"
    if values.is_list:
        sql = f"list_transform({values.sql}, lambda number: {clean.format('number')})"
    else:
        sql = clean.format(values.sql)
    each = f"SELECT {clean.format('value')} AS value FROM ({each})"
    return replace(values, sql=sql, kind=kind), each


def _encodings(data: Scan, columns: Sequence[_Column]) -> dict[str, str]:
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


def _query(data: Scan, columns: Sequence[_Column], wide: Sequence[str]) -> str:
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
