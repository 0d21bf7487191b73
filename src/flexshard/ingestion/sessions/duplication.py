"""How much of a dataset is said twice: per session, per feature, and as batches see it (RecD paper, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.types as pt

from flexshard._internal import (
    JaggedArray,
    PathLike,
    check_int,
    distinct_rows,
    expand,
    first_repeated,
    is_list,
    shared_runs,
)
from flexshard.errors import DataError
from flexshard.ingestion.batches import batches_in_order
from flexshard.ingestion.sessions.columns import listed_features, lists_of, located_lists
from flexshard.ingestion.sessions.whole_sessions import WholeSessions
from flexshard.ingestion.stored_rows import StoredRows
from flexshard.tables import dedup_factor

__all__ = ["Duplication", "FeatureDuplication", "measure_duplication"]

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
        lists: samples of all batches per distinct list, empty ones too.
        runs: values of all batches per value of shared buffers, in partially deduplicated batches.
        newest: end at which new values are added, "last" or "first", that gives the larger ``runs``.
        ids: values of all batches per distinct value of a batch, which ``index_dedup`` looks up.
    """

    feature: str
    avg_length: float
    exact: float
    partial: float
    same: float
    predicted: float
    measured: float
    lists: float
    runs: float
    newest: str
    ids: float


@dataclass(frozen=True)
class Duplication:
    """How much of a dataset is said twice.

    Attributes:
        rows: of the dataset.
        batch_size: B, rows of a batch, in the order of the files.
        session_sizes: samples of each session, in the dataset; shape (sessions,).
        batch_session_sizes: samples of each session in each batch; shape (sessions of all batches,).
        distinct_rows: samples of all batches that have other values than those before in their batch, in some feature.
        features: each of them.
    """

    rows: int
    batch_size: int
    session_sizes: IntArray
    batch_session_sizes: IntArray
    distinct_rows: int
    features: tuple[FeatureDuplication, ...]

    @property
    def samples_per_row(self) -> float:
        """Samples per distinct row of all features together, in batches."""
        return self.rows / self.distinct_rows if self.distinct_rows else 1.0

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
    batch_size = check_int(batch_size, "batch_size", DataError)
    sources = expand(paths)
    names = listed_features(sources, features)
    stored = StoredRows(sources, list(dict.fromkeys([session, *names])))
    by_case = first_repeated(name.lower() for name in dict.fromkeys([session, *names]))
    if by_case is not None:
        raise DataError(f"{sources[0].name}: columns called {by_case!r} differ by case only; rename one")
    if pt.is_nested(sources[0].schema.field(session).type):
        kind = sources[0].schema.field(session).type
        raise DataError(f"{sources[0].name}: session column {session!r} holds {kind}; expected one key per row")
    counts = {name: np.zeros(len(_Counts._fields), np.int64) for name in names}
    in_batches: list[IntArray] = []
    rows = apart = 0
    for batch in batches_in_order(stored, batch_size):
        keys = batch.table.column(session)
        if keys.null_count:
            where, row = batch.origin_of(int(np.flatnonzero(pc.is_null(keys).to_numpy(zero_copy_only=False))[0]))
            raise DataError(f"{where}: session column {session!r} is null in row {row:,}; drop or fill such rows")
        where = batch.origin_of(0)[0]
        sessions = distinct_rows(lists_of(keys, session, where)).inverse
        in_batches.append(np.bincount(sessions))
        order = np.argsort(sessions, kind="stable")
        together = np.flatnonzero(np.diff(sessions[order]) == 0)
        columns = {name: located_lists(batch, name) for name in names}
        for name, column in columns.items():
            counts[name] += _counted(column, order, together)
        rows += batch.table.num_rows
        apart += distinct_rows(*columns.values()).first.size
    per_batch = np.concatenate(in_batches) if in_batches else np.zeros(0, np.int64)
    mean = max(float(per_batch.mean()), 1.0) if per_batch.size else 1.0
    with closing(WholeSessions(sources, session, names)) as whole_sessions:
        sizes = whole_sessions.sizes()
        measured = []
        for name in names:
            counted = _Counts(*counts[name].tolist())
            d = counted.same / counted.pairs if counted.pairs else 0.0
            shares = whole_sessions.duplication(name, lists=is_list(sources[0].schema.field(name).type))
            newest = "first" if counted.newest_first < counted.newest_last else "last"
            measured.append(
                FeatureDuplication(
                    name,
                    counted.values / rows if rows else 0.0,
                    *shares,
                    d,
                    dedup_factor(mean, d),
                    measured=_ratio(counted.values, counted.kept),
                    lists=_ratio(rows, counted.lists),
                    runs=_ratio(counted.values, min(counted.newest_last, counted.newest_first)),
                    newest=newest,
                    ids=_ratio(counted.values, counted.ids),
                )
            )
    return Duplication(rows, batch_size, sizes, per_batch, apart, tuple(measured))


class _Counts(NamedTuple):
    """Of one feature, over all batches."""

    values: int
    kept: int  # of distinct lists
    pairs: int  # of rows of a session that follow each other
    same: int  # of those, with the same list
    lists: int  # distinct ones
    newest_last: int  # values of shared buffers
    newest_first: int
    ids: int  # distinct values


def _counted(column: JaggedArray, order: IntArray, together: IntArray) -> IntArray:
    """As :class:`_Counts`, of one batch, whose rows are in ``order`` of sessions; pairs start at ``together`` there."""
    distinct = distinct_rows(column)
    codes = distinct.inverse[order]
    lists = column.take(distinct.first)
    same = np.count_nonzero(codes[together] == codes[together + 1])
    buffers = [shared_runs(lists, newest=newest)[0].size for newest in ("last", "first")]
    numbers = (column.values.size, lists.values.size, together.size, same, len(lists), *buffers)
    return np.array([*numbers, np.unique(column.values).size], np.int64)


def _ratio(whole: int, kept: int) -> float:
    return whole / kept if kept else 1.0
