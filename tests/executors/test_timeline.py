"""A step as a trace: what ran, on every rank, beside what was predicted."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch

from flexshard import AccessProfile, Cluster, Table, TableConstraints, solve
from flexshard.costmodels import StepWork, overlap_of
from flexshard.errors import DataError
from flexshard.executors import Observation, Observer, compare_observed, timeline
from flexshard.executors.comm.collectives import Collectives, Label
from flexshard.planner import Plan
from tests.executors import models, ranks

STEPS = 5


def observed(rank: int, plan: Any) -> Observation:
    observer, _ = models.observe(rank, plan, STEPS)
    return observer.result(fingerprint=plan.fingerprint)


@pytest.fixture(scope="module")
def ran() -> tuple[Plan, Observation]:
    cluster = models.small_cluster(2, 2)
    plan = models.plan_of(cluster, models.random_split(cluster, np.random.default_rng(4)))
    found = ranks.run(2, 2, observed, plan)
    assert all(one.calls == found[0].calls for one in found)
    return plan, found[0]


def test_every_call_of_one_step_is_kept(ran: tuple[Plan, Observation], tmp_path: Path) -> None:
    _, seen = ran
    per_step = {(c.kind, c.group_size, c.content): c.calls for c in seen.collectives}
    for rank in range(4):
        mine = [call for call in seen.calls if call.rank == rank]
        counted = {key: sum((c.kind, c.group_size, c.content) == key for c in mine) for key in per_step}
        assert counted == per_step
        assert [call.start_seconds for call in mine] == sorted(call.start_seconds for call in mine)
        assert all(0 <= call.start_seconds <= max(seen.step_seconds) for call in mine)
        assert all(begin >= call.start_seconds for call in mine for begin, _ in call.waits)
    seen.save(tmp_path / "o.json")
    assert Observation.load(tmp_path / "o.json") == seen


def test_a_trace_has_a_track_per_rank_and_link(ran: tuple[Plan, Observation]) -> None:
    plan, seen = ran
    events = timeline(plan, seen)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == [
        "predicted, average rank",
        "predicted, busiest rank",
        *(f"observed, rank {rank}" for rank in range(4)),
    ]
    tracks = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in spans} <= tracks
    assert sum(e["pid"] >= 2 and not e["name"].startswith("wait") for e in spans) == len(seen.calls)
    # On one track nothing runs at once; the phases are the step.
    for process in (0, 1):
        for thread in {e["tid"] for e in spans if e["pid"] == process}:
            mine = sorted((e["ts"], e["dur"]) for e in spans if (e["pid"], e["tid"]) == (process, thread))
            assert all(a + d <= b + 0.01 for (a, d), (b, _) in pairwise(mine))
    step = sum(phase.seconds for phase in plan.phases)
    assert max(e["ts"] + e["dur"] for e in spans if e["pid"] == 1) == pytest.approx(1e6 * step, abs=0.1)


def test_what_ranks_did_not_wait_for_was_hidden(ran: tuple[Plan, Observation]) -> None:
    plan, seen = ran
    overlap = seen.overlap(plan)
    assert overlap == compare_observed(plan, seen).overlap
    assert overlap
    assert all(0.0 <= share <= 1.0 for share in overlap.values())
    assert {f"{kind}@{size}" for kind, size in overlap_of(overlap, plan.cluster)} == set(overlap)
    with pytest.raises(DataError, match="is of plan ffffffffffff"):
        Observation("f" * 64, 4, seen.step_seconds, seen.collectives).overlap(plan)


def test_what_is_left_of_a_step_is_dense_work(ran: tuple[Plan, Observation]) -> None:
    plan, seen = ran
    waited = sum(one.exposed_seconds for one in seen.collectives)
    work = seen.step_work(plan)
    assert work == StepWork(seen.mean_step_seconds - waited)
    assert 0 < work.dense_seconds < seen.mean_step_seconds
    other = Observation("f" * 64, 4, seen.step_seconds, seen.collectives)
    with pytest.raises(DataError, match="is of plan ffffffffffff"):
        other.step_work(plan)
    idle = Observation(seen.fingerprint, 4, (1e-9,), seen.collectives)
    with pytest.raises(DataError, match="nothing is left for dense work"):
        idle.step_work(plan)


def waited(rank: int, how: str) -> tuple[Observation, list[tuple[float, float]]]:
    """A large all-to-all a step, behind work, or for which one rank comes late; what was observed, and of each call of
    this rank how long it took and how long it was waited for.
    """
    entries = 1 << 20
    with Observer(blocking=how == "blocking") as observer:
        for _ in range(3):
            if how != "hidden" and rank == 0:
                time.sleep(0.3)
            sent, received = torch.ones(entries), torch.empty(entries)
            label = Label(2, "embeddings", ("t",))
            halves = [entries // 2] * 2
            work = Collectives().all_to_all(received, sent, halves, halves, None, label)
            if how == "hidden":
                time.sleep(0.5)
            work.wait()
            observer.step()
    return observer.result(), [(call.seconds, call.exposed_seconds) for step in observer._steps for call in step.calls]


@pytest.mark.parametrize("how", ["hidden", "late", "blocking"])
def test_messages_of_gloo_end_when_they_are_over(how: str) -> None:
    """Whether anybody waits for them by then or not."""
    found = ranks.run(1, 2, waited, how)
    for seen, calls in found:
        (one,) = seen.collectives
        assert one.mean_seconds is not None
        hidden = 1 - one.exposed_seconds / one.mean_seconds
        assert hidden > 0.5 if how == "hidden" else hidden < 0.5
        if how == "hidden":  # over long before anybody waits
            assert all(0 <= exposed <= seconds < 0.5 for seconds, exposed in calls)
    if how == "late":
        assert min(seconds for seconds, _ in found[1][1]) > 0.25


@pytest.mark.parametrize("step", [None, StepWork(0.01)])
def test_pooled_tables_alone_have_a_trace(step: StepWork | None) -> None:
    """Of phases whose calls wait for one another, on whichever links they are."""
    profile = AccessProfile.from_counts(np.ceil(900 / np.arange(1, 401)).astype(np.int64), 1_000)
    tables = [Table(name, 400, 64, profile, pooling=pooling) for name, pooling in (("a", "sum"), ("b", "mean"))]
    asked = {"a": TableConstraints(sharding_types=["row_wise"])}
    plan = solve(tables, Cluster.preset("dgx-h100", nodes=2), batch_size=256, step=step, constraints=asked)
    events = timeline(plan)["traceEvents"]
    calls = [event for event in events if event["ph"] == "X" and "latency_us" in event["args"]]
    expected = sum(len(phase.collectives) for phase in plan.phases)
    assert [sum(event["pid"] == process for event in calls) for process in (0, 1)] == [expected, expected]
    assert expected > 2
