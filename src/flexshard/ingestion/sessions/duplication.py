"""How much of a dataset is said twice: per session, per feature, and as batches see it (RecD paper, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.types as pt

from flexshard._internal import PathLike, check_int, distinct_rows, expand, first_repeated, is_list
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
    counts = {name: np.zeros(4, np.int64) for name in names}  # values, values kept, pairs of rows, pairs the same
    in_batches: list[IntArray] = []
    rows = 0
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
        for name in names:
            column = located_lists(batch, name)
            distinct = distinct_rows(column)
            codes = distinct.inverse[order]
            same = codes[together] == codes[together + 1]
            distinct_values = int(column.lengths[distinct.first].sum())
            repeated = int(np.count_nonzero(same))
            counts[name] += np.array([column.values.size, distinct_values, together.size, repeated])
        rows += batch.table.num_rows
    per_batch = np.concatenate(in_batches) if in_batches else np.zeros(0, np.int64)
    mean = max(float(per_batch.mean()), 1.0) if per_batch.size else 1.0
    with closing(WholeSessions(sources, session, names)) as whole_sessions:
        sizes = whole_sessions.sizes()
        measured = []
        for name in names:
            values, kept, pairs, same = counts[name].tolist()
            d = same / pairs if pairs else 0.0
            exact, partial = whole_sessions.duplication(name, lists=is_list(sources[0].schema.field(name).type))
            length, factor = values / rows if rows else 0.0, values / kept if kept else 1.0
            measured.append(FeatureDuplication(name, length, exact, partial, d, dedup_factor(mean, d), factor))
    return Duplication(rows, batch_size, sizes, per_batch, tuple(measured))
