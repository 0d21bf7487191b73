"""Where the host's memory is nearly enough for a table: what lies between all of it behind a cache, and none."""

from __future__ import annotations

import numpy as np
import pytest

import flexshard
from flexshard.errors import BudgetError
from flexshard.planner import Problem
from flexshard.planner.caching import _sides
from flexshard.planner.solver.cached_program import waits_of
from flexshard.planner.solver.cached_rows import Options, options_of
from flexshard.planner.solver.cached_sums import BATCHES
from flexshard.planner.solver.deduplication import Variants
from flexshard.topologies import Cluster, CollectiveRate, Level
from tests.planner.test_caching import budget_of

RATE = CollectiveRate(1e-6, 1e9)
CLUSTER = Cluster("c", 1, 8, 1e11, 0.0, (Level(1, None, RATE), Level(8, RATE, None)), host_bytes_per_s=1e10)


def table_of(rows: int) -> flexshard.Table:
    counts = np.floor(rows * 50 / (1 + np.arange(rows))).astype(np.int64)
    profile = flexshard.AccessProfile.from_counts(counts, num_samples=rows * 50)
    return flexshard.Table("t", rows, 64, profile, optimizer="sgd")


def problem_of(rows: int, of_neutral: float, of_rows: float) -> Problem:
    table = table_of(rows)
    neutral = flexshard.solve([table], CLUSTER, batch_size=8).settings.budget_bytes
    host = of_rows * rows * table.row_bytes * table.kappa_sharded / CLUSTER.world_size
    return Problem([table], CLUSTER, 8, budget=budget_of(of_neutral * neutral), host_memory=host, index_dedup=False)


def every(problem: Problem, rows: int) -> tuple[Options, np.ndarray]:
    """Many options of a table with copies of some rows, and what each takes without latencies."""
    (side,) = _sides(problem, Variants(problem))
    copies = np.unique(
        np.append(np.geomspace(1, rows, 2_001).astype(np.int64), [0, rows // 100, rows // 20, rows // 10])
    )
    allocation = np.stack([copies, rows - copies], axis=1)
    options = Options.joined(
        [options_of(side, np.zeros_like(copies), allocation, np.full(copies.size, number)) for number in (0, *BATCHES)]
    )
    return options, options.seconds + waits_of([side], options).sum(axis=1)


@pytest.mark.parametrize("of_rows", [0.99, 0.95, 0.9])
@pytest.mark.parametrize("of_neutral", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("rows", [2_000, 100_000])
def test_just_so_many_copies_as_the_host_has_no_room_for(rows: int, of_neutral: float, of_rows: float) -> None:
    """Nothing was found to fit, or it took three times as long as it had to, with bounds of nothing."""
    problem = problem_of(rows, of_neutral, of_rows)
    assert isinstance(problem.host_memory, float)
    options, seconds = every(problem, rows)
    limit = float(problem.budget.limit_bytes(0.0, CLUSTER))
    fits = (options.hbm_bytes <= limit) & (options.host_bytes <= problem.host_memory)
    if not fits.any():
        with pytest.raises(BudgetError) as refused:
            flexshard.solve(problem)
        least = options.hbm_bytes[options.host_bytes <= problem.host_memory].min()
        assert refused.value.least_bytes == pytest.approx(least, rel=0.02)
        return
    plan = flexshard.solve(problem)
    (table,) = plan.tables.values()
    assert plan.predicted.memory_bytes <= limit * (1 + 1e-12)
    assert plan.predicted.host_memory_bytes <= problem.host_memory * (1 + 1e-12)
    copies = sum(tier.rows for tier in table.tiers if tier.group_size == 1)
    (side,) = _sides(problem, Variants(problem))
    batches = 0 if table.cache is None else table.cache.batches
    allocation = np.array([[copies, rows - copies]])
    own = options_of(side, np.zeros(1, np.int64), allocation, np.array([batches]))
    assert float(own.seconds[0] + waits_of([side], own).sum()) <= seconds[fits].min() * (1 + 1e-3)
    assert plan.proven_gap <= 0.06
