"""Which samples contain a row, where a sample is a key that many rows of the files may share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexshard.profiling.hashing import splitmix64

__all__ = ["SamplePairs"]

IntArray = npt.NDArray[np.int64]
HashArray = npt.NDArray[np.uint64]

_MOST_PAIRS = 1 << 23
_EVERY_KEY = 1 << 64


class SamplePairs:
    """Distinct pairs of (sample, row) and how often each occurs: of all samples while they are few, else of those whose
    keys hash to the lowest numbers. Which these are depends on the data, not on their order.
    """

    def __init__(self, *, most: int = _MOST_PAIRS) -> None:
        """Keep about ``most`` pairs."""
        self._most, self._below = most, _EVERY_KEY
        empty = np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._parts: list[tuple[HashArray, IntArray, IntArray]] = [empty]
        self._waiting = 0

    @property
    def is_exact(self) -> bool:
        """Whether the pairs of all samples are known."""
        return self._below == _EVERY_KEY

    def add(self, keys: HashArray, rows: IntArray) -> None:
        """Accesses: the hash of each one's sample and its row; shape (n,) both."""
        self._push(*_distinct(*self._kept(keys, rows, np.ones(rows.size, np.int64))))

    def merged(self, other: SamplePairs) -> SamplePairs:
        """Pairs of both."""
        result = SamplePairs(most=self._most)
        result._below = min(self._below, other._below)
        for pairs in (self, other):
            for part in pairs._parts:
                result._push(*result._kept(*part))
        return result

    def samples(self, counts: IntArray) -> IntArray:
        """How many samples contain each row.

        Args:
            counts: accesses of each row; shape (rows,).

        Returns:
            exact where :attr:`is_exact`; else scaled by how often rows of about the same count repeat within a sample.
        """
        self._compact()
        _, rows, times = self._parts[0]
        if self.is_exact:
            return np.bincount(rows, minlength=counts.size).astype(np.int64)
        bucket = np.frexp(counts.astype(np.float64))[1]
        pairs = np.bincount(bucket[rows], minlength=65)
        accesses = np.bincount(bucket[rows], weights=times, minlength=65)
        share = np.divide(pairs, accesses, out=np.ones(65), where=accesses > 0)
        estimate = np.rint(counts * share[bucket]).astype(np.int64)
        return np.asarray(np.clip(estimate, np.minimum(counts, 1), counts))

    def _kept(self, keys: HashArray, rows: IntArray, times: IntArray) -> tuple[HashArray, IntArray, IntArray]:
        if self.is_exact:
            return keys, rows, times
        kept = keys < np.uint64(self._below)
        return keys[kept], rows[kept], times[kept]

    def _push(self, keys: HashArray, rows: IntArray, times: IntArray) -> None:
        self._parts.append((keys, rows, times))
        self._waiting += rows.size
        if self._waiting > self._most:
            self._compact()

    def _compact(self) -> None:
        if len(self._parts) > 1:
            whole = (np.concatenate(arrays) for arrays in zip(*self._parts, strict=True))
            self._parts = [_distinct(*whole)]
        while self._parts[0][1].size > self._most:
            self._below //= 2
            self._parts = [self._kept(*self._parts[0])]
        self._waiting = 0


def _distinct(keys: HashArray, rows: IntArray, times: IntArray) -> tuple[HashArray, IntArray, IntArray]:
    """Every pair once."""
    pair = keys ^ splitmix64(rows, 1)
    order = np.argsort(pair)
    in_order = pair[order]
    first = np.flatnonzero(np.concatenate([[True], in_order[1:] != in_order[:-1]])) if order.size else order
    total = np.add.reduceat(times[order], first) if first.size else times
    return keys[order[first]], rows[order[first]], total
