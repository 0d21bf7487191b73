"""Profiles of arrays of ids."""

from __future__ import annotations

import numpy.typing as npt

from flexshard.errors import DataError
from flexshard.profiling.count.burst_counter import BurstCounter
from flexshard.profiling.count.counter import IdCounter
from flexshard.profiling.count.id_batches import IdBatch
from flexshard.profiling.profile import AccessProfile
from flexshard.profiling.row_counts import as_array, checked_whole

__all__ = ["profile_arrays"]


def profile_arrays(
    ids: npt.ArrayLike, lengths: npt.ArrayLike | None, *, num_rows: int | None, hash: str | None, table: str
) -> AccessProfile:
    """See :meth:`AccessProfile.from_ids`."""
    array = as_array(ids, "ids", DataError)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise DataError(f"ids must be a one-dimensional array of integers, found {array.dtype} of shape {array.shape}")
    each = None if lengths is None else checked_whole(lengths, "lengths", least=0)
    if each is not None and int(each.sum()) != array.size:
        raise DataError(f"lengths add up to {int(each.sum()):,}, but there are {array.size:,} ids")
    counter = IdCounter(table, num_rows, hash)
    batch = IdBatch(array, each, "the array", 0)
    rows, bursts = counter.add(batch), BurstCounter()
    if rows is not None:
        bursts.add(batch.name, rows, each)
    return counter.profile(batch.moments(), bursts=bursts)
