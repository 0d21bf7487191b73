"""Plans whose copies' gradients may be gathered, against every placement there is and every way to reduce its tiers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from flexshard import AccessProfile, Cluster, Table, solve
from flexshard.costmodels import StepWork
from flexshard.planner import REDUCTIONS, Problem, explain, pareto
from flexshard.planner.reductions import Auto, cost_with_reductions
from flexshard.planner.solver import deduplication
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solver.gathered import cheapest_tiers, reduced_seconds, replicated
from flexshard.planner.solver.gathered_ranges import least_cuts
from flexshard.planner.solver.instance import Allocation, Instance
from flexshard.topologies import CollectiveRate, Level

CLOSE = 1e-9


def cluster_of(all_reduce: float, nodes: int = 4, alpha: float = 0.0) -> Cluster:
    fast, slow = CollectiveRate(alpha, 10e9), CollectiveRate(alpha, 1e9)
    reduce = CollectiveRate(alpha, all_reduce)
    levels = Level(1, None, reduce), Level(2, fast, reduce), Level(2 * nodes, slow, None)
    return Cluster("c", nodes, 2, 1e12, 0.0, levels)


def drawn(generator: np.random.Generator, most_tables: int, least_rows: int, most_rows: int) -> list[Table]:
    tables = []
    for index in range(int(generator.integers(1, most_tables + 1))):
        rows = int(generator.integers(least_rows, most_rows + 1))
        p = np.sort(generator.uniform(1e-4, 1, rows) ** generator.uniform(1, 4))[::-1]
        profile = AccessProfile.from_probabilities(p, np.ones(rows, np.int64))
        tables.append(Table(f"t{index}", rows, int(generator.choice([4, 8, 16])), profile))
    return tables


def least(instance: Instance, limit: float) -> float:
    """Of all placements that fit, with every choice of tiers that are gathered."""
    best = np.inf
    per_table = [[one for one in product(range(rows + 1), repeat=3) if sum(one) == rows] for rows in instance.num_rows]
    for rows in product(*per_table):
        allocation: Allocation = np.array(rows)
        if instance.memory_bytes(allocation) > limit * (1 + 1e-12):
            continue
        tiers = replicated(instance, allocation)
        for chosen in product((False, True), repeat=int(tiers.sum())):
            sparse = np.zeros_like(tiers)
            sparse[tiers] = chosen
            best = min(best, reduced_seconds(instance, allocation, sparse))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_below_the_bound_and_hardly_anything_below_the_plan(seed: int) -> None:
    generator = np.random.default_rng(seed)
    tables = drawn(generator, 2, 2, 5)
    cluster = cluster_of(10 ** generator.uniform(8, 11), int(generator.choice([2, 4])), generator.choice([0, 1e-9]))
    how = {"batch_size": int(generator.choice([2, 8, 64])), "index_dedup": False}
    variants = Variants(Problem(tables, cluster, reduction="auto", **how))
    instance = variants.plain
    neutral = instance.memory_bytes(instance.uniform(cluster.world_size))
    limit = neutral + generator.uniform(0, 1.5) * sum(table.rows * table.row_bytes for table in tables)
    _, found = variants.solve(limit, 3)
    expected = least(instance, limit)
    assert instance.memory_bytes(found.allocation) <= limit * (1 + 1e-12)
    assert found.lower_bound_seconds <= expected * (1 + CLOSE)
    assert expected * (1 - CLOSE) <= found.seconds <= expected * (1 + 1e-4)
    _, dense = Variants(Problem(tables, cluster, **how)).solve(limit, 3)
    assert found.seconds <= dense.seconds * (1 + CLOSE)


def test_more_memory_is_never_worse() -> None:
    """Where counts by themselves would fit at hardly any price, ranges of them do at a much higher one."""
    fast, slow = CollectiveRate(11e-6, 390e9), CollectiveRate(50e-6, 20e9)
    reduce = CollectiveRate(35e-6, 40e9)
    cluster = Cluster(
        "c",
        2,
        4,
        8e9,
        1e9,
        (Level(1, None, CollectiveRate(35e-6, 200e9)), Level(4, fast, reduce), Level(8, slow, None)),
    )
    p = np.arange(1, 40_001) ** -1.05
    counts = np.random.default_rng(0).multinomial(22_680, p / p.sum())
    tables = [Table("t", 40_000, 128, AccessProfile.from_counts(counts, 4_536), optimizer="adam")]
    how = {"batch_size": 512, "reduction": "sparse", "index_dedup": False}
    plans = [solve(tables, cluster, budget=f"+{mib}MiB", **how) for mib in (0, 4, 8, 12, 15, 20)]
    took = [plan.predicted.exposed_seconds for plan in plans]
    assert took == sorted(took, reverse=True)
    for plan, least in zip(plans, np.minimum.accumulate(took), strict=True):
        assert plan.lower_bound_seconds <= least * (1 + CLOSE)


def zipf(exponent: float = 0.9, rows: int = 2000) -> Table:
    p = 0.4 * np.arange(1, rows + 1) ** -exponent
    return Table("t", rows, 8, AccessProfile.from_probabilities(p, np.ones(rows, np.int64)))


@pytest.mark.parametrize(("index_dedup", "step"), [(False, None), (True, None), ("auto", None), (False, StepWork(0.0))])
def test_tiers_are_chosen_for_what_gathering_takes(index_dedup: bool | str, step: StepWork | None) -> None:
    # Rows that are touched now and then cost next to nothing to gather, and would be too much to reduce whole.
    tables, cluster = [zipf(), Table("u", 500, 16, zipf(1.3, 500).profile)], cluster_of(3e9, nodes=2)
    how = {"batch_size": 16, "budget": "+60000B", "index_dedup": index_dedup, "step": step}
    plans = {name: solve(tables, cluster, reduction=name, **how) for name in ("dense", "sparse", "auto")}
    took = {name: plan.objective_seconds(plan.predicted) for name, plan in plans.items()}
    assert took["auto"] <= min(took["dense"], took["sparse"]) * (1 + CLOSE)
    assert took["auto"] < 0.8 * took["dense"]
    dense = plans["dense"]
    if step is None and not index_dedup:  # its tiers, chosen for reductions and gathered then
        instance, found = Variants(Problem(tables, cluster, **how)).solve(dense.settings.budget_bytes, 3)
        gathered = reduced_seconds(instance, found.allocation, cheapest_tiers(instance, found.allocation))
        assert took["auto"] < 0.9 * gathered
    for plan in plans.values():
        assert plan.lower_bound_seconds <= plan.objective_seconds(plan.predicted)
    assert plans["auto"].lower_bound_seconds <= took["auto"] <= 1.1 * plans["auto"].lower_bound_seconds
    assert plans["auto"].lower_bound_seconds < dense.lower_bound_seconds, "it holds for more placements"


@pytest.mark.slow
def test_the_frontier_gathers_where_that_takes_less() -> None:
    how = {"batch_size": 16, "reduction": "auto", "index_dedup": False}
    problem = Problem([zipf()], cluster_of(3e9, nodes=2), **how)
    curve = pareto(problem.tables, problem.cluster, **how)
    dense = pareto(replace(problem, reduction=REDUCTIONS["dense"]))
    gained = 0
    for point in curve.points:
        assert point.lower_bound_seconds is not None
        assert point.lower_bound_seconds <= point.exposed_seconds
        within = [one.exposed_seconds for one in dense.points if one.memory_bytes <= point.memory_bytes]
        assert point.exposed_seconds <= min(within, default=np.inf) * (1 + CLOSE)
        gained += point.exposed_seconds < 0.9 * min(within, default=0.0)
    assert gained


@pytest.mark.slow
def test_the_frontier_is_of_mean_memory_whatever_the_budget_bounds() -> None:
    """It searched within limits of the mean for plans whose fullest rank stays within them, and found none."""
    lengths = np.random.default_rng(0).poisson(5, 500)
    ids = np.minimum(np.random.default_rng(1).zipf(1.2, int(lengths.sum())) - 1, 1_999)
    table = Table("t", 2_000, 16, AccessProfile.from_ids(ids, lengths=lengths, num_rows=2_000))
    problem = Problem([table], cluster_of(3e9, nodes=2), 16, reduction="auto")
    curve = pareto(replace(problem, memory="p99.9", budget="+1GiB"))
    assert curve == pareto(problem)
    assert len(curve.points) > 1
    assert curve.mark("row_wise").rows == (0, 0, 2_000)
    assert curve.mark("full_replication").rows == (2_000, 0, 0)
    assert curve.mark("memory_neutral").memory_bytes <= curve.neutral_bytes


def test_with_pooled_tables() -> None:
    tables = [zipf(), Table("p", 1000, 16, zipf(1.1, 1000).profile, pooling="sum")]
    how = {"batch_size": 16, "budget": "+60000B", "index_dedup": False, "gap": 0.05}
    dense, auto = (solve(tables, cluster_of(3e9, nodes=2), reduction=name, **how) for name in ("dense", "auto"))
    assert auto.predicted.exposed_seconds < 0.9 * dense.predicted.exposed_seconds
    assert auto.lower_bound_seconds <= auto.predicted.exposed_seconds <= 1.1 * auto.lower_bound_seconds


@pytest.mark.parametrize("overlap", [None, {"all_reduce@1": 0.3, "all_gather@2": 0.5}])
def test_seconds_are_those_of_the_calls(overlap: dict[str, float] | None) -> None:
    tables = [zipf(), Table("u", 500, 16, zipf(1.3, 500).profile, optimizer="adam")]
    problem = Problem(tables, cluster_of(3e9, nodes=2, alpha=1e-6), 16, index_dedup=False, overlap=overlap)
    instance = Variants(problem).plain
    allocation = np.array([[10, 200, 1790], [0, 100, 400]])
    for chosen in product((False, True), repeat=4):
        sparse = np.zeros(allocation.shape, np.bool_)
        sparse[:, :2] = np.array(chosen).reshape(2, 2)
        sparse &= replicated(instance, allocation)
        calls = cost_with_reductions(instance, allocation, sparse).exposed_seconds
        assert reduced_seconds(instance, allocation, sparse) == pytest.approx(calls, rel=1e-12)


@pytest.mark.parametrize("reduction", ["dense", "sparse", "auto"])
def test_reasons_know_what_gathering_takes(reduction: str) -> None:
    tables = [zipf(), Table("u", 500, 16, zipf(1.3, 500).profile)]
    how = {"batch_size": 16, "budget": "+60000B", "index_dedup": False, "reduction": reduction}
    plan = solve(tables, cluster_of(3e9, nodes=2), **how)
    seconds = plan.predicted.exposed_seconds
    for name, table in plan.tables.items():
        assert table.alternatives
        for one in table.alternatives:
            assert one.priced_seconds >= -1e-3 * seconds, "nothing else is better"
        for boundary in explain(plan, name).boundaries:
            # Tiers are gathered whole or not at all, so a row at their edge may be a little better off elsewhere.
            assert boundary.chosen.priced_seconds <= 1.3 * boundary.others[0].priced_seconds
    assert any(tier.reduction != "dense" for table in plan.tables.values() for tier in table.tiers) == (
        reduction != "dense"
    )


def test_a_reduction_of_ones_own_is_bounded_too() -> None:
    class Half(Auto):
        """The first table's tiers alone."""

        name = "half"

        def sparse_tiers(self, instance: Instance, allocation: Allocation) -> np.ndarray:
            first = np.arange(len(allocation))[:, None] == 0
            return super().sparse_tiers(instance, allocation) & first

    tables = [zipf(), Table("u", 500, 16, zipf(1.3, 500).profile)]
    how = {"batch_size": 16, "budget": "+60000B", "index_dedup": False}
    plan = solve(tables, cluster_of(3e9, nodes=2), reduction=Half(), **how)
    auto = solve(tables, cluster_of(3e9, nodes=2), reduction="auto", **how)
    assert {tier.reduction for tier in plan.tables["u"].tiers} == {"dense"}
    assert plan.lower_bound_seconds <= plan.predicted.exposed_seconds
    assert auto.predicted.exposed_seconds <= plan.predicted.exposed_seconds * (1 + CLOSE)


