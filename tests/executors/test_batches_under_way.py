"""Batches that are under way where their rows move to other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torchrec")

from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from flexshard.errors import PlanError
from flexshard.executors import LookaheadPipeline, reshard
from tests.executors import lookahead_model as looking, models, ranks
from tests.executors.test_lookahead import HOST, _profiles, fused

AHEAD = {"lookahead": 3}
PIPELINES: dict[str, tuple[type, float | None, dict[str, Any]]] = {
    "drained": (LookaheadPipeline, None, AHEAD),
    "TorchRec's": (TrainPipelineSparseDist, None, {}),
    "known ahead": (LookaheadPipeline, None, AHEAD),
    "cached": (LookaheadPipeline, 0.3, AHEAD),
    "delayed": (LookaheadPipeline, None, {**AHEAD, "delayed_sync": True}),
    "cached, delayed": (LookaheadPipeline, 0.3, {**AHEAD, "delayed_sync": True}),
}


def _message(step: Callable[..., Any], *given: Any, **how: Any) -> str:
    with pytest.raises(PlanError) as error:
        step(*given, **how)
    return str(error.value)


def resharded(rank: int, plan: Any, other: Any) -> dict[str, list[str]]:
    """What is wrong, by kind of pipeline."""
    found, truth = {}, None
    for name, (kind, factor, how) in PIPELINES.items():
        parallel, optim = looking.shard(plan, factor, fused("rowwise_adagrad"))
        pipeline, wrong = kind(parallel, optim, HOST, **how), []
        batches = looking.batches(rank, range(4 if name == "drained" else 12))
        seen = [pipeline.progress(batches).detach() for _ in range(4)]
        reshard(parallel, other, profiles=_profiles(), quiet=True)
        if name != "drained":
            said = _message(pipeline.progress, batches)
            wrong += [] if "this batch was begun before reshard() moved their rows" in said else [said]
            pipeline.reset()
        batches = looking.batches(rank, range(4, 12))
        seen += [pipeline.progress(batches).detach() for _ in range(8)]
        state = looking.everything(parallel)
        if truth is None:
            truth = seen, state
        found[name] = wrong + looking.steps_that_differ(seen, truth[0]) + looking.differs(state, truth[1])
    return found


def between_passes(rank: int, plan: Any, other: Any) -> bool:
    parallel, _ = looking.shard(plan, None, fused("sgd"))
    loss, _ = parallel(looking.batch_of(0, rank))
    reshard(parallel, other, profiles=_profiles(), quiet=True)
    return "begun before reshard()" in _message(loss.backward)


def test_they_are_refused_and_read_again() -> None:
    plans = [looking.plan_for(1, 2, tiers=tiers) for tiers in (True, False)]
    for before, after in (plans, plans[::-1]):
        nothing: dict[str, list[str]] = {name: [] for name in PIPELINES}
        assert ranks.run(1, 2, resharded, before, after) == [nothing, nothing]


def test_gradients_do_not_go_to_where_rows_were() -> None:
    plans = [looking.plan_for(1, 2, tiers=tiers) for tiers in (True, False)]
    assert ranks.run(1, 2, between_passes, *plans) == [True, True]


def without_rows_behind_a_cache(rank: int) -> tuple[str, bool]:
    """Of the second collection; what is said, and whether the first one is where it was."""
    cluster = models.small_cluster(1, 2)
    split = {name: [(2, rows, "dense")] for name, rows in models.ALL_ROWS.items()}
    copied = split | {"users": [(1, models.ALL_ROWS["users"], "dense")]}
    cached = {"cache_load_factors": {"goods": 0.5, "users": 0.5}}
    parallel, _ = models.shard(models.plan_of(cluster, split), "sgd", sharder=cached)
    before = parallel.module.wide.tables
    said = _message(reshard, parallel, models.plan_of(cluster, copied), quiet=True)
    return said, parallel.module.wide.tables is before


def test_nothing_moves_where_a_plan_leaves_a_cache_no_rows() -> None:
    for said, stays in ranks.run(1, 2, without_rows_behind_a_cache):
        assert stays
        assert "tables users are behind a cache, and the plan has copies of all of their rows" in said
