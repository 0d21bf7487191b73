"""Samples that are the distinct values of a column, which many rows may share: lengths, and which are held out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flexshard.errors import ProfileError
from flexshard.profiling.count.sample_pairs import SamplePairs
from flexshard.profiling.hashing import splitmix64, text_keys
from flexshard.profiling.moments import LengthMoments

__all__ = ["KeyedLengths", "held_out", "key_hashes"]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_COMPACT_KEYS = 4_000_000
_PAIRS = -1  # stream of hashes that no holdout has


class KeyedLengths:
    """Number of ids of each sample, where a sample is a distinct key that many rows may share.

    Attributes:
        pairs: which rows the samples that are counted contain.
    """

    def __init__(self, holdout: float = 0.0, seed: int = 0, *, compact_keys: int = _COMPACT_KEYS) -> None:
        """Lengths by key, of which equal ones are put together after every ``compact_keys`` rows or more."""
        self.holdout, self.seed, self._compact_keys = holdout, seed, compact_keys
        self.pairs = SamplePairs()
        self._parts: list[pa.Table] = []
        self._rows = 0  # of all parts
        self._most_rows = compact_keys

    def add(
        self,
        keys: pa.ChunkedArray,
        lengths: IntArray | None,
        rows: IntArray | None,
        unseen: BoolArray | None = None,
    ) -> None:
        """Add what samples have to their keys.

        Args:
            keys: of rows of a file.
            lengths: ids that each has; None where it is one.
            rows: of the table, which these ids name; None where they cannot be told.
            unseen: ids that are held out, if any; shape as of ``rows``.
        """
        if rows is not None:
            hashes = key_hashes(keys, _PAIRS)
            if lengths is not None:
                hashes = np.repeat(hashes, lengths)
            self.pairs.add(*((hashes, rows) if unseen is None else (hashes[~unseen], rows[~unseen])))
        numbers = np.ones(len(keys), np.int64) if lengths is None else lengths
        part = pa.table({"key": keys.combine_chunks() if keys.num_chunks != 1 else keys.chunk(0), "length": numbers})
        self._push(_lengths_by_key(part))

    def _push(self, part: pa.Table) -> None:
        self._parts.append(part)
        self._rows += part.num_rows
        if self._rows > self._most_rows:
            # Keys that are distinct do not become fewer: wait for as many again before the next try.
            self._most_rows = self._compact_keys + self.table().num_rows

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

    def samples(self, counts: IntArray) -> IntArray:
        """How many of the samples that are counted contain each row; see :meth:`SamplePairs.samples`."""
        return np.minimum(self.pairs.samples(counts), self.moments()[0].num_samples)

    def merged(self, other: KeyedLengths) -> KeyedLengths:
        """Lengths of the keys of both.

        Raises:
            ProfileError: the two hold out different samples.
        """
        if (self.holdout, self.seed) != (other.holdout, other.seed):
            raise ProfileError("profiles that hold out different samples do not add up; build both with one holdout")
        result = KeyedLengths(self.holdout, self.seed)
        result.pairs = self.pairs.merged(other.pairs)
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
    limit = np.uint64(min(int(share * 2**64), 2**64 - 1))
    return key_hashes(keys, seed) < limit


def key_hashes(keys: Any, seed: int) -> npt.NDArray[np.uint64]:
    """64-bit numbers of samples' keys; ``keys`` as for :func:`held_out`."""
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.combine_chunks()
    if isinstance(keys, pa.Array):
        if pa.types.is_integer(keys.type):
            keys = keys.to_numpy(zero_copy_only=False)
        else:
            offsets = np.frombuffer(keys.buffers()[1], np.int64)[keys.offset : keys.offset + len(keys) + 1]
            keys = text_keys(np.frombuffer(keys.buffers()[2] or b"", np.uint8), offsets)
    return np.asarray(splitmix64(keys, seed))
