"""Distinct counts and how many rows have each, from what people give."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexshard.errors import ProfileError
from flexshard.profiling.row_counts import as_array, checked_whole

__all__ = ["checked_histogram", "counts_of_probabilities"]

IntArray = npt.NDArray[np.int64]


def checked_histogram(counts: npt.ArrayLike, rows: npt.ArrayLike) -> tuple[IntArray, IntArray, int]:
    """Counts above 0, descending, the rows that have each, and all rows that were given.

    Raises:
        ProfileError: as :meth:`AccessProfile.from_histogram`.
    """
    values = checked_whole(counts, "counts", least=0)
    numbers = checked_whole(rows, "rows", least=0)
    if values.shape != numbers.shape:
        raise ProfileError(f"counts and rows differ in length: {values.size} and {numbers.size}")
    if float(numbers.sum(dtype=np.float64)) >= 2**62:
        raise ProfileError("more than 2^62 rows; check the histogram")
    given_rows = int(numbers.sum())
    kept = (values > 0) & (numbers > 0)
    values, numbers = values[kept], numbers[kept]
    if values.size > 1 and not np.all(values[:-1] > values[1:]):
        order = np.argsort(-values, kind="stable")
        values, numbers = values[order], numbers[order]
        twice = np.flatnonzero(values[:-1] == values[1:])
        if twice.size:
            raise ProfileError(f"count {values[twice[0]]} is given twice; add up its rows")
    return values, numbers, given_rows


def counts_of_probabilities(
    probabilities: npt.ArrayLike, rows: npt.ArrayLike | None, table: str
) -> tuple[IntArray, IntArray, int]:
    """Distinct counts, the rows that have each, and the number of samples in which they are counted: a power of two as
    large as 64-bit sums allow.

    Raises:
        ProfileError: as :meth:`AccessProfile.from_probabilities`.
    """
    p = as_array(probabilities, "probabilities", ProfileError, np.float64)
    numbers = np.ones(p.shape, np.int64) if rows is None else checked_whole(rows, "rows", least=0)
    if p.ndim != 1 or p.shape != numbers.shape:
        raise ProfileError(f"probabilities and rows must be of one length, found shapes {p.shape}, {numbers.shape}")
    bad = np.flatnonzero(~np.isfinite(p) | (p < 0))
    if bad.size:
        raise ProfileError(f"probability {bad[0]} is {p[bad[0]]}; expected a finite number of at least 0")
    unsorted = np.flatnonzero(p[:-1] < p[1:])
    if unsorted.size:
        k = int(unsorted[0])
        raise ProfileError(f"probabilities must not ascend, but {k + 1} is {p[k + 1]} after {p[k]}; sort them")
    with np.errstate(over="ignore"):
        expected = float(p @ numbers)
    if expected >= 2**60:
        raise ProfileError(f"probabilities add up to {expected:.3g} reads per sample; they are expected appearances")
    if expected <= 0:
        raise ProfileError(f"table {table!r} is never read; all its probabilities are 0")
    samples = 1 << int(np.clip(62 - np.ceil(np.log2(expected)), 1, 52))
    counts = np.rint(p * samples).astype(np.int64)
    starts = np.flatnonzero(np.concatenate([[True], counts[:-1] != counts[1:]]))
    return counts[starts], np.add.reduceat(numbers, starts), samples
