"""A column that is being encoded: what its values are numbered by, and how many of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexshard._internal import sql_name, sql_text
from flexshard.errors import DataError
from flexshard.profiling.encoding.encoded_by import check_not_yet_encoded, digest_of
from flexshard.profiling.encoding.mapping import Mapping
from flexshard.profiling.encoding.sources import Scan, Values, check_types, resolved

__all__ = ["WIDE", "ColumnToEncode", "EncodedColumn"]

_FEW_ROWS = (1 << 31) - 1
WIDE = ("HUGEINT", "UHUGEINT")


@dataclass(frozen=True)
class EncodedColumn:
    """What became of a column.

    Attributes:
        mapping: how its values are numbered.
        ids: that were written.
        dropped: ids that were left out: null ones, those that the mapping has not, and those of rows that are left out
            for the id of another column.
        is_list: whether a row has a list of ids.
    """

    mapping: Mapping
    ids: int
    dropped: int
    is_list: bool


@dataclass
class ColumnToEncode:
    """A column under way; its mapping is the table ``mapping_<number>``."""

    number: int
    values: Values
    given: Mapping | None
    result: EncodedColumn
    digest: str = ""

    @property
    def table(self) -> str:
        """The mapping's."""
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
    ) -> ColumnToEncode:
        """A column of the data, with its mapping brought in or made; raises DataError as :func:`encode`."""
        separator = separator if given is None else given.separator
        values = resolved(database, data, name, separator)
        check_types(database, data, values, separator)
        each = values.each(data)
        if values.kind in ("FLOAT", "DOUBLE"):
            values, each = _whole(database, data, values, each)
        if values.kind in WIDE:  # which Parquet has not: 64 bits, or texts
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
            about = Mapping("", name, rows, nulls if missing else None, separator)
        else:
            column._take(database, given, nulls)
            column.digest = digest_of(given.path)
            lost = database.sql(
                "SELECT coalesce(sum(c.count), 0)::BIGINT, any_value(c.value)::VARCHAR, count(*)"
                f" FROM counts_{number} c LEFT JOIN {column.table} m ON c.value IS NOT DISTINCT FROM m.value"
                f" WHERE m.row IS NULL AND (c.value IS NOT NULL OR {nulls == 'keep'})"
            ).fetchall()[0]
            check_not_yet_encoded(zip(data.files, data.schemas, strict=False), name, given.path, column.digest)
            if lost[0] and unknown == "error":
                such = "null" if lost[1] is None else repr(lost[1])
                raise DataError(
                    f"{data.files[0]}: column {name!r} has {lost[2]:,} values that {given.path} has not, {such} among"
                    " them; leave them out (--unknown drop), or encode anew"
                )
            about = given
        column.result = EncodedColumn(about, ids, 0, values.is_list)
        return column

    def written(self, database: Any, draft: Path) -> EncodedColumn:
        """What became of the column in a file that has it."""
        name = sql_name(self.values.name)
        number = f"coalesce(sum(len({name})), 0)::BIGINT" if self.values.is_list else "count(*)"
        (ids,) = database.sql(f"SELECT {number} FROM {_parquet(draft)}").fetchall()[0]
        return replace(self.result, ids=ids, dropped=self.result.ids - ids)

    def _take(self, database: Any, given: Mapping, nulls: str | None) -> None:
        """Bring in a mapping that was made before; its values as this data have them."""
        read = _parquet(given.path)
        entries, values, rows, least, most = database.sql(
            "SELECT count(*), count(DISTINCT value) + coalesce(max((value IS NULL)::INT), 0), count(DISTINCT row),"
            f" min(row), max(row) FROM {read}"
        ).fetchall()[0]
        if not entries == values == rows == given.rows or (entries and (least, most) != (0, entries - 1)):
            raise DataError(
                f"{given.path}: does not give each of {given.rows:,} rows, from 0 on, to one value; take the file that"
                " 'flexshard encode' wrote, or encode anew"
            )
        kind = database.sql(f"DESCRIBE SELECT value FROM {read}").fetchall()[0][1]
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
        kept = "" if nulls == "keep" else " WHERE value IS NOT NULL"
        database.execute(f"CREATE TABLE {self.table} AS SELECT * FROM {read}{kept}")

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
        """DuckDB's type of its ids."""
        return "INTEGER" if self.result.mapping.rows <= _FEW_ROWS else "BIGINT"


def _parquet(path: object) -> str:
    """DuckDB's expression for a file by itself, whatever its folders are called."""
    return f"read_parquet({sql_text(str(path))}, hive_partitioning = false)"


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
