"""How much of a dataset is said twice: per session, per feature, and as batches see it (RecD paper, section 3)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.types as pt

from flexshard._dedup import dedup_factor
from flexshard._jagged import JaggedArray, distinct_rows, jagged_of_arrow
from flexshard._sources import ParquetSource, expand, is_list, one_array
from flexshard._values import finite, first_repeated, whole
from flexshard.errors import DataError
from flexshard.ingestion._batches import Rows, check_columns, fill_batches, row_groups
from flexshard.ingestion._sql import quoted

__all__ = ["Duplication", "FeatureDuplication", "measure_duplication", "suggest_groups"]

PathLike = str | os.PathLike[str]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FeatureDuplication:
    """How much of one feature is said twice.

    Attributes:
        feature: its column.
        avg_length: l, values per sample.
        exact: share of samples whose list another sample of the session has, all but the first of them (Figure 4).
        partial: share of values that another sample of the session has, all but the first of them (Figure 4).
        same: d, the probability that the list stays the same from one row of a session to the next within a batch.
        predicted: DedupFactor after the paper's model, from S of a batch and d.
        measured: values of all batches per value that deduplicated batches keep.
    """

    feature: str
    avg_length: float
    exact: float
    partial: float
    same: float
    predicted: float
    measured: float


@dataclass(frozen=True)
class Duplication:
    """How much of a dataset is said twice.

    Attributes:
        rows: of the dataset.
        batch_size: B, rows of a batch, in the order of the files.
        session_sizes: samples of each session, in the dataset; shape (sessions,).
        batch_session_sizes: samples of each session in each batch; shape (sessions of all batches,).
        features: each of them.
    """

    rows: int
    batch_size: int
    session_sizes: IntArray
    batch_session_sizes: IntArray
    features: tuple[FeatureDuplication, ...]

    @property
    def samples_per_session(self) -> float:
        """S of the dataset (Figure 3, left)."""
        return float(self.session_sizes.mean()) if self.session_sizes.size else 0.0

    @property
    def samples_per_session_in_batch(self) -> float:
        """S of a batch (Figure 3, right)."""
        return float(self.batch_session_sizes.mean()) if self.batch_session_sizes.size else 0.0

    def overall(self, *, weighted: bool) -> tuple[float, float]:
        """Exact and partial duplication of all features, each counted once or as often as it is long."""
        weights = np.array([feature.avg_length if weighted else 1.0 for feature in self.features])
        if not weights.sum():
            return 0.0, 0.0
        exact, partial = np.array([[feature.exact, feature.partial] for feature in self.features]).T
        return float(exact @ weights / weights.sum()), float(partial @ weights / weights.sum())


def measure_duplication(
    paths: PathLike | Sequence[PathLike],
    *,
    session: str,
    features: Sequence[str] | None = None,
    batch_size: int = 4096,
) -> Duplication:
    """Measure a Parquet dataset in the order of its files.

    DuckDB counts whole sessions wherever their rows lie, and spills; batches are read one after the other.

    Args:
        paths: files, globs, folders or URLs.
        session: column whose distinct values are the sessions.
        features: columns of ids or of lists of ids (numbers or texts); by default every column of lists.
        batch_size: B.

    Raises:
        DataError: a missing column, or a null session; names file and row.
    """
    batch_size = whole(batch_size, "batch_size", DataError)
    sources = expand(paths)
    names = _features(sources, features)
    check_columns(sources, [session, *names])
    by_case = first_repeated(name.lower() for name in dict.fromkeys([session, *names]))
    if by_case is not None:
        raise DataError(f"{sources[0].name}: columns called {by_case!r} differ by case only; rename one")
    if pt.is_nested(sources[0].schema.field(session).type):
        kind = sources[0].schema.field(session).type
        raise DataError(f"{sources[0].name}: session column {session!r} holds {kind}; expected one key per row")
    counts = {name: np.zeros(4, np.int64) for name in names}  # values, values kept, pairs of rows, pairs the same
    in_batches: list[IntArray] = []
    rows = 0
    for batch in fill_batches(row_groups(sources, [session, *names]), [session, *names], batch_size):
        keys = batch.table.column(session)
        if keys.null_count:
            where, row = batch.origin_of(int(np.flatnonzero(pc.is_null(keys).to_numpy())[0]))
            raise DataError(f"{where}: session column {session!r} is null in row {row:,}; drop or fill such rows")
        where = batch.origins[0][1]
        sessions = distinct_rows(_jagged(keys, session, where)).inverse
        in_batches.append(np.bincount(sessions))
        order = np.argsort(sessions, kind="stable")
        together = np.flatnonzero(np.diff(sessions[order]) == 0)
        for name in names:
            column = _located(batch, name)
            found = distinct_rows(column)
            codes = found.inverse[order]
            same = codes[together] == codes[together + 1]
            kept = column.lengths[found.first].sum()
            counts[name] += [column.values.size, kept, together.size, np.count_nonzero(same)]
        rows += batch.table.num_rows
    per_batch = np.concatenate(in_batches) if in_batches else np.zeros(0, np.int64)
    mean = max(float(per_batch.mean()), 1.0) if per_batch.size else 1.0
    with closing(_Sessions(sources, session, names)) as whole_sessions:
        sizes = whole_sessions.sizes()
        measured = []
        for name in names:
            values, kept, pairs, same = counts[name].tolist()
            d = same / pairs if pairs else 0.0
            exact, partial = whole_sessions.duplication(name, lists=is_list(sources[0].schema.field(name).type))
            length, factor = values / rows if rows else 0.0, values / kept if kept else 1.0
            measured.append(FeatureDuplication(name, length, exact, partial, d, dedup_factor(mean, d), factor))
    return Duplication(rows, batch_size, sizes, per_batch, tuple(measured))


def _features(sources: Sequence[ParquetSource], features: Sequence[str] | None) -> list[str]:
    if isinstance(features, str):
        raise DataError(f"features are a list of columns, found {features!r}")
    if features is not None:
        twice = first_repeated(features)
        if twice is not None:
            raise DataError(f"feature {twice!r} is named twice")
        return list(features)
    names = [field.name for field in sources[0].schema if is_list(field.type) and not pt.is_nested(_inner(field.type))]
    if not names:
        raise DataError(f"{sources[0].name}: no columns of lists; name the features")
    return names


def _located(batch: Rows, name: str) -> JaggedArray:
    """A column of a batch, with errors that name the row of the file."""
    try:
        return _jagged(batch.table.column(name), name, batch.origins[0][1])
    except DataError:
        for table, where, row in batch.runs():
            if pt.is_integer(_inner(table.schema.field(name).type)):
                jagged_of_arrow(table.column(name), name, where=where, first_row=row)
        raise


def _inner(kind: pa.DataType) -> pa.DataType:
    """Of what a list is, or the type itself."""
    inner = kind.value_type if is_list(kind) else kind
    return inner.value_type if pt.is_dictionary(inner) else inner


def _jagged(column: pa.ChunkedArray, name: str, where: str) -> JaggedArray:
    """A column of numbers or texts, or of lists of them; texts as numbers that tell them apart."""
    kind = column.type
    inner = _inner(kind)
    if pt.is_nested(inner) or isinstance(inner, pa.BaseExtensionType):
        raise DataError(f"{where}: column {name!r} holds {kind}; expected numbers or texts, or lists of them")
    if (pt.is_integer(inner) or pt.is_floating(inner)) and not (is_list(kind) and pt.is_dictionary(kind.value_type)):
        return jagged_of_arrow(column, name, where=where)
    flat = one_array(column)
    if pt.is_dictionary(kind):
        flat, kind = flat.dictionary_decode(), kind.value_type
    if not is_list(kind):
        return jagged_of_arrow(_codes(flat), name, where=where)
    lengths = pc.fill_null(pc.list_value_length(flat), 0).to_numpy(zero_copy_only=False)
    return JaggedArray.of(_codes(flat.flatten()).to_numpy(zero_copy_only=False), lengths)


def _codes(values: pa.Array) -> pa.Array:
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    return pc.fill_null(values.dictionary_encode(null_encoding="encode").indices, -1)


class _Sessions:
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
        self._session = quoted(session)

    def close(self) -> None:
        self._database.close()

    def sizes(self) -> IntArray:
        """Samples of each session."""
        found = self._database.sql(f"SELECT count(*) AS n FROM data GROUP BY {self._session}").fetchnumpy()
        return np.sort(np.asarray(found["n"], np.int64))

    def duplication(self, feature: str, *, lists: bool) -> tuple[float, float]:
        """Shares of lists, and of values, that a session has already.

        A value that a list has twice is said twice there only: what a session needs is the most of any one list.
        """
        column = quoted(feature) if lists else f"[{quoted(feature)}]"
        rows, kept, values = self._one(
            f"SELECT sum(n), sum(d), sum(v) FROM (SELECT count(*) AS n, count(DISTINCT {column}) AS d,"
            f" coalesce(sum(len({column})), 0) AS v FROM data WHERE {quoted(feature)} IS NOT NULL"
            f" GROUP BY {self._session})"
        )
        (needed,) = self._one(
            f"WITH lists AS (SELECT DISTINCT {self._session} AS s, {column} AS l FROM data"
            f" WHERE {quoted(feature)} IS NOT NULL),"
            " numbered AS (SELECT row_number() OVER () AS r, s, l FROM lists),"
            " flat AS (SELECT s, r, unnest(l) AS v FROM numbered),"
            " counted AS (SELECT s, v, r, count(*) AS c FROM flat GROUP BY s, v, r)"
            " SELECT sum(m) FROM (SELECT max(c) AS m FROM counted GROUP BY s, v)"
        )
        return (1 - kept / rows if rows else 0.0), (1 - needed / values if values else 0.0)

    def _one(self, query: str) -> tuple[float, ...]:
        (row,) = self._database.sql(query).fetchall()
        return tuple(float(value or 0) for value in row)


def suggest_groups(
    data: pa.Table | PathLike | Sequence[PathLike],
    *,
    features: Sequence[str] | None = None,
    batch_size: int = 4096,
    threshold: float = 1.5,
    tolerance: float = 0.02,
    max_batches: int = 16,
) -> list[list[str]]:
    """Features worth deduplicating, those that change together in one group.

    Args:
        data: a table, or Parquet files, in the order in which batches will be read.
        features: to look at; by default every column of lists.
        batch_size: B.
        threshold: features with a DedupFactor above it are proposed (the paper's 1.5).
        tolerance: share of ids that a group may keep beyond what its features would keep apart.
        max_batches: batches looked at, from the beginning.

    Returns:
        groups, as :meth:`InverseKeyedJaggedTensor.from_arrow` takes them; the most ids spared first.

    Raises:
        DataError: a missing column, or data that cannot be read.
    """
    batch_size = whole(batch_size, "batch_size", DataError)
    threshold, tolerance = finite(threshold, "threshold", DataError), finite(tolerance, "tolerance", DataError)
    codes: dict[str, list[IntArray]] = {}
    lengths: dict[str, list[IntArray]] = {}
    for table, where in islice(_tables(data, features, batch_size), whole(max_batches, "max_batches", DataError)):
        for name in table.schema.names:
            column = _jagged(table.column(name), name, where)
            codes.setdefault(name, []).append(distinct_rows(column).inverse)
            lengths.setdefault(name, []).append(column.lengths)
    kept = {name: _kept(codes[name], [lengths[name]]) for name in codes}
    total = {name: sum(int(part.sum()) for part in lengths[name]) for name in codes}
    worth = [name for name in codes if kept[name] and total[name] / kept[name] > threshold]
    groups: dict[bytes, list[str]] = {}  # features of equal codes need no comparison
    for name in worth:
        groups.setdefault(b"".join(part.tobytes() for part in codes[name]), []).append(name)
    merged: list[tuple[list[str], list[IntArray]]] = []
    for names in sorted(groups.values(), key=lambda names: -sum(total[name] for name in names)):
        _join(merged, names, codes[names[0]], lengths, kept, tolerance)
    spared = sorted(merged, key=lambda group: -sum(total[name] - kept[name] for name in group[0]))
    return [names for names, _ in spared]


def _join(
    groups: list[tuple[list[str], list[IntArray]]],
    names: list[str],
    codes: list[IntArray],
    lengths: dict[str, list[IntArray]],
    kept: dict[str, int],
    tolerance: float,
) -> None:
    """Add features of equal codes to the first group that keeps hardly more ids with them, or as a new one."""
    for place, (others, shared) in enumerate(groups):
        both = [_paired(a, b) for a, b in zip(shared, codes, strict=True)]
        everything = [*others, *names]
        if _kept(both, [lengths[name] for name in everything]) <= (1 + tolerance) * sum(kept[n] for n in everything):
            groups[place] = (everything, both)
            return
    groups.append((names, codes))


def _paired(a: IntArray, b: IntArray) -> IntArray:
    return np.unique(np.stack([a, b], axis=1), axis=0, return_inverse=True)[1].reshape(-1)


def _kept(codes: Sequence[IntArray], lengths: Iterable[Sequence[IntArray]]) -> int:
    """Ids of the distinct rows of all batches."""
    first = [np.unique(part, return_index=True)[1] for part in codes]
    return sum(int(each[rows].sum()) for feature in lengths for each, rows in zip(feature, first, strict=True))


def _tables(
    data: pa.Table | PathLike | Sequence[PathLike], features: Sequence[str] | None, batch_size: int
) -> Iterable[tuple[pa.Table, str]]:
    if isinstance(data, pa.Table):
        names = [field.name for field in data.schema if is_list(field.type)] if features is None else list(features)
        for name in names:
            if data.schema.names.count(name) != 1:
                raise DataError(f"the table: no column {name!r}; there are {', '.join(data.schema.names)}")
        chosen: Any = data.select(names)
        yield from ((chosen.slice(start, batch_size), "the table") for start in range(0, data.num_rows, batch_size))
        return
    sources = expand(data)
    names = _features(sources, features)
    check_columns(sources, names)
    for batch in fill_batches(row_groups(sources, names), names, batch_size):
        yield batch.table, batch.origins[0][1]
