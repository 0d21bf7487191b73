"""Moments of a feature's length: how many ids a sample has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["LengthMoments"]


@dataclass(frozen=True)
class LengthMoments:
    """Sums over samples of the number of ids in each, as exact integers, so that they add.

    Attributes:
        num_samples: samples counted.
        total: sum of lengths.
        total_squares: sum of squared lengths.
        maximum: longest length.
    """

    num_samples: int = 0
    total: int = 0
    total_squares: int = 0
    maximum: int = 0

    @classmethod
    def of(cls, lengths: npt.NDArray[np.integer]) -> LengthMoments:
        """Moments of an array of lengths, shape (samples,)."""
        longest = int(lengths.max(initial=0))
        # Squares of up to 2^31 in blocks of at most 2^31 samples would overflow only past 2^93 accesses.
        if longest < 1 << 20:
            squares = int(np.square(lengths.astype(np.int64)).sum())
        else:
            squares = sum(int(length) ** 2 for length in lengths)
        return cls(int(lengths.size), int(lengths.sum(dtype=np.int64)), squares, longest)

    def __add__(self, other: LengthMoments) -> LengthMoments:
        return LengthMoments(
            self.num_samples + other.num_samples,
            self.total + other.total,
            self.total_squares + other.total_squares,
            max(self.maximum, other.maximum),
        )

    @property
    def mean(self) -> float:
        """Mean length L."""
        return self.total / self.num_samples

    @property
    def variance(self) -> float:
        """Variance of the length (of the population)."""
        return max(0.0, (self.total_squares - self.total**2 / self.num_samples) / self.num_samples)
