"""What a cache of known batches holds and fetches, in expectation (BagPipe, section 3.2 and Table 3).

Of rows that a batch reads with probability q, each batch on its own, with the next ℒ batches known beside the current
one: a row is fetched for a batch if none of the ℒ batches before read it, q (1-q)^ℒ; it is in the cache if one of the
ℒ + 1 known ones reads it, 1 - (1-q)^(ℒ+1); two batches in a row read it with probability q².

Recorded streams drift and burst: a row is read again sooner than by such draws. All four numbers follow from how many
distinct rows D(n) stretches of n consecutive samples read, whatever their order, if that is the same throughout: a
batch reads D(n), the cache has D((ℒ+1)n), of which D((ℒ+1)n) - D(ℒn) are new, and D(2n) = 2 D(n) - carried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexshard._internal import check_finite, check_int
from flexshard.errors import JobError
from flexshard.profiling import AccessProfile
from flexshard.tables import expected_distinct

__all__ = [
    "LookaheadReads",
    "cached_share",
    "cached_shares",
    "distinct_of_stretches",
    "log_unread",
    "longest_lookahead",
    "lookahead_reads",
    "lookahead_reads_of_stretches",
    "read_chance",
    "stretches_of",
]

FloatArray = npt.NDArray[np.float64]

_MOST = 1 << 20


@dataclass(frozen=True)
class LookaheadReads:
    """Rows, over all ranks, per step.

    Attributes:
        distinct: that the step's batch reads.
        carried: of these, which the next batch reads too.
        fetched: of these, which were not in a cache that keeps no row beyond the batches known.
        cached: that such a cache holds while the batch is trained.
    """

    distinct: float
    carried: float
    fetched: float
    cached: float


def lookahead_reads(
    profile: AccessProfile, samples: float, lookahead: int, *, in_order: bool = False
) -> LookaheadReads:
    """Of a table's rows, in expectation.

    Args:
        profile: of the table.
        samples: of all ranks together in one step, B·U.
        lookahead: ℒ, batches known beside the current one; at least 0.
        in_order: whether samples come in the order that was profiled, with its bursts; as if each were drawn by itself
            otherwise, or where the profile does not know its order.

    Raises:
        JobError: an argument that is out of range.
    """
    ahead = check_int(lookahead, "lookahead", JobError, least=0)
    known = stretches_of(profile) if in_order else None
    if known is not None:
        return lookahead_reads_of_stretches(*known, samples, ahead)
    return _reads(read_chance(profile, samples), profile.rows, ahead)


def lookahead_reads_of_stretches(
    sizes: npt.ArrayLike, distinct: npt.ArrayLike, samples: float, lookahead: int
) -> LookaheadReads:
    """As :func:`lookahead_reads`, from distinct rows of stretches of consecutive samples, whatever their order.

    Between two sizes log D is a straight line in log n; beyond them the outermost lines go on, but D grows no faster
    than n.

    Args:
        sizes: n, ascending; shape (k,), k at least 2.
        distinct: D(n), mean over stretches; shape (k,).
        samples, lookahead: as of :func:`lookahead_reads`.

    Raises:
        JobError: sizes that do not ascend, or fewer than two; an argument that is out of range.
    """
    ahead = check_int(lookahead, "lookahead", JobError, least=0)
    number, of = check_finite(samples, "samples", JobError), distinct_of_stretches(sizes, distinct)
    one, cached = of(number), of((ahead + 1) * number)
    return LookaheadReads(one, 2 * one - of(2 * number), cached - (of(ahead * number) if ahead else 0.0), cached)


def stretches_of(profile: AccessProfile) -> tuple[FloatArray, FloatArray] | None:
    """Sizes of stretches of consecutive samples, all of the data the last, and how many distinct rows they read on
    average; None of a profile that does not know its order.
    """
    if profile.bursts is None:
        return None
    sizes, distinct = profile.bursts.distinct_rows()
    if sizes.size and profile.num_samples > sizes[-1]:
        sizes, distinct = np.append(sizes, profile.num_samples), np.append(distinct, profile.rows_read)
    if sizes.size < 2 or np.any(distinct <= 0):
        return None
    return sizes.astype(np.float64), distinct.astype(np.float64)


def distinct_of_stretches(sizes: npt.ArrayLike, distinct: npt.ArrayLike) -> Callable[[float], float]:
    """D of any number of samples from that of some; arguments and errors as of :func:`lookahead_reads_of_stretches`."""
    n, d = np.asarray(sizes, np.float64), np.asarray(distinct, np.float64)
    if n.ndim != 1 or n.shape != d.shape or n.size < 2 or np.any(np.diff(n) <= 0) or n[0] <= 0 or np.any(d <= 0):
        raise JobError("sizes must be two or more above 0, ascending, with a number of distinct rows above 0 for each")
    x, y = np.log(n), np.log(d)
    slopes = np.clip(np.diff(y) / np.diff(x), 0.0, 1.0)

    def of(stretch: float) -> float:
        at = np.log(stretch)
        piece = int(np.clip(np.searchsorted(x, at) - 1, 0, len(slopes) - 1))
        return float(np.exp(y[piece] + slopes[piece] * (at - x[piece])))

    return of


def longest_lookahead(profile: AccessProfile, samples: float, cache_rows: float) -> int | None:
    """The longest lookahead of which a cache of so many rows over all ranks has room in expectation, up to 2^20; None
    if it has none for one batch. Arguments as of :func:`lookahead_reads`.
    """
    q, rows = read_chance(profile, samples), profile.rows
    if _reads(q, rows, 0).cached > cache_rows:
        return None
    low, high = 0, _MOST + 1  # the cache holds more the longer it is
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _reads(q, rows, middle).cached <= cache_rows else (low, middle)
    return low


def read_chance(profile: AccessProfile, samples: float) -> FloatArray:
    """q: that a batch of so many samples of all ranks together reads a row, of each distinct count of a profile."""
    number = check_finite(samples, "samples", JobError)
    if number <= 0:
        raise JobError(f"samples must be above 0, found {number:g}")
    return np.asarray(expected_distinct(profile.sample_share, number))


def log_unread(q: FloatArray) -> FloatArray:
    """log(1 - q), where a row is read with probability q."""
    return np.asarray(np.log1p(-np.minimum(q, 1.0 - 2**-53)))


def cached_share(
    q: FloatArray, batches: float | npt.NDArray[np.int64], unread: FloatArray | None = None
) -> tuple[FloatArray, FloatArray]:
    """Of a row that a batch reads with probability q (any shape) and that stays in a cache for so many batches from
    one that reads it, that one included: the share of time that it is there, 1 - (1-q)^n; and how often a batch
    fetches it, q (1-q)^(n-1). With a lookahead of ℒ, n is at least ℒ + 1. ``unread``: :func:`log_unread` of q, where
    it is known already.
    """
    unread = log_unread(q) if unread is None else unread
    return np.asarray(-np.expm1(batches * unread)), np.asarray(q * np.exp((batches - 1) * unread))


def cached_shares(q: FloatArray, batches: Iterable[int]) -> Iterator[tuple[FloatArray, FloatArray]]:
    """:func:`cached_share` of several whole numbers of batches, each at least 1. Where they are sums of each other or
    doubles, as 3, 5, 9, 17 are but for one, a product or two per number do what takes an exponential otherwise; nothing
    is subtracted, so small shares are as exact.
    """
    known = {0: (np.zeros_like(q), np.ones_like(q)), 1: (q, 1.0 - q)}

    def of(number: int) -> tuple[FloatArray, FloatArray]:
        """That some of so many batches read a row, 1 - (1-q)^n, and that none does."""
        if number not in known:
            first, second = (number // 2, number // 2) if number % 2 == 0 else (number - 1, 1)
            (read, unread), (later, never) = of(first), of(second)
            known[number] = read + unread * later, unread * never
        return known[number]

    for number in batches:
        read, unread = of(number - 1)
        fetched = q * unread
        yield read + fetched, fetched


def _reads(q: FloatArray, rows: npt.NDArray[np.int64], ahead: int) -> LookaheadReads:
    cached, fetched = cached_share(q, ahead + 1)
    return LookaheadReads(float(q @ rows), float((q * q) @ rows), float(fetched @ rows), float(cached @ rows))
