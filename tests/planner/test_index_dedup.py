"""Repeated ids sent once where that pays: every other choice, neutral memory, what a plan says and keeps."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from benchmarks.published import published_table
from hypothesis import given, settings, strategies as st

from flexshard import AccessProfile, Cluster, Plan, Table, explain, solve
from flexshard.errors import BudgetError, JobError
from flexshard.planner import Problem, pareto
from flexshard.planner.solver import deduplication
from flexshard.planner.solver.build import build_instance
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solver.dual_search import solve_instance
from flexshard.profiling import power_law_probabilities
from flexshard.topologies import CollectiveRate, Level
from tests.planner.instances import clusters, table_lists

CLUSTER = Cluster.preset("dgx-h100", nodes=4)


def table(name: str, rows: int, length: float, exponent: float, dim: int = 64) -> Table:
    return Table(name, rows, dim, AccessProfile.from_probabilities(power_law_probabilities(rows, length, exponent)))


def cold(name: str) -> Table:
    """Ids that hardly repeat, of rows that weigh little."""
    return Table(name, 20_000_000, 4, AccessProfile.from_histogram([1], [20_000_000], 10_000_000))


def by_every_choice(problem: Problem, limit: float) -> tuple[float, float]:
    """Least seconds and least bound of all choices of tables."""
    found = []
    for mask in product((False, True), repeat=len(problem.tables)):
        try:
            found.append(solve_instance(build_instance(problem, np.array(mask)), limit, problem.tiers))
        except BudgetError:
            continue
    return min(one.seconds for one in found), min(one.lower_bound_seconds for one in found)


@settings(max_examples=25)
@given(
    clusters(max_levels=3),
    table_lists(max_tables=5, max_rows=12),
    st.sampled_from([50, 1000]),
    st.sampled_from([0.0, 1e-9, 1e-6]),
    st.floats(0.0, 1.0),
)
def test_no_choice_of_tables_is_better(
    cluster: Cluster, tables: list[Table], batch: int, per_id: float, generosity: float
) -> None:
    problem = Problem(tables, cluster, batch, index_dedup_seconds_per_id=per_id)
    variants = Variants(problem)
    plain, once = (one.cost(one.uniform(cluster.world_size)).memory_bytes for one in (variants.plain, variants.once))
    limit = once + generosity * (plain - once) * (1 + 1e-9)
    best, bound = by_every_choice(problem, limit)
    instance, solution = variants.solve(limit, problem.tiers)
    assert solution.lower_bound_seconds <= best * (1 + 1e-9)
    assert solution.seconds >= best * (1 - 1e-9)
    if len(tables) <= 4:  # every choice is tried
        assert solution.seconds <= best * (1 + 1e-9)
        assert solution.lower_bound_seconds <= bound * (1 + 1e-9)
    assert instance.memory_bytes(solution.allocation) <= limit * (1 + 1e-11)
    assert instance.exposed_seconds(solution.allocation) == pytest.approx(solution.seconds, rel=1e-9)


def test_many_tables_are_deduplicated_where_it_pays() -> None:
    """With a nanosecond an id, tables whose ids hardly repeat go without; the bound says that nothing is better."""
    tables = [*(table(f"hot{k}", 400_000, 40, 0.8, dim=256) for k in range(4)), *(cold(f"cold{k}") for k in range(4))]
    plan = solve(tables, CLUSTER, batch_size=4096)
    chosen = {name for name, one in plan.tables.items() if one.index_dedup}
    assert chosen
    assert all(name.startswith("hot") for name in chosen)
    assert plan.predicted.exposed_seconds <= plan.lower_bound_seconds * (1 + 1e-3)
    for how in (True, False):
        other = solve(tables, CLUSTER, batch_size=4096, index_dedup=how)
        assert other.settings.budget_bytes == plan.settings.budget_bytes, "neutral is plain row-wise's"
        assert other.predicted.exposed_seconds > plan.predicted.exposed_seconds
    # So long a time to find them that none pays.
    none = solve(tables, CLUSTER, batch_size=4096, index_dedup_seconds_per_id=1e-3)
    assert not any(one.index_dedup for one in none.tables.values())


def test_a_mixture_is_the_two_it_is_made_of() -> None:
    tables = [table("a", 5_000, 40, 1.1), table("b", 3_000, 10, 0.5), table("c", 400, 5, 1.0)]
    problem = Problem(tables, CLUSTER, 256)
    mask = np.array([True, False, True])
    mixed, built = Variants(problem).of(mask), build_instance(problem, mask)
    for name in ("reads", "unit_reads", "cum_rows"):
        assert np.array_equal(getattr(mixed, name), getattr(built, name))
    assert np.allclose(mixed.total_reads, built.total_reads, rtol=1e-12)
    allocation = np.array([[10, 90, 4_900], [0, 0, 3_000], [400, 0, 0]])
    assert mixed.cost(allocation).exposed_seconds == pytest.approx(built.cost(allocation).exposed_seconds)
    assert mixed.cost(allocation).index_dedup_seconds == pytest.approx(256 * (40 + 5) * 1e-9)


def test_a_plan_says_and_keeps_which(tmp_path: Path) -> None:
    tables = [table("hot", 400_000, 40, 0.8, dim=256), cold("cold")]
    plan = solve(tables, CLUSTER, batch_size=4096)
    assert [one.index_dedup for one in plan.tables.values()] == [True, False]
    assert "repeated ids sent once (1 of the tables)" in str(plan)
    assert "row_wise_dedup" in plan.baselines
    assert plan.predicted.index_dedup_seconds == pytest.approx(4096 * 40 * 1e-9)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.fingerprint == plan.fingerprint
    assert [one.index_dedup for one in again.tables.values()] == [True, False]
    assert again.predicted == plan.predicted
    boundary = explain(again, "hot").boundaries[-1]
    w = plan.tables["hot"].tiers[-1].coldest_c
    assert w is not None
    assert boundary.chosen.memory_bytes > 0
    every = solve(tables, CLUSTER, batch_size=4096, index_dedup=True)
    every.save(tmp_path / "every.json")
    assert all(one.index_dedup for one in Plan.load(tmp_path / "every.json").tables.values())
    with pytest.raises(JobError, match="index_dedup_seconds_per_id is a time of at least 0 s"):
        solve(tables, CLUSTER, batch_size=512, index_dedup_seconds_per_id=-1.0)


@pytest.mark.parametrize(
    ("model", "overlap", "times"),
    [("RM-1", None, 2.5), ("RM-3", None, 1.8), ("RM-4", None, 2.7), ("RM-1", "paper", 5.0), ("RM-2", "paper", 10.0)],
)
def test_the_published_models_in_plain_row_wises_memory(
    model: str, overlap: str | None, times: float, paper_cluster: Cluster
) -> None:
    plan = solve([published_table(model)], paper_cluster, batch_size=4096, overlap=overlap)
    row_wise = plan.baselines["row_wise"]
    assert plan.tables[model].index_dedup
    assert row_wise.exposed_seconds > times * plan.predicted.exposed_seconds
    assert plan.predicted.memory_bytes <= row_wise.memory_bytes
    without = solve([published_table(model)], paper_cluster, batch_size=4096, overlap=overlap, index_dedup=False)
    assert plan.predicted.exposed_seconds < without.predicted.exposed_seconds
    assert replace(plan.settings, index_dedup=False) == without.settings


def test_rows_that_samples_repeat_are_taken_in_order_of_their_counts() -> None:
    """A row of 100 reads in one sample is in fewer batches than one of 50 reads in 50 samples; tiers go by counts."""
    profile = AccessProfile(np.array([100, 50]), np.array([4, 4]), 8, 1000, samples=np.array([4, 200]))
    own = Table("a", 8, 16, profile, "float32", "sgd")
    reads = own.reads(50, index_dedup=True)
    single = [1 - (1 - c) ** 50 for c in (0.001, 0.05)]
    assert reads.tolist() == pytest.approx([sum(single) / 2] * 2)
    levels = Level(1, None, CollectiveRate(0.0, 1e8)), Level(4, CollectiveRate(0.0, 1e7), None)
    cluster = Cluster("c", 1, 4, 1e9, 0.0, levels)
    instance = build_instance(Problem([own], cluster, 50), np.array([True]))
    for limit in np.linspace(1200, 3000, 12).tolist():
        try:
            found = solve_instance(instance, limit, 2)
        except BudgetError:
            continue
        every = [np.array([[rows, 8 - rows]]) for rows in range(9)]
        fits = [one for one in every if instance.memory_bytes(one) <= limit]
        assert found.seconds == pytest.approx(min(instance.exposed_seconds(one) for one in fits))
        assert found.lower_bound_seconds <= found.seconds


def test_nothing_to_communicate_is_nothing_to_deduplicate() -> None:
    hidden = {f"{kind}@{size}": 1.0 for kind, size in (("all_to_all", 8), ("all_to_all", 16), ("all_reduce", 1))}
    hidden |= {"all_reduce@8": 1.0}
    tables = [table(f"t{k}", 20_000, 20, 1.0) for k in range(6)]
    cluster = Cluster.preset("dgx-h100", nodes=2)
    plan = solve(tables, cluster, batch_size=256, overlap=hidden)
    assert plan.predicted.exposed_seconds == 0.0
    assert not any(one.index_dedup for one in plan.tables.values())


def test_one_rank_sends_nothing_and_deduplicates_nothing() -> None:
    """But where memory is short, as the frontier says, whose neutral plan is the plan."""
    cluster = Cluster("one", 1, 1, 1e9, 0.0, (Level(1, None, None),))
    own = table("t", 2_000, 20, 1.0)
    plan, curve = solve([own], cluster, batch_size=64), pareto([own], cluster, batch_size=64)
    assert not plan.tables["t"].index_dedup
    distinct = solve([own], cluster, batch_size=64, index_dedup=True)
    assert {point.memory_bytes for point in curve.points} == {one.predicted.memory_bytes for one in (distinct, plan)}
    assert curve.mark("memory_neutral").exposed_seconds == plan.predicted.exposed_seconds == 0.0


def test_on_one_rank_ids_are_looked_up_once_where_nothing_else_fits() -> None:
    cluster, tables = Cluster("one", 1, 1, 1e9, 0.0, (Level(1, None, None),)), [table("often", 1000, 40.0, 1.2)]
    least = []
    for once in (False, True, "auto"):
        with pytest.raises(BudgetError) as caught:
            solve(tables, cluster, batch_size=64, budget="1B", index_dedup=once)
        least.append(caught.value.least_bytes)
    assert least[0] > least[1] == least[2]
    for budget, once in ((least[0], False), ((least[0] + least[1]) / 2, True)):
        plan = solve(tables, cluster, batch_size=64, budget=f"{budget + 1:.0f}B", index_dedup="auto")
        assert plan.tables["often"].index_dedup is once


@pytest.mark.parametrize("seed", range(6))
def test_on_one_rank_every_choice_of_tables_is_weighed(seed: int) -> None:
    """What sends least fits, and the bound is of all choices; so is the frontier's."""
    generator = np.random.default_rng([6, seed])
    cluster = Cluster("one", 1, 1, 1e9, 0.0, (Level(1, None, None),))
    tables = [table(f"t{index}", 200, float(generator.integers(1, 40)), 1.0) for index in range(3)]
    variants = Variants(Problem(tables, cluster, 64))
    found = {}
    for mask in product((False, True), repeat=3):
        instance = variants.of(np.array(mask))
        every = instance.uniform(1)
        found[mask] = instance.memory_bytes(every), instance.exposed_seconds(every)
    curve = pareto(tables, cluster, batch_size=64)
    assert curve.points[0].memory_bytes == pytest.approx(min(memory for memory, _ in found.values()))
    for memory, _ in found.values():
        plan = solve(tables, cluster, batch_size=64, budget=f"{memory + 1:.0f}B")
        least = min(seconds for held, seconds in found.values() if held <= memory)
        assert plan.predicted.exposed_seconds == pytest.approx(least)
        assert plan.lower_bound_seconds == pytest.approx(least)


