"""Which tables to compress: the program against trying every choice, and what it says of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from flexshard import AccessProfile, Cluster, Table, solve
from flexshard._internal import as_text
from flexshard.costmodels import (
    PooledCosts,
    StepWork,
    TableRates,
    TTRates,
    TTReads,
    pooled_cost,
    step_seconds,
    tensor_train_cost,
)
from flexshard.errors import BudgetError, FlexShardError, JobError, PlanError, SolverError, TableError
from flexshard.planner import CompressionPlan, Problem, TTOption, measure_losses, plan_compression
from flexshard.planner.solver.build import build_instance
from flexshard.tables.tensor_train_shape import TTShape

# Seconds per unit: an operation takes about as long as on one core, a row of a dense table a microsecond.
DENSE = TableRates(1, 1, (0.0, 1e-4), (1e-7, 1e-9, 0.0), (1e-7, 1e-9, 0.0))
RATES = TTRates(
    "test", (1e-4, 1e-7, 0, 0, 1e-7, 1e-9, 0, 1e-5, 2e-11, 1e-9, 3e-11, 5e-10), (1e-4, 1e-7, 1e-9), (), (DENSE,)
)
CLUSTER = Cluster.preset("a100-4x8-roce")


def table(name: str, rows: int, skew: float, length: float, dim: int = 64) -> Table:
    """Many rows share a count, so that one row more or less is nothing."""
    ranks = np.unique(np.logspace(0, np.log10(rows), 40).astype(np.int64))
    counts = np.repeat((1e9 / ranks**skew).astype(np.int64), np.diff(ranks, append=rows + 1))
    values, number = np.unique(counts, return_counts=True)
    samples = int((values * number).sum() / length)
    return Table(name, rows, dim, AccessProfile.from_histogram(values, number, samples, num_rows=rows))


def tables() -> list[Table]:
    return [table("a", 2_000_000, 1.1, 20), table("b", 500_000, 0.6, 3, dim=32), table("c", 1_000_000, 0.9, 60)]


def options(tables: list[Table], ranks: list[int]) -> dict[str, list[TTOption]]:
    return {t.name: [TTOption(TTShape.choose(t.rows, t.dim, r), 1.0 / r) for r in ranks] for t in tables}


def every_choice(
    tables: list[Table], offered: dict[str, list[TTOption]], limit: float, batch_size: int, loss_limit: float
) -> float:
    """The shortest step of all choices, each with the exact plan of the tables that stay."""
    best = float("inf")
    costs = PooledCosts(CLUSTER, batch_size, {}, RATES.local)
    for choice in itertools.product(*[[None, *offered.get(t.name, [])] for t in tables]):
        stay = [t for t, own in zip(tables, choice, strict=True) if own is None]
        taken = [(t, own) for t, own in zip(tables, choice, strict=True) if own is not None]
        if sum(own.loss for _, own in taken) > loss_limit * (1 + 1e-9):
            continue
        placed, left, seconds = [], limit, 0.0
        for t, own in taken:
            reads = TTReads.expected(t, batch_size, own.shape)
            option = costs.tensor_train(t, own.shape, reads, RATES.step_seconds(own.shape, reads), own.loss)
            placed.append((option, tuple(range(CLUSTER.world_size))))
        if placed:
            cost = pooled_cost(costs, placed, sum(costs.received_bytes(t) for t, _ in taken))
            left -= cost.memory_bytes
            seconds += step_seconds(cost, CLUSTER.world_size, StepWork(0.0))
        if left < 0:
            continue
        if stay:
            row_wise = build_instance(Problem(stay, CLUSTER, batch_size))
            left -= row_wise.cost(row_wise.uniform(CLUSTER.world_size)).memory_bytes
            try:
                plan = solve(stay, CLUSTER, batch_size=batch_size, budget=left, step=StepWork(0.0, RATES.local))
            except BudgetError:
                continue
            seconds += plan.objective_seconds(plan.predicted)
        best = min(best, seconds)
    return best


@settings(max_examples=6)
@given(
    st.lists(st.sampled_from([4, 16, 32]), min_size=1, max_size=2, unique=True),
    st.floats(0.0, 1.0),
    st.sampled_from([256, 2048]),
    st.sampled_from([None, 0.05, 0.3]),
    st.integers(1, 3),
)
def test_no_choice_is_better(
    ranks: list[int], share: float, batch_size: int, loss_limit: float | None, count: int
) -> None:
    own = tables()[:count]
    offered = options(own, ranks)
    instance = build_instance(Problem(own, CLUSTER, batch_size))
    neutral = instance.cost(instance.uniform(CLUSTER.world_size)).memory_bytes
    limit = share * neutral
    expected = every_choice(own, offered, limit, batch_size, np.inf if loss_limit is None else loss_limit)

    def decide() -> CompressionPlan:
        return plan_compression(
            own,
            CLUSTER,
            options=offered,
            rates=RATES,
            batch_size=batch_size,
            budget=limit - neutral,
            loss_limit=loss_limit,
            gap=1e-4,
        )

    if np.isinf(expected):
        with pytest.raises((BudgetError, SolverError)):
            decide()
        return
    found = decide()
    assert found.step_seconds >= expected * (1 - 1e-9), "no choice that was tried is better"
    assert found.step_seconds <= expected * (1 + 2e-4)
    assert found.lower_bound_seconds <= expected * (1 + 1e-9)
    assert found.memory_bytes <= limit * (1 + 1e-9)
    assert loss_limit is None or found.loss <= loss_limit * (1 + 1e-9)
    assert set(found.shapes) == set(found.tables) - set(found.plan.tables if found.plan else ())


def test_a_budget_that_row_wise_needs_leaves_tables_as_they_are_and_a_small_one_compresses() -> None:
    own = tables()
    offered = options(own, [16])
    cluster = Cluster.preset("dgx-h100", nodes=4)
    rich = plan_compression(own, cluster, options=offered, rates=RATES, batch_size=256, budget="+30GiB")
    assert rich.shapes == {}
    assert rich.plan is not None
    alone = solve(own, cluster, batch_size=256, budget="+30GiB", step=StepWork(0.0, RATES.local))
    assert rich.plan.predicted == alone.predicted
    assert "budget does not bind" in rich.explain("a")
    assert sum(table.option.memory_bytes for table in rich.tables.values()) == pytest.approx(rich.memory_bytes)
    cost = rich.plan.predicted
    busiest = cost.look_up_seconds + cost.overlapped_look_up_seconds
    busiest += cost.overlapped_update_seconds + cost.row_wise_update_seconds
    compute = sum(table.option.compute_seconds for table in rich.tables.values())  # an average rank's
    assert 0.5 * busiest <= compute <= busiest * (1 + 1e-9)
    least = plan_compression(own, CLUSTER, options=offered, rates=RATES, batch_size=256, budget="-14MB")
    assert least.shapes
    assert least.plan is None or least.plan.predicted.memory_bytes < least.budget_bytes
    name = next(iter(least.shapes))
    text = least.explain(name)
    assert "tensor train, rows" in text
    assert "As tiers of rows it would need" in text
    stays = [n for n in least.tables if n not in least.shapes]
    assert all("As tensor train" in least.explain(n) for n in stays)


def test_all_tables_may_be_compressed_and_decisions_are_kept(tmp_path: Path) -> None:
    own = tables()[:1]
    shape = TTShape.choose(own[0].rows, own[0].dim, 8)
    reads = TTReads.expected(own[0], 256, shape)
    received = PooledCosts(CLUSTER, 256, {}, RATES.local).received_bytes(own[0])
    memory = tensor_train_cost(own[0], CLUSTER, shape, reads).memory_bytes + received
    instance = build_instance(Problem(own, CLUSTER, 256))
    neutral = instance.cost(instance.uniform(CLUSTER.world_size)).memory_bytes
    found = plan_compression(
        own, CLUSTER, options={"a": [TTOption(shape)]}, rates=RATES, batch_size=256, budget=1.01 * memory - neutral
    )
    assert found.plan is None
    assert found.shapes == {"a": shape}
    assert found.memory_bytes == pytest.approx(memory)
    assert found.table("a").option.memory_bytes == pytest.approx(memory)
    tight = plan_compression(own, CLUSTER, options={"a": [TTOption(shape)]}, rates=RATES, batch_size=256)
    if not tight.shapes and memory > tight.budget_bytes:
        assert "beyond the budget" in tight.explain("a")
    for decided in (found, plan_compression(own, CLUSTER, options={}, rates=RATES, batch_size=256)):
        path = tmp_path / "decision.json"
        decided.save(path)
        again = CompressionPlan.load(path)
        assert again.document() == decided.document()
        assert again.tables == decided.tables
        again.save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    path.write_text(path.read_text().replace('"chosen": 0', '"chosen": 1'))
    with pytest.raises(PlanError, match="does not match its fingerprint"):
        CompressionPlan.load(path)


def test_options_say_what_was_planned() -> None:
    own = tables()
    for offered, budget in (({}, "neutral"), (options(own, [16]), "-15MB")):
        found = plan_compression(own, CLUSTER, options=offered, rates=RATES, batch_size=4096, budget=budget)
        assert sum(t.option.memory_bytes for t in found.tables.values()) == pytest.approx(found.memory_bytes)
        latency = found.step_seconds - sum(t.option.seconds for t in found.tables.values())
        alphas = [(level.all_to_all, level.all_reduce) for level in CLUSTER.levels]
        assert -1e-9 <= latency <= 3 * sum(rate.alpha_seconds for pair in alphas for rate in pair if rate is not None)
        if not offered:
            assert found.plan is not None
            assert found.lower_bound_seconds == pytest.approx(found.step_seconds, rel=1.01e-2)
            assert found.memory_price_seconds_per_gib == pytest.approx(
                found.plan.memory_price_seconds_per_gib, rel=0.05
            )


def test_limits_hold_to_the_last_byte() -> None:
    own = tables()[:1]
    shapes = [TTShape.choose(own[0].rows, own[0].dim, rank) for rank in (4, 8)]
    instance = build_instance(Problem(own, CLUSTER, 256))
    neutral = instance.cost(instance.uniform(CLUSTER.world_size)).memory_bytes
    received = PooledCosts(CLUSTER, 256, {}, RATES.local).received_bytes(own[0])
    memory = [
        tensor_train_cost(own[0], CLUSTER, shape, TTReads.expected(own[0], 256, shape)).memory_bytes + received
        for shape in shapes
    ]
    at_once = TableRates(1, 1, (0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    slow_small = TTRates("test", (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1e-12), (0, 0, 0), (), (at_once,))
    for short, rank in ((0.0, 0), (1e-7, 0), (1e-8, 0)):
        found = plan_compression(
            own,
            CLUSTER,
            options={"a": [TTOption(shape, 8e-7 * place) for place, shape in enumerate(shapes)]},
            rates=slow_small,
            batch_size=256,
            budget=memory[1] * (1 - short) - neutral,
            loss_limit=0.0,
        )
        assert found.shapes == {"a": shapes[rank]}
        assert found.memory_bytes <= found.budget_bytes * (1 + 1e-12)
    with pytest.raises(SolverError, match="no choice keeps the losses within"):
        plan_compression(
            own, CLUSTER, options={"a": [TTOption(shapes[0], 8e-7)]}, rates=RATES, batch_size=256,
            budget=1.01 * memory[0] - neutral, loss_limit=0.0,
        )  # fmt: skip


def test_too_little_for_one_tier_is_a_matter_of_the_budget() -> None:
    hot = Table("hot", 10, 64, AccessProfile.from_counts([10**6] * 10, num_samples=1000))
    cold = Table("cold", 10**6, 64, AccessProfile.from_counts([1], num_samples=1000, num_rows=10**6))
    with pytest.raises(BudgetError, match="no choice of tensor trains and tiers fits budget") as raised:
        plan_compression([hot, cold], CLUSTER, options={}, rates=RATES, batch_size=256, budget="-1314MB", tiers=1)
    least = raised.value.least_bytes
    instance = build_instance(Problem([hot, cold], CLUSTER, 256))
    neutral = instance.cost(instance.uniform(CLUSTER.world_size)).memory_bytes
    budget = least - neutral + 1
    plan_compression([hot, cold], CLUSTER, options={}, rates=RATES, batch_size=256, budget=budget, tiers=1)
    own = tables()
    how = {"options": options(own[:2], [4, 16]), "rates": RATES, "batch_size": 256}
    instance = build_instance(Problem(own, CLUSTER, 256))
    neutral = instance.cost(instance.uniform(CLUSTER.world_size)).memory_bytes
    with pytest.raises(BudgetError, match="no choice of tensor trains and tiers fits budget") as raised:
        plan_compression(own, CLUSTER, **how, budget=1 - neutral)  # type: ignore[arg-type]
    least = raised.value.least_bytes - neutral
    assert plan_compression(own, CLUSTER, **how, budget=least + 1).shapes  # type: ignore[arg-type]
    with pytest.raises(BudgetError):
        plan_compression(own, CLUSTER, **how, budget=least - 100)  # type: ignore[arg-type]


def test_a_search_that_runs_out_of_time() -> None:
    own = [table(f"t{k}", 20_000 + 1000 * k, 0.8 + 0.01 * k, 5 + k) for k in range(40)]
    offered = {
        t.name: [TTOption(TTShape.choose(t.rows, t.dim, r), (k % 7 + 1) / r) for r in range(2, 34, 4)]
        for k, t in enumerate(own)
    }
    found = plan_compression(
        own, CLUSTER, options=offered, rates=RATES, batch_size=256, budget="-10MB", loss_limit=2.0,
        time_limit_seconds=1e-3,
    )  # fmt: skip
    assert found.loss <= 2.0
    assert found.memory_bytes <= found.budget_bytes
    assert 0 < found.lower_bound_seconds <= found.step_seconds


@pytest.mark.parametrize("text", ['"a": 1e999', '"tables": 3', '"plan": null'])
def test_damaged_decisions(tmp_path: Path, text: str) -> None:
    path = tmp_path / "d.json"
    path.write_text('{"format": "flexshard.compression", "version": 1, "fingerprint": "x", ' + text + "}")
    with pytest.raises(PlanError, match=r"d\.json"):
        CompressionPlan.load(path)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"options": {"z": []}}, JobError, "table 'z', which is not there; there are a"),
        ({"options": {"a": [TTOption(TTShape.choose(100, 64, 4))]}}, JobError, "an option is for 100 rows of 64"),
        ({"budget": "-1TB"}, BudgetError, "no choice of tensor trains .* fits budget '-1TB'"),
        ({"loss_limit": -1.0}, JobError, "loss_limit must be at least 0"),
        ({"loss_limit": "much"}, JobError, "loss_limit must be a number"),
        ({"tiers": 2.5}, JobError, "tiers must be a whole number"),
        ({"time_limit_seconds": 0}, JobError, "time_limit_seconds must be above 0"),
        ({"options": {"a": [TTShape.choose(100, 64, 4)]}}, JobError, "must be a list of TTOption"),
        ({"loss_limit": 0.01, "budget": "-14MB"}, SolverError, "raise one of them, or offer other ranks"),
    ],
)
def test_what_cannot_be_decided(wrong: dict[str, object], error: type[FlexShardError], message: str) -> None:
    own = tables()[:1]
    arguments = {"options": options(own, [8]), "rates": RATES, "batch_size": 256} | wrong
    with pytest.raises(error, match=message):
        plan_compression(own, CLUSTER, **arguments)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TableError, match="loss is at least 0"):
        TTOption(TTShape.choose(100, 64, 4), -1.0)
    with pytest.raises(PlanError, match="there is no table 'q'"):
        plan_compression(own, CLUSTER, options={}, rates=RATES, batch_size=256).explain("q")


def test_losses_are_measured_with_each_option_alone() -> None:
    own = tables()
    offered = options(own, [8, 16])
    asked: list[tuple[dict[str, TTShape], int]] = []

    def score(shapes: Mapping[str, TTShape], seed: int) -> float:
        asked.append((dict(shapes), seed))
        if not shapes:
            return 0.75 + 0.01 * seed
        ((name, shape),) = shapes.items()
        return 0.75 + 0.01 * seed - (0.02 if shape.tt_ranks[0] == 8 else -0.005) * (name == "a")

    found = measure_losses(offered, score, seeds=(0, 1))
    names = list(offered)
    assert asked[:2] == [({}, 0), ({}, 1)]
    assert len(asked) == 2 + 2 * sum(len(each) for each in offered.values())
    assert all(len(shapes) <= 1 for shapes, _ in asked)
    assert [option.loss for option in found.options["a"]] == pytest.approx([0.02, 0.0])
    assert all(option.loss == 0 for name in names if name != "a" for option in found.options[name])
    assert [option.shape for option in found.options["a"]] == [option.shape for option in offered["a"]]
    text = as_text(found.grid(), 100)
    assert "TT ranks 8 x 8" in text
    assert "0.755 ± 0.005" in text
    limited = {"rates": RATES, "batch_size": 256, "budget": "-13MB"}
    decided = plan_compression(own, CLUSTER, options=found.options, loss_limit=0.01, **limited)
    assert "a" not in decided.shapes or decided.shapes["a"].tt_ranks[0] == 16
    with pytest.raises(TableError, match="a score"):
        measure_losses(offered, lambda *_: float("nan"))
    with pytest.raises(TableError, match="with one seed at least"):
        measure_losses(offered, score, seeds=())
