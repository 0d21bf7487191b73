"""Memory of the fullest rank: against distributions that are known, and against draws."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from flexshard.costmodels import BATCH_SHARES, Loads, ServedRows, batch_lengths, fullest_bytes, own_bytes


@pytest.mark.parametrize("samples", [1, 7, 64, 1000])
def test_sums_of_geometric_lengths(samples: int) -> None:
    lengths = np.arange(400.0)
    shares = 0.1 * 0.9**lengths
    found = batch_lengths(lengths, shares / shares.sum(), samples)
    upper = 1 - BATCH_SHARES
    known = stats.nbinom(samples, 0.1).isf(upper[upper > 1e-8]) / (9.0 * samples)
    assert found[upper > 1e-8] == pytest.approx(known, rel=0.02, abs=2 / samples)


def test_constant_lengths_do_not_vary() -> None:
    assert batch_lengths(np.array([5.0]), np.array([1.0]), 64).tolist() == [1.0] * BATCH_SHARES.size


def test_long_samples_are_in_the_tail() -> None:
    # One sample of a thousand is 1,000 long, the others 1: 64 of them have two such in 0.2 % of batches.
    found = batch_lengths(np.array([1.0, 1000.0]), np.array([0.999, 0.001]), 64)
    known = stats.binom(64, 0.001).isf(1 - BATCH_SHARES[:-1])
    expected = (64 + 999 * known) / (64 * 1.999)
    near = (1 - BATCH_SHARES[:-1]) > 1e-8
    assert found[:-1][near] == pytest.approx(expected[near], rel=0.03, abs=0.06)


def served(reads: np.ndarray, holder: np.ndarray, size: int) -> ServedRows:
    """One table's rows, all of them looked at one by one; samples read one row each."""
    none = np.zeros(1)
    hot = reads[None]
    return ServedRows(
        size, reads.sum(keepdims=True), hot, hot, hot, holder[None], none, none, none, none, none, np.ones(1)
    )


@pytest.mark.parametrize("skew", [0.0, 1.0, 1.5])
@pytest.mark.parametrize("size", [4, 32])
def test_quantile_of_draws(skew: float, size: int) -> None:
    random = np.random.default_rng(0)
    p = np.arange(1.0, 401) ** -skew
    reads, holder = 100 * p / p.sum(), np.arange(400) % size
    loads = Loads(
        np.array([1000.0]), np.array([4.0]), np.ones((1, BATCH_SHARES.size)), np.ones(1), [served(reads, holder, size)]
    )
    said = fullest_bytes(loads, size, 0.999, in_order=False)
    drawn = random.poisson(size * reads, (20_000, 400))
    by_rank = np.stack([drawn[:, holder == rank].sum(axis=1) for rank in range(size)])
    fullest = 1000 + 4 * by_rank.max(axis=0)
    assert (fullest > said).mean() <= 0.001
    assert said <= 1.05 * np.quantile(fullest, 0.999)


def test_nothing_varies_nothing_is_added() -> None:
    still = served(np.full(8, 3.0), np.arange(8) % 4, 4)
    still = ServedRows(**{**vars(still), "hot_variance": np.zeros((1, 8)), "hot_third": np.zeros((1, 8))})
    loads = Loads(np.array([50.0]), np.array([2.0]), np.ones((1, BATCH_SHARES.size)), np.ones(1), [still])
    assert fullest_bytes(loads, 4, 0.999, in_order=False) == pytest.approx(50 + 2 * 4 * 6.0)


def test_bursts_fall_to_one_rank() -> None:
    loads = served(np.full(8, 3.0), np.arange(8) % 4, 4)
    burst = ServedRows(**{**vars(loads), "burst_hottest": np.array([60.0])})
    said = [
        fullest_bytes(
            Loads(np.array([50.0]), np.array([2.0]), np.ones((1, BATCH_SHARES.size)), np.ones(1), [one]),
            4,
            0.999,
            in_order=True,
        )
        for one in (loads, burst)
    ]
    assert said[1] > 50 + 2 * 24 + 2 * 60 > said[0]


def test_what_the_model_keeps() -> None:
    # 10 lookups of 8-byte rows and gradients: all of them travel, or 2 do and the gradients put together are more.
    ten, eight, per = np.array([10.0]), np.array([8.0]), (np.array([16.0]), np.array([8.0]))
    assert own_bytes(ten, ten, eight, *per).tolist() == [240.0]
    assert own_bytes(ten, np.array([2.0]), eight, *per).tolist() == [160.0 + 80 - 16]
