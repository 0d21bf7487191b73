"""Memory of the fullest rank of a step: who reads more than others, and who serves more than others.

Legend: T tables, U ranks, g group size, R expected lookups of a rank's batch. A rank's dynamic memory is a sum over its
own lookups and over those that it serves to its group. How many its samples have follows from the lengths of samples;
which rows they are is taken to have a shifted gamma distribution over steps, with the sum's mean, variance and third
moment. Samples are independent draws; bursts come on top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from flexshard.costmodels.holders import by_rank

__all__ = ["BATCH_SHARES", "Loads", "ServedRows", "batch_lengths", "fullest_bytes", "lookup_bytes"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Of batches, by length: the longest ones finely, since they are the fullest.
BATCH_SHARES: FloatArray = np.concatenate([np.arange(0.1, 0.95, 0.1), 1 - 10 ** -np.arange(1.0, 9.1, 0.125), [1.0]])
_GRID, _RANKS = 1 << 13, 64
# Of a lookup: its id, location, slot and indices; of a row that travels: its slot, as it came and as an index.
_LOOKUP_INDEX_BYTES, _ROW_INDEX_BYTES = 40, 12


def lookup_bytes(row_bytes: float, gradient_bytes: float) -> tuple[float, float]:
    """Bytes per lookup of what the model gets, and per row that travels, of the rank that asks and of the one that
    serves alike: the most of forward and backward. Ids and indices are in it as the executor has them.

    In forward the one that asks has rows as they come and as the model gets them; in backward the latter, their
    gradients from the model, and those that it sends. The one that serves has the rows, then the gradients. Before any
    are sent, gradients of several features are put together: then as many again as the model gives.
    """
    return row_bytes + gradient_bytes + _LOOKUP_INDEX_BYTES, max(row_bytes, gradient_bytes) + _ROW_INDEX_BYTES


@dataclass(frozen=True, eq=False)
class ServedRows:
    """The tables' rows at one level with g > 1, as their group's ranks serve them.

    Attributes:
        group_size: g.
        reads: lookups by one rank; shape (T,).
        hot: those of each table's k hottest rows there, hottest first; shape (T, k).
        hot_variance, hot_third: second and third central moments of these; shape (T, k).
        holder: local rank that holds each; shape (T, k).
        rest_variance, rest_third: moments of the lookups of all other rows; shape (T,).
        rest_squares: sum of squared lookups of these, which differ from rank to rank by chance; shape (T,).
        burst_hottest: most lookups of one row in a step of the group, in the order of the data; shape (T,).
        burst_squares: most of the sum of the next hottest rows' squared lookups in such a step; shape (T,).
        burst_length: most lookups of such a step, as a multiple of the expected; shape (T,).
    """

    group_size: int
    reads: FloatArray
    hot: FloatArray
    hot_variance: FloatArray
    hot_third: FloatArray
    holder: IntArray
    rest_variance: FloatArray
    rest_third: FloatArray
    rest_squares: FloatArray
    burst_hottest: FloatArray
    burst_squares: FloatArray
    burst_length: FloatArray

    def by_rank(self, hot: FloatArray, rest: FloatArray) -> FloatArray:
        """Sums over the hot rows that each local rank holds, and its share of the rest; shape (T, g)."""
        size = self.group_size
        return np.asarray(by_rank(hot, self.holder, size) + rest[:, None] / size)


@dataclass(frozen=True, eq=False)
class Loads:
    """What the ranks look up and serve.

    Attributes:
        own_bytes: that a rank's own lookups are expected to take while rows travel; shape (T,).
        together_bytes: that they are while features' gradients are put together, when none travel; shape (T,).
        served_bytes: of a row that a rank serves; shape (T,).
        own_variance, own_third: second and third central moment of how many rows a rank asks for, where its lookups do
            not say: of ids that are sent once; shape (T,).
        batch_lengths: lookups of a batch as a multiple of the expected, of the shortest batches to the longest: in the
            share of batches that ``BATCH_SHARES`` gives, at most so many; shape (T, Q).
        burst_length: most lookups of a rank's consecutive samples, as a multiple of the expected; shape (T,).
        served: by level.
    """

    own_bytes: FloatArray
    together_bytes: FloatArray
    served_bytes: FloatArray
    own_variance: FloatArray
    own_third: FloatArray
    batch_lengths: FloatArray
    burst_length: FloatArray
    served: Sequence[ServedRows]


def fullest_bytes(loads: Loads, world_size: int, quantile: float, *, in_order: bool) -> float:
    """Dynamic memory that no rank of a step exceeds, in this share of the steps.

    Args:
        loads: of the tables.
        world_size: U.
        quantile: share of the steps.
        in_order: whether samples come in the order of the data, so that bursts count; else they are independent.
    """
    # Each of both moments has half of the probability.
    exceeded, none = (1.0 - quantile) / 2, np.zeros(world_size)
    together = np.repeat((loads.together_bytes @ loads.batch_lengths)[None], world_size, axis=0)
    shuffled = max(_least_above(*_moments(loads, world_size), exceeded), _least_above(together, none, none, exceeded))
    if not in_order:
        return shuffled
    in_bursts = float(loads.together_bytes @ loads.burst_length)
    return max(shuffled, in_bursts, _in_bursts(loads, world_size, quantile))


def batch_lengths(lengths: FloatArray, shares: FloatArray, samples: float) -> FloatArray:
    """Sum of the lengths of so many samples, as a multiple of the expected: quantiles at ``BATCH_SHARES``.

    Args:
        lengths: of samples; shape (n,).
        shares: of the samples that have each; shape (n,).
        samples: of a batch; of a part of one, as if it were whole.
    """
    mean = float(lengths @ shares)
    deviation = np.sqrt(max(float(lengths**2 @ shares) - mean**2, 0.0))
    whole_samples = max(np.ceil(samples), 1.0)
    more, samples = whole_samples / samples, whole_samples
    if deviation <= 1e-9 * mean:
        return np.full(BATCH_SHARES.size, more)
    # The distribution of a sum is a power of its parts' in frequency space; one long sample may come on top of many.
    most = samples * mean + 12 * np.sqrt(samples) * deviation + 3 * float(lengths.max())
    step = most / (_GRID - 2)
    skewness = float((lengths - mean) ** 3 @ shares) / deviation**3 / np.sqrt(samples)
    if step > deviation / 4 and abs(skewness) < 0.2:  # so many that their sum is nearly normal
        z = np.array([NormalDist().inv_cdf(min(max(share, 1e-12), 1 - 1e-12)) for share in BATCH_SHARES.tolist()])
        normal = 1 + (z + skewness * (z**2 - 1) / 6) * deviation / (mean * np.sqrt(samples))
        return np.asarray(np.maximum(normal, 0.0) * more)
    whole, part = np.divmod(lengths / step, 1.0)
    at = whole.astype(np.int64)
    one = np.bincount(at, weights=shares * (1 - part), minlength=_GRID)
    one += np.bincount(at + 1, weights=shares * part, minlength=_GRID)
    logarithm = np.log(np.maximum(np.abs(transformed := np.fft.rfft(one)), 1e-300))
    angle = np.unwrap(np.angle(transformed))
    together = np.fft.irfft(np.exp(samples * (logarithm + 1j * angle)), _GRID)
    likely = np.maximum(together, 0.0)
    beyond = np.cumsum((likely / likely.sum())[::-1])[::-1]  # probability of at least so many
    # Below what rounding leaves of a probability, the longest batches are alike.
    found = np.searchsorted(-np.maximum(beyond, 1e-13), -(1 - BATCH_SHARES))
    return np.asarray(np.minimum(found, _GRID - 1) * step / (samples * mean) * more)


def _moments(loads: Loads, world: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """What each rank's own samples come to, by length, shape (U, Q); and variance and third central moment of what
    else differs from step to step, shape (U,) each.
    """
    ranks, bytes_ = np.arange(world), loads.served_bytes
    deviation = np.zeros(world)
    variance = np.full(world, float(bytes_**2 @ loads.own_variance))
    third = np.full(world, float(bytes_**3 @ loads.own_third))
    # Of a rank's own samples, by length: a long sample weighs on its rank and on those that serve it; shape (U, Q).
    own = np.repeat((loads.own_bytes @ loads.batch_lengths)[None], world, axis=0)
    mean = np.zeros(world)
    weights = np.diff(BATCH_SHARES, prepend=0.0)
    spread = np.sqrt(np.maximum((loads.batch_lengths - 1) ** 2 @ weights, 0.0))
    for level in loads.served:
        size, at = level.group_size, ranks % level.group_size
        reads = level.by_rank(level.hot, level.reads - level.hot.sum(axis=1))
        variance += (size * (bytes_**2 @ level.by_rank(level.hot_variance, level.rest_variance)))[at]
        variance += (size - 1) * float(bytes_**2 @ level.rest_squares)
        third += (size * (bytes_**3 @ level.by_rank(level.hot_third, level.rest_third)))[at]
        served = bytes_[:, None] * reads
        own += (served.T @ loads.batch_lengths)[at]
        mean += (size - 1) * served.sum(axis=0)[at]
        # Features of one sample may be long together; taken to be, their deviations add.
        deviation = np.hypot(deviation, np.sqrt(size - 1) * (spread @ served)[at])
    return mean[:, None] + own, variance + deviation**2, third


def _least_above(values: FloatArray, variance: FloatArray, third: FloatArray, exceeded: float) -> float:
    """The least number that the largest of all ranks exceeds with this probability; ``values`` of shape (U, Q) have the
    shares of :data:`BATCH_SHARES`, variance and third moment (shape (U,)) come on top.
    """
    weights = np.diff(BATCH_SHARES, prepend=0.0)
    deviation, skewed = np.sqrt(variance), np.cbrt(np.maximum(third, 0.0))
    most = values[:, -1] + 12 * deviation + 12 * skewed
    # The others are taken to be as full as the last that is looked at.
    order = np.argsort(-(values @ weights + 4 * deviation), kind="stable")[:_RANKS]
    alike = np.ones(order.size)
    alike[-1] += most.size - order.size
    low, high = 0.0, float(most.max())
    for _ in range(45):
        middle = (low + high) / 2
        tails = _tail(middle - values[order], deviation[order, None], third[order, None])
        low, high = (middle, high) if float(alike @ tails @ weights) > exceeded else (low, middle)
    return high


def _tail(excess: FloatArray, deviation: FloatArray, third: FloatArray) -> FloatArray:
    """Probability that gamma variables of mean 0 exceed a value, by Wilson and Hilferty's cube root."""
    from scipy.special import ndtr  # takes as long to import as all else here

    spread = np.where(deviation > 0, deviation, 1.0)
    skewness = np.clip(third / spread**3, 1e-6, 4.0)
    root = np.cbrt(np.maximum(1 + skewness * excess / spread / 2, 0.0))
    z = 6 / skewness * (root - 1) + skewness / 6
    return np.asarray(ndtr(-np.where(deviation > 0, z, np.where(excess >= 0, np.inf, -np.inf))))


def _in_bursts(loads: Loads, world: int, quantile: float) -> float:
    """The same where samples come in bursts: the hottest row of any table's falls to a rank that serves its share of
    all others besides.
    """
    bytes_ = loads.served_bytes
    nbytes = float(loads.own_bytes @ loads.burst_length)
    hottest, squares = 0.0, 0.0
    for level in loads.served:
        nbytes += float((bytes_ * level.reads) @ level.burst_length)
        hot = bytes_ * level.burst_hottest
        hottest = max(hottest, float(hot.max()))
        even = float(bytes_**2 @ (level.hot_variance.sum(axis=1) + level.rest_variance + level.rest_squares))
        squares += float(hot @ hot + bytes_**2 @ level.burst_squares) / level.group_size + even
    # One table's hottest row is there already.
    squares -= hottest**2 / max((level.group_size for level in loads.served), default=1)
    return nbytes + hottest + NormalDist().inv_cdf(1 - (1 - quantile) / world) * math.sqrt(max(squares, 0.0))
