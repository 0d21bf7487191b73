"""Memory of the fullest rank: against distributions that are known, and against draws."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from flexshard.costmodels import BATCH_SHARES, Loads, ServedRows, batch_lengths, fullest_bytes


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


MEANS = np.array([50.0]), np.array([0.0]), np.array([2.0])
STEADY = np.zeros(1), np.zeros(1)  # lookups say how many rows a rank asks for


@pytest.mark.parametrize("skew", [0.0, 1.0, 1.5])
@pytest.mark.parametrize("size", [4, 32])
def test_quantile_of_draws(skew: float, size: int) -> None:
    random = np.random.default_rng(0)
    p = np.arange(1.0, 401) ** -skew
    reads, holder = 100 * p / p.sum(), np.arange(400) % size
    loads = Loads(
        np.array([1000.0]),
        np.array([0.0]),
        np.array([4.0]),
        *STEADY,
        np.ones((1, BATCH_SHARES.size)),
        np.ones(1),
        [served(reads, holder, size)],
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
    loads = Loads(*MEANS, *STEADY, np.ones((1, BATCH_SHARES.size)), np.ones(1), [still])
    assert fullest_bytes(loads, 4, 0.999, in_order=False) == pytest.approx(50 + 2 * 4 * 6.0)


def test_bursts_fall_to_one_rank() -> None:
    loads = served(np.full(8, 3.0), np.arange(8) % 4, 4)
    burst = ServedRows(**{**vars(loads), "burst_hottest": np.array([60.0])})
    said = [
        fullest_bytes(
            Loads(*MEANS, *STEADY, np.ones((1, BATCH_SHARES.size)), np.ones(1), [one]),
            4,
            0.999,
            in_order=True,
        )
        for one in (loads, burst)
    ]
    assert said[1] > 50 + 2 * 24 + 2 * 60 > said[0]


def test_gradients_put_together_may_be_more_than_rows_that_travel() -> None:
    none = np.zeros((1, 8))
    still = ServedRows(**{**vars(served(np.zeros(8), np.arange(8) % 4, 4)), "hot_variance": none, "hot_third": none})
    shares = np.linspace(0.5, 2.0, BATCH_SHARES.size)[None]
    loads = Loads(np.array([50.0]), np.array([80.0]), np.array([2.0]), *STEADY, shares, np.ones(1), [still])
    most = np.interp(1 - 0.0005 / 4, BATCH_SHARES, shares[0])
    assert fullest_bytes(loads, 4, 0.999, in_order=False) == pytest.approx(80 * most, rel=0.03)


@pytest.mark.parametrize("samples", [0.25, 0.5, 1.7, 2.5])
def test_parts_of_a_sample_count_as_whole_ones(samples: float) -> None:
    found = batch_lengths(np.array([1.0, 21.0]), np.array([0.5, 0.5]), samples)
    whole = batch_lengths(np.array([1.0, 21.0]), np.array([0.5, 0.5]), float(np.ceil(samples)))
    assert found == pytest.approx(whole * np.ceil(samples) / samples)
    mean = found @ np.diff(BATCH_SHARES, prepend=0.0)
    assert 1.0 <= mean <= 1.25 * np.ceil(samples) / samples


def test_many_samples_are_nearly_normal() -> None:
    found = batch_lengths(np.array([1.0, 21.0]), np.array([0.5, 0.5]), 65_536)
    at = np.searchsorted(BATCH_SHARES, 0.999)
    assert found[at] == pytest.approx(1 + stats.norm.ppf(BATCH_SHARES[at]) * 10 / 11 / 256, abs=2e-3)
