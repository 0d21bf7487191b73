"""Reads of near columns as one (DPP paper, section 4.2.3), and what reads take of a disk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexshard._internal import check_finite
from flexshard.errors import DataError

__all__ = ["Disk", "ReadCost", "merged_reads", "read_cost"]

IntArray = npt.NDArray[np.int64]
MOST_BYTES = 32 << 20  # of one read, so that several run at once where that helps


@dataclass(frozen=True)
class Disk:
    """What reading takes: a wait before every read, and a rate. By default the paper's representative disk.

    Attributes:
        seek_seconds: before each read.
        bytes_per_s: from then on.
    """

    seek_seconds: float = 0.012
    bytes_per_s: float = 200e6

    def __post_init__(self) -> None:
        check_finite(self.seek_seconds, "seek_seconds", DataError)
        if self.seek_seconds < 0 or not check_finite(self.bytes_per_s, "bytes_per_s", DataError) > 0:
            raise DataError(f"a disk seeks in 0 s or more and reads more than nothing per second, found {self}")

    @property
    def break_even_gap(self) -> float:
        """Bytes that are read in the time of a seek: the widest gap that is better read than skipped."""
        return self.seek_seconds * self.bytes_per_s

    def seconds(self, reads: float, nbytes: float) -> float:
        """That reads of so many bytes together take."""
        return reads * self.seek_seconds + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class ReadCost:
    """What was, or would be, asked of storage. Adds up.

    Attributes:
        reads: issued.
        bytes_wanted: of the columns that are used.
        bytes_read: those and what lies in gaps.
    """

    reads: int = 0
    bytes_wanted: int = 0
    bytes_read: int = 0

    def __add__(self, other: ReadCost) -> ReadCost:
        return ReadCost(
            self.reads + other.reads, self.bytes_wanted + other.bytes_wanted, self.bytes_read + other.bytes_read
        )

    @property
    def over_read(self) -> float:
        """Bytes read for nothing, per byte that was wanted."""
        return self.bytes_read / self.bytes_wanted - 1 if self.bytes_wanted else 0.0

    def seconds(self, disk: Disk) -> float:
        """That a disk takes for it."""
        return disk.seconds(self.reads, self.bytes_read)


def merged_reads(starts: IntArray, sizes: IntArray, gap: float, *, most: int = MOST_BYTES) -> tuple[IntArray, IntArray]:
    """Reads that cover some stretches of a file, in its order.

    Args:
        starts, sizes: of the stretches in bytes, which do not overlap; shape (N,).
        gap: bytes between two stretches up to which one read takes both.
        most: bytes of one read, unless one stretch alone has more.

    Returns:
        Starts and sizes of the reads; shape (reads,).
    """
    order = np.argsort(starts, kind="stable")
    first, end = starts[order], starts[order] + sizes[order]
    if not first.size:
        return first, end
    is_new = np.ones(first.size, bool)
    is_new[1:] = first[1:] - end[:-1] > gap
    begins = np.flatnonzero(is_new)
    ends = end[np.append(begins[1:], first.size) - 1]
    for run in np.flatnonzero(ends - first[begins] > most):
        place, last = begins[run], np.append(begins, first.size)[run + 1]
        while (place := max(place + 1, np.searchsorted(end, first[place] + most, side="right"))) < last:
            is_new[place] = True
    begins = np.flatnonzero(is_new)
    ends = end[np.append(begins[1:], first.size) - 1]
    return first[begins], ends - first[begins]


def read_cost(starts: IntArray, sizes: IntArray, gap: float) -> ReadCost:
    """Of reading some stretches of a file, merged over gaps of up to ``gap`` bytes."""
    _, merged = merged_reads(starts, sizes, gap)
    return ReadCost(int(merged.size), int(sizes.sum()), int(merged.sum()))
