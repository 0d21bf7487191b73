"""Batches that are over, and those that nobody trains on, are let go of."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torchrec")
pytest.importorskip("numba")

import torch

from flexshard.executors import LookaheadPipeline
from flexshard.executors.comm.exchange import Exchange
from flexshard.executors.lookahead.row_moves import AnnouncedBatch
from tests.executors import lookahead_model as looking, ranks, test_pooled_caches as pooled
from tests.executors.test_lookahead import fused

STEPS = 12


def alive() -> int:
    gc.collect()
    return sum(
        issubclass(type(one), Exchange | AnnouncedBatch) for one in gc.get_objects()
    )  # not what proxies stand for


def looped(rank: int, plan: Any, *, of_bags: bool, ahead: bool) -> list[int]:
    """How many batches there are after some steps, and after as many more."""
    batch_of = pooled.batch_of if of_bags else looking.batch_of
    if of_bags:
        parallel, optimizer = pooled.shard({"goods": 0.8, "shops": 0.8}, "sgd")
    else:
        parallel, optimizer = looking.shard(plan, 0.8, fused("sgd"))
    pipeline = LookaheadPipeline(parallel, optimizer, torch.device("cpu"), lookahead=2) if ahead else None
    batches, kept = (batch_of(step, rank) for step in range(100)), []
    underway = parallel(batch_of(0, rank))[0]
    assert alive() > 0
    del underway
    for _ in range(2):
        for _ in range(STEPS):
            if pipeline is not None:
                pipeline.progress(batches)
                continue
            optimizer.zero_grad()
            parallel(next(batches))[0].backward()
            optimizer.step()
        for store in (pooled if of_bags else looking).caches(parallel):
            store.flush()  # behind all that its thread was asked for, which has let go of what is over then
        kept.append(alive())
    return kept


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("world", "how"), [(1, {"index_dedup": False}), (1, {"index_dedup": True}), (2, {})])
def test_of_rows_behind_a_cache(world: int, how: dict[str, Any], ahead: bool) -> None:
    plan = looking.plan_for(1, world, **how)
    for first, second in ranks.run(1, world, partial(looped, of_bags=False, ahead=ahead), plan):
        assert second <= first


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_of_bags_behind_a_cache(world: int, ahead: bool) -> None:
    for first, second in ranks.run(1, world, partial(looped, of_bags=True, ahead=ahead), None):
        assert second <= first


def skipped(rank: int, plan: Any) -> tuple[int, int]:
    """Lookups beside a cache, of steps after many that were not trained."""
    parallel, optimizer = looking.shard(plan, 0.35, fused("sgd"))
    (store,) = looking.caches(parallel)
    for step in range(20):
        loss = parallel(looking.batch_of(step, rank))[0]
    del loss
    gc.collect()
    before = store.traffic.beside
    for step in range(20, 40):
        optimizer.zero_grad()
        parallel(looking.batch_of(step, rank))[0].backward()
        optimizer.step()
    return before, store.traffic.beside


@pytest.mark.parametrize(("world", "index_dedup"), [(1, False), (1, True), (2, False)])
def test_of_steps_that_are_skipped(world: int, index_dedup: bool) -> None:
    for before, after in ranks.run(1, world, skipped, looking.plan_for(1, world, index_dedup=index_dedup)):
        assert after == before