def test_a_step_on_one_rank_looks_up_once_what_pays() -> None:
    cluster = Cluster("one", 1, 1, 1e9, 0.0, (Level(1, None, None),), 1e12)
    counts = [AccessProfile.from_counts(np.full(10, reads), 10) for reads in (1000, 100)]
    tables = [Table(f"t{index}", 10, 64, profile) for index, profile in enumerate(counts)]
    auto, once = (
        solve(tables, cluster, batch_size=64, budget="100MB", objective="step", index_dedup=how)
        for how in ("auto", True)
    )
    assert auto.objective_seconds(auto.predicted) <= once.objective_seconds(once.predicted) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_frontier_knows_choices_of_tables(seed: int) -> None:
    """Its neutral plan is the plan, and its bounds are of plans within other budgets, too."""
    generator = np.random.default_rng([5, seed])
    tables = []
    for number, dim in enumerate(generator.choice([4, 16, 64], 4).tolist()):
        rows = int(10 ** generator.uniform(1, 4.5))
        weights = np.arange(1.0, rows + 1) ** -generator.uniform(0.3, 1.3)
        counts = generator.multinomial(int(10 ** generator.uniform(3, 5)), weights / weights.sum())
        tables.append(Table(f"t{number}", rows, dim, AccessProfile.from_counts(counts, num_samples=1000)))
    cluster = Cluster.preset("a100-4x8-roce")
    plan, curve = solve(tables, cluster, batch_size=128), pareto(tables, cluster, batch_size=128)
    neutral = curve.mark("memory_neutral")
    assert (neutral.memory_bytes, neutral.exposed_seconds) == pytest.approx(
        (plan.predicted.memory_bytes, plan.predicted.exposed_seconds), rel=1e-9
    )
    assert neutral.lower_bound_seconds == pytest.approx(plan.lower_bound_seconds, rel=1e-6)
    memory = np.array([point.memory_bytes for point in curve.points])
    seconds = [point.exposed_seconds for point in curve.points]
    assert all((point.lower_bound_seconds or 0.0) > 0.5 * point.exposed_seconds for point in curve.points)
    assert seconds == sorted(seconds, reverse=True)
    for budget in np.linspace(memory[0], memory[-1], 7).tolist():
        limit = f"{budget + cluster.reserve_bytes + 1:.0f}B"
        found = solve(tables, cluster, batch_size=128, budget=limit).predicted
        above = np.searchsorted(memory, found.memory_bytes)
        if above < memory.size:
            assert (curve.points[above].lower_bound_seconds or 0.0) <= found.exposed_seconds * (1 + 1e-9)


