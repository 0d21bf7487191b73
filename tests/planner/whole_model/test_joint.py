"""Whole models under our costs: against every plan there is, with constraints, in files and in words."""

from __future__ import annotations

import importlib.util
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexshard import AccessProfile, Cluster, Plan, Problem, Table, TableConstraints, compare, diff, explain, solve
from flexshard.costmodels import PooledCosts, StepWork, pooled_cost, step_seconds
from flexshard.errors import BudgetError, JobError, PlanError
from flexshard.planner import costs_grid, load_job, pareto, whole_table_cost
from flexshard.planner.constraints import SEQUENCE_SHARDINGS
from flexshard.planner.solver.deadline import ended_at
from flexshard.planner.whole_model import annealing_kernels, columns, joint, laying_kernels
from flexshard.planner.whole_model.annealing import compile_loops
from flexshard.topologies import CollectiveRate, Level
from flexshard.units import format_bytes, format_seconds
from tests.slow import first


def cluster(nodes: int = 2, ranks: int = 2, alpha: float = 2e-5, host: float | None = 2e9) -> Cluster:
    world = nodes * ranks

    def rate(beta: float) -> CollectiveRate:
        return CollectiveRate(alpha, beta)

    levels = [Level(1, None, rate(2e9) if world > 1 else None)]
    if ranks > 1:
        levels.append(Level(ranks, rate(16e9), rate(4e9) if nodes > 1 else None))
    if nodes > 1:
        levels.append(Level(world, rate(4e9), None))
    return Cluster("c", nodes, ranks, 1e9, 0.0, tuple(levels), 1e11, host_bytes_per_s=host)


def tables(seed: int, pooled: int, sequences: int) -> list[Table]:
    rng = np.random.default_rng(seed)
    found = []
    for index in range(pooled + sequences):
        rows, dim = int(10 ** rng.uniform(1, 3.3)), int(rng.choice([16, 64, 256]))
        counts = np.ceil(rng.uniform(50, 2_000) / np.arange(1, rows + 1) ** rng.uniform(0.5, 1.3)).astype(np.int64)
        profile = AccessProfile.from_counts(counts, 1_000, num_rows=rows)
        name = f"p{index}" if index < pooled else f"s{index - pooled}"
        found.append(Table(name, rows, dim, profile, pooling="none" if index >= pooled else ("sum", "mean")[index % 2]))
    return found


