"""Moments of what the ranks of a placement serve, against sums over its rows one by one; prices found by bisection."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from flexshard import AccessProfile, Cluster, Problem, Table
from flexshard.planner.solver import holders, loads
from flexshard.planner.solver.bisection import bisect_floats
from flexshard.planner.solver.build import build_instance

BATCH = 16


def tables_of(seed: int, often: bool) -> list[Table]:
    """Profiles from logs, which know how many samples have a row, and from counts, which do not."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 6, 300)
    ids = random.zipf(1.3, int(lengths.sum())) % 150
    log = AccessProfile.from_ids(ids, lengths=lengths, num_rows=160)
    counts = np.unique(random.integers(1, 900 if often else 250, 40))[::-1]
    rows = random.integers(1, 4, counts.size)
    known = AccessProfile.from_histogram(counts, rows, 300, int(rows.sum()) + 9, lengths=log.lengths)
    return [Table("log", 160, 32, log), Table("counts", known.num_rows, 64, known)]


def of_each_row(table: Table, once: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reads of a rank's batch, and a bound of what they vary by, of rows by descending reads."""
    profile, samples = table.profile, table.distinct_samples(BATCH)
    reads = np.repeat(table.reads(BATCH, index_dedup=once), profile.rows)
    variance = np.maximum(reads * (1 - reads / (1 if once else samples)), 0.0)
    if profile.samples is not None and not once:
        # A sample that has a row has it as often as a Poisson distribution says that is not 0.
        share, having = np.repeat(profile.counts / 300, profile.rows), np.repeat(profile.sample_share, profile.rows)
        mean = np.full(share.size, 1e-9)
        for _ in range(20_000):
            mean = np.maximum(0.5 * mean + 0.5 * share / having * -np.expm1(-mean), 1e-12)
        variance = reads * np.maximum(1 + np.where(share > having * (1 + 1e-9), mean, 0) - share, 0)
    pad = np.zeros(table.rows - reads.size)
    return np.append(reads, pad), np.append(variance, pad), np.append(reads**2, pad)


@pytest.mark.parametrize("once", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("often", [False, True])
def test_sums_over_rows(often: bool, once: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "_HOT_ROWS", 0)  # of which sums have no part; 16 of each table at least
    tables = tables_of(3, often)
    if often:
        assert tables[1].profile.counts[0] > 300  # more often than once a sample
    instance = build_instance(Problem(tables, Cluster.preset("dgx-h100", nodes=2), BATCH), np.array(once))
    random = np.random.default_rng(0)
    for _ in range(10):
        cuts = [np.sort(random.integers(0, table.rows + 1, 2)) for table in tables]
        allocation = np.array([np.diff([0, *cut, table.rows]) for cut, table in zip(cuts, tables, strict=True)])
        ends, found_loads = np.cumsum(allocation, axis=1), loads.loads_of(instance, allocation)
        for index, table in enumerate(tables):  # how many rows a rank asks for varies where each is once
            own = of_each_row(table, True)[1].sum() if once[index] else 0.0
            assert found_loads.own_variance[index] == pytest.approx(own, rel=1e-6, abs=1e-9)
            assert found_loads.own_third[index] == pytest.approx(own, rel=1e-6, abs=1e-9)
        levels = np.flatnonzero((instance.group_sizes > 1) & allocation.any(axis=0)).tolist()
        for level, served in zip(levels, found_loads.served, strict=True):
            for index, table in enumerate(tables):
                reads, variance, squares = of_each_row(table, once[index])
                here = slice(int(ends[index, level] - allocation[index, level]), int(ends[index, level]))
                assert served.reads[index] == pytest.approx(reads[here].sum())
                found = served.hot_variance[index].sum() + served.rest_variance[index]
                assert found == pytest.approx(variance[here].sum(), rel=1e-6, abs=1e-9)
                found = (served.hot[index] ** 2).sum() + served.rest_squares[index]
                assert found == pytest.approx(squares[here].sum(), abs=1e-9)


@given(st.floats(0, 1e300), st.floats(1e-300, 1e300, exclude_min=True), st.floats(1e-300, 1e300), st.integers(0, 30))
def test_bisection_wherever_it_starts(mark: float, high: float, near: float, bits: int) -> None:
    mark = min(mark, high)
    low = 0.0
    tried = []

    def passes(value: float) -> bool:
        tried.append(value)
        return value >= mark

    if passes(low):
        return
    below, at = bisect_floats(low, high, passes, bits=bits, near=near)
    assert below < mark <= at
    assert len(tried) <= 64 + 8
    apart = int(np.float64(at).view(np.int64)) - int(np.float64(below).view(np.int64))
    assert 1 <= apart <= 1 << bits
    if bits == 0:
        assert (below, at) == bisect_floats(low, high, lambda value: value >= mark)
