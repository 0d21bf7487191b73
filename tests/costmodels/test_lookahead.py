"""What a cache of known batches holds and fetches: worked by hand, and against caches that ran."""

from __future__ import annotations

import numpy as np
import pytest

import flexshard
from flexshard.costmodels import (
    cached_share,
    cached_shares,
    longest_lookahead,
    lookahead_reads,
    lookahead_reads_of_stretches,
)
from flexshard.errors import JobError
from flexshard.profiling import power_law_probabilities


def test_a_profile_worked_by_hand() -> None:
    """Four rows in half of the samples, two in none; batches of 2 samples: q = 3/4."""
    profile = flexshard.AccessProfile.from_histogram([50], [4], num_samples=100, num_rows=6)
    reads = lookahead_reads(profile, 2, 2)
    assert reads.distinct == pytest.approx(4 * 3 / 4)
    assert reads.carried == pytest.approx(4 * 9 / 16)
    assert reads.fetched == pytest.approx(4 * 3 / 4 * (1 / 4) ** 2)
    assert reads.cached == pytest.approx(4 * (1 - (1 / 4) ** 3))
    assert lookahead_reads(profile, 2, 0).fetched == pytest.approx(reads.distinct)
    assert lookahead_reads(profile, 2, 0).cached == pytest.approx(reads.distinct)


def test_shares_of_many_numbers_of_batches_are_those_of_each() -> None:
    """To rounding, which a power of n multiplies, of rows that are hardly read as of those that nearly always are."""
    chances, batches = np.array([0.0, 1e-300, 1e-15, 1e-6, 0.1, 0.5, 0.9, 1 - 1e-12]), (1, 2, 3, 7, 97, 16_385)
    for number, found in zip(batches, cached_shares(chances, batches), strict=True):
        for each, expected in zip(found, cached_share(chances, number), strict=True):
            assert each == pytest.approx(expected, rel=1e-14 * (1 + number), abs=1e-300)
    assert np.ravel([*cached_shares(np.ones(1), (1, 5))]).tolist() == [1, 1, 1, 0]


def test_the_longest_lookahead_is_the_last_that_fits() -> None:
    profile = flexshard.AccessProfile.from_probabilities(power_law_probabilities(20_000, 5.0, 1.1))
    for rows in (300.0, 2_000.0, 9_000.0):
        ahead = longest_lookahead(profile, 64, rows)
        assert lookahead_reads(profile, 64, ahead).cached <= rows < lookahead_reads(profile, 64, ahead + 1).cached
    assert longest_lookahead(profile, 64, 10.0) is None
    assert longest_lookahead(profile, 64, 20_000.0) == 1 << 20


def test_caches_that_ran_hold_and_fetch_as_much() -> None:
    """Independent draws: fetches within 1 %, the cache within 4 %."""
    pytest.importorskip("numba")
    pytest.importorskip("torch")
    from flexshard.executors.lookahead.oracle import LookaheadOracle

    rng = np.random.default_rng(0)
    rows, samples, ahead, steps = 30_000, 1_500, 6, 120
    weights = 1.0 / np.arange(1, rows + 1) ** 1.05
    weights /= weights.sum()
    expected = lookahead_reads(flexshard.AccessProfile.from_probabilities(weights), samples, ahead)
    oracle = LookaheadOracle(rows, rows, keep=False)
    found = []
    for step in range(steps):
        admission = oracle.admit(rng.choice(rows, samples, p=weights))
        if step >= ahead:
            held = oracle.held().rows.size
            found.append((admission.rows.size, admission.carried.size, admission.fetched.rows.size, held))
            oracle.retire()
    distinct, carried, fetched, cached = np.mean(found[ahead:], axis=0)
    assert distinct == pytest.approx(expected.distinct, rel=0.01)
    assert carried == pytest.approx(expected.carried, rel=0.02)
    assert fetched == pytest.approx(expected.fetched, rel=0.01)
    assert cached == pytest.approx(expected.cached, rel=0.04)


