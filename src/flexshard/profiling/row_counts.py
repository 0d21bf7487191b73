"""Counts by row, their histogram and their ranking, without comparison sorts of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard.errors import FlexShardError, ProfileError
from flexshard.profiling.hashing import splitmix64

__all__ = ["RowCounts", "as_array", "check_index", "checked_whole", "histogram"]

IntArray = npt.NDArray[np.int64]

# Counts below this are put in order by counting; the few above are sorted.
_SMALL = 1 << 16
_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class RowCounts:
    """Counts of rows: of row 0, 1, ... where ``rows`` is None, else of the rows named there.

    Attributes:
        counts: shape (n,).
        rows: distinct row ids, shape (n,), or None.
        held: counts of held-out samples, in a form of its own.
        samples: how many samples contain each row, in a form of its own; None where no sample repeats a row, or where
            it is not known.
    """

    counts: IntArray
    rows: IntArray | None = None
    held: RowCounts | None = None
    samples: RowCounts | None = None
    _cache: dict[str, tuple[IntArray, IntArray]] = field(default_factory=dict, repr=False, compare=False)
    _blocks: dict[tuple[int, int], IntArray] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def dense(cls, counts: IntArray) -> RowCounts:
        """Counts of row 0, 1, ..., shape (rows,)."""
        return cls(counts)

    @property
    def size(self) -> int:
        """One above the largest row that is named."""
        if self.rows is None:
            return int(self.counts.size)
        return int(self.rows.max(initial=-1)) + 1

    def to_dense(self, num_rows: int) -> IntArray:
        """Counts of every row; shape (num_rows,)."""
        dense = np.zeros(num_rows, np.int64)
        if self.rows is None:
            dense[: self.counts.size] = self.counts
        else:
            dense[self.rows] = self.counts
        return dense

    def in_blocks(self, block: int, number: int) -> IntArray:
        """Counts of each of the first ``number`` blocks of so many consecutive rows, added up; shape (number,)."""
        if (block, number) in self._blocks:  # every way of sharding asks, several times
            return self._blocks[block, number]
        found = self._blocks[block, number] = np.zeros(number, np.int64)
        if self.rows is None:
            starts = np.arange(0, min(self.counts.size, block * number), block)
            if starts.size:
                found[: starts.size] = np.add.reduceat(self.counts[: block * number], starts)
        else:
            at = self.rows // block
            np.add.at(found, at[at < number], self.counts[at < number])
        return found

    def ranked(self) -> tuple[IntArray, IntArray]:
        """Rows that were read and their counts, by descending count, then ascending row."""
        if "ranked" not in self._cache:
            rows = np.flatnonzero(self.counts) if self.rows is None else self.rows[self.counts > 0]
            counts = self.counts[self.counts > 0]
            if self.rows is not None and np.any(rows[:-1] > rows[1:]):
                by_row = np.argsort(rows, kind="stable")
                rows, counts = rows[by_row], counts[by_row]
            order = _descending(counts)
            self._cache["ranked"] = rows[order], counts[order]
        return self._cache["ranked"]

    def hottest(self, number: int, least: int) -> IntArray:
        """The first of the ranked rows, whose counts are all at least ``least``, without ranking the others."""
        if "ranked" in self._cache:
            return self._cache["ranked"][0][:number]
        at = np.flatnonzero(self.counts >= least)
        rows, counts = at if self.rows is None else self.rows[at], self.counts[at]
        above = counts > least
        ahead = rows[above][np.lexsort((rows[above], -counts[above]))]
        ties = rows[~above]
        missing = max(number - ahead.size, 0)
        ties = np.sort(ties if ties.size <= missing else np.partition(ties, missing)[:missing])
        return np.asarray(np.concatenate([ahead, ties])[:number])

    def digest(self) -> bytes:
        """A number that says which rows have which counts, in whatever form and order they are held."""
        read = np.flatnonzero(self.counts)
        rows = read if self.rows is None else self.rows[read]
        # Sums of mixed pairs do not depend on the order, so no ranking is needed.
        pair = splitmix64(rows, 1) ^ splitmix64(self.counts[read], 2)
        with np.errstate(over="ignore"):
            return np.array([splitmix64(pair, seed).sum(dtype=np.uint64) for seed in (3, 4)], "<u8").tobytes()

    def accesses_by_count(self, held: RowCounts, counts: IntArray) -> IntArray:
        """Sum of ``held`` over the rows of each of the distinct ``counts`` (descending), then over those of none."""
        size = max(self.size, held.size)
        mine, other = self.to_dense(size), held.to_dense(size)
        read = np.flatnonzero(other)
        group = counts.size - np.searchsorted(counts[::-1], mine[read], side="left") - 1
        group[mine[read] == 0] = counts.size
        return np.bincount(group, weights=other[read], minlength=counts.size + 1).astype(np.int64)


def histogram(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Distinct counts above 0, descending, and how many rows have each."""
    small = np.zeros(_SMALL, np.int64)
    large: list[IntArray] = []
    for start in range(0, counts.size, _BLOCK):  # blocks, so that no copy of a large table is made
        block = counts[start : start + _BLOCK]
        above = block >= _SMALL
        if above.any():
            large.append(block[above])
            block = block[~above]
        small += np.bincount(block, minlength=_SMALL)
    small[0] = 0
    values = np.flatnonzero(small)[::-1]
    high, numbers = np.unique(np.concatenate([np.zeros(0, np.int64), *large]), return_counts=True)
    return (
        np.concatenate([high[::-1], values]).astype(np.int64),
        np.concatenate([numbers[::-1], small[values]]).astype(np.int64),
    )


