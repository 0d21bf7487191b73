"""Lists that were shifted or have grown, as runs of one buffer: exact, compiled or in NumPy (RecD paper, section 7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard._internal.checks import check_int
from flexshard._internal.jagged import IntArray, JaggedArray, as_unsigned, compiled_kernels
from flexshard.errors import DataError

__all__ = ["check_sharing", "run_layout", "shared_runs"]

AnyArray = npt.NDArray[Any]


def shared_runs(rows: JaggedArray, *, newest: str = "last", max_shift: int = 16) -> tuple[AnyArray, IntArray]:
    """One buffer in which every list is a run, where a list goes on from the one before it (RecD paper, section 7).

    A list that was shifted (some of the oldest values dropped, new ones added) shares what stayed with the list
    before; anything else starts afresh, so the result is exact whatever the lists are.

    Args:
        rows: lists, those of one session one after the other; weights are not read.
        newest: at which end new values are added, "last" or "first".
        max_shift: most values that may have been dropped for a shift to be found.

    Returns:
        values of the buffer, and where each row's run starts in it; shape (rows,). Its length is the row's own.

    Raises:
        DataError: ``newest`` is neither.
    """
    places, starts, _ = run_layout([rows], newest=newest, max_shift=max_shift)
    return rows.values[places], starts


def run_layout(
    columns: Sequence[JaggedArray], *, newest: str = "last", max_shift: int = 16, compiled: bool | None = None
) -> tuple[IntArray, IntArray, IntArray]:
    """As :func:`shared_runs`, of columns that have as many values in every row and whose runs are to be the same.

    Args:
        columns: lists, of equal lengths row by row.
        newest, max_shift: as there.
        compiled: whether to use compiled loops; by default where numba is installed and rows are enough to pay for
            loading them.

    Returns:
        where each of the buffer's values stands among the columns' values, shape (N,); where each row's run starts in
        the buffer, shape (rows,); and how many of the buffer's values each row brought, shape (rows,).

    Raises:
        DataError: as :func:`check_sharing`.
    """
    check_sharing(newest, max_shift)
    offsets = columns[0].offsets
    lengths = np.diff(offsets)
    values = [as_unsigned(column.values) for column in columns]
    mirror = None if newest == "last" else _mirrored(offsets)
    seen = values if mirror is None else [each[mirror] for each in values]
    kernels = compiled_kernels(lengths.size, compiled)
    kept = _overlaps(seen, offsets, max_shift) if kernels is None else kernels.overlaps(seen, offsets, max_shift)
    fresh = lengths - kept  # of every row, only what the row before does not have
    ends = np.cumsum(fresh)
    source = np.repeat(offsets[1:] - ends, fresh) + np.arange(int(ends[-1]) if ends.size else 0)
    if mirror is None:
        return source, ends - lengths, fresh
    return mirror[source][::-1].copy(), source.size - ends, fresh


def check_sharing(newest: str, max_shift: int) -> None:
    """Raise DataError unless lists can go on from others so."""
    if newest not in ("last", "first"):
        raise DataError(f"newest is 'last' or 'first', found {newest!r}")
    check_int(max_shift, "max_shift", DataError, least=0)


def _mirrored(offsets: IntArray) -> IntArray:
    """Places of every row's values back to front."""
    lengths = np.diff(offsets)
    return np.repeat(offsets[:-1] + offsets[1:] - 1, lengths) - np.arange(int(lengths.sum()))


def _overlaps(columns: Sequence[AnyArray], offsets: IntArray, max_shift: int) -> IntArray:
    """How many values at the start of each row are, in order, the last ones of the row before, in all columns."""
    lengths = np.diff(offsets)
    overlaps = np.zeros(lengths.size, np.int64)
    pairs = np.flatnonzero((lengths[1:] > 0) & (lengths[:-1] > 0)) + 1
    longest = int(lengths.max(initial=0))
    for shift in range(min(max_shift + 1, longest)):
        if not pairs.size:
            break
        left = lengths[pairs - 1] - shift  # of the row before
        fits = (left > 0) & (left <= lengths[pairs])
        candidates = pairs[fits]
        begins = offsets[candidates - 1] + shift
        likely = columns[0][begins] == columns[0][offsets[candidates]]
        candidates, begins, size = candidates[likely], begins[likely], left[fits][likely]
        before = np.repeat(begins, size) + _counting(size)
        after = np.repeat(offsets[candidates], size) + _counting(size)
        ends = np.cumsum(size)
        agree = np.ones(before.size, bool)
        for values in columns:
            agree &= values[before] == values[after]
        same = np.concatenate([[0], np.cumsum(agree)])
        equal = same[ends] - same[ends - size] == size
        overlaps[candidates[equal]] = size[equal]
        pairs = pairs[overlaps[pairs] == 0]
    return overlaps


def _counting(sizes: IntArray) -> IntArray:
    """0 to size - 1 for each size, one after the other."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
