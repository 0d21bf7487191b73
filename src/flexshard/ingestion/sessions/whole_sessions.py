"""What whole sessions repeat, wherever their rows lie: counted by DuckDB."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as pads

from flexshard._internal import ParquetSource, sql_name

__all__ = ["WholeSessions"]

IntArray = npt.NDArray[np.int64]


class WholeSessions:
    """Whole sessions, counted by DuckDB."""

    def __init__(self, sources: Sequence[ParquetSource], session: str, names: Sequence[str]) -> None:
        import duckdb

        self._database = duckdb.connect()
        # Only the columns that are asked for: others may differ from file to file.
        schema = pa.schema([sources[0].schema.field(name) for name in dict.fromkeys([session, *names])])
        parts = [
            pads.dataset([source.path], schema, filesystem=source.filesystem, format="parquet") for source in sources
        ]
        self._database.register("data", parts[0] if len(parts) == 1 else pads.dataset(parts))
        self._session = sql_name(session)

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def sizes(self) -> IntArray:
        """Samples of each session."""
        columns = self._database.sql(f"SELECT count(*) AS n FROM data GROUP BY {self._session}").fetchnumpy()
        return np.sort(np.asarray(columns["n"], np.int64))

    def duplication(self, feature: str, *, lists: bool) -> tuple[float, float]:
        """Shares of lists, and of values, that a session has already.

        A value that a list has twice is said twice there only: what a session needs is the most of any one list.
        """
        column = sql_name(feature) if lists else f"[{sql_name(feature)}]"
        rows, kept, values = self._one(
            f"SELECT sum(n), sum(d), sum(v) FROM (SELECT count(*) AS n, count(DISTINCT {column}) AS d,"
            f" coalesce(sum(len({column})), 0) AS v FROM data WHERE {sql_name(feature)} IS NOT NULL"
            f" GROUP BY {self._session})"
        )
        (needed,) = self._one(
            f"WITH lists AS (SELECT DISTINCT {self._session} AS s, {column} AS l FROM data"
            f" WHERE {sql_name(feature)} IS NOT NULL),"
            " numbered AS (SELECT row_number() OVER () AS r, s, l FROM lists),"
            " flat AS (SELECT s, r, unnest(l) AS v FROM numbered),"
            " counted AS (SELECT s, v, r, count(*) AS c FROM flat GROUP BY s, v, r)"
            " SELECT sum(m) FROM (SELECT max(c) AS m FROM counted GROUP BY s, v)"
        )
        return (1 - kept / rows if rows else 0.0), (1 - needed / values if values else 0.0)

    def _one(self, query: str) -> tuple[float, ...]:
        (row,) = self._database.sql(query).fetchall()
        return tuple(float(value or 0) for value in row)