def test_distinct_rows_of_stretches_say_what_a_cache_does_in_any_order() -> None:
    """Sessions: a row is read in one stretch of 40 samples and never again, so that popularity says nothing."""
    pytest.importorskip("numba")
    pytest.importorskip("torch")
    from flexshard.executors.lookahead.oracle import LookaheadOracle

    rng = np.random.default_rng(0)
    stream = np.concatenate([rng.integers(20 * k, 20 * (k + 1), 40) for k in range(1500)])
    samples, ahead = 64, 3
    sizes = [64, 128, 192, 256]
    distinct = [
        np.mean([np.unique(stream[at : at + size]).size for at in range(0, stream.size - size, 61)]) for size in sizes
    ]
    expected = lookahead_reads_of_stretches(sizes, distinct, samples, ahead)
    oracle, found = LookaheadOracle(30_000, 30_000, keep=False), []
    for start in range(0, stream.size - samples + 1, samples):
        admission = oracle.admit(stream[start : start + samples])
        if oracle.window > ahead:
            found.append(
                (admission.rows.size, admission.carried.size, admission.fetched.rows.size, oracle.held().rows.size)
            )
            oracle.retire()
    ran = np.mean(found[ahead:], axis=0)
    assert ran == pytest.approx([expected.distinct, expected.carried, expected.fetched, expected.cached], rel=0.06)
    by_popularity = lookahead_reads(
        flexshard.AccessProfile.from_counts(np.bincount(stream), num_samples=stream.size), samples, ahead
    )
    assert by_popularity.fetched > 1.5 * ran[2]


def test_stretches_beyond_those_measured_and_bad_ones() -> None:
    reads = lookahead_reads_of_stretches([10, 100], [10, 100], 1000, 4)  # no row comes again
    assert (reads.distinct, reads.carried) == (pytest.approx(1000), pytest.approx(0, abs=1e-9))
    assert (reads.fetched, reads.cached) == (pytest.approx(1000), pytest.approx(5000))
    for sizes, distinct in (([10], [5]), ([10, 10], [5, 6]), ([20, 10], [5, 6]), ([10, 20], [0, 6]), ([0, 9], [1, 2])):
        with pytest.raises(JobError, match="sizes must be"):
            lookahead_reads_of_stretches(sizes, distinct, 8, 1)


@pytest.mark.parametrize(
    ("samples", "ahead", "text"), [(0, 1, "samples"), (float("nan"), 1, "samples"), (8, -1, "lookahead")]
)
def test_arguments_out_of_range(samples: float, ahead: int, text: str) -> None:
    profile = flexshard.AccessProfile.from_histogram([50], [4], num_samples=100)
    with pytest.raises(JobError, match=text):
        lookahead_reads(profile, samples, ahead)


def test_a_profile_that_knows_its_order_is_asked_in_order() -> None:
    """Each row is read for a while and never again: popularity alone would have every row come again."""
    ids = np.repeat(np.arange(4_096), 16)
    ids = ids.reshape(-1, 64 * 16).copy()
    np.random.default_rng(0).permuted(ids, axis=1, out=ids)
    profile = flexshard.AccessProfile.from_ids(ids.reshape(-1), num_rows=4_096)
    shuffled, in_order = (lookahead_reads(profile, 1_024, 4, in_order=order) for order in (False, True))
    assert shuffled.fetched > 5 * in_order.fetched
    assert in_order.distinct == pytest.approx(64, rel=0.01)
    assert in_order.fetched == pytest.approx(64, rel=0.05)
    assert in_order.cached == pytest.approx(5 * 64, rel=0.05)
    unknown = flexshard.AccessProfile.from_counts(np.bincount(ids.reshape(-1)), num_samples=65_536)
    assert lookahead_reads(unknown, 1_024, 4, in_order=True) == lookahead_reads(unknown, 1_024, 4)
