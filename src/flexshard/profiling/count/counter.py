"""Counting ids into one number per row, in memory that only the table's rows bound."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flexshard._internal import check_int
from flexshard.errors import DataError
from flexshard.profiling.count.burst_counter import BurstCounter
from flexshard.profiling.count.id_batches import IdBatch
from flexshard.profiling.count.keyed_lengths import KeyedLengths
from flexshard.profiling.hashing import check_hash, hash_to_rows
from flexshard.profiling.holdout import Holdout
from flexshard.profiling.moments import LengthMoments
from flexshard.profiling.profile import AccessProfile
from flexshard.profiling.row_counts import RowCounts

__all__ = ["IdCounter"]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Without num_rows the counts grow with the largest id; past this, ids are surely raw.
_MOST_INFERRED_ROWS = 1 << 28
_MOST_ROWS = 1 << 36


@dataclass
class IdCounter:
    """Counts per row of one table, added to batch by batch, and how many samples contain each.

    Attributes:
        table: name, for messages.
        num_rows: rows of the table; None to take one above the largest id.
        hash: name of the hash that folds raw ids, or None.
    """

    table: str
    num_rows: int | None = None
    hash: str | None = None
    counts: IntArray = field(init=False)
    _repeats: IntArray | None = field(init=False, default=None)
    _largest: int = field(init=False, default=-1)
    _bad: int = field(init=False, default=0)
    _first_bad: str = field(init=False, default="")
    _first_negative: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        check_hash(self.hash, self.num_rows)
        if self.num_rows is not None:
            self.num_rows = check_int(self.num_rows, "num_rows", DataError)
            if self.num_rows > _MOST_ROWS:
                raise DataError(f"num_rows is {self.num_rows:,}; counts of more than {_MOST_ROWS:,} rows are not kept")
        self.counts = np.zeros(self.num_rows if self.num_rows is not None else 1024, np.int64)

    def add(self, batch: IdBatch) -> IntArray | None:
        """Count a batch's ids; gives the rows that they name, as :meth:`rows_of`."""
        rows = self.rows_of(batch)
        if rows is not None:
            self._count(rows, batch.sample_of_ids())
        return rows

    def add_apart(self, batch: IdBatch, held: IntArray, unseen: BoolArray) -> tuple[IntArray | None, IntArray]:
        """Count a batch's ids, but those ``unseen`` into ``held``, which is returned as large as the counts, after the
        rows that they name.
        """
        rows = self.rows_of(batch)
        if held.size < self.counts.size:
            held = np.concatenate([held, np.zeros(self.counts.size - held.size, np.int64)])
        if rows is not None:
            samples = batch.sample_of_ids()
            self._count(rows[~unseen], None if samples is None else samples[~unseen])
            np.add.at(held, rows[unseen], 1)
        return rows, held

    def _count(self, rows: IntArray, samples: IntArray | None) -> None:
        np.add.at(self.counts, rows, 1)
        if samples is None:
            return
        pairs = np.sort(samples * self.counts.size + rows)
        repeated = pairs[1:][pairs[1:] == pairs[:-1]] % self.counts.size
        if repeated.size:
            if self._repeats is None:
                self._repeats = np.zeros(self.counts.size, np.int64)
            elif self._repeats.size < self.counts.size:
                self._repeats = np.concatenate(
                    [self._repeats, np.zeros(self.counts.size - self._repeats.size, np.int64)]
                )
            np.add.at(self._repeats, repeated, 1)

    @property
    def samples(self) -> IntArray | None:
        """How many samples contain each row, where they are rows of the data; None where that is each one's count."""
        if self._repeats is None:
            return None
        samples = self.counts.copy()
        samples[: self._repeats.size] -= self._repeats
        return samples

    def rows_of(self, batch: IdBatch) -> IntArray | None:
        """The rows that a batch's ids name; None where some are outside the table, which :meth:`check` reports."""
        if self.hash is not None and self.num_rows is not None:
            return hash_to_rows(batch.ids, self.num_rows)
        if batch.ids.size and not self._in_range(batch):
            return None
        return batch.ids.astype(np.int64, copy=False)

    def _in_range(self, batch: IdBatch) -> bool:
        """Whether all ids are rows of the table, which grows if it may; if not, notes them for :meth:`check`."""
        ids = batch.ids
        low, high = int(ids.min()), int(ids.max())
        limit = self.num_rows if self.num_rows is not None else _MOST_INFERRED_ROWS
        if low < 0 or high >= limit:
            outside = (ids < 0) | (ids >= limit)
            if not self._bad:
                first = int(np.flatnonzero(outside)[0])
                self._first_negative = bool(ids[first] < 0)
                self._first_bad = f"{int(ids[first])} in {batch.name}, row {batch.row_of(first):,}"
            self._bad += int(np.count_nonzero(outside))
            return False
        if self.num_rows is None and high >= self.counts.size:
            more = max(high + 1 - self.counts.size, self.counts.size)
            self.counts = np.concatenate([self.counts, np.zeros(more, np.int64)])
        self._largest = max(self._largest, high)
        return True

    @property
    def size(self) -> int:
        """Rows of the table, as far as they are known."""
        return self.num_rows if self.num_rows is not None else self._largest + 1

    def check(self) -> None:
        """Raise a DataError if any id was outside the table."""
        if self._bad:
            limit = f"[0, {self.num_rows:,})" if self.num_rows is not None else "[0, 2^28)"
            remedy = "raise num_rows (--rows)" if self.num_rows is not None else "give num_rows (--rows)"
            if self._first_negative:
                remedy = "drop negative ids (they often mean padding)"
            raise DataError(
                f"table {self.table!r}: {self._bad:,} ids are outside {limit}, the first is {self._first_bad};"
                f" {remedy}, or fold raw ids with hash='splitmix64' (--hash splitmix64)"
            )

    def profile(
        self,
        lengths: LengthMoments,
        *,
        held: IntArray | None = None,
        holdout: Holdout | None = None,
        sample_key: str | None = None,
        sample_keys: KeyedLengths | None = None,
        bursts: BurstCounter | None = None,
    ) -> AccessProfile:
        """The profile of everything counted.

        Raises:
            DataError: ids outside the table.
            ProfileError: no samples, or no accesses.
        """
        self.check()
        samples = self.samples if sample_keys is None else sample_keys.samples(self.counts)
        return AccessProfile.from_row_counts(
            RowCounts.dense(self.counts[: self.size]),
            lengths.num_samples,
            self.size,
            lengths,
            held=None if held is None else RowCounts.dense(held[: self.size]),
            samples=None if samples is None else RowCounts.dense(samples[: self.size]),
            holdout=holdout,
            table=self.table,
            sample_key=sample_key,
            sample_keys=sample_keys,
            bursts=None if bursts is None else bursts.bursts(self.counts),
        )
