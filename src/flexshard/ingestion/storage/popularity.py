"""Which bytes most reads are of, and what a faster tier would save (DPP paper, Figure 7, Table 8, section 6)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexshard._internal import check_finite
from flexshard.errors import DataError

__all__ = ["HDD", "SSD", "PopularBytes", "StorageTier", "TieredStorage", "popular_bytes", "tiered_storage"]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PopularBytes:
    """Bytes that are read most first (Figure 7).

    Attributes:
        of_bytes: share of all stored bytes, ascending from 0 to 1; shape (columns + 1,).
        of_reads: share of what is read that these bytes are; the same shape.
    """

    of_bytes: FloatArray
    of_reads: FloatArray

    def bytes_for(self, reads: float) -> float:
        """Least share of bytes that serves a share of what is read."""
        needed = int(np.searchsorted(self.of_reads, reads, side="left")) + 1  # columns that nobody reads come last
        return float(np.interp(reads, self.of_reads[:needed], self.of_bytes[:needed]))

    def reads_of(self, nbytes: float) -> float:
        """Share of what is read that the most popular share of bytes serves."""
        return float(np.interp(nbytes, self.of_bytes, self.of_reads))


def popular_bytes(sizes: npt.ArrayLike, hits: npt.ArrayLike) -> PopularBytes:
    """From the bytes of columns, and how often each is read; shape (columns,) both.

    Raises:
        DataError: nothing is stored, or nothing is read.
    """
    size, hit = np.asarray(sizes, np.float64), np.asarray(hits, np.float64)
    read = size * hit
    if not read.sum() > 0:
        raise DataError("no bytes of these columns are read; give the log of jobs that read them")
    order = np.argsort(-hit, kind="stable")
    sums = [np.concatenate([[0.0], np.cumsum(each[order])]) for each in (size, read)]
    return PopularBytes(*(each / each[-1] for each in sums))


@dataclass(frozen=True)
class StorageTier:
    """A kind of storage node, beside one of hard disks.

    Attributes:
        bytes_per_watt: that it holds.
        rate_per_watt: at which it reads.
    """

    bytes_per_watt: float
    rate_per_watt: float


HDD, SSD = StorageTier(1.0, 1.0), StorageTier(0.09, 3.26)  # Table 8


@dataclass(frozen=True)
class TieredStorage:
    """Popular bytes on a faster tier, the others on the slower one.

    Attributes:
        share: of bytes on the faster tier, so that power is least.
        reads: share of what is read that it serves.
        power: that both tiers take together, in that of the slower one for holding all bytes.
        slower_alone, faster_alone: that one tier takes for everything.
    """

    share: float
    reads: float
    power: float
    slower_alone: float
    faster_alone: float

    @property
    def saved(self) -> float:
        """Share of the power of the better of both alone."""
        return 1 - self.power / min(self.slower_alone, self.faster_alone)


def tiered_storage(
    popular: PopularBytes, demand: float, *, slower: StorageTier = HDD, faster: StorageTier = SSD
) -> TieredStorage:
    """The split between two tiers that takes least power.

    A tier takes what holding its bytes takes, or what reading them takes, whichever is more.

    Args:
        popular: what is read of which bytes.
        demand: power of the slower tier for reading, in its power for holding: above 1, it is bound by reads.
        slower, faster: by default the paper's nodes of hard disks and of flash.

    Raises:
        DataError: a demand that is none.
    """
    if check_finite(demand, "demand", DataError) <= 0:
        raise DataError(f"demand is reads over capacity, above 0; found {demand}")
    share, reads = _refined(popular)

    def power(tier: StorageTier, held: FloatArray | float, served: FloatArray | float) -> FloatArray:
        scale = (slower.bytes_per_watt / tier.bytes_per_watt, slower.rate_per_watt / tier.rate_per_watt)
        return np.maximum(np.asarray(held) * scale[0], np.asarray(served) * demand * scale[1])

    both = power(faster, share, reads) + power(slower, 1 - share, 1 - reads)
    best = int(np.argmin(both))
    alone = float(power(slower, 1.0, 1.0)), float(power(faster, 1.0, 1.0))
    return TieredStorage(float(share[best]), float(reads[best]), float(both[best]), *alone)


def _refined(popular: PopularBytes) -> tuple[FloatArray, FloatArray]:
    """Splits within columns too: rows of one may lie on both tiers."""
    share = np.union1d(popular.of_bytes, np.linspace(0, 1, 1001))
    return share, np.interp(share, popular.of_bytes, popular.of_reads)
