"""Which pooled tables to compress: against every choice of tensor trains, shardings and ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexshard import AccessProfile, Cluster, Problem, Table, TableConstraints, solve
from flexshard.costmodels import (
    LocalRates,
    PooledCosts,
    PooledOption,
    StepWork,
    TableRates,
    TTRates,
    TTReads,
    pooled_cost,
    step_seconds,
)
from flexshard.errors import BudgetError, JobError, SolverError
from flexshard.planner import CompressionPlan, TTOption, plan_compression
from flexshard.planner.whole_model import joint
from flexshard.tables.tensor_train_shape import TTShape
from flexshard.topologies import CollectiveRate, Level
from tests.slow import first

BATCH = 64
DENSE = TableRates(1, 1, (0.0, 1e-7), (0.0, 1e-9, 1e-11), (0.0, 2e-9, 1e-11))
RATES = TTRates(
    "test", (3e-5, 1e-7, 0, 0, 1e-8, 1e-9, 0, 1e-7, 2e-12, 1e-10, 3e-12, 5e-11), (1e-6, 1e-9, 1e-11), (), (DENSE,)
)


def cluster(world: int = 2) -> Cluster:
    slow = CollectiveRate(0.0, 1e9)
    levels = (Level(1, None, slow), Level(world, CollectiveRate(0.0, 2e9), None))
    return Cluster("c", 1, world, 1e10, 0.0, levels)


def tables(count: int, seed: int = 0, pooling: str = "sum") -> list[Table]:
    rng = np.random.default_rng(seed)
    found = []
    for index in range(count):
        rows, dim = int(rng.integers(2_000, 30_000)), int(rng.choice([16, 32]))
        counts = np.ceil(rng.uniform(50, 2_000) / np.arange(1, rows + 1) ** rng.uniform(0.5, 1.2)).astype(np.int64)
        profile = AccessProfile.from_counts(counts, int(counts.sum() / rng.uniform(1, 9)))
        found.append(Table(f"t{index}", rows, dim, profile, pooling=pooling))
    return found


def offered(given: list[Table], ranks: list[int]) -> dict[str, list[TTOption]]:
    return {t.name: [TTOption(TTShape.choose(t.rows, t.dim, r), 1.0 / r) for r in ranks] for t in given}


def every_choice(
    given: list[Table], options: dict[str, list[TTOption]], limit: float, where: Cluster, loss_limit: float
) -> float:
    """The shortest step of all choices of options and ranks within limits."""
    costs = PooledCosts(where, BATCH, {}, RATES.local)
    received = sum(costs.received_bytes(table) for table in given)
    ranks = range(where.world_size)
    ways: list[list[tuple[PooledOption, tuple[int, ...]]]] = []
    for table in given:
        ways.append([])
        for option in costs.options(table):
            places = [tuple(ranks)] if option.shards == where.world_size else itertools.product(ranks)
            ways[-1] += [(option, place) for place in places]
        for train in options.get(table.name, []):
            reads = TTReads.expected(table, BATCH, train.shape)
            seconds = RATES.step_seconds(train.shape, reads)
            ways[-1].append((costs.tensor_train(table, train.shape, reads, seconds, train.loss), tuple(ranks)))
    best = np.inf
    for placed in itertools.product(*ways):
        cost = pooled_cost(costs, placed, received)
        if cost.memory_bytes <= limit and sum(option.loss for option, _ in placed) <= loss_limit * (1 + 1e-9):
            best = min(best, step_seconds(cost, where.world_size, StepWork(0.0)))
    return best


def decided(
    given: list[Table], where: Cluster, limit: float, best: float, close: float, **how: Any
) -> CompressionPlan | None:
    """The decision within a limit, which takes what the best one does; None where there is none, and it is refused."""

    def decide() -> CompressionPlan:
        return plan_compression(given, where, rates=RATES, batch_size=BATCH, budget=f"{limit!r} B", **how)

    if np.isinf(best):
        with pytest.raises((BudgetError, SolverError)):
            decide()
        return None
    found = decide()
    assert found.step_seconds == pytest.approx(best, rel=close)
    assert found.lower_bound_seconds <= best * (1 + 1e-9)
    assert found.memory_bytes <= limit * (1 + 1e-9)
    assert how["loss_limit"] is None or found.loss <= how["loss_limit"] * (1 + 1e-9)
    return found


@pytest.mark.parametrize("seed", first(1, [1, 0, *range(2, 8)]))
@pytest.mark.parametrize("loss_limit", first(1, [0.3, None]))
def test_no_choice_is_better(seed: int, loss_limit: float | None, tmp_path: Path) -> None:
    given, where = tables(3, seed), cluster()
    options = offered(given, [4, 8])
    neutral = solve(given, where, batch_size=BATCH).settings.budget_bytes
    limit = neutral * (0.25, 0.5, 0.8, 1.5)[seed % 4]
    best = every_choice(given, options, limit, where, np.inf if loss_limit is None else loss_limit)

    how = {"options": options, "loss_limit": loss_limit, "gap": 1e-6}
    found = decided(given, where, limit, best, 1e-5, **how)
    if found is None:
        return
    assert found.plan is None or set(found.plan.pooled) == {t.name for t in given} - set(found.shapes)
    if found.plan is not None:
        assert found.plan.lower_bound_seconds <= found.plan.objective_seconds(found.plan.predicted)
    found.save(tmp_path / "decision.json")
    again = CompressionPlan.load(tmp_path / "decision.json")
    assert (again.tables, again.shapes) == (found.tables, found.shapes)
    assert (again.plan and again.plan.fingerprint) == (found.plan and found.plan.fingerprint)


def test_little_memory_compresses_pooled_tables_beside_sequences() -> None:
    pooled, sequences = tables(2, 5), [replace(t, name=f"s{i}", pooling="none") for i, t in enumerate(tables(2, 9))]
    given, where = [*pooled, *sequences], cluster(4)
    options = offered(pooled, [4])
    roomy = solve(given, where, batch_size=BATCH)
    how = {"options": options, "rates": RATES, "batch_size": BATCH}
    alone = plan_compression(given, where, **how)  # type: ignore[arg-type]
    least = plan_compression(given, where, **how, budget=f"{roomy.settings.budget_bytes * 0.6!r} B")  # type: ignore[arg-type]
    assert set(least.shapes) <= {"t0", "t1"}
    assert least.shapes
    assert least.plan is not None
    assert set(least.plan.tables) == {"s0", "s1"}
    assert least.memory_bytes <= least.budget_bytes
    assert least.step_seconds >= alone.step_seconds
    assert least.lower_bound_seconds <= least.step_seconds
    name = next(iter(least.shapes))
    assert "tensor train" in least.explain(name)
    assert "As table_wise/fused" in least.explain(name) or "As row_wise/fused" in least.explain(name)
    assert "tiers of rows" in least.explain("s0")
    with pytest.raises(BudgetError):
        solve(given, where, batch_size=BATCH, budget=f"{least.memory_bytes * 0.9!r} B")


def test_constraints_of_tables_that_are_compressed_go_with_them() -> None:
    given, where = tables(3, 2), cluster(4)
    asked = {"t0": TableConstraints(apart=["t1", "t2"]), "t1": TableConstraints(sharding_types=["table_wise"])}
    found = plan_compression(
        given,
        where,
        options=offered(given[:1], [4]),
        rates=RATES,
        batch_size=BATCH,
        constraints=asked,
        budget="1.6 MiB",
    )
    assert set(found.shapes) == {"t0"}
    assert found.plan is not None
    assert found.plan.pooled["t1"].sharding_type == "table_wise"
    assert not any("t0" in asked for asked in found.plan.settings.constraints)


def test_losses_that_add_up_to_their_limit_are_allowed() -> None:
    given = [replace(table, name=f"t{i}") for i, table in enumerate(tables(1, 0) * 3)]
    shape = TTShape.choose(given[0].rows, given[0].dim, 4)
    options = {table.name: [TTOption(shape, 0.1)] for table in given}
    how = {"options": options, "rates": RATES, "batch_size": BATCH}
    all_three = plan_compression(given, cluster(), **how, budget="3MB", loss_limit=1.0)  # type: ignore[arg-type]
    neutral = solve(given, cluster(), batch_size=BATCH).settings.budget_bytes
    tight = f"{neutral * 0.25!r} B"
    free = plan_compression(given, cluster(), **how, budget=tight)  # type: ignore[arg-type]
    assert len(free.shapes) == 3 > len(all_three.shapes)
    # Which is 0.30000000000000004 in all.
    exact = plan_compression(given, cluster(), **how, budget=tight, loss_limit=0.3)  # type: ignore[arg-type]
    assert exact.step_seconds == free.step_seconds
    with pytest.raises(SolverError, match=r"no choice keeps the losses within 0\.29 and memory within"):
        plan_compression(given, cluster(), **how, budget=tight, loss_limit=0.29)  # type: ignore[arg-type]
    # The unit of losses does not matter, nor which of two of one shape comes first.
    for order in (1, -1):
        both = [TTOption(shape, 1e-8), TTOption(shape, 5e-8)][::order]
        how["options"] = {table.name: both for table in given}
        small = plan_compression(given, cluster(), **how, budget=tight, loss_limit=3e-8)  # type: ignore[arg-type]
        assert small.step_seconds == pytest.approx(free.step_seconds)


def test_the_bound_of_those_that_stay_holds_without_the_others() -> None:
    rate = CollectiveRate(2e-4, 4e9)  # copies are dear to reduce, unless others are reduced anyway
    where = Cluster("c", 1, 4, 1e9, 0.0, (Level(1, None, rate), Level(4, CollectiveRate(1e-6, 16e9), None)), 1e11)
    large, small = tables(2, 1)
    small = replace(small, rows=200, profile=AccessProfile.from_counts(np.arange(200, 0, -1), 2_000))
    train = [TTOption(TTShape.choose(large.rows, large.dim, 4))]
    checked = 0
    for budget in ("450 kB", "600 kB", "800 kB"):
        found = plan_compression(
            [large, small], where, options={large.name: train}, rates=RATES, batch_size=BATCH, budget=budget
        )
        if not found.shapes or found.plan is None:
            continue
        alone = Problem(
            [small], where, BATCH, step=StepWork(0.0, RATES.local), budget=f"{found.plan.settings.budget_bytes!r} B"
        )
        checked += 1
        best = solve(alone)
        assert found.plan.lower_bound_seconds <= best.objective_seconds(best.predicted) * (1 + 1e-9)
        assert not any(one.compute_kernel.startswith("tensor") for one in found.plan.pooled[small.name].alternatives)
    assert checked


@pytest.mark.parametrize("seed", first(3, range(8)))
@pytest.mark.parametrize(("loss_limit", "beside"), [(None, 1), (0.2, 1), (None, 0)])
def test_sequences_become_tensor_trains(seed: int, loss_limit: float | None, beside: int) -> None:
    """Beside pooled tables or none: against each choice of what two sequences become, one by one."""
    pooled = tables(beside, seed)
    sequences = [replace(one, pooling="none") for one in tables(3, seed)[1:]]
    where, step = cluster(), StepWork(0.0, RATES.local)
    options = offered(sequences, [4, 8])
    neutral = solve([*pooled, *sequences], where, batch_size=BATCH).settings.budget_bytes
    limit = neutral * (0.3, 0.6, 0.8, 1.5)[seed % 4]
    costs = PooledCosts(where, BATCH, {}, RATES.local)
    best, kinds = np.inf, [None, 0, 1]
    for choice in itertools.product(kinds, kinds):
        left, seconds, loss = limit, 0.0, 0.0
        for table, number in zip(sequences, choice, strict=True):
            if number is None:
                continue
            train = options[table.name][number]
            reads = TTReads.expected(table, BATCH, train.shape)
            option = costs.tensor_train(table, train.shape, reads, RATES.step_seconds(train.shape, reads), train.loss)
            cost = pooled_cost(costs, [(option, tuple(range(where.world_size)))], costs.received_bytes(table))
            left -= cost.memory_bytes
            seconds += step_seconds(cost, where.world_size, StepWork(0.0))
            loss += train.loss
        rest = [*pooled, *(table for table, number in zip(sequences, choice, strict=True) if number is None)]
        if left <= 0 or loss > (np.inf if loss_limit is None else loss_limit * (1 + 1e-9)):
            continue
        if rest:
            try:
                plan = solve(rest, where, batch_size=BATCH, budget=f"{left!r} B", step=step, gap=1e-6)
            except BudgetError:
                continue
            seconds += plan.objective_seconds(plan.predicted)
        best = min(best, seconds)

    how = {"options": options, "loss_limit": loss_limit, "step": step, "gap": 1e-5}
    found = decided([*pooled, *sequences], where, limit, best, 1e-4, **how)
    if found is None:
        return
    assert set(found.tables) == {table.name for table in (*pooled, *sequences)}
    for table in sequences:
        choice_of = found.tables[table.name]
        assert len(choice_of.options) == 3
        assert choice_of.options[0].memory_bytes > 0
        planned = set() if found.plan is None else {*found.plan.tables, *found.plan.pooled}
        assert (table.name in planned) is (table.name not in found.shapes)


@pytest.mark.slow
def test_many_sequences_may_become_tensor_trains() -> None:
    pooled, sequences = (
        tables(2, 5),
        [replace(one, name=f"s{i}", pooling="none") for i, one in enumerate(tables(12, 9))],
    )
    given, where = [*pooled, *sequences], cluster(4)
    neutral = solve(given, where, batch_size=BATCH).settings.budget_bytes
    how = {"options": offered(given, [4, 8]), "rates": RATES, "batch_size": BATCH, "budget": f"{0.6 * neutral!r} B"}
    free = plan_compression(given, where, **how)  # type: ignore[arg-type]
    assert free.step_seconds <= free.lower_bound_seconds * 1.0102
    assert free.memory_bytes <= free.budget_bytes
    limit = free.loss
    less = plan_compression(given, where, **how, loss_limit=limit)  # type: ignore[arg-type]
    assert less.loss <= limit * (1 + 1e-9)
    assert less.step_seconds >= free.lower_bound_seconds * (1 - 1e-9)
    assert free.step_seconds >= less.lower_bound_seconds * (1 - 0.0102)
    with pytest.raises(SolverError, match="no choice keeps the losses within"):  # which is proven, not given up
        plan_compression(given, where, **how, loss_limit=0.2)  # type: ignore[arg-type]


def test_few_choices_are_looked_at_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing travels, bounds of open choices are of what the rank itself does."""
    where = Cluster("c", 1, 1, 1e10, 0.0, (Level(1, None, None),))
    given = [replace(one, name=f"s{i}", pooling="none") for i, one in enumerate(tables(9, 4))]
    neutral = solve(given, where, batch_size=BATCH).settings.budget_bytes
    looked: list[int] = []
    real = joint._searched
    monkeypatch.setattr(joint, "_searched", lambda *args: (looked.append(1), real(*args))[1])
    for share in (0.5, 0.7):
        found = plan_compression(
            given, where, options=offered(given, [4]), rates=RATES, batch_size=BATCH, budget=f"{share * neutral!r} B"
        )
        assert found.shapes
        assert found.step_seconds <= found.lower_bound_seconds * 1.0021
    assert len(looked) <= 30


