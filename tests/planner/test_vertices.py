"""Many prices of memory at once give what each gives by itself, and searches what counting gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from flexshard import AccessProfile, pareto, solve
from flexshard.planner import Problem
from flexshard.planner.solver import leading_counts as searches, vertices
from flexshard.planner.solver.build import build_instance
from flexshard.planner.solver.dual_search import price_range
from flexshard.planner.solver.leading_counts import leading_counts, search_steps
from flexshard.planner.solver.thresholds import allocate, crossing_prices
from flexshard.tables import Table
from flexshard.topologies import Cluster, CollectiveRate, Level
from tests.planner.instances import clusters, table_lists


@settings(max_examples=40)
@given(clusters(), table_lists(max_tables=4, max_rows=40), st.sampled_from([1, 1000]), st.sampled_from([1, 7, 200_000]))
def test_allocations_of_many_prices_are_those_of_each(
    cluster: Cluster, tables: list[Table], batch: int, at_once: int
) -> None:
    instance = build_instance(Problem(tables, cluster, batch))
    for levels in instance.level_subsets(3):
        prices = np.concatenate([crossing_prices(instance, levels, 20), [0.0, *price_range(instance)]])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vertices, "_AT_ONCE", at_once)
            found = vertices.vertices_at(instance, levels, prices)
        for index, price in enumerate(prices.tolist()):
            allocation, _ = allocate(instance, levels, price)
            assert found.rows[index].tolist() == allocation.sum(axis=0).tolist()
            assert found.memory_bytes[index] == pytest.approx(instance.memory_bytes(allocation), rel=1e-12)
            assert found.exposed_seconds[index] == pytest.approx(instance.exposed_seconds(allocation), rel=1e-12)
            waits = instance.excess_seconds(allocation).sum()
            assert found.waits_seconds[index] == pytest.approx(waits, rel=1e-12, abs=1e-30)


@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=9), min_size=1, max_size=4),
    st.lists(st.sampled_from([-np.inf, -3.0, -0.5, 0.0, 1.0, 3.0, np.inf]), min_size=0, max_size=3),
    st.booleans(),
)
def test_a_search_counts(tables: list[list[int]], wanted: list[float], above: bool) -> None:
    sizes = np.array([len(table) for table in tables])
    values = np.concatenate([np.sort(np.array(table, np.float64))[:: -1 if above else 1] for table in tables])
    starts, sought = np.cumsum(sizes) - sizes, np.array([wanted] * len(tables)).reshape(len(tables), len(wanted))
    expected = [[sum(v >= w if above else v <= w for v in table) for w in wanted] for table in tables]
    for few in (0, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(searches, "_FEW", few)
            found = leading_counts(values, starts, sizes, lambda: search_steps(sizes), sought, above=above)
        assert found.shape == sought.shape
        assert found.tolist() == expected


@pytest.mark.parametrize("seed", [0, 16, 22])
def test_points_that_may_not_be_the_best_say_so(seed: int) -> None:
    """Where ranks wait for owners of hot rows, searches end with a bound, which is the point's."""
    random, (slow, fast) = np.random.default_rng([9, seed]), (CollectiveRate(0.0, rate) for rate in (2.2e7, 1.5e7))
    tables = []
    for index, (rows, dim) in enumerate(((277, 64), (3, 8), (283, 8))):
        counts = random.uniform(10, 1e5) / np.arange(1, rows + 1) ** random.uniform(0.3, 1.5)
        tables.append(
            Table(f"t{index}", rows, dim, AccessProfile.from_counts(counts.astype(int) + 1, num_samples=1000))
        )
    inner = Level(4, CollectiveRate(1e-3, 2.6e8), CollectiveRate(1e-7, 1.9e6))
    cluster = Cluster("c", 8, 4, 1e9, 0.0, (Level(1, None, fast), inner, Level(32, slow, None)))
    problem = Problem(tables, cluster, 1, index_dedup=False)
    curve = pareto(problem)
    assert any(point.lower_bound_seconds is not None for point in curve.points)
    for point in curve.points[::3] + curve.points[-1:]:
        best = solve(replace(problem, budget=f"{point.memory_bytes!r} B")).predicted.exposed_seconds
        least = point.exposed_seconds * (1 - 1e-4) if point.lower_bound_seconds is None else point.lower_bound_seconds
        assert best >= least * (1 - 1e-9)