def best_of_all(problem: Problem) -> float:
    """The objective of the best plan of pooled tables, tried one by one; infinite where none fits."""
    costs = PooledCosts(problem.cluster, problem.batch_size, problem.hidden, problem.rates)
    limit = solve(problem).settings.budget_bytes
    received = sum(costs.received_bytes(table) for table in problem.tables)
    world, node = problem.cluster.world_size, problem.cluster.ranks_per_node
    hosts = [tuple(range(first, first + node)) for first in range(0, world, node)]
    ways: list[list[tuple[Any, tuple[int, ...]]]] = []
    for table in problem.tables:
        ways.append([])
        for option in costs.options(table):
            if option.is_sequence and option.sharding_type not in SEQUENCE_SHARDINGS:
                continue
            if option.sharding_type in ("data_parallel", "row_wise"):
                places = [tuple(range(world))]
            elif option.sharding_type == "table_row_wise":
                places = hosts
            elif option.sharding_type == "grid_shard":
                places = [sum(pair, ()) for pair in itertools.permutations(hosts, option.shards // node)]
            else:
                places = list(itertools.product(range(world), repeat=option.shards))
                if option.sharding_type == "table_column_wise":
                    places = [one for one in places if len({rank // node for rank in one}) == 1]
            ways[-1] += [(option, where) for where in places]
    best = np.inf
    for placed in itertools.product(*ways):
        cost = pooled_cost(costs, placed, received)
        if cost.memory_bytes <= limit * (1 + 1e-12):
            seconds = step_seconds(cost, world, StepWork(0.0)) if problem.step else cost.exposed_seconds
            best = min(best, seconds)
    return best + (problem.step.dense_seconds if problem.step else 0.0)


@pytest.mark.parametrize("sequences", [0, 1])
@pytest.mark.parametrize("seed", first(1, [2, 3, 0, 1, *range(4, 12)]))
def test_plans_of_shards_are_the_best_of_all(seed: int, sequences: int) -> None:
    step = StepWork(1e-5) if seed % 2 else None
    shape = ((2, 2), (1, 3), (2, 1))[seed % 3]
    many = 3 if shape == (2, 1) else 2
    budget = ("neutral", "+200KiB", "+5MiB")[seed // 3 % 3]
    own, constraints = tables(seed, many - sequences, sequences), {"s0": TableConstraints(SEQUENCE_SHARDINGS)}
    asked = constraints if sequences else {}
    problem = Problem(own, cluster(*shape), 64, budget=budget, step=step, gap=1e-6, constraints=asked)
    plan = solve(problem)
    assert plan.objective_seconds(plan.predicted) == pytest.approx(best_of_all(problem), rel=1e-5)
    assert plan.lower_bound_seconds <= plan.objective_seconds(plan.predicted)
    assert plan.predicted.memory_bytes <= plan.settings.budget_bytes * (1 + 1e-12)
    assert not plan.tables
    assert plan.predicted == plan.pooled_predicted


@pytest.mark.parametrize("seed", first(1, [0, 1, 2, 4, 6]))
def test_one_limit_for_both_is_better_than_any_limit_for_each(seed: int) -> None:
    step = StepWork(1e-5) if seed % 2 else None
    own = tables(seed, 3, 2)
    problem = Problem(own, cluster(), 64, budget=("neutral", "+1MiB")[seed % 2], step=step, gap=1e-4)
    plan = solve(problem)
    seconds = plan.objective_seconds(plan.predicted)
    assert plan.lower_bound_seconds <= seconds <= plan.lower_bound_seconds * 1.1
    limit = plan.settings.budget_bytes
    assert plan.predicted.memory_bytes <= limit * (1 + 1e-9)
    assert set(plan.tables) == {"s0", "s1"}
    assert set(plan.pooled) == {"p0", "p1", "p2"}
    found = []
    for share in np.linspace(0.2, 0.8, 4):
        parts = []
        for part, nbytes in ((own[:3], share * limit), (own[3:], (1 - share) * limit)):
            try:
                alone = solve(replace(problem, tables=part, budget=f"{float(nbytes)!r} B"))
            except BudgetError:
                break
            parts.append(alone.objective_seconds(alone.predicted))
        if len(parts) == 2:
            found.append(sum(parts) - (step.dense_seconds if step else 0.0))
    assert found
    assert seconds <= min(found) * (1 + 1e-4)
    assert plan.lower_bound_seconds <= min(found) * (1 + 1e-9)


@pytest.mark.parametrize("seed", first(1, [0, 2, 1, 3, 4, 5]))
def test_tiers_or_shards_are_the_best_of_every_choice(seed: int) -> None:
    step = StepWork(1e-5) if seed % 2 else None
    own = tables(seed, 2, 2)
    neutral = solve(own, cluster(), batch_size=64).settings.budget_bytes
    budget = f"{neutral * (0.7, 1.0, 1.5)[seed // 2]!r} B"
    kinds = ["table_wise", "column_wise"]

    def plan_with(**asked: list[str]) -> Plan | None:
        constraints = {name: TableConstraints(sharding_types=types) for name, types in asked.items() if types}
        problem = Problem(own, cluster(), 64, budget=budget, step=step, gap=1e-3, constraints=constraints)
        try:
            return solve(problem)
        except BudgetError:
            return None

    every = [plan_with(s0=one, s1=other) for one in ([], kinds) for other in ([], kinds)]
    chosen = plan_with(s0=["flex_shard", *kinds], s1=["flex_shard", *kinds])
    fitting = [plan for plan in every if plan is not None]
    assert (chosen is None) is (not fitting)
    if chosen is None:
        return
    best = min(plan.objective_seconds(plan.predicted) for plan in fitting)
    seconds = chosen.objective_seconds(chosen.predicted)
    assert seconds <= best * (1 + 2e-3)
    assert chosen.lower_bound_seconds <= best * (1 + 1e-9)
    assert chosen.predicted.memory_bytes <= chosen.settings.budget_bytes * (1 + 1e-9)
    assert {*chosen.tables, *chosen.pooled} == {"p0", "p1", "s0", "s1"}


def test_a_sequence_goes_where_there_is_room() -> None:
    """Even shares of it do not fit beside a table that fills one of two ranks."""
    profile = AccessProfile.from_counts(np.full(2_000, 3), 1_000)
    full = Table("full", 4_000, 64, AccessProfile.from_counts(np.full(4_000, 1), 1_000), pooling="sum")
    sequence = Table("s", 2_000, 64, profile)
    how: dict[str, Any] = {"batch_size": 8, "budget": "1.15 MiB"}
    pinned = {"full": TableConstraints(sharding_types=["table_wise"], pin=[0])}
    with pytest.raises(BudgetError):
        solve([full, sequence], cluster(1, 2), **how, constraints=pinned)
    either = pinned | {"s": TableConstraints(sharding_types=["flex_shard", "table_wise"])}
    plan = solve([full, sequence], cluster(1, 2), **how, constraints=either)
    assert plan.pooled["s"].ranks == (1,)
    assert plan.pooled["s"].pooling == "none"
    assert not plan.tables
    roomy = solve([full, sequence], cluster(1, 2), batch_size=8, budget="9 MiB", constraints=either)
    assert set(roomy.tables) == {"s"}
    assert roomy.lower_bound_seconds <= roomy.predicted.exposed_seconds


def test_a_table_that_leaves_tiers_moves_once() -> None:
    own = tables(2, 1, 1)
    whole = {"s0": TableConstraints(sharding_types=["table_wise"])}
    plans = [solve(own, cluster(), batch_size=64, budget="50MiB", constraints=asked) for asked in ({}, whole)]
    nbytes = own[1].rows * own[1].row_bytes
    assert diff(*plans).nbytes == nbytes
    assert diff(*plans[::-1]).nbytes == nbytes


def test_tiers_or_shards_without_pooled_tables() -> None:
    own = tables(2, 0, 2)
    alone = solve(own, cluster(), batch_size=64)
    either = {"s1": TableConstraints(sharding_types=["flex_shard", "table_wise"])}
    plan = solve(own, cluster(), batch_size=64, constraints=either)
    assert plan.predicted.exposed_seconds <= alone.predicted.exposed_seconds * (1 + 1e-3)


def test_a_table_that_is_left_no_shards_is_in_tiers_and_is_told() -> None:
    allowed = TableConstraints(sharding_types=["flex_shard", "table_wise"])
    nothing = replace(allowed, forbid=["table_wise"])
    own = tables(2, 0, 2)
    asked = {"s0": nothing, "s1": allowed}
    with pytest.warns(UserWarning, match=r"'s0': .*forbid leave.* no way of sharding .*its rows are in tiers"):
        plan = solve(own, cluster(), batch_size=64, constraints=asked)
    assert "s0" in plan.tables


def test_the_bound_holds_between_the_limits_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(tables(4, 3, 2), cluster(), 64, gap=1e-4)
    best = solve(problem)
    monkeypatch.setattr(columns, "_FIRST", 3)
    monkeypatch.setattr(columns, "_ROUNDS", 0)
    monkeypatch.setattr(joint, "_ROUNDS", 1)
    coarse = solve(problem)
    assert coarse.lower_bound_seconds <= best.predicted.exposed_seconds * (1 + 1e-9)
    assert coarse.predicted.exposed_seconds >= best.predicted.exposed_seconds * (1 - 1e-4)


def test_more_memory_is_never_worse_and_the_same_problem_has_the_same_plan() -> None:
    problem = Problem(tables(3, 4, 1), cluster(), 64, gap=1e-4)
    seconds = [
        solve(replace(problem, budget=budget)).predicted.exposed_seconds for budget in ("+0B", "+1MiB", "+50MiB")
    ]
    assert seconds[0] * (1 + 1e-4) >= seconds[1]
    assert seconds[1] * (1 + 1e-4) >= seconds[2]
    assert solve(problem).fingerprint == solve(problem).fingerprint


def asked(**constraints: TableConstraints) -> Plan:
    return solve(tables(2, 4, 0), cluster(), batch_size=64, budget="100MiB", constraints=constraints)


def test_constraints_are_kept() -> None:
    only = asked(p0=TableConstraints(sharding_types=["table_wise"], pin=[3])).pooled["p0"]
    assert (only.sharding_type, only.ranks) == ("table_wise", (3,))
    for kind in ("row_wise", "table_row_wise", "data_parallel"):
        assert asked(p2=TableConstraints(sharding_types=[kind])).pooled["p2"].sharding_type == kind
    not_copied = asked(p1=TableConstraints(forbid=["data_parallel", "row_wise/fused"])).pooled["p1"]
    assert not_copied.sharding_type not in ("data_parallel", "row_wise")
    alone = TableConstraints(sharding_types=["table_wise"])
    together = asked(p0=replace(alone, with_tables=["p1", "p2"])).pooled
    assert together["p0"].ranks == together["p1"].ranks == together["p2"].ranks
    apart = asked(
        p0=replace(alone, pin=[1], apart=["p1"]), p1=replace(alone, apart=["p2"]), p2=replace(alone, apart=["p0"])
    ).pooled
    assert apart["p0"].ranks == (1,)
    assert len({apart[name].ranks for name in ("p0", "p1", "p2")}) == 3
    dense = asked(p0=TableConstraints(sharding_types=["table_wise"], compute_kernels=["dense"])).pooled["p0"]
    assert dense.compute_kernel == "dense"


def test_column_widths_that_are_asked_for() -> None:
    wide = [replace(table, dim=256) for table in tables(2, 2, 0)]
    constraint = TableConstraints(sharding_types=["column_wise"], min_partition=32)
    plan = solve(wide, cluster(), batch_size=64, budget="100MiB", constraints={"p0": constraint})
    assert [shard.columns for shard in plan.pooled["p0"].shards] == [32] * 8


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"no": {}}, "constraints of table 'no': there is no such table; there are p0"),
        ({"s0": {"pin": [1]}}, "constraints of table 's0' decide nothing, since its rows are placed one by one"),
        ({"s0": {"sharding_types": ["grid_shard"]}}, "tables without pooling are not planned as 'grid_shard'"),
        ({"s0": {"sharding_types": ["data_parallel"]}}, "tables without pooling are not planned as 'data_parallel'"),
        (
            {"s0": {"sharding_types": ["table_wise"], "compute_kernels": ["dense"]}},
            "kernel 'dense' is not planned for tables without pooling",
        ),
        ({"p0": {"sharding_types": ["flex_shard"]}}, "'flex_shard' is of tables without pooling, and it is pooled"),
        (
            {"s0": {"sharding_types": ["flex_shard", "table_wise"], "apart": ["p0"]}},
            "apart is of tables that are sharded in any case; leave 'flex_shard' out",
        ),
        (
            {"s0": {"sharding_types": ["table_wise"], "with_tables": ["p0"]}},
            "with names 'p0', and only one of the two is pooled",
        ),
        ({"p0": {"sharding_types": ["columns"]}}, "sharding_types must be of data_parallel, .* found 'columns'"),
        ({"p0": {"sharding_types": "row_wise"}}, "sharding_types must be a list"),
        ({"p0": {"compute_kernels": ["fused_uvm"]}}, "'p0': fused_uvm needs host memory"),
        ({"p0": {"device_group": "cuda"}}, "device_group decides nothing"),
        ({"p0": {"pin": [7]}}, "pin names rank 7 of 4"),
        ({"p0": {"pin": [0, 0, 0]}}, r"table 'p0': pin \[0, 0, 0\] leaves no option; .* table_wise/fused has 1"),
        ({"p0": {"with_tables": ["s0"]}}, "with names 's0', and only one of the two is pooled"),
        ({"p0": {"apart": ["p0"]}}, "apart names 'p0'"),
        ({"p0": {"apart": ["s0"]}}, "apart names 's0', which is no other table that TorchRec shards"),
        ({"p0": {"apart": ["p1"], "with_tables": ["p1"]}}, "'p0' and 'p1' are to be apart and with one another"),
        (
            {"p0": {"forbid": ["fused", "data_parallel"]}},
            "table 'p0': forbid leaves no way of sharding its .* rows of .* on 4 ranks",
        ),
        (
            {"p0": {"sharding_types": ["row_wise"], "with_tables": ["p1"]}, "p1": {"sharding_types": ["table_wise"]}},
            "'p0' and 'p1' are to be with one another, and have no way of sharding in common",
        ),
        (
            {"p0": {"sharding_types": ["row_wise"], "apart": ["p1"]}},
            "constraints leave no plan, whatever the memory: p0 apart from p1; there would be one without apart",
        ),
        ({"p0": {"cache_load_factors": [0.0]}}, "cache_load_factors are shares"),
        ({"p0": {"compute_kernels": []}}, "compute_kernels allows nothing"),
        ({"p0": {"forbid": ["fused/row_wise"]}}, "forbid must be of .* or a type and a kernel such as row_wise/fused"),
        ({"p0": {"with_tables": [["p1"]]}}, "with must be a list of names"),
    ],
)
def test_constraints_that_cannot_be_kept_are_named(constraints: dict[str, dict[str, Any]], message: str) -> None:
    own = tables(2, 2, 1 if "s0" in str(constraints) else 0)
    with pytest.raises(JobError, match=message):
        solve(
            own,
            cluster(),
            batch_size=64,
            budget="500MiB",
            constraints={name: TableConstraints(**fields) for name, fields in constraints.items()},
        )


def test_constraints_that_decide_nothing_are_named() -> None:
    with pytest.warns(UserWarning, match="table 'p0': constraint min_partition decides nothing"):
        solve(
            [replace(table, dim=16) for table in tables(2, 2, 0)],
            cluster(),
            batch_size=64,
            constraints={"p0": TableConstraints(min_partition=16)},
        )


def test_host_memory_makes_room() -> None:
    own = tables(4, 3, 0)
    free = solve(own, cluster(), batch_size=64, budget="500MiB")
    constraints = {table.name: TableConstraints(forbid=["dense"]) for table in own}
    small = f"{free.predicted.memory_bytes / 2!r} B"
    with pytest.raises(BudgetError, match=r"table .p0.: whatever way it is sharded, a rank needs .* of HBM"):
        solve(own, cluster(), batch_size=64, budget=small, constraints=constraints)
    plan = solve(own, cluster(), batch_size=64, budget=small, constraints=constraints, host_memory="1GiB")
    kernels = {table.compute_kernel for table in plan.pooled.values()}
    assert kernels & {"fused_uvm", "fused_uvm_caching"}
    assert plan.predicted.host_memory_bytes > 0
    assert plan.predicted.exposed_seconds > free.predicted.exposed_seconds  # rows cross the link to the host
    assert plan.settings.host_memory == 2**30
    kernels_of = TableConstraints(compute_kernels=["fused_uvm"], forbid=["dense"])
    with pytest.raises(BudgetError, match="host memory"):
        solve(own, cluster(), batch_size=64, constraints=dict.fromkeys(constraints, kernels_of), host_memory="2 kB")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "paper"}, "method 'paper' places rows one by one, and table 'p0' is pooled"),
        ({"memory": "p99.9"}, "memory 'p99.9' "),
        ({"host_memory": "-1GiB"}, "host_memory is a number of bytes above 0"),
        ({"gap": -1.0}, "gap must be at least 0"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds must be finite"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        Problem(tables(2, 1, 0), cluster(), 64, **options)


def test_means_are_not_cut_by_rows() -> None:
    mean = [replace(table, pooling="mean") for table in tables(2, 3, 0)]
    plan = solve(mean, cluster(), batch_size=64, budget="100MiB")
    assert {table.sharding_type for table in plan.pooled.values()} <= {
        *("table_wise", "column_wise", "table_column_wise", "data_parallel")
    }
    with pytest.raises(JobError, match="table 'p0': sharding_types leaves no way of sharding"):
        solve(mean, cluster(), batch_size=64, constraints={"p0": TableConstraints(sharding_types=["row_wise"])})


def test_time_ends_the_search_of_sequences_too() -> None:
    own = tables(33, 2, 1)
    start = time.monotonic()
    plan = solve(own, cluster(3, 2, alpha=0.0), batch_size=64, timeout_seconds=1)
    assert time.monotonic() - start < 12  # 21 s before
    assert plan.lower_bound_seconds <= plan.predicted.exposed_seconds


@pytest.mark.parametrize("seed", first(3, range(6)))
def test_placements_that_time_ends_have_bounds_that_hold(seed: int) -> None:
    step = StepWork(1e-5) if seed % 2 else None
    problem = Problem(tables(seed, 0, 2), cluster(2, 4), 64, budget=("neutral", "+20KiB")[seed // 2 % 2], step=step)
    with ended_at(0.0):
        hurried = solve(problem)
    best = solve(problem)
    assert hurried.lower_bound_seconds <= best.objective_seconds(best.predicted) * (1 + 1e-9)
    assert best.lower_bound_seconds <= hurried.objective_seconds(hurried.predicted) * (1 + 1e-9)
    assert hurried.predicted.memory_bytes <= hurried.settings.budget_bytes * (1 + 1e-9)


def test_memory_that_apart_needs_is_found_out() -> None:
    given = [replace(one, pooling="sum") for one in tables(1, 2, 0)]
    asked = {"p0": TableConstraints(apart=["p1"], sharding_types=["table_wise"])}
    problem = Problem(given, cluster(1, 4), 64, constraints=asked, budget="100MiB", timeout_seconds=10.0)
    assert solve(problem).pooled["p0"].ranks != solve(problem).pooled["p1"].ranks
    with pytest.raises(BudgetError):
        solve(replace(problem, budget="1 kB"))
    assert pareto(problem).points  # although "neutral" may not be enough


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "data_parallel"])
def test_ids_that_are_sent_are_those_of_tables_that_are_not_copied(kind: str) -> None:
    profile = AccessProfile.from_counts(np.arange(1, 401), 1_000)
    given = [Table(name, 400, 16, profile, pooling="sum") for name in ("p", "q")]
    asked = {"p": TableConstraints(sharding_types=[kind]), "q": TableConstraints(sharding_types=["data_parallel"])}
    plan = solve(given, cluster(), batch_size=64, constraints=asked, budget="100MiB")
    sent = 0.0 if kind == "data_parallel" else given[0].lookups(64)
    assert plan.predicted.input_ids == pytest.approx(sent)
    if not sent:
        assert not any("ids" in one.content for one in plan.predicted.collectives)


def test_rows_that_are_read_most_are_priced_where_they_lie() -> None:
    """Of tables whose ids are numbered by popularity: what is planned, priced and explained is the busiest rank's."""
    counts = np.maximum(200_000 // np.arange(1, 4_001), 1)
    known = AccessProfile.from_counts(counts, 10_000)
    unknown = AccessProfile.from_histogram(*np.unique(counts, return_counts=True), 10_000)
    asked = {"p": TableConstraints(sharding_types=["row_wise"])}
    plans = [
        solve(
            [Table("p", 4_000, 16, profile, pooling="sum")],
            cluster(),
            batch_size=64,
            constraints=asked,
            budget="100MiB",
        )
        for profile in (known, unknown)
    ]
    ranks = cluster().world_size
    share = counts[: 4_000 // ranks].sum() / counts.sum()
    for plan, most in zip(plans, (share * ranks, 1.0), strict=True):
        (ids,) = (one for one in plan.predicted.collectives if one.content == "pooled ids")
        assert plan.predicted.rows_read == pytest.approx(plan.predicted.input_ids * most)
        assert ids.excess_bytes * ids.calls == pytest.approx(8 * plan.predicted.input_ids * (most - 1), abs=1e-6)
    assert plans[0].predicted.exposed_seconds > plans[1].predicted.exposed_seconds
    block = f"That is the one of rows 0 to {4_000 // ranks - 1:,}, "
    assert block in explain(plans[0], "p").text
    assert "its rows are read most" not in explain(plans[1], "p").text


def test_what_ranks_receive_is_said_where_nothing_fits() -> None:
    """A budget of the bytes that an error names is not refused with the same words."""
    alone = Cluster("alone", 1, 1, 1e12, 0.0, (Level(1, None, None),))
    sizes = (("a", 17, 3), ("b", 5, 8))
    tables = [
        Table(name, rows, dim, AccessProfile.from_counts(np.arange(rows, 0, -1), 100), pooling="sum")
        for name, rows, dim in sizes
    ]
    received = 16 * (3 + 8) * 4
    least = []
    for budget in (1, 661, 1_500):
        with pytest.raises(BudgetError, match=f"besides {received} B that every rank receives") as error:
            solve(tables, alone, batch_size=16, budget=f"{budget} B")
        least.append(error.value.least_bytes)
        assert least[-1] > budget
    plan = solve(tables, alone, batch_size=16, budget=f"{1.02 * max(least)} B")
    assert plan.predicted.memory_bytes >= max(least)


def test_least_bytes_are_of_a_ranks_own_memory() -> None:
    cached = TableConstraints(compute_kernels=["fused_uvm_caching"], sharding_types=["table_wise", "row_wise"])
    given = tables(11, 4, 0)
    asked = {table.name: cached for table in given}
    problem = Problem(given, cluster(), 64, host_memory="1GiB", constraints=asked, timeout_seconds=20.0)
    curve = pareto(problem)
    least = curve.points[0].memory_bytes
    with pytest.raises(BudgetError) as error:
        solve(replace(problem, budget=f"{least * 0.3!r} B"))
    assert error.value.least_bytes <= least


def test_tables_of_other_data_types_are_with_one_another() -> None:
    first, second = tables(1, 2, 0)
    given = [first, replace(second, dtype="float16")]
    asked = {"p0": TableConstraints(with_tables=["p1"], dtypes=["float32", "float16"])}
    plan = solve(Problem(given, cluster(), 64, constraints=asked, budget="100MiB"))
    assert plan.pooled["p0"].sharding_type == plan.pooled["p1"].sharding_type
    assert plan.pooled["p1"].dtype == "float16"
    other = replace(plan, pooled=plan.pooled | {"p0": replace(plan.pooled["p0"], dtype="bfloat16")})
    (moved,) = diff(plan, other).pooled
    assert moved.nbytes == sum(one.rows * one.columns for one in plan.pooled["p0"].shards) * 2


@pytest.mark.parametrize("sequences", first(1, [0, 2]))
def test_points_of_the_frontier_are_plans_of_their_memory(sequences: int) -> None:
    given = []
    for one in tables(4, 4, sequences):  # larger ones, of which memory decides something
        counts = np.ceil(3e6 / np.arange(1, 30 * one.rows + 1) ** 1.1).astype(np.int64)
        given.append(replace(one, rows=30 * one.rows, profile=AccessProfile.from_counts(counts, 100_000)))
    problem = Problem(given, cluster(), batch_size=1024, index_dedup=False, timeout_seconds=20.0 if sequences else 60.0)
    curve = pareto(problem)
    memory = [point.memory_bytes for point in curve.points]
    seconds = [point.exposed_seconds for point in curve.points]
    assert len(curve.points) > 2
    assert memory == sorted(memory)
    assert seconds == sorted(seconds, reverse=True)
    for point in curve.points:
        assert sum(count for _, count in point.pooled) == 4
        assert (sum(point.rows) > 0) == (sequences > 0)
        assert point.lower_bound_seconds is not None
        assert point.lower_bound_seconds <= point.exposed_seconds
    for baseline in ("row_wise", "table_wise"):  # none is below what was found
        other = curve.mark(baseline)
        within = [point.exposed_seconds for point in curve.points if point.memory_bytes <= other.memory_bytes]
        assert not within or min(within) <= other.exposed_seconds
    budgets, bounds = zip(*curve.bounds, strict=True)
    assert (list(budgets), list(bounds)) == (sorted(budgets), sorted(bounds, reverse=True))
    for budget, bound in curve.bounds:
        assert all(point.exposed_seconds >= bound for point in curve.points if point.memory_bytes <= budget)
    steps = curve.bound_corners
    assert (steps[0][0], steps[-1][0]) == (memory[0], memory[-1])
    assert all(here[0] == there[0] or here[1] == there[1] for here, there in itertools.pairwise(steps))
    neutral = curve.mark("memory_neutral")
    assert neutral.memory_bytes <= curve.neutral_bytes == curve.mark("row_wise").memory_bytes
    if sequences:  # each plan with a close bound takes longer than this test may
        return
    for point in curve.points[:: max(len(memory) // 3, 1)]:
        plan = solve(replace(problem, budget=f"{point.memory_bytes * (1 + 1e-9)!r} B"))
        assert plan.predicted.exposed_seconds == pytest.approx(point.exposed_seconds, rel=0.005)
    whole = solve(replace(problem, budget=f"{problem.cluster.hbm_bytes!r} B"))
    assert seconds[-1] == pytest.approx(whole.predicted.exposed_seconds, rel=0.005)
    assert neutral.exposed_seconds == pytest.approx(solve(problem).predicted.exposed_seconds, rel=0.005)
    with pytest.raises(BudgetError):
        solve(replace(problem, budget=f"{curve.points[0].memory_bytes * 0.9!r} B"))


def test_data_types_are_options_where_they_are_listed(tmp_path: Path) -> None:
    asked = {"p0": TableConstraints(dtypes=["float32", "float16"]), "p1": TableConstraints(dtypes=["float16"])}
    given = tables(5, 3, 0)
    plain = solve(Problem(given, cluster(), batch_size=64))
    # With less memory than all tables need as they are, and with as much as anybody wants.
    tight = f"{plain.settings.budget_bytes * 0.6!r} B"
    plan = solve(Problem(given, cluster(), batch_size=64, constraints=asked, budget=tight))
    assert [plan.pooled[name].dtype for name in ("p0", "p1", "p2")] == ["float16", "float16", "float32"]
    held = {name: sum(shard.memory_bytes for shard in plan.pooled[name].shards) for name in plan.pooled}
    alone = solve(Problem(given, cluster(), batch_size=64, constraints={"p1": asked["p1"]}))
    assert alone.pooled["p1"].dtype == "float16"
    assert held["p0"] < sum(shard.memory_bytes for shard in plain.pooled["p0"].shards)
    assert any(one.dtype == "float32" for one in plan.pooled["p0"].alternatives)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").pooled == plan.pooled
    assert "in float32" in str(explain(plan, "p0").text)
    assert "dtypes float32 float16" in explain(plan, "p0").text
    with pytest.raises(JobError, match="dtypes must be of float32, float16, bfloat16, found 'fp16'"):
        TableConstraints(dtypes=["fp16"])
    with pytest.warns(UserWarning, match="constraint dtypes decides nothing"):
        solve(Problem(given, cluster(), batch_size=64, constraints={"p2": TableConstraints(dtypes=["float32"])}))


def test_what_is_of_other_tables_alone_says_so() -> None:
    with pytest.raises(JobError, match="how fast ranks reach it"):
        Problem(tables(2, 1, 0), cluster(host=None), 64, host_memory="1GiB")
    with pytest.raises(JobError, match="whole tables is of tables in tiers of rows, and 'p0' is pooled"):
        whole_table_cost(Problem(tables(2, 1, 1), cluster(), 64))


def test_the_file_and_what_is_said_of_it(tmp_path: Path) -> None:
    constraint = TableConstraints(sharding_types=["table_wise", "data_parallel"])
    own = tables(2, 4, 1)
    plan = compare(own, cluster(), batch_size=64, step=StepWork(1e-4), constraints={"p0": constraint})
    caption = str(costs_grid(plan).caption)
    means = any(table.pooling == "mean" for table in own)
    assert ("cut tables of means by rows" in caption) == means
    assert "keep to none of the job's constraints, which this plan does not" in caption
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read.fingerprint == plan.fingerprint
    assert read.pooled == plan.pooled
    assert read.pooled_predicted == plan.pooled_predicted
    assert read.settings.constraints == ("p0: sharding_types table_wise data_parallel",)
    expected = {"row_wise", "data_parallel", "table_wise"}
    assert expected | ({"torchrec"} if importlib.util.find_spec("torchrec") else set()) <= set(plan.baselines)
    text = str(read)
    assert "4 pooled table(s) and 1 without pooling on c" in text
    assert "How pooled tables are sharded" in text
    for name, table in plan.pooled.items():
        explanation = explain(read, name)
        assert table.sharding_type in explanation.text
        assert json.loads(json.dumps(explanation.document()))["table"]["name"] == name
        for one in table.alternatives:
            assert one.sharding_type in explanation.text
    assert "Asked of it: sharding_types table_wise data_parallel." in explain(read, "p0").text
    assert "s0" in explain(read, "s0").text
    with pytest.raises(PlanError, match="which of the plan's 5 tables"):
        explain(read)
    document = json.loads((tmp_path / "plan.json").read_text())
    document["pooled"][0]["shards"][0]["rank"] += 1
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(PlanError):
        Plan.load(tmp_path / "plan.json")


def test_what_moves_between_plans() -> None:
    own = tables(2, 2, 0)
    at = [
        solve(own, cluster(), batch_size=64, budget="100MiB", constraints={"p0": TableConstraints(**fields)})
        for fields in (
            {"sharding_types": ["table_wise"], "pin": [0]},
            {"sharding_types": ["table_wise"], "pin": [1]},
            {"sharding_types": ["row_wise"]},
            {"sharding_types": ["data_parallel"]},
        )
    ]
    weights = own[0].rows * own[0].row_bytes
    (moved,) = (move for move in diff(at[0], at[1]).pooled if move.table == "p0")
    assert (moved.source, moved.target, moved.nbytes) == (("table_wise", (0,)), ("table_wise", (1,)), weights)
    assert moved.held is None
    assert not diff(at[0], at[0]).pooled
    cached = [replace(at[0].pooled["p0"], compute_kernel="fused_uvm_caching", cache_load_factor=f) for f in (0.2, 0.6)]
    others = [replace(at[0], pooled=at[0].pooled | {"p0": table}) for table in cached]
    (other,) = diff(*others).pooled
    shape = f"float32 {own[0].rows:,} x {own[0].dim}"
    assert other.held == (f"fused_uvm_caching of 0.2, {shape}", f"fused_uvm_caching of 0.6, {shape}")
    assert (other.source, other.nbytes) == (other.target, 0)
    block = -(-own[0].rows // 4) * own[0].row_bytes
    assert next(move.nbytes for move in diff(at[0], at[2]).pooled if move.table == "p0") == weights - block
    assert next(move.nbytes for move in diff(at[1], at[3]).pooled if move.table == "p0") == 3 * weights
    assert next(move.nbytes for move in diff(at[3], at[1]).pooled if move.table == "p0") == 0


def test_jobs_say_what_problems_do(tmp_path: Path) -> None:
    own = tables(2, 2, 1)
    cluster().save(tmp_path / "cluster.yaml")
    for table in own:
        table.profile.save(tmp_path / f"{table.name}.parquet")
    job = tmp_path / "job.yaml"
    lines = [
        *("format: flexshard.job", "version: 1", "cluster: cluster.yaml", "batch_size: 64", "budget: 100MiB"),
        *("host_memory: 1GiB", "gap: 0.001", "timeout_seconds: 30.0", "tables:"),
    ]
    for table in own:
        asked_of = ", constraints: {sharding_types: [table_wise], apart: [p1]}" if table.name == "p0" else ""
        shape = f"name: {table.name}, dim: {table.dim}, pooling: {table.pooling}"
        lines.append(f"- {{{shape}, profile: {table.name}.parquet{asked_of}}}")
    job.write_text("\n".join(lines))
    read = load_job(job)
    assert [table.pooling for table in read.tables] == ["sum", "mean", "none"]
    assert read.constraints == {"p0": TableConstraints(sharding_types=["table_wise"], apart=["p1"])}
    assert (read.host_memory, read.gap, read.timeout_seconds) == (2**30, 0.001, 30.0)
    same = solve(
        own, cluster(), batch_size=64, budget="100MiB", host_memory="1GiB", gap=0.001, constraints=read.constraints
    )
    assert read.solve().pooled["p0"].shards == same.pooled["p0"].shards
    job.write_text("\n".join(lines).replace("[p1]", "[nobody]"))
    with pytest.raises(JobError, match=r"job.yaml.*constraints of table 'p0': apart names 'nobody'"):
        load_job(job)
    job.write_text("\n".join(lines).replace("sharding_types: [table_wise]", "sharding_types: [tables]"))
    with pytest.raises(JobError, match=r"job.yaml:10: tables\[0\].constraints: sharding_types must be of"):
        load_job(job)


def test_time_that_falls_by_steps_is_bounded_where_it_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences whose time falls by steps as they get memory are placed a few times, not in ever narrower intervals."""
    from benchmarks.whole_model_costs import drawn

    placed = []
    place = columns.Sequences._placed

    def counted(self: columns.Sequences, limit: float, enough: float, work: float) -> columns.Column:
        placed.append(limit)
        return place(self, limit, enough, work)

    monkeypatch.setattr(columns.Sequences, "_placed", counted)
    plan = solve(drawn(10, 2, 9), Cluster.preset("dgx-h100", nodes=1), batch_size=1024)
    assert plan.predicted.exposed_seconds <= plan.lower_bound_seconds * 1.002
    assert len(placed) <= 20


def test_a_search_compiles_nothing_once_its_time_runs() -> None:
    pytest.importorskip("numba")
    compile_loops()
    known: list[Any] = [laying_kernels.lay, annealing_kernels.anneal_moves]
    before = [loop.signatures for loop in known]
    for one in (tables(1, 4, 0), tables(2, 3, 2)):
        solve(Problem(one, cluster(), batch_size=1024, index_dedup=False, timeout_seconds=5.0))
    assert [loop.signatures for loop in known] == before
    assert all(len(signatures) == 1 for signatures in before)


def test_a_rank_has_all_of_its_shards() -> None:
    """What the table of shards says of a rank is of all shards that it has."""
    table = Table("a", 400, 256, AccessProfile.from_counts(np.full(400, 2), 1_000), pooling="sum")
    asked = {"a": TableConstraints(sharding_types=["column_wise"], min_partition=32)}
    plan = solve([table], cluster(), batch_size=64, budget="+5MiB", constraints=asked)
    shards = [shard for shard in plan.pooled["a"].shards if shard.rank == 0]
    assert len(shards) == 2
    line = next(line for line in str(plan).splitlines() if "column_wise" in line)
    assert format_bytes(sum(shard.memory_bytes for shard in shards)) in line
    assert format_seconds(sum(shard.seconds for shard in shards)) in line


def test_next_best_ways_are_those_that_constraints_leave() -> None:
    profile = AccessProfile.from_counts(np.ceil(900 / np.arange(1, 401)).astype(np.int64), 1_000)

    def ways(dim: int, asked: TableConstraints, *others: Table) -> set[str]:
        table = Table("a", 400, dim, profile, pooling="sum")
        plan = solve([table, *others], cluster(), batch_size=64, budget="+5MiB", constraints={"a": asked})
        return {one.sharding_type for one in plan.pooled["a"].alternatives}

    assert ways(256, TableConstraints(pin=[0, 0])) == {"column_wise"}  # beside table_column_wise, which is planned
    assert ways(64, TableConstraints(pin=[3])) <= {"table_wise", "column_wise", "table_column_wise"}
    other = Table("b", 400, 64, profile, pooling="sum")
    assert not ways(64, TableConstraints(apart=["b"]), other) & {"row_wise", "data_parallel"}


def test_a_sequence_that_may_be_in_tiers_has_another_way() -> None:
    full = Table("full", 4_000, 64, AccessProfile.from_counts(np.full(4_000, 1), 1_000), pooling="sum")
    sequence = Table("s", 2_000, 64, AccessProfile.from_counts(np.full(2_000, 3), 1_000))
    asked = {
        "full": TableConstraints(sharding_types=["table_wise"], pin=[0]),
        "s": TableConstraints(sharding_types=["flex_shard", "table_wise"]),
    }
    plan = solve([full, sequence], cluster(1, 2), batch_size=8, budget="1.15 MiB", constraints=asked)
    assert "There is no other way of sharding it but tiers of rows" in explain(plan, "s").text
