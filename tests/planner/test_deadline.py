"""Searches end by the work that they have done, whatever the machine does besides, and by the user's clock."""

from __future__ import annotations

import time

import pytest

from flexshard import Problem, solve
from flexshard.planner.solver.deadline import ended_at, is_enough
from tests.planner.whole_model.test_joint import cluster, tables


def test_work_counts_within_and_no_longer_than_asked_for() -> None:
    assert not is_enough(1e12)  # nobody set an end
    with ended_at(time.monotonic() + 60, 10.0):
        assert [is_enough(4.0) for _ in range(5)] == [False, False, False, True, True]
        with ended_at(time.monotonic() - 1):
            assert is_enough()
    assert not is_enough()


def test_a_slow_machine_has_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(tables(3, 4, 1), cluster(), 64, gap=1e-4, timeout_seconds=1e6)
    known = solve(problem).fingerprint
    clock = time.monotonic

    def slower() -> float:  # a machine that takes twenty times as long
        return clock() * 20

    monkeypatch.setattr(time, "monotonic", slower)
    assert solve(problem).fingerprint == known