def test_very_many_counts_that_are_all_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, cluster = [zipf(), zipf(1.2)], cluster_of(1e9)
    tables[1] = Table("u", 2000, 8, tables[1].profile)
    how = {"batch_size": 16, "budget": "+60000B", "index_dedup": False, "reduction": "sparse"}
    one_by_one = solve(tables, cluster, **how)
    monkeypatch.setattr(deduplication, "MANY_COUNTS", 10)
    monkeypatch.setattr("flexshard.planner.solver.gathered.MANY_COUNTS", 10)
    as_reduced = solve(tables, cluster, **how)
    assert one_by_one.predicted.exposed_seconds <= as_reduced.predicted.exposed_seconds * (1 + CLOSE)
    assert as_reduced.lower_bound_seconds <= one_by_one.predicted.exposed_seconds
    row_wise = as_reduced.baselines["row_wise"].exposed_seconds
    assert as_reduced.predicted.exposed_seconds <= row_wise * (1 + CLOSE)


def test_many_counts_that_are_all_gathered() -> None:
    counts = np.unique(np.geomspace(1, 10**9, 40_000).astype(np.int64))[::-1]
    profile = AccessProfile.from_histogram(counts, np.ones_like(counts), 10**9, 200_000)
    tables = [Table(name, 200_000, 64, profile) for name in "ab"]
    plan = solve(tables, cluster_of(3e9, nodes=2), batch_size=64, reduction="sparse", index_dedup=False)
    assert plan.predicted.exposed_seconds <= plan.lower_bound_seconds * 1.005
    assert plan.predicted.exposed_seconds < 0.7 * plan.baselines["row_wise"].exposed_seconds


@pytest.mark.parametrize("seed", range(20))
def test_where_levels_end(seed: int) -> None:
    generator = np.random.default_rng(seed)
    levels, counts = int(generator.integers(1, 4)), int(generator.integers(1, 6))
    values = generator.integers(-3, 8, (levels, counts)).astype(np.float64)
    barred = generator.integers(0, counts + 1, levels)
    barred[-1] = 0 if generator.random() < 0.8 else barred[-1]

    def cost(cuts: tuple[int, ...]) -> float:
        ends = [0, *cuts, counts]
        total = 0.0
        for level in range(levels):
            first, last = ends[level], ends[level + 1]
            if last < first or (last > first and first < barred[level]):
                return np.inf
            total += float(values[level, first:last].sum())
        return total

    best = min(cost(cuts) for cuts in product(range(counts + 1), repeat=levels - 1))
    value, cuts = least_cuts(values, barred)
    assert value == best
    if np.isfinite(best):
        assert cost(tuple(cuts.tolist())) == best
