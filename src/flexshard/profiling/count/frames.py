"""Profiles of tables in memory, and tables of profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from flexshard._internal import is_list, there_are
from flexshard.errors import DataError
from flexshard.profiling.count.arrays import profile_arrays
from flexshard.profiling.count.id_batches import arrow_ids

if TYPE_CHECKING:
    from flexshard.profiling.profile import AccessProfile

__all__ = ["frame_of_profile", "ids_of_frame", "profile_frame"]

IntArray = npt.NDArray[np.int64]


def profile_frame(frame: Any, *, column: str, num_rows: int | None, hash: str | None, table: str) -> AccessProfile:
    """See :meth:`AccessProfile.from_frame`."""
    ids, lengths = ids_of_frame(frame, column)
    return profile_arrays(ids, lengths, num_rows=num_rows, hash=hash, table=table)


def ids_of_frame(frame: Any, column: str) -> tuple[npt.NDArray[Any], IntArray | None]:
    """Ids of a column of a pandas, polars or Arrow table, and how many each row has; None where it has one.

    Raises:
        DataError: no such table or column, nulls, or values that are not whole numbers.
    """
    data = _arrow(frame, column)
    if is_list(data.type) and pt.is_floating(data.type.value_type):
        raise DataError(f"column {column!r} holds {data.type}, not ids; give lists of whole numbers")
    if pt.is_floating(data.type):  # as pandas has whole numbers beside a null
        if data.null_count or pc.any(pc.is_nan(data)).as_py():
            raise DataError(f"column {column!r} has ids that are null; drop or fill them")
        try:
            data = data.cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise DataError(f"column {column!r} has numbers that are no ids: {error}") from error
    if pt.is_dictionary(data.type):
        data = data.cast(data.type.value_type)
    inner = data.type.value_type if is_list(data.type) else data.type
    if not pt.is_integer(inner):
        raise DataError(
            f"column {column!r} holds {data.type}, not ids; number its values first, such as by pandas' factorize or"
            " flexshard.profiling.encode"
        )
    batch = arrow_ids(data, "the table", column, 0)
    return batch.ids, batch.lengths


def _arrow(frame: Any, column: str) -> pa.ChunkedArray:
    if isinstance(frame, pa.Table | pa.RecordBatch):
        names, take = frame.column_names, frame.column
    elif hasattr(frame, "to_arrow") and hasattr(frame, "get_column"):  # polars
        names, take = list(frame.columns), lambda name: frame.get_column(name).to_arrow()
    elif hasattr(frame, "iloc") and hasattr(frame, "columns"):  # pandas
        names, take = [str(name) for name in frame.columns], lambda name: pa.Array.from_pandas(frame[name])
    else:
        lazy = "; collect it first" if hasattr(frame, "collect_schema") else ""
        raise DataError(f"a table is pandas', polars' or Arrow's, found {type(frame).__name__}{lazy}")
    if names.count(column) != 1:
        raise DataError(f"no column {column!r} once; {there_are(names)}")
    try:
        found = take(column)
    except pa.ArrowException as error:
        raise DataError(f"column {column!r} is of mixed values: {str(error).splitlines()[0]}") from error
    return found if isinstance(found, pa.ChunkedArray) else pa.chunked_array([found])


def frame_of_profile(profile: AccessProfile) -> pa.Table:
    """See :meth:`AccessProfile.to_frame`."""
    counts = np.repeat(profile.counts, profile.rows)
    known = profile.row_counts is not None
    rows = np.asarray(profile.ranked_rows[: counts.size], np.int64) if known else None
    return pa.table(
        {
            "position": np.arange(counts.size),
            "row": pa.nulls(counts.size, pa.int64()) if rows is None else pa.array(rows),
            "count": counts,
            "reads_per_sample": counts / profile.num_samples,
        }
    )