def test_pins_are_of_sharded_tables() -> None:
    given, where = tables(2, 3), cluster()
    options, asked = offered(given[:1], [4]), {"t0": TableConstraints(pin=[1])}
    neutral = solve(given, where, batch_size=BATCH).settings.budget_bytes
    how = {"options": options, "rates": RATES, "batch_size": BATCH, "constraints": asked}
    roomy = plan_compression(given, where, **how, budget="10 MiB")  # type: ignore[arg-type]
    assert roomy.plan is not None
    assert roomy.plan.pooled["t0"].ranks == (1,)
    least = plan_compression(given, where, **how, budget=f"{neutral * 0.6!r} B")  # type: ignore[arg-type]
    assert set(least.shapes) == {"t0"}
    how["constraints"] = {"t1": TableConstraints(with_tables=["t0"])}
    with pytest.raises(JobError, match="'t0' is to be with 't1', which it could not be as a tensor train"):
        plan_compression(given, where, **how)  # type: ignore[arg-type]


def test_what_cannot_be_decided() -> None:
    pooled = tables(1)
    how = {"rates": RATES, "batch_size": BATCH}
    options = offered(pooled, [4])
    with pytest.raises(JobError, match="options are given for table 'no'"):
        plan_compression(pooled, cluster(), options={"no": options["t0"]}, **how)  # type: ignore[arg-type]
    assert isinstance(RATES.local, LocalRates)


@pytest.mark.parametrize(
    "asked",
    [
        TableConstraints(pin=[0, 1]),
        TableConstraints(sharding_types=["row_wise"], pin=[2]),
        TableConstraints(sharding_types=["row_wise"], apart=["t1"]),
    ],
)
def test_a_table_that_constraints_leave_tensor_trains_alone(asked: TableConstraints, tmp_path: Path) -> None:
    """Pooled tables have no tiers that it could be in otherwise."""
    given, where = tables(3, 2), cluster(4)
    how: dict[str, Any] = {"batch_size": BATCH, "constraints": {"t0": asked}, "budget": "20MiB"}
    found = plan_compression(given, where, options=offered(given[:1], [4, 8]), rates=RATES, **how)
    assert all(option.shape is not None for option in found.tables["t0"].options)
    assert len(found.tables["t0"].options) == 2
    assert found.tables["t0"].option.shape is not None
    assert "tiers of rows" not in found.explain("t0")
    found.save(tmp_path / "decision.json")
    assert CompressionPlan.load(tmp_path / "decision.json").explain("t0") == found.explain("t0")
    one = plan_compression(given, where, options=offered(given[:1], [4]), rates=RATES, **how)
    assert one.explain("t0").endswith("Constraints leave it no other way.")