def test_choices_of_many_small_tables_are_not_all_tried() -> None:
    even = [
        Table(f"t{k}", 1000 * (k + 1), 64, AccessProfile.from_counts(np.full(1000 * (k + 1), 50), num_samples=2000))
        for k in range(16)
    ]
    problem = Problem(even, Cluster.preset("dgx-h100", 4), 2048, overlap="paper")
    with mock.patch.object(deduplication, "bound_at_price", wraps=deduplication.bound_at_price) as bounded:
        plan = solve(problem)
    assert bounded.call_count < 3_000
    assert plan.lower_bound_seconds <= plan.predicted.exposed_seconds


def often_read(seed: int, count: int | None = None) -> list[Table]:
    generator = np.random.default_rng([9, seed])
    tables = []
    for number in range(int(generator.integers(3, 6)) if count is None else count):
        rows = int(10 ** generator.uniform(1, 3.5))
        weights = np.arange(1.0, rows + 1) ** -generator.uniform(0.3, 1.3)
        counts = generator.multinomial(int(10 ** generator.uniform(4, 6)), weights / weights.sum())
        dim, samples = int(generator.choice([16, 64, 256])), int(10 ** generator.uniform(2.5, 4))
        tables.append(Table(f"t{number}", rows, dim, AccessProfile.from_counts(counts, num_samples=samples)))
    return tables


