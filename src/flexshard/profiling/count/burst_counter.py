"""Finding distinct and hottest rows of stretches of consecutive samples, while samples go by."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexshard.profiling.bursts import MOST_WINDOWS, TOP_ROWS, Bursts, Windows

__all__ = ["BurstCounter"]

IntArray = npt.NDArray[np.int64]

_SIZES = tuple(64 * 4**power for power in range(7))  # to 262,144 samples
# Of a window, larger ones are not looked at; and of all that are kept of a size, beyond a few: they are sorted one by
# one, which takes longer than counting them.
_MOST_IDS, _FEW_WINDOWS = 1 << 22, 16
# More ids than these are sorted only where their last 14 bits are among the most frequent.
_SORTED_IDS, _BUCKETS, _HOT_BUCKETS = 1 << 13, 1 << 14, 64
_HASH = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: its products' first bits are even (Knuth)


class BurstCounter:
    """Windows of samples in the order of their files; none crosses from one file to the next.

    Of each size at most 512 are kept at a time, and at most so many as have four million ids, evenly spaced: long data
    cost little more than short ones.
    """

    def __init__(self) -> None:
        self._of_size = [_OfSize(size) for size in _SIZES]
        self._file: str | None = None

    def add(self, file: str, rows: IntArray, lengths: IntArray | None) -> None:
        """Rows that the next samples of a file read, and how many each; None where it is one."""
        if file != self._file:
            self._file = file
            for one in self._of_size:
                one.restart()
        ends = np.arange(rows.size + 1) if lengths is None else np.concatenate([[0], np.cumsum(lengths)])
        for one in self._of_size:
            one.add(rows, ends)

    def bursts(self, counts: IntArray) -> Bursts:
        """What was found, in data that read each row so often (shape (E,))."""
        return Bursts(tuple(one.windows(counts) for one in self._of_size if one.number))


def _often(ids: IntArray) -> IntArray:
    """Those ids among which the most frequent ones are: of many, as counting is far faster than sorting, those in the
    fullest buckets. A row is never more frequent than its bucket.
    """
    if ids.size <= _SORTED_IDS:
        return ids
    bucket = (ids & (_BUCKETS - 1)).astype(np.intp)
    counts = np.bincount(bucket, minlength=_BUCKETS)
    # As many buckets as are wanted, and those that are as full as the last of them.
    at_least = np.cumsum(np.bincount(counts)[::-1])[::-1]
    least = int(np.flatnonzero(at_least >= _HOT_BUCKETS)[-1])
    return ids[(counts >= least)[bucket]]


def _distinct(ids: IntArray) -> int:
    """How many rows there are among ids: of many, those that a hash chooses are counted, some 8,000 or more."""
    parts = max(ids.size // _SORTED_IDS, 1).bit_length() - 1
    if parts:
        ids = ids[(ids.astype(np.uint64) * _HASH) >> np.uint64(64 - parts) == 0]
    return int(np.unique(ids).size << parts)


class _OfSize:
    """Windows of one size: of those that are a multiple of a stride, the hottest rows."""

    def __init__(self, size: int) -> None:
        self.size, self._stride = size, 1
        self._index = self._at = 0  # the present window, and how many of its samples have come
        self._pending: list[IntArray] = []
        self._found: list[tuple[int, IntArray, IntArray, int]] = []
        self._gave_up, self._ids = False, 0
        self._before = np.zeros(0, np.int64), np.zeros(0, np.int64)  # rows and counts of the last window

    @property
    def number(self) -> int:
        return 0 if self._gave_up else len(self._found)

    def restart(self) -> None:
        self._at, self._pending = 0, []
        self._before = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def add(self, rows: IntArray, ends: IntArray) -> None:
        first, samples = 0, ends.size - 1
        while first < samples and not self._gave_up:
            skipped = -self._index % self._stride * self.size - self._at
            if skipped > 0:
                taken = min(skipped, samples - first)
                whole, self._at = divmod(self._at + taken, self.size)
                self._index += whole
            else:
                taken = min(self.size - self._at, samples - first)
                self._pending.append(rows[ends[first] : ends[first + taken]])
                self._at += taken
                self._gave_up = sum(part.size for part in self._pending) > _MOST_IDS
                if self._at == self.size and not self._gave_up:
                    self._finish()
            first += taken

    def _finish(self) -> None:
        """Keep the rows that the window reads most, and those that it reads most beyond the window before, half of
        each: rows that are always hot may all be where nobody serves them.
        """
        ids = np.concatenate(self._pending)
        self._index, self._at, self._pending = self._index + 1, 0, []
        rows, counts = np.unique(_often(ids), return_counts=True)
        before, often = self._before
        at = np.minimum(np.searchsorted(before, rows), max(before.size - 1, 0))
        known = before[at] == rows if before.size else np.zeros(rows.size, bool)
        beyond = counts - np.where(known, often[at] if before.size else 0, 0)
        self._before = rows, counts
        half = np.argsort(-counts, kind="stable")[: TOP_ROWS // 2]
        beyond[half] = counts.max(initial=0) + 1
        kept = np.argsort(-beyond, kind="stable")[:TOP_ROWS]
        kept = kept[np.lexsort((rows[kept], -counts[kept]))]
        self._found.append((ids.size, rows[kept], counts[kept], _distinct(ids)))
        self._ids += ids.size
        number = len(self._found)
        if number > 2 * MOST_WINDOWS or (number > _FEW_WINDOWS and self._ids > _MOST_IDS):
            self._found, self._stride = self._found[::2], 2 * self._stride
            self._ids = sum(size for size, *_ in self._found)

    def windows(self, totals: IntArray) -> Windows:
        rows = np.full((len(self._found), TOP_ROWS), -1, np.int64)
        counts = np.zeros_like(rows)
        for index, (_, hottest, often, _) in enumerate(self._found):
            rows[index, : hottest.size], counts[index, : often.size] = hottest, often
        lengths, distinct = (np.array([one[part] for one in self._found], np.int64) for part in (0, 3))
        # An estimate may be above what there is.
        distinct = np.minimum(distinct, np.minimum(lengths, totals.size))
        return Windows(self.size, lengths, rows, counts, counts, distinct).thinned().with_totals(totals)
