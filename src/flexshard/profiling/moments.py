"""Moments of a feature's length: how many ids a sample has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["LENGTH_BINS", "LengthMoments"]

IntArray = npt.NDArray[np.int64]

# Lengths are counted one by one to 64, then in bins that grow by a fifth: first length of each.
_ONE_BY_ONE = 65
LENGTH_BINS: IntArray = np.concatenate(
    [np.arange(_ONE_BY_ONE), np.unique((_ONE_BY_ONE * 2 ** (np.arange(200) / 4)).astype(np.int64))]
)


@dataclass(frozen=True)
class LengthMoments:
    """Sums over samples of the number of ids in each, as exact integers, so that they add.

    Attributes:
        num_samples: samples counted.
        total: sum of lengths.
        total_squares: sum of squared lengths.
        maximum: longest length.
        histogram: bin of ``LENGTH_BINS``, samples and sum of their lengths of every bin that has any, ascending; None
            where it is not known.
    """

    num_samples: int = 0
    total: int = 0
    total_squares: int = 0
    maximum: int = 0
    histogram: tuple[tuple[int, int, int], ...] | None = None

    def __post_init__(self) -> None:
        if self.maximum <= 1:
            empty, single = self.num_samples - self.total, self.total
            bins = ((0, empty, 0), (1, single, single))
            object.__setattr__(self, "histogram", tuple(one for one in bins if one[1]))

    @classmethod
    def of(cls, lengths: npt.NDArray[np.integer]) -> LengthMoments:
        """Moments of an array of lengths, shape (samples,)."""
        longest = int(lengths.max(initial=0))
        # Squares of up to 2^31 in blocks of at most 2^31 samples would overflow only past 2^93 accesses.
        if longest < 1 << 20:
            squares = int(np.square(lengths.astype(np.int64)).sum())
        else:
            squares = sum(int(length) ** 2 for length in lengths)
        return cls(int(lengths.size), int(lengths.sum(dtype=np.int64)), squares, longest, _histogram(lengths, longest))

    def __add__(self, other: LengthMoments) -> LengthMoments:
        return LengthMoments(
            self.num_samples + other.num_samples,
            self.total + other.total,
            self.total_squares + other.total_squares,
            max(self.maximum, other.maximum),
            _added(self.histogram, other.histogram),
        )

    @property
    def mean(self) -> float:
        """Mean length L."""
        return self.total / self.num_samples

    @property
    def variance(self) -> float:
        """Variance of the length (of the population)."""
        return max(0.0, (self.total_squares - self.total**2 / self.num_samples) / self.num_samples)

    @property
    def values(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
        """Lengths, means of a bin where they are counted in bins, and the share of samples that have each; None where
        they are not known.
        """
        if self.histogram is None:
            return None
        bins = np.array(self.histogram, np.float64).reshape(-1, 3)
        return bins[:, 2] / bins[:, 1], bins[:, 1] / self.num_samples


def _histogram(lengths: npt.NDArray[np.integer], longest: int) -> tuple[tuple[int, int, int], ...]:
    if longest < _ONE_BY_ONE:
        samples = np.bincount(lengths.astype(np.int64, copy=False), minlength=longest + 1)
        sums = samples * np.arange(samples.size)
    else:
        place = np.searchsorted(LENGTH_BINS, lengths, side="right") - 1
        samples, sums = np.bincount(place), np.zeros(int(place.max()) + 1, np.int64)
        np.add.at(sums, place, lengths)
    there = np.flatnonzero(samples)
    return tuple(zip(there.tolist(), samples[there].tolist(), sums[there].tolist(), strict=True))


def _added(
    a: tuple[tuple[int, int, int], ...] | None, b: tuple[tuple[int, int, int], ...] | None
) -> tuple[tuple[int, int, int], ...] | None:
    if a is None or b is None:
        return None
    found = {place: (samples, total) for place, samples, total in a}
    for place, samples, total in b:
        before = found.get(place, (0, 0))
        found[place] = before[0] + samples, before[1] + total
    return tuple((place, *found[place]) for place in sorted(found))
