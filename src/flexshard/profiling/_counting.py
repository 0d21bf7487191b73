"""Counting ids into one number per row, in memory that only the table's rows bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flexshard._values import whole
from flexshard.errors import DataError, ProfileError
from flexshard.profiling._hashing import HASHES, hash_to_rows, splitmix64, text_keys
from flexshard.profiling._ids import IdBatch
from flexshard.profiling._moments import LengthMoments
from flexshard.profiling._profile import AccessProfile, Holdout
from flexshard.profiling._ranking import RowCounts

__all__ = ["IdCounter", "KeyedLengths", "held_out"]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Without num_rows the counts grow with the largest id; past this, ids are surely raw.
_MOST_INFERRED_ROWS = 1 << 28
_MOST_ROWS = 1 << 36
_COMPACT_KEYS = 4_000_000


@dataclass
class IdCounter:
    """Counts per row of one table, added to batch by batch.

    Attributes:
        table: name, for messages.
        num_rows: rows of the table; None to take one above the largest id.
        hash: name of the hash that folds raw ids, or None.
    """

    table: str
    num_rows: int | None = None
    hash: str | None = None
    counts: IntArray = field(init=False)
    _largest: int = field(init=False, default=-1)
    _bad: int = field(init=False, default=0)
    _first_bad: str = field(init=False, default="")
    _first_negative: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.hash is not None and self.hash not in HASHES:
            raise DataError(f"no hash is called {self.hash!r}; there are {', '.join(HASHES)}")
        if self.hash is not None and self.num_rows is None:
            raise DataError("hashing needs the number of rows to fold the ids into; give num_rows (--rows)")
        if self.num_rows is not None:
            self.num_rows = whole(self.num_rows, "num_rows", DataError)
            if self.num_rows > _MOST_ROWS:
                raise DataError(f"num_rows is {self.num_rows:,}; counts of more than {_MOST_ROWS:,} rows are not kept")
        self.counts = np.zeros(self.num_rows if self.num_rows is not None else 1024, np.int64)

    def add(self, batch: IdBatch) -> None:
        """Count a batch's ids."""
        rows = self.rows_of(batch)
        if rows is not None:
            np.add.at(self.counts, rows, 1)

    def add_apart(self, batch: IdBatch, held: IntArray, unseen: BoolArray) -> IntArray:
        """Count a batch's ids, but those ``unseen`` into ``held``, which is returned as large as the counts."""
        rows = self.rows_of(batch)
        if held.size < self.counts.size:
            held = np.concatenate([held, np.zeros(self.counts.size - held.size, np.int64)])
        if rows is not None:
            np.add.at(self.counts, rows[~unseen], 1)
            np.add.at(held, rows[unseen], 1)
        return held

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
    ) -> AccessProfile:
        """The profile of everything counted.

        Raises:
            DataError: ids outside the table.
            ProfileError: no samples, or no accesses.
        """
        self.check()
        return AccessProfile.from_row_counts(
            RowCounts.dense(self.counts[: self.size]),
            lengths.num_samples,
            self.size,
            lengths,
            held=None if held is None else RowCounts.dense(held[: self.size]),
            holdout=holdout,
            table=self.table,
            sample_key=sample_key,
            sample_keys=sample_keys,
        )


class KeyedLengths:
    """Number of ids of each sample, where a sample is a distinct key that many rows may share."""

    def __init__(self, holdout: float = 0.0, seed: int = 0) -> None:
        self.holdout, self.seed = holdout, seed
        self._parts: list[pa.Table] = []
        self._rows = 0  # of all parts
        self._most_rows = _COMPACT_KEYS

    def add(self, keys: pa.ChunkedArray, lengths: IntArray | None) -> None:
        """Add the lengths of rows to their keys (1 each where ``lengths`` is None)."""
        numbers = np.ones(len(keys), np.int64) if lengths is None else lengths
        part = pa.table({"key": keys.combine_chunks() if keys.num_chunks != 1 else keys.chunk(0), "length": numbers})
        self._push(_lengths_by_key(part))

    def _push(self, part: pa.Table) -> None:
        self._parts.append(part)
        self._rows += part.num_rows
        if self._rows > self._most_rows:
            # Keys that are distinct do not become fewer: wait for as many again before the next try.
            self._most_rows = _COMPACT_KEYS + self.table().num_rows

    def table(self) -> pa.Table:
        """Distinct keys and their lengths."""
        if len(self._parts) > 1:
            self._parts = [_lengths_by_key(pa.concat_tables(self._parts))]
            self._rows = self._parts[0].num_rows
        return self._parts[0]

    def moments(self) -> tuple[LengthMoments, LengthMoments]:
        """Moments over the samples that are counted, and over those held out."""
        table = self.table()
        lengths = table.column("length").to_numpy()
        if not self.holdout:
            return LengthMoments.of(lengths), LengthMoments()
        unseen = held_out(table.column("key"), self.holdout, self.seed)
        return LengthMoments.of(lengths[~unseen]), LengthMoments.of(lengths[unseen])

    def merged(self, other: KeyedLengths) -> KeyedLengths:
        """Lengths of the keys of both.

        Raises:
            ProfileError: the two hold out different samples.
        """
        if (self.holdout, self.seed) != (other.holdout, other.seed):
            raise ProfileError("profiles that hold out different samples do not add up; build both with one holdout")
        result = KeyedLengths(self.holdout, self.seed)
        for part in (self.table(), other.table()):
            result._push(part)
        return result


def _lengths_by_key(table: pa.Table) -> pa.Table:
    return table.group_by("key").aggregate([("length", "sum")]).rename_columns(["key", "length"])


def held_out(keys: Any, share: float, seed: int) -> BoolArray:
    """Which samples a holdout keeps: those whose key hashes to the lowest ``share`` of 64-bit numbers.

    Args:
        keys: Arrow or numpy integers, or Arrow's large binaries; shape (n,).
    """
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.combine_chunks()
    if isinstance(keys, pa.Array):
        if pa.types.is_integer(keys.type):
            keys = keys.to_numpy(zero_copy_only=False)
        else:
            offsets = np.frombuffer(keys.buffers()[1], np.int64)[keys.offset : keys.offset + len(keys) + 1]
            keys = text_keys(np.frombuffer(keys.buffers()[2] or b"", np.uint8), offsets)
    limit = np.uint64(min(int(share * 2**64), 2**64 - 1))
    return np.asarray(splitmix64(keys, seed) < limit)
