"""Rows on the host behind caches on a GPU: ``make test-gpu``. One GPU is enough; without one every test is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torchrec")
pytest.importorskip("numba")

import torch

from flexshard._internal import SideStream
from flexshard.executors import LookaheadPipeline, full_state_dict, load_checkpoint, reshard, save_checkpoint
from flexshard.executors.lookahead.row_moves import RowMoves
from flexshard.executors.stores.fused import FusedStore
from flexshard.executors.stores.mapped import MappedStore
from flexshard.executors.stores.updates import OptimizerSpec
from flexshard.tables import OPTIMIZERS
from tests.executors import lookahead_model as looking, ranks, test_lookahead as host, test_pooled_caches as pooled

DEVICE, BACKENDS = "cuda", {1: "cpu:gloo,cuda:nccl", 2: "cpu:gloo,cuda:gloo"}
CYCLES = 20_000_000  # of a stream that is kept busy, about 12 ms

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def contents(parallel: Any) -> dict[str, np.ndarray]:
    """Whole tables and layers, on the first rank; where there is one alone, states too."""
    if torch.distributed.get_world_size() == 1:
        return looking.everything(parallel)
    return {name: values.cpu().numpy() for name, values in full_state_dict(parallel).items()}


def apart(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest difference of two models."""
    assert found.keys() == expected.keys()
    differences = [float(np.abs(found[name] - values).max(initial=0.0)) for name, values in expected.items()]
    return max(differences, default=0.0)


@contextmanager
def busy(which: str, cycles: int = CYCLES) -> Iterator[None]:
    """One of two streams comes late: that of the copies, or that of the steps."""
    enter, announce = SideStream.inside, RowMoves.announce

    @contextmanager
    def late(self: SideStream) -> Iterator[None]:
        with enter(self):
            torch.cuda._sleep(cycles)
            yield

    def after_a_while(self: RowMoves, ids: torch.Tensor) -> Any:
        torch.cuda._sleep(cycles)
        return announce(self, ids)

    owner, name, wrapped = (SideStream, "inside", late) if which == "copies" else (RowMoves, "announce", after_a_while)
    with mock.patch.object(owner, name, wrapped):
        yield


def every_optimizer(rank: int, plan: Any) -> list[tuple[str, float]]:
    """How far training with a cache is from training without one, on the GPU."""
    found = []
    for optimizer in OPTIMIZERS:
        outputs, _, parallel = host.train(rank, plan, None, optimizer, stock=True, device=DEVICE)
        expected = contents(parallel)
        for factor, ahead, late in ((0.1, 4, "copies"), (0.1, 2, "steps"), (0.3, 16, "copies"), (1.0, 1, "steps")):
            with busy(late):
                logits, _, parallel = host.train(rank, plan, factor, optimizer, ahead=ahead, device=DEVICE)
            (store,) = looking.caches(parallel)
            assert isinstance(store, MappedStore)
            assert store.traffic.batches == host.STEPS
            difference = apart(contents(parallel), expected)
            difference = max(difference, *(float((a - b).abs().max()) for a, b in zip(logits, outputs, strict=True)))
            found.append((f"{optimizer}, cache of {factor}, {ahead} ahead, {late} late", difference))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_training_is_what_it_is_without_a_cache(world: int) -> None:
    plan = looking.plan_for(1, world)
    for cases in ranks.run(1, world, every_optimizer, plan, backend=BACKENDS[world]):
        assert [case for case in cases if not case[1] < 1e-4] == []


def _copies_do_not_wait(self: SideStream, moment: Any) -> None:
    """Nor do steps."""


def _not_carried(self: RowMoves, oracle: Any, rows: Any, cache: Any, label: str) -> None:
    host._init(self, oracle, rows, {"weight": cache["weight"]}, label)


MUTANTS = {
    "streams do not wait": (SideStream, "wait_here", _copies_do_not_wait),
    "state not carried": (RowMoves, "__init__", _not_carried),
}


def mutated(rank: int, plan: Any, mutant: str) -> bool:
    """Whether some step's logits differ."""
    outputs, _, _ = host.train(rank, plan, None, "rowwise_adagrad", stock=True, steps=range(20), device=DEVICE)
    owner, method, wrong = MUTANTS[mutant]
    with mock.patch.object(owner, method, wrong), busy("copies", 10 * CYCLES):
        logits, _, _ = host.train(rank, plan, 0.1, "rowwise_adagrad", ahead=2, steps=range(20), device=DEVICE)
    return any(float((a - b).abs().max()) > 1e-3 for a, b in zip(logits, outputs, strict=True))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_noticed(mutant: str) -> None:
    plan = looking.plan_for(1, 1)
    (noticed,) = ranks.run(1, 1, mutated, plan, mutant, backend=BACKENDS[1], expect_failures=True)
    # Slots that have not come may be anything: a process that reads beyond its memory has noticed, too.
    crashed = mutant == "streams do not wait" and type(noticed) is RuntimeError and "ended with code" in str(noticed)
    assert crashed or noticed is True, noticed


