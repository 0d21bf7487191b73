"""Rows of several widths in one buffer, so that one all-to-all carries them all (NumPy only).

A *class* is tables of one dimension and type; a *segment* is what goes to one rank. In a buffer segment follows
segment, and in a segment class follows class, each from a multiple of its row's bytes on: a class's rows, wherever they
lie, are rows of one view of the buffer. Both ends of a segment know its counts, and so where everything in it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, lcm

import numpy as np
import numpy.typing as npt

__all__ = ["Frame", "bundles", "class_runs", "expected_padding", "segment_bytes"]

IntArray = npt.NDArray[np.int64]
# A segment is padded to the least common multiple of its rows' bytes, which powers of two keep at that of the widest.
_LARGEST_PADDING_BYTES = 1 << 13


def bundles(row_bytes: Sequence[int]) -> list[tuple[int, ...]]:
    """Classes that travel in one buffer, as indices into ``row_bytes``: all of them, unless their widths share so few
    factors that the padding between them would be noticed.
    """
    result: list[list[int]] = []
    for index in np.argsort(-np.asarray(row_bytes), kind="stable").tolist():
        for bundle in result:
            if lcm(row_bytes[index], *(row_bytes[other] for other in bundle)) <= max(
                _LARGEST_PADDING_BYTES, row_bytes[bundle[0]]
            ):
                bundle.append(index)
                break
        else:
            result.append([index])
    return [tuple(bundle) for bundle in result]  # the widest first, which takes least padding


@dataclass(frozen=True)
class Frame:
    """Where rows lie in a buffer.

    Attributes:
        counts: rows of each segment and class; shape (S, K).
        row_bytes: of each class; shape (K,).
    """

    counts: IntArray
    row_bytes: tuple[int, ...]

    @cached_property
    def _offsets(self) -> tuple[IntArray, IntArray]:
        """First byte of each segment's class, shape (S, K), and of each segment with the end, shape (S + 1,)."""
        inside, sizes = _inside(self.counts, self.row_bytes)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        return ends[:-1, None] + inside, ends

    @property
    def ends(self) -> IntArray:
        """First byte of each segment, and the end of the last; shape (S + 1,)."""
        return self._offsets[1]

    @property
    def nbytes(self) -> int:
        """Of the buffer."""
        return int(self.ends[-1])

    @property
    def splits(self) -> list[int]:
        """Bytes of each segment."""
        splits: list[int] = np.diff(self.ends).tolist()
        return splits

    @property
    def packed(self) -> bool:
        """Whether the buffer is rows of one class and nothing else."""
        return len(self.row_bytes) == 1

    @property
    def uniform(self) -> bool:
        """Whether the buffer is rows of one width and nothing else."""
        return len(set(self.row_bytes)) == 1

    @cached_property
    def first_rows(self) -> IntArray:
        """First row of each segment's class in the class's view; shape (S, K)."""
        rows: IntArray = self._offsets[0] // np.array(self.row_bytes)
        return rows

    @cached_property
    def runs(self) -> list[tuple[list[int], list[int]]]:
        """Of each class, where its run of each segment begins in its view, and how many rows that has."""
        return class_runs(self.first_rows, self.counts)

    def part(self, segments: slice) -> Frame:
        """Of some segments, in a buffer of their own: each begins where its offsets do not depend on those before."""
        first, ends = self._offsets
        part = Frame(self.counts[segments], self.row_bytes)
        start = ends[segments.start]
        part.__dict__["_offsets"] = first[segments] - start, ends[segments.start : segments.stop + 1] - start
        return part


def class_runs(first: IntArray, counts: IntArray) -> list[tuple[list[int], list[int]]]:
    """Of each class, the first of each segment and how many there are; both of shape (S, K)."""
    firsts: list[list[int]] = first.T.tolist()
    numbers: list[list[int]] = counts.T.tolist()
    return list(zip(firsts, numbers, strict=True))


def segment_bytes(counts: IntArray, row_bytes: Sequence[int]) -> IntArray:
    """Bytes of segments of one buffer with so many rows of each class.

    Args:
        counts: shape (..., K).
        row_bytes: of each class; shape (K,).
    """
    return _inside(counts, row_bytes)[1]


def expected_padding(row_bytes: Sequence[int]) -> float:
    """Bytes between and behind rows of several classes in a segment, on average: where a class begins and where the
    segment ends are taken to be equally far from each place where they may.

    Args:
        row_bytes: of each class; shape (K,).
    """
    if len(row_bytes) < 2:
        return 0.0
    padding, shared = 0.0, row_bytes[0]
    for width in row_bytes[1:]:
        shared = gcd(shared, width)
        padding += (width - shared) / 2
    return padding + (lcm(*row_bytes) - shared) / 2


def _inside(counts: IntArray, row_bytes: Sequence[int]) -> tuple[IntArray, IntArray]:
    """First byte of each class in its segment, shape (..., K), and the segments' bytes, shape (...)."""
    first = np.empty_like(counts)
    cursor = np.zeros(counts.shape[:-1], np.int64)
    for index, width in enumerate(row_bytes):
        first[..., index] = -(-cursor // width) * width
        cursor = np.where(counts[..., index] > 0, first[..., index] + counts[..., index] * width, cursor)
    align = lcm(*row_bytes)
    return first, -(-cursor // align) * align
