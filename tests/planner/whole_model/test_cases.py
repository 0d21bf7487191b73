"""Which tables without pooling are in tiers: bounds and plans against those where it is given."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest

from flexshard import Plan, Problem, Table, TableConstraints, solve
from flexshard.costmodels import StepWork
from flexshard.errors import BudgetError
from flexshard.planner.whole_model import joint
from flexshard.planner.whole_model.cases import Cases
from tests.planner.whole_model.test_joint import cluster, tables
from tests.slow import first

SHARDED = ["table_wise", "column_wise"]


def problem_of(own: list[Table], seed: int, share: float, either: set[str], outside: set[str]) -> Problem:
    """Some tables may be either, some are not in tiers, the others are."""
    neutral = solve(own, cluster(), batch_size=64).settings.budget_bytes
    constraints = {name: TableConstraints(sharding_types=["flex_shard", *SHARDED]) for name in either}
    constraints |= {name: TableConstraints(sharding_types=SHARDED) for name in outside}
    how: dict[str, Any] = {"budget": f"{neutral * share!r} B", "step": StepWork(1e-5) if seed % 2 else None}
    how |= {"timeout_seconds": 4.0}
    how["reduction"] = "auto" if seed % 3 == 2 else "dense"
    return Problem(own, cluster(), 64, **how, gap=1e-3, constraints=constraints)


def seconds_of(problem: Problem) -> float:
    try:
        plan = solve(problem)
    except BudgetError:
        return np.inf
    return plan.objective_seconds(plan.predicted)


@pytest.mark.parametrize("seed", first(1, [2, 0, *range(4, 12, 2), *range(1, 12, 2)]))
def test_bounds_hold_wherever_tables_are(seed: int) -> None:
    own, names = tables(seed, seed % 2, 3), ("s0", "s1", "s2")
    share = (0.7, 1.0, 1.5)[seed // 2 % 3]
    best = {}
    for chosen in itertools.product((False, True), repeat=3):
        outside = {name for name, out in zip(names, chosen, strict=True) if out}
        best[chosen] = seconds_of(problem_of(own, seed, share, set(), outside))
    relaxation = Cases(problem_of(own, seed, share, set(names), set()), {}, None, time.monotonic() + 10).relaxation()
    known = min(best.values())
    for given in itertools.product((None, False, True), repeat=3):
        inside = {name for name, out in zip(names, given, strict=True) if out is False}
        outside = {name for name, out in zip(names, given, strict=True) if out}
        fitting = [
            seconds
            for chosen, seconds in best.items()
            if all(a in (None, b) for a, b in zip(given, chosen, strict=True))
        ]
        relaxed = relaxation.at(inside, outside, np.inf)
        assert relaxed.bound <= min(fitting)
        if None not in given and np.isfinite(min(fitting)):  # calls of tables that are open are left out
            assert relaxed.bound >= 0.4 * min(fitting)
        # Nothing that is better than what is known is ruled out.
        for wanted in (known * 1.01, known * 1.2):
            relaxed = relaxation.at(inside, outside, wanted)
            assert relaxed.bound <= min(fitting)
            better = [chosen for chosen, seconds in best.items() if seconds < wanted and best[chosen] in fitting]
            for chosen in better:
                out = {name for name, flag in zip(names, chosen, strict=True) if flag}
                if not (inside <= set(names) - out and outside <= out):
                    continue
                assert relaxed.bound <= best[chosen]
                assert relaxed.outside <= out
                assert not relaxed.inside & out


@pytest.mark.parametrize("seed", first(0, [0, 4, 2, 6, 1, 3, 5, 7]))
def test_many_tables_may_be_in_tiers_or_not(seed: int) -> None:
    own, names = tables(seed, 1, 9), {f"s{number}" for number in range(9)}
    share = (1.0, 0.7)[seed // 2 % 2]
    started = time.monotonic()
    plan: Plan = solve(problem_of(own, seed, share, names, set()))
    assert time.monotonic() - started < 60
    seconds = plan.objective_seconds(plan.predicted)
    assert {*plan.tables, *plan.pooled} == {table.name for table in own}
    assert plan.lower_bound_seconds <= seconds
    assert plan.predicted.memory_bytes <= plan.settings.budget_bytes * (1 + 1e-9)
    rng = np.random.default_rng(seed)
    some = {name for name in sorted(names) if rng.random() < 0.5}
    for outside in (set[str](), some, set(plan.pooled) & names):
        other = seconds_of(problem_of(own, seed, share, set(), outside))
        assert seconds <= other * (1 + 2e-3)
        assert plan.lower_bound_seconds <= other * (1 + 1e-9)


def test_plans_that_were_not_found_count_as_much_as_they_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    own = tables(4, 0, 2)
    problem = problem_of(own, 4, 4.0, {"s0", "s1"}, set())
    best = seconds_of(problem)
    searched = joint._searched

    def not_found(problem: Problem, sequences: Any, *rest: Any) -> Any:
        if sequences is not None and len(sequences.problem.tables) == 2:
            raise BudgetError("none was found", 0.0, by_sums=False)
        return searched(problem, sequences, *rest)

    assert solve(problem).tables.keys() == {"s0", "s1"}
    monkeypatch.setattr(joint, "_searched", not_found)
    plan = solve(problem)
    assert len(plan.tables) < 2
    assert plan.lower_bound_seconds <= best