def _descending(counts: IntArray) -> IntArray:
    """Stable order of descending counts: a radix sort of 16-bit keys, then a sort of the few that do not fit."""
    keys = np.empty(counts.size, np.uint16)
    np.minimum(counts, _SMALL - 1, out=keys, casting="unsafe")
    # Complement turns ascending into descending and keeps ties in place; numpy sorts 16-bit keys by radix.
    order = np.argsort(np.invert(keys, out=keys), kind="stable")
    large = int(np.count_nonzero(counts >= _SMALL - 1))
    order[:large] = order[:large][np.argsort(-counts[order[:large]], kind="stable")]
    return order


def as_array(
    values: npt.ArrayLike, name: str, error_type: type[FlexShardError], dtype: npt.DTypeLike | None = None
) -> npt.NDArray[Any]:
    """As NumPy has it.

    Raises:
        error_type: lists of unequal lengths, masked entries, or what is no number where ``dtype`` wants them.
    """
    if np.ma.is_masked(values):
        raise error_type(f"{name} has masked entries; drop or fill them")
    try:
        return np.asarray(values, dtype)
    except (ValueError, TypeError, RuntimeError) as error:  # the last of tensors that want gradients
        raise error_type(f"{name} must be an array of numbers: {str(error).splitlines()[0]}") from error


def check_index(counts: object) -> None:
    """Refuse a pandas Series whose index is not 0, 1, ...: its values are not those of these rows.

    Raises:
        ProfileError: as ``value_counts()`` gives it, most frequent first.
    """
    index = getattr(counts, "index", None)
    if index is None or callable(index):
        return
    labels = np.asarray(index)
    if not np.array_equal(labels, np.arange(labels.size)):
        raise ProfileError(
            "counts has an index that is not 0, 1, 2, ..., and a count is of the row in whose place it stands; give"
            " counts.reindex(range(rows), fill_value=0), or counts.to_numpy() if the order is that of the rows"
        )


def checked_whole(values: npt.ArrayLike, name: str, *, least: int) -> IntArray:
    """One-dimensional whole numbers of at least ``least`` as int64.

    Raises:
        ProfileError: another shape, NaN, fractions, or smaller numbers; names the first.
    """
    array = as_array(values, name, ProfileError)
    if array.ndim != 1:
        raise ProfileError(f"{name} must be one-dimensional, found shape {array.shape}")
    if array.dtype.kind not in "iuf" and array.size:
        raise ProfileError(f"{name} must be whole numbers, found {array.dtype}")
    if array.dtype.kind == "f":
        bad = np.flatnonzero(~np.isfinite(array) | (array != np.floor(array)))
        if bad.size:
            raise ProfileError(
                f"{name}[{bad[0]}] is {array[bad[0]]}; expected a whole number (scale counts and num_samples alike)"
            )
    below = np.flatnonzero(array < least)
    if below.size:
        raise ProfileError(f"{name}[{below[0]}] is {array[below[0]]}; expected at least {least}")
    if array.dtype.kind in "uf" and array.size and float(array.max()) >= 2**63:
        raise ProfileError(f"{name} has a number of 2^63 or more; divide counts and num_samples by a common factor")
    return array.astype(np.int64)
