"""Profiles of Ray datasets: one partial profile per block, made where the block lies."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from flexshard._internal import there_are
from flexshard.errors import DataError, MissingDependencyError
from flexshard.profiling.count.counter import IdCounter
from flexshard.profiling.count.id_batches import arrow_ids
from flexshard.profiling.moments import LengthMoments
from flexshard.profiling.profile import AccessProfile
from flexshard.profiling.row_counts import RowCounts

__all__ = ["profile_ray"]


def profile_ray(dataset: Any, *, column: str, num_rows: int, hash: str | None, table: str) -> AccessProfile:
    """See :meth:`AccessProfile.from_ray`."""
    try:
        import ray.data  # noqa: F401 - only to say in one line that it is missing
    except ImportError as error:
        raise MissingDependencyError("from_ray needs Ray; pip install 'flexshard[ray]'") from error
    count = partial(_count_block, column=column, num_rows=num_rows, hash=hash, table=table)
    partials = dataset.map_batches(count, batch_format="pyarrow", batch_size=None)
    counts, repeats, lengths = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64), LengthMoments()
    for block in partials.iter_batches(batch_format="pyarrow", batch_size=None):
        for record in block.to_pylist():
            if record["error"]:
                raise DataError(record["error"])
            rows = np.frombuffer(record["rows"], np.int64)
            counts[rows] += np.frombuffer(record["counts"], np.int64)
            repeats[rows] += np.frombuffer(record["repeats"], np.int64)
            histogram = tuple((place, samples, total) for place, samples, total in record["histogram"])
            number, total, squares, longest = record["moments"]
            lengths += LengthMoments(number, total, squares, longest, histogram)
    samples = RowCounts.dense(counts - repeats) if repeats.any() else None
    return AccessProfile.from_row_counts(
        RowCounts.dense(counts), lengths.num_samples, num_rows, lengths, samples=samples, table=table
    )


def _count_block(block: pa.Table, *, column: str, num_rows: int, hash: str | None, table: str) -> pa.Table:
    """One record: the rows that a block reads, how often, and its moments; or what is wrong with it."""
    record: dict[str, Any] = {
        "rows": b"",
        "counts": b"",
        "repeats": b"",
        "moments": [0, 0, 0, 0],
        "histogram": [],
        "error": "",
    }
    try:
        if block.num_rows:
            if column not in block.column_names:
                raise DataError(f"the dataset has no column {column!r}; {there_are(block.column_names)}")
            batch = arrow_ids(block.column(column), "the dataset", column, 0)
            if batch.ids.size and batch.ids.dtype.kind not in "iu":
                raise DataError(f"column {column!r} of the dataset holds {batch.ids.dtype}, not ids")
            counter = IdCounter(table, num_rows, hash)
            counter.add(batch)
            counter.check()
            rows = np.flatnonzero(counter.counts)
            moments = batch.moments()
            counts = counter.counts[rows]
            containing = counts if counter.samples is None else counter.samples[rows]
            record |= {
                "rows": rows.astype(np.int64).tobytes(),
                "counts": counts.tobytes(),
                "repeats": (counts - containing).tobytes(),
                "moments": [moments.num_samples, moments.total, moments.total_squares, moments.maximum],
                "histogram": [list(one) for one in moments.histogram or ()],
            }
    except DataError as error:
        record["error"] = str(error)
    return pa.Table.from_pylist([record])
