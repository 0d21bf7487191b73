"""Whole steps: phases by hand, bounds against every placement, and what the default objective is."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from flexshard import AccessProfile, Cluster, Plan, Problem, Table, pareto, solve
from flexshard.costmodels import Collective, Cost, LocalRates, StepWork, TableRates, step_phases, step_seconds
from flexshard.errors import BudgetError, JobError
from flexshard.planner.solver.build import build_instance
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solver.instance import Instance
from flexshard.topologies import CollectiveRate, Level
from tests.planner.instances import clusters, table_lists

WORK = StepWork(2e-3, LocalRates((0.0, 1e-9, 1e-12), (0.0, 3e-9, 2e-12), 5e-12))


def test_phases_by_hand() -> None:
    def call(kind: str, size: int, content: str, nbytes: float, overlap: float = 0.0, calls: int = 1) -> Collective:
        return Collective(kind, size, calls, nbytes, 1.0, 10.0, overlap, content)  # type: ignore[arg-type]

    cost = Cost(
        collectives=(
            call("all_to_all", 8, "counts", 10),  # 2 s
            call("all_to_all", 2, "ids", 20),  # 3 s
            call("all_to_all", 8, "ids", 40),  # 5 s
            call("all_to_all", 2, "embeddings", 190, calls=2),  # 40 s
            call("all_to_all", 8, "embeddings", 290),  # 30 s
            call("all_to_all", 2, "gradients", 290),  # 30 s
            call("all_to_all", 8, "gradients", 190),  # 20 s
            call("all_reduce", 2, "replicas", 90),  # 10 s, on the outer links too
            call("all_reduce", 1, "replicas", 190, overlap=0.5),  # 10 s that show
        ),
        index_dedup_seconds=1.5,
        look_up_seconds=4.0,
        update_seconds=6.0,
        overlapped_look_up_seconds=35.0,
        overlapped_update_seconds=15.0,
        row_wise_update_seconds=13.0,
    )
    phases = step_phases(cost, 8, StepWork(100.0))
    assert [(phase.name, phase.seconds) for phase in phases] == [
        ("find distinct ids", 1.5),
        ("counts", 2.0),
        ("ids", 5.0),
        ("look up", 4.0),
        ("embeddings", 40.0),
        ("dense", 100.0),
        ("gradients", 40.0),
        ("update", 6.0),
    ]
    gradients = next(phase for phase in phases if phase.name == "gradients")
    # Row-wise rows are updated after their gradients came, which takes 20 s, longer than to add up the others'.
    assert gradients.links == {"links@2": 30.0, "links@8": 40.0, "rank": 33.0}
    assert {one.key for phase in phases for one in phase.collectives} == {one.key for one in cost.collectives}
    assert step_seconds(cost, 8, StepWork(100.0)) == 198.5
    # Copies, and rows within nodes, are looked up while the others are on their way.
    rows = next(phase for phase in phases if phase.name == "embeddings")
    assert rows.links == {"links@2": 40.0, "links@8": 30.0, "rank": 35.0}
    assert step_seconds(replace(cost, overlapped_look_up_seconds=45.0), 8, StepWork(100.0)) == 203.5
    assert step_seconds(replace(cost, row_wise_update_seconds=25.0), 8, StepWork(100.0)) == 203.5
    assert step_seconds(replace(cost, overlapped_update_seconds=30.0), 8, StepWork(100.0)) == 201.5
    assert cost.local_seconds == 1.5 + 4 + 6 + 35 + 15 + 13


def placements(instance: Instance, tiers: int) -> list[np.ndarray]:
    """Every placement in ranges of rows, of at most so many levels."""
    levels = instance.group_sizes.size
    per_table = []
    for rows in instance.num_rows.tolist():
        cuts = combinations_with_replacement(range(rows + 1), levels - 1)
        per_table.append([np.diff([0, *cut, rows]) for cut in cuts])
    every = [np.stack(choice) for choice in product(*per_table)]
    return [one for one in every if one.any(axis=0).sum() <= tiers]


def rows_of(plan: Plan, instance: Instance) -> np.ndarray:
    """Rows per table and level of a plan."""
    found = np.zeros((len(plan.tables), instance.group_sizes.size), np.int64)
    for index, table in enumerate(plan.tables.values()):
        for tier in table.tiers:
            found[index, instance.group_sizes.tolist().index(tier.group_size)] = tier.rows
    return found


@settings(max_examples=60, deadline=None)
@given(
    clusters(max_levels=3),
    table_lists(max_tables=2, max_rows=4),
    st.sampled_from([50, 1000]),
    st.integers(1, 3),
    st.floats(0.0, 1.0),
    st.sampled_from([None, 0.0, 1e-7, 1e-5]),
    st.sampled_from([0.0, 1e-7, 1e-5]),
    st.sampled_from([None, (-1, 0.8), (1, 0.8), (1, 1.0)]),
)
def test_no_placement_beats_the_bound(
    cluster: Cluster,
    tables: list[Table],
    batch: int,
    tiers: int,
    generosity: float,
    per_row: float | None,
    per_update: float,
    hidden: tuple[int, float] | None,
) -> None:
    work = StepWork(1e-3)
    if per_row is not None:  # the last table's rows take as long as that
        rates = (0.0, per_row, 0.0), (0.0, per_update, 0.0)
        own = TableRates(tables[-1].rows, tables[-1].dim, (0.0, 0.0), *rates)
        assert WORK.rates is not None
        work = StepWork(1e-3, replace(WORK.rates, tables=(own,)))
    overlap = None if hidden is None else {f"all_to_all@{cluster.group_sizes[hidden[0]]}": hidden[1]}
    how = {"batch_size": batch, "tiers": tiers, "index_dedup": False, "step": work, "overlap": overlap}
    problem = Problem(tables, cluster, **how)
    instance = build_instance(problem)
    every = placements(instance, tiers)
    memory = np.array([instance.memory_bytes(one) for one in every])
    neutral = instance.memory_bytes(instance.uniform(cluster.world_size))
    budget = memory.min() + generosity * (max(memory.max(), neutral) - memory.min())
    step = np.array([step_seconds(instance.cost(one), cluster.world_size, work) for one in every])
    least = step[memory <= budget * (1 + 1e-12)].min()
    try:
        plan = solve(tables, cluster, budget=float(budget - neutral), **how)
    except BudgetError:
        assert budget < memory.min() * (1 + 1e-9)
        return
    found = plan.objective_seconds(plan.predicted)
    assert plan.predicted.memory_bytes <= budget * (1 + 1e-9)
    assert plan.lower_bound_seconds <= least * (1 + 1e-9)
    assert found >= least * (1 - 1e-9)
    assert found <= step[[one.any(axis=0).sum() == 1 for one in every] & (memory <= budget * (1 + 1e-12))].min(
        initial=np.inf
    ) * (1 + 1e-6)
    plain = {"batch_size": batch, "tiers": tiers, "index_dedup": False, "overlap": overlap}
    by_sum = solve(tables, cluster, budget=float(budget - neutral), **plain)
    same = instance.cost(rows_of(by_sum, instance))
    assert found <= step_seconds(same, cluster.world_size, work) * (1 + 1e-9)


def two_links(nodes: int = 4, width: int = 8) -> Cluster:
    world = nodes * width
    fast, slow = CollectiveRate(1e-5, 3e10), CollectiveRate(3e-5, 1e10)
    levels = (Level(1, None, slow), Level(width, fast, slow), Level(world, slow, None))
    return Cluster("two links", nodes, width, 4e10, 0.0, levels, 2e12)


def zipf(name: str, rows: int = 100_000, dim: int = 64, exponent: float = 1.0, length: float = 20.0) -> Table:
    p = np.arange(1.0, rows + 1) ** -exponent
    return Table(name, rows, dim, AccessProfile.from_probabilities(p * (length / p.sum())))


@pytest.mark.parametrize("overlap", [None, {"all_to_all@8": 0.5}])
@pytest.mark.parametrize("dedup", [False, "auto"])
def test_bounds_are_close_on_large_tables(dedup: bool | str, overlap: dict[str, float] | None) -> None:
    tables = [zipf("a"), zipf("b", 30_000, 128, 0.8), zipf("c", 10_000, 32, 1.2, 5.0)]
    how = {"batch_size": 2048, "index_dedup": dedup, "overlap": overlap}
    plan = solve(tables, two_links(), step=StepWork(1e-3), **how)
    found = plan.objective_seconds(plan.predicted)
    assert plan.lower_bound_seconds <= found <= plan.lower_bound_seconds * (1 + 1e-3)
    # The least sum of all links' times is not the shortest step.
    by_sum = solve(tables, two_links(), **how)
    mask = np.array([table.index_dedup for table in by_sum.tables.values()])
    instance = build_instance(Problem(tables, two_links(), step=StepWork(1e-3), **how), mask)
    assert plan.objective_seconds(instance.cost(rows_of(by_sum, instance))) > 1.001 * found
    assert plan.baselines["row_wise"].look_up_seconds > 0


def test_the_objective_follows_from_what_is_known(tmp_path: Path) -> None:
    tables, cluster = [zipf("a", 1000)], two_links()
    known = solve(tables, cluster, batch_size=512, step=StepWork(1e-3))
    unknown = solve(tables, cluster, batch_size=512)
    asked = solve(tables, cluster, batch_size=512, objective="step")
    assert (known.settings.objective, known.settings.dense_seconds) == ("step", 1e-3)
    assert (unknown.settings.objective, unknown.settings.dense_seconds) == ("communication", None)
    assert (asked.settings.objective, asked.settings.dense_seconds) == ("step", None)
    # What the rest takes changes no placement.
    assert asked.lower_bound_seconds + 1e-3 == pytest.approx(known.lower_bound_seconds)
    assert [t.rows for t in asked.tables["a"].tiers] == [t.rows for t in known.tables["a"].tiers]
    known.save(tmp_path / "p.json")
    loaded = Plan.load(tmp_path / "p.json")
    assert loaded.fingerprint == known.fingerprint
    assert loaded.phases == known.phases
    assert "a step of less than" in str(known)
    with pytest.raises(JobError, match="step decides nothing"):
        solve(tables, cluster, batch_size=512, objective="communication", step=StepWork(1e-3))
    with pytest.raises(JobError, match="objective must be 'communication' or 'step', found 'time'"):
        solve(tables, cluster, batch_size=512, objective="time")  # type: ignore[arg-type]
    with pytest.raises(JobError, match="dense_seconds is a time of at least 0 s"):
        StepWork(-1.0)
    with pytest.raises(JobError, match="step must be a StepWork"):
        solve(tables, cluster, batch_size=512, step=1e-3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="decides nothing here: 'step'"):
        pareto(tables, cluster, batch_size=512, step=StepWork(1e-3))  # type: ignore[call-arg]


def test_a_step_of_one_rank() -> None:
    table = Table("t", 3, 8, AccessProfile.from_counts([3, 2, 1], 10))
    plan = solve(
        [table], Cluster("c", 1, 1, 1e9, 0.0, (Level(1, None, None),), 1e12), batch_size=8, step=StepWork(1e-3)
    )
    assert plan.objective_seconds(plan.predicted) == plan.lower_bound_seconds > 1e-3


def test_ranks_that_share_a_link_share_what_the_hottest_row_adds() -> None:
    counts = np.array([5000, 3000, 1000, 1000])
    table = Table("t", 4, 16, AccessProfile.from_counts(counts, 10_000))
    slow, fast = CollectiveRate(1e-5, 1e9), CollectiveRate(1e-5, 1e10)
    levels = (Level(1, None, slow), Level(2, fast, slow), Level(4, slow, None))
    excess = []
    for sharing in (1, 2):
        cluster = Cluster("two", 2, 2, 1e9, 0.0, levels, ranks_per_link=sharing)
        instance = build_instance(Problem([table], cluster, 100))
        for size in (2, 4):
            cost = instance.cost(instance.uniform(size))
            rows = next(c for c in cost.collectives if c.content == "embeddings")
            excess.append(rows.excess_bytes)
            assert cost.exposed_seconds == pytest.approx(instance.exposed_seconds(instance.uniform(size)))
    # The hottest row has half of 100 lookups; within a node nothing is shared.
    assert excess == [50 * 64.0, 3 * 50 * 64.0, 50 * 64.0, 3 * 50 * 64.0 / 2]


def test_lookups_are_of_the_rank_that_serves_most() -> None:
    rate = CollectiveRate(1e-5, 1e10)
    cluster = Cluster("one", 1, 4, 4e10, 0.0, (Level(1, None, rate), Level(4, rate, None)), 2e12)
    counts = np.array([5000, 3000, 1000, 1000])
    table = Table("t", 4, 16, AccessProfile.from_counts(counts, 10_000))
    instance = build_instance(Problem([table], cluster, 100, step=WORK))
    cost = instance.cost(instance.uniform(4))
    # Reads: 100 per rank, of which row 0 has 50; its owner serves 3 x 50 more than the mean.
    assert cost.look_up_seconds == pytest.approx(250 * (1e-9 + 64e-12))
    assert cost.row_wise_update_seconds == pytest.approx(250 * (3e-9 + 128e-12))
    assert (cost.overlapped_look_up_seconds, cost.overlapped_update_seconds, cost.update_seconds) == (0.0, 0.0, 0.0)
    copies = instance.cost(instance.uniform(1))
    assert (copies.look_up_seconds, copies.row_wise_update_seconds) == (0.0, 0.0)
    assert copies.overlapped_look_up_seconds == pytest.approx(100 * (1e-9 + 64e-12))
    assert copies.overlapped_update_seconds == pytest.approx(100 * (3e-9 + 128e-12))
    assert copies.update_seconds == pytest.approx(4 * 64 * 5e-12)
    assert Problem([table], cluster, 100, objective="step").rates == LocalRates.of_bandwidth(2e12)
    assert Problem([table], cluster, 100).rates is None


def test_a_step_sends_other_ids_once_where_links_work_at_once() -> None:
    """Under the weights of the bound another table's ids would be sent once, which takes 9 % longer."""
    all_to_all, reduce = CollectiveRate(1e-7, 10744298.15), CollectiveRate(0.0, 59380427.3)
    cluster = Cluster("c", 1, 4, 1e9, 0.0, (Level(1, None, reduce), Level(4, all_to_all, None)), 1e11)
    profiles = [
        AccessProfile.from_counts(*how)
        for how in (([900, 900, 30, 1], 5000), ([900, 900, 200, 1, 0], 1000), ([200, 200, 2], 100))
    ]
    tables = [
        Table("t0", 4, 8, profiles[0], "float16", "sgd", 6.0),
        Table("t1", 5, 8, profiles[1], "float32", "sgd", 6.0),
        Table("t2", 3, 4, profiles[2], "float32", "adam"),
    ]
    rates = LocalRates((0.0, 0.0, 1e-11), (0.0, 2e-9, 1e-11), 1e-12)
    problem = Problem(tables, cluster, 1000, budget="500MB", tiers=4, step=StepWork(0.0, rates))
    plan, variants = solve(problem), Variants(problem)
    for chosen in product((False, True), repeat=3):
        instance = variants.of(np.array(chosen))
        step = plan.objective_seconds(instance.cost(instance.uniform(1)))
        assert plan.objective_seconds(plan.predicted) <= step * (1 + 1e-4)