@pytest.mark.parametrize("seed", [3, 4, 14, 15])
def test_hidden_all_to_alls_leave_the_choice_to_memory(seed: int) -> None:
    """Where no time is saved by sending ids once, tables are chosen by what just fits: prices give none or all."""
    problem = Problem(often_read(seed), Cluster.preset("dgx-h100", 4), 2048, overlap="paper")
    plan, least = solve(problem), np.inf
    for mask in product((False, True), repeat=len(problem.tables)):
        with suppress(BudgetError):
            instance = Variants(problem).of(np.array(mask))
            least = min(least, solve_instance(instance, plan.settings.budget_bytes, problem.tiers).seconds)
    assert plan.predicted.exposed_seconds == pytest.approx(least, rel=1e-3)
    assert plan.lower_bound_seconds == pytest.approx(least, rel=1e-3)
    assert plan.predicted.exposed_seconds <= pareto(problem).mark("memory_neutral").exposed_seconds * (1 + 1e-9)


@pytest.mark.parametrize("number", [30, 100])
def test_on_one_rank_bounds_of_many_tables_are_near(number: int) -> None:
    """Nothing but finding distinct ids takes time there; prices of memory have to be of that. Of 30 tables one large
    one just does not fit, for which small ones make up.
    """
    cluster = Cluster("one", 1, 1, 80e9, 0.0, (Level(1, None, None),))
    tables = []
    for index in range(number):
        generator = np.random.default_rng(index)
        reads = 10 ** generator.uniform(2, 6) / np.arange(1, 2001) ** generator.uniform(0.3, 1.6)
        tables.append(Table(f"t{index}", 2000, 64, AccessProfile.from_counts(reads.astype(int) + 1, num_samples=1000)))
    sides = Variants(Problem(tables, cluster, 256)).sides
    budget = sum(side.memory_bytes(side.uniform(1)) for side in sides) / 2
    plan = solve(tables, cluster, batch_size=256, budget=f"{budget:.0f}B")
    assert plan.predicted.exposed_seconds <= plan.lower_bound_seconds * 1.005