def interrupted(rank: int, plan: Any, other: Any, folder: str) -> float:
    """Evaluation, checkpoints, writing to parameters and resharding with a warm cache."""
    finals = []
    for factor in (None, 0.3):
        parallel, optim = looking.shard(plan, factor, host.fused("rowwise_adagrad"), DEVICE)
        device = torch.device(DEVICE)
        pipeline = LookaheadPipeline(parallel, optim, device, lookahead=3)
        batches, seen = looking.batches(rank, range(40)), []
        torch.cuda._sleep(CYCLES)
        with torch.no_grad():  # what the first batch has to wait for, on whichever stream it begins
            for weight in parallel.module.tables.parameters():
                weight.mul_(1.5)
        seen += [pipeline.progress(batches).detach() for _ in range(4)]
        pipeline.detach()
        parallel.eval()
        with torch.no_grad():
            seen.append(parallel(looking.batch_of(77, rank).to(device))[1])
        parallel.train()
        pipeline.attach()
        states = [contents(parallel)]
        save_checkpoint(f"{folder}/{factor}", parallel)
        seen += [pipeline.progress(batches).detach() for _ in range(3)]
        load_checkpoint(f"{folder}/{factor}", parallel)
        states.append(contents(parallel))
        seen += [pipeline.progress(batches).detach() for _ in range(3)]
        seen += [pipeline.progress(iter(())).detach() for _ in range(len(pipeline.batches))]
        reshard(parallel, other, profiles=host._profiles(), quiet=True)
        states.append(contents(parallel))
        again = LookaheadPipeline(parallel, optim, device, lookahead=2)
        more = looking.batches(rank, range(50, 55))
        seen += [again.progress(more).detach() for _ in range(5)]
        again.detach()
        pipeline.detach()
        contents(parallel)  # as new as the cache, so that nothing is lost
        with torch.no_grad():
            for weight in parallel.module.tables.parameters():
                weight.mul_(0.5)
        seen.append(parallel(looking.batch_of(78, rank).to(device))[1].detach())
        states.append(contents(parallel))
        finals.append((seen, states))
    (seen, states), (ours, ours_states) = finals
    outputs = max(float((a - b).abs().max()) for a, b in zip(seen, ours, strict=True))
    return max(outputs, *(apart(b, a) for a, b in zip(states, ours_states, strict=True)))


@pytest.mark.parametrize(("world", "tiers"), [(1, True), (2, True), (2, False)])
def test_evaluation_checkpoints_writing_and_resharding(world: int, tiers: bool, tmp_path: Any) -> None:
    plans = looking.plan_for(1, world, tiers=tiers), looking.plan_for(1, world, tiers=not tiers)
    found = ranks.run(1, world, interrupted, *plans, str(tmp_path), backend=BACKENDS[world])
    assert max(found) < 1e-4, found


def pooled_tables(rank: int) -> list[float]:
    found = []
    factors = {"goods": 0.2, "shops": 0.2}
    for optimizer in ("rowwise_adagrad", "adam", "sgd"):
        expected, _ = pooled.train(rank, None, optimizer, stock=True, torchrec=True, sums=True, device=DEVICE)
        logits, ours = pooled.train(rank, factors, optimizer, sums=True, device=DEVICE)
        assert pooled.caches(ours)[0].traffic.fetched > 0
        found.append(max(float(np.abs(a - b).max()) for a, b in zip(logits, expected, strict=True)))
    return found


def test_pooled_tables() -> None:
    (found,) = ranks.run(1, 1, pooled_tables, backend=BACKENDS[1])
    assert max(found) < 1e-4, found


def test_the_gpu_holds_the_cache_and_the_copies_alone() -> None:
    rows, dim, copied, device = 1_000_000, 64, 10_000, torch.device(DEVICE)
    spec = OptimizerSpec.of(host.fused("adagrad"), "t", device)
    torch.zeros(1, device=device)
    before = torch.cuda.memory_allocated()
    how: dict[str, Any] = {"cache_rows": 50_000, "cache": FusedStore, "label": "t"}
    store = MappedStore(spec, rows, dim, torch.float32, device, **how, ranges=[range(copied, rows)])
    held = torch.cuda.memory_allocated() - before
    assert held < 1.2 * (copied + 50_000) * 2 * dim * 4
    store._moves.close()


@pytest.mark.parametrize("world", [1, 2])
def test_a_learning_rate_of_later_steps_reaches_every_row(world: int) -> None:
    ranks.run(1, world, learning_rates, looking.plan_for(1, world), backend=BACKENDS[world])


def learning_rates(rank: int, plan: Any) -> None:
    finals = []
    for factor in (None, 0.2):
        parallel, optim = looking.shard(plan, factor, host.fused("adagrad"), DEVICE)
        pipeline = LookaheadPipeline(parallel, optim, torch.device(DEVICE), lookahead=2)
        batches = looking.batches(rank, range(8))
        for step in range(8):
            for group in optim.param_groups:
                group["lr"] = 0.1 / (1 + step)
            pipeline.progress(batches)
        finals.append(contents(parallel))
    assert apart(*finals) < 1e-4
