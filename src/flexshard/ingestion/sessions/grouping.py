"""Which features to deduplicate together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flexshard._internal import (
    JaggedArray,
    PathLike,
    check_finite,
    check_int,
    distinct_rows,
    expand,
    is_list,
    run_layout,
    there_are,
)
from flexshard.errors import DataError
from flexshard.ingestion.batches import batches_in_order
from flexshard.ingestion.sessions.columns import listed_features, lists_of
from flexshard.ingestion.stored_rows import StoredRows

__all__ = ["suggest_groups", "suggest_partial"]

IntArray = npt.NDArray[np.int64]


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
    batch_size = check_int(batch_size, "batch_size", DataError)
    threshold, tolerance = (
        check_finite(threshold, "threshold", DataError),
        check_finite(tolerance, "tolerance", DataError),
    )
    codes: dict[str, list[IntArray]] = {}
    lengths: dict[str, list[IntArray]] = {}
    for table, where in islice(_tables(data, features, batch_size), check_int(max_batches, "max_batches", DataError)):
        for name in table.schema.names:
            column = lists_of(table.column(name), name, where)
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


def suggest_partial(
    data: pa.Table | PathLike | Sequence[PathLike],
    *,
    features: Sequence[str] | None = None,
    batch_size: int = 4096,
    newest: str = "last",
    threshold: float = 1.5,
    tolerance: float = 0.02,
    max_batches: int = 16,
) -> list[list[str]]:
    """Features worth deduplicating partially, those whose lists grow and shift together in one group.

    Args:
        data, features, batch_size, tolerance, max_batches: as of :func:`suggest_groups`.
        newest: end of lists at which new ids are added, "last" or "first".
        threshold: features are proposed whose shared buffers hold so many times fewer ids than their distinct lists.

    Returns:
        groups, as ``partial`` of :meth:`InverseKeyedJaggedTensor.from_arrow` takes them; leave their features out of
        the exact groups. The most ids spared first.

    Raises:
        DataError: as :func:`suggest_groups`; or ``newest`` is neither.
    """
    threshold, tolerance = (
        check_finite(threshold, "threshold", DataError),
        check_finite(tolerance, "tolerance", DataError),
    )
    batch_size = check_int(batch_size, "batch_size", DataError)
    columns: dict[str, list[JaggedArray]] = {}
    for table, where in islice(_tables(data, features, batch_size), check_int(max_batches, "max_batches", DataError)):
        for name in table.schema.names:
            columns.setdefault(name, []).append(lists_of(table.column(name), name, where))
    kept = {name: _in_buffers([columns[name]], newest) for name in columns}
    exact = {name: sum(_distinct_lists([part])[0].values.size for part in columns[name]) for name in columns}
    worth = [name for name in columns if kept[name] and exact[name] / kept[name] > threshold]
    groups: list[list[str]] = []
    for name in sorted(worth, key=lambda name: kept[name] - exact[name]):
        for group in groups:
            lengths = zip(columns[group[0]], columns[name], strict=True)
            if not all(np.array_equal(one.offsets, other.offsets) for one, other in lengths):
                continue
            together = [*group, name]
            shared = _in_buffers([columns[each] for each in together], newest) * len(together)
            if shared <= (1 + tolerance) * sum(kept[each] for each in together):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def _distinct_lists(columns: Sequence[JaggedArray]) -> list[JaggedArray]:
    """The distinct rows of some columns."""
    first = distinct_rows(*columns).first
    return [column.take(first) for column in columns]


def _in_buffers(columns: Sequence[Sequence[JaggedArray]], newest: str) -> int:
    """Values of a feature's shared buffers in all batches, where all these share runs."""
    batches = zip(*columns, strict=True)
    return sum(run_layout(_distinct_lists(batch), newest=newest)[0].size for batch in batches)


def _join(
    groups: list[tuple[list[str], list[IntArray]]],
    names: list[str],
    codes: list[IntArray],
    lengths: dict[str, list[IntArray]],
    kept: dict[str, int],
    tolerance: float,
) -> None:
    """Add features of equal codes to the first group that keeps hardly more ids with them, or as a new one."""
    for index, (others, shared) in enumerate(groups):
        both = [_paired(a, b) for a, b in zip(shared, codes, strict=True)]
        everything = [*others, *names]
        if _kept(both, [lengths[name] for name in everything]) <= (1 + tolerance) * sum(kept[n] for n in everything):
            groups[index] = (everything, both)
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
) -> Iterable[tuple[pa.Table | pa.RecordBatch, str]]:
    if isinstance(data, pa.Table):
        names = [field.name for field in data.schema if is_list(field.type)] if features is None else list(features)
        for name in names:
            if data.schema.names.count(name) != 1:
                raise DataError(f"the table: no column {name!r}; {there_are(data.schema.names)}")
        chosen: Any = data.select(names)
        yield from ((chosen.slice(start, batch_size), "the table") for start in range(0, data.num_rows, batch_size))
        return
    sources = expand(data)
    names = listed_features(sources, features)
    for batch in batches_in_order(StoredRows(sources, names), batch_size):
        yield batch.table, batch.origin_of(0)[0]
