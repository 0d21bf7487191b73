"""Training with rows on the host behind a cache is what it is without one, bit for bit."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torchrec")
pytest.importorskip("numba")

import torch
from torchrec import KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

import flexshard
from flexshard.errors import CacheError, FlexShardError, PlanError, TableError
from flexshard.executors import FlexShardEmbeddingCollectionSharder, LookaheadPipeline, reshard
from flexshard.executors.lookahead.oracle import LookaheadOracle
from flexshard.executors.lookahead.row_moves import RowMoves
from flexshard.executors.sharding import sharded_tables
from flexshard.executors.state.checkpoints import load_checkpoint, save_checkpoint
from flexshard.executors.state.norms import table_norms
from flexshard.executors.stores import cached
from flexshard.executors.stores.cached import CachedStore
from flexshard.executors.stores.mapped import MappedStore
from flexshard.planner import Plan
from flexshard.tables import OPTIMIZERS
from tests.executors import lookahead_model as looking, models, ranks
from tests.host_waits import as_on_cuda
from tests.slow import first

HOST = torch.device("cpu")
STEPS = 14
FACTORS = (0.1, 0.3, 1.0)
AHEAD = (1, 2, 4, 16)
SHAPES = {1: (1, 1), 2: (1, 2), 4: (2, 2)}


def fused(name: str) -> dict[str, Any]:
    """Options that make the most of an optimizer."""
    takes = OPTIMIZERS[name].takes
    options = {"eps": 1e-8, "weight_decay": 0.01, "momentum": 0.9, "eta": 0.5}
    given = {option: value for option, value in options.items() if option in takes}
    if "weight_decay_mode" in takes:
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

        given["weight_decay_mode"] = WeightDecayMode.L2
    kind = OPTIMIZERS[name].fbgemm
    assert kind is not None
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return {"optimizer": EmbOptimType[kind], "learning_rate": 0.2} | given


def train(
    rank: int,
    plan: Any,
    factors: Any,
    optimizer: str,
    *,
    ahead: int | None = None,
    stock: bool = False,
    steps: range = range(STEPS),
    device: str = "cpu",
    **how: Any,
) -> tuple[list[torch.Tensor], Any, Any]:
    """Logits of every step, the pipeline, and the model."""
    parallel, optim = looking.shard(plan, factors, fused(optimizer), device)
    kind = TrainPipelineSparseDist if stock else LookaheadPipeline
    pipeline = kind(parallel, optim, torch.device(device), **({} if stock else {"lookahead": ahead} | how))
    batches = looking.batches(rank, steps)
    return [pipeline.progress(batches).detach() for _ in steps], pipeline, parallel


_fetch = RowMoves._fetch


def every_case(
    rank: int, plan: Any, factors: Sequence[float], aheads: Sequence[int], *, mapped: bool = False
) -> list[Any]:
    """(optimizer, share, lookahead, what differs, what the cache did, rows that it ever held) of all of them.

    With ``mapped``, in the store that GPUs have.
    """
    if mapped:
        with as_on_cuda():
            return every_case(rank, plan, factors, aheads)
    found = []
    for optimizer in OPTIMIZERS:
        outputs, _, parallel = train(rank, plan, None, optimizer, stock=True)
        expected = looking.everything(parallel)
        for factor, ahead in itertools.product(factors, aheads):
            rows: list[np.ndarray] = []

            def noted(self: RowMoves, fetched: np.ndarray, slots: np.ndarray, rows: list[np.ndarray] = rows) -> None:
                rows.append(fetched)
                _fetch(self, fetched, slots)

            with mock.patch.object(RowMoves, "_fetch", noted):
                logits, _, parallel = train(rank, plan, factor, optimizer, ahead=ahead)
            (store,) = looking.caches(parallel)
            assert isinstance(store, MappedStore) == sharded_tables.host_waits_for(HOST)
            traffic, seen = replace(store.traffic), np.unique(np.concatenate(rows)).size
            differing = looking.differs(looking.everything(parallel), expected)
            differing += looking.steps_that_differ(logits, outputs)
            found.append((optimizer, factor, ahead, differing, traffic, seen))
    return found


@pytest.mark.parametrize(
    "case",
    first(2, [(1, FACTORS, AHEAD), (4, (0.1,), (4,)), (2, FACTORS, (4,)), (2, FACTORS, AHEAD), (4, FACTORS, AHEAD)]),
)
def test_every_optimizer_lookahead_and_size(case: tuple[int, Sequence[float], Sequence[int]]) -> None:
    world, factors, aheads = case
    plan = looking.plan_for(*SHAPES[world])
    results = ranks.run(*SHAPES[world], every_case, plan, factors, aheads, limit=500.0)
    for cases in results:
        assert len(cases) == len(OPTIMIZERS) * len(factors) * len(aheads)
        assert [case[:4] for case in cases if case[3]] == []
        # The smallest cache lets rows go and fetches them again; the largest never does.
        for _, factor, _, _, traffic, seen in cases:
            assert traffic.batches == STEPS
            assert traffic.beside == 0
            refetched = traffic.fetched - seen
            assert refetched > 0 if factor == min(FACTORS) else refetched >= 0
            assert (traffic.written_back, refetched) == (0, 0) or factor < max(FACTORS)


def test_rows_with_copies_apart_as_on_a_gpu() -> None:
    for cases in ranks.run(*SHAPES[2], partial(every_case, mapped=True), looking.plan_for(*SHAPES[2]), (0.1,), (2,)):
        assert [case[:4] for case in cases if case[3]] == []


def _weights_alone(self: RowMoves, oracle: Any, host: Any, cache: Any, label: str) -> None:
    _init(self, oracle, host, {"weight": cache["weight"]}, label)


def _evicted_too_early(self: LookaheadOracle) -> Any:
    """As if no later batch were known."""
    batch = self._admitted[0]
    for slot in batch.row_slots.tolist():
        if self._last_read[slot] > batch.batch:
            self._last_read[slot] = batch.batch
            self._row_words[self._slot_rows[slot]] = (batch.batch << 32) | slot
    self.keep = False
    return _retire(self)


def _slot_used_too_early(self: RowMoves, admission: Any) -> None:
    """What comes overwrites what has not left."""
    self._fetch(admission.fetched.rows, admission.fetched.slots)
    self._write_back(admission.evicted.rows, admission.evicted.slots)


def _not_written_back(self: RowMoves, admission: Any) -> None:
    """What leaves for what comes is lost."""
    self._newer[admission.evicted.slots] = False
    _move(self, admission)


def _gradient_of_the_batch_before(self: Any, gradient: torch.Tensor) -> None:
    """Rows are updated by what came for the batch before, and that of the last one is lost."""
    last, self._store.last = getattr(self._store, "last", None), (self._found, gradient.clone())
    if last is not None:
        last[0].update(last[1])
    self._batch.kept = True
    self._store._moves.finish(self._batch, trained=True)


def _ids_of_the_batch_before(self: RowMoves, ids: torch.Tensor) -> Any:
    """Rows are fetched for the wrong batch; lookups find what their slots happen to hold."""
    last = getattr(self, "last", ids)
    self.last = ids  # type: ignore[attr-defined]
    return _announce(self, torch.from_numpy(np.resize(last.numpy(), ids.numel())) if last.numel() else ids)


_init, _retire, _announce, _move = RowMoves.__init__, LookaheadOracle.retire, RowMoves.announce, RowMoves._move
MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "state not carried": (RowMoves, "__init__", _weights_alone),
    "evicted too early": (LookaheadOracle, "retire", _evicted_too_early),
    "slot reused too early": (RowMoves, "_move", _slot_used_too_early),
    "not written back": (RowMoves, "_move", _not_written_back),
    "gradient of the wrong batch": (cached._Announced, "_update", _gradient_of_the_batch_before),
    "ids not ahead": (RowMoves, "announce", _ids_of_the_batch_before),
}


def mutated(rank: int, plan: Any) -> dict[str, bool]:
    """Whether some step's logits differ under each mutant."""
    outputs, _, _ = train(rank, plan, None, "rowwise_adagrad", stock=True, steps=range(30))
    noticed = {}
    for name, (owner, method, wrong) in MUTANTS.items():
        with mock.patch.object(owner, method, wrong):
            logits, _, _ = train(rank, plan, 0.1, "rowwise_adagrad", ahead=2, steps=range(30))
        noticed[name] = any((a != b).any() for a, b in zip(logits, outputs, strict=True))
    return noticed


def test_mutants_are_noticed() -> None:
    for noticed in ranks.run(1, 2, mutated, looking.plan_for(1, 2)):
        assert noticed == dict.fromkeys(MUTANTS, True)


# -- around steps


def interrupted(rank: int, plan: Any, other: Any, folder: str, *, mapped: bool = False, **how: Any) -> list[str]:
    """Evaluation, checkpoints, loading and resharding with a warm cache and batches under way; what differs."""
    if mapped:
        with as_on_cuda():
            return interrupted(rank, plan, other, folder, **how)
    finals = []
    for factor in (None, 0.3):
        parallel, optim = looking.shard(plan, factor, fused("rowwise_adagrad"))
        pipeline = LookaheadPipeline(parallel, optim, HOST, lookahead=3, **(how if factor else {}))
        batches, seen = looking.batches(rank, range(40)), []
        seen += [pipeline.progress(batches).detach() for _ in range(4)]
        # In between: the model by itself, on what the pipeline has not come to.
        pipeline.detach()
        before = fetched(parallel)
        parallel.eval()
        with torch.no_grad():
            seen.append(parallel(looking.batch_of(77, rank))[1])
        parallel.train()
        assert before == fetched(parallel)
        pipeline.attach()
        states = [looking.everything(parallel)]
        save_checkpoint(f"{folder}/{factor}", parallel)
        seen += [pipeline.progress(batches).detach() for _ in range(3)]
        load_checkpoint(f"{folder}/{factor}", parallel)
        states.append(looking.everything(parallel))
        seen += [pipeline.progress(batches).detach() for _ in range(3)]
        seen += [pipeline.progress(iter(())).detach() for _ in range(len(pipeline.batches))]
        reshard(parallel, other, profiles=_profiles(), quiet=True)
        states.append(looking.everything(parallel))
        again = LookaheadPipeline(parallel, optim, HOST, lookahead=2, **(how if factor else {}))
        more = looking.batches(rank, range(50, 55))
        seen += [again.progress(more).detach() for _ in range(5)]
        states.append(looking.everything(parallel))
        finals.append((seen, states))
    (seen, states), (ours, ours_states) = finals
    differing = [f"output {i}" for i, (a, b) in enumerate(zip(seen, ours, strict=True)) if (a != b).any()]
    for i, (a, b) in enumerate(zip(states, ours_states, strict=True)):
        differing += [f"state {i}: {name}" for name in looking.differs(b, a)]
    return differing


def fetched(parallel: Any) -> list[int]:
    """Rows, by cache, once what was begun has ended."""
    return [store.traffic.fetched for store in looking.caches(parallel) if store.drained()]


def _profiles() -> Any:
    generator = np.random.default_rng(0)
    return {name: looking._profile(rows, generator) for name, rows in looking.ROWS.items()}


@pytest.mark.parametrize(("mapped", "tiers"), [(False, True), (True, True), (True, False)])
def test_evaluation_checkpoints_and_resharding_with_a_warm_cache(tmp_path: Any, mapped: bool, tiers: bool) -> None:
    plans = looking.plan_for(1, 2, tiers=tiers), looking.plan_for(1, 2, tiers=not tiers)
    assert ranks.run(1, 2, partial(interrupted, mapped=mapped), *plans, str(tmp_path)) == [[], []]


def plainly(rank: int, plan: Any) -> list[str]:
    """A plain loop, with forward passes that nobody trains on, and two batches' gradients at once."""
    finals = []
    for factor in (None, 0.3):
        parallel, optim = looking.shard(plan, factor, fused("adagrad"))
        seen = []
        for step in range(0, 12, 2):
            optim.zero_grad()
            parallel(looking.batch_of(step + 500, rank))  # and nothing comes of it
            first, logits = parallel(looking.batch_of(step, rank))
            second, more = parallel(looking.batch_of(step + 1, rank))
            (first + second).backward()
            optim.step()
            seen += [logits.detach(), more.detach()]
            del first, second
            gc.collect()
            with torch.no_grad():
                seen.append(parallel(looking.batch_of(step + 900, rank))[1])
        finals.append((seen, looking.everything(parallel)))
    (seen, state), (ours, our_state) = finals
    differing = [f"output {i}" for i, (a, b) in enumerate(zip(seen, ours, strict=True)) if (a != b).any()]
    return differing + looking.differs(our_state, state)


@pytest.mark.parametrize("index_dedup", first(1, [True, False]))
def test_a_plain_loop(index_dedup: bool) -> None:
    assert ranks.run(1, 2, plainly, looking.plan_for(1, 2, index_dedup=index_dedup)) == [[], []]


def outputs_in_order(rank: int, plan: Any) -> list[list[str]]:
    features = looking.batch_of(0, rank).features
    found = [list(looking.Model().tables(features))]
    for factors in (None, {"goods": 0.5}, {"shops": 0.5}):
        parallel, _ = looking.shard(plan, factors, fused("sgd"))
        found.append(list(parallel.module.tables(features).keys()))
    return found


def test_outputs_come_in_the_collections_order_whatever_is_cached() -> None:
    for unsharded, *sharded in ranks.run(1, 2, outputs_in_order, looking.plan_for(1, 2)):
        assert sharded == [unsharded] * 3


def chosen(rank: int, plan: Any) -> list[int | None]:
    found = []
    for factor, steps in ((0.14, 60), (0.4, 110), (1.0, 210), (None, 10)):
        outputs, pipeline, _ = train(rank, plan, factor, "sgd", steps=range(steps))
        found.append(pipeline.lookahead)
        assert pipeline.trained == len(outputs) == steps
    return found


def test_lookahead_follows_from_the_cache_and_is_the_same_on_every_rank() -> None:
    first, second = ranks.run(1, 2, chosen, looking.plan_for(1, 2))
    assert first == second
    small, large, most, without = first
    assert 1 <= small < large < 110
    assert most == 200
    assert without == 1


# -- caches that a plan asks for


def with_caches() -> Plan:
    """A plan that keeps rows on the host, since ranks have little memory."""
    cluster = replace(looking.plan_for(1, 2).cluster, host_bytes_per_s=1e9)
    generator = np.random.default_rng(0)
    tables = [
        flexshard.Table(name, rows, looking.DIM, looking._profile(rows, generator))
        for name, rows in looking.ROWS.items()
    ]
    how: dict[str, Any] = {"batch_size": looking.SAMPLES, "index_dedup": False, "tiers": 1}
    neutral = flexshard.solve(tables, cluster, **how).settings.budget_bytes
    return flexshard.solve(tables, cluster, **how, budget=f"{0.95 * neutral!r} B", host_memory="1MiB")


def as_planned(rank: int, plan: Plan, without: Plan) -> list[Any]:
    """What differs from training without caches, their sizes, and what moving rows out of them says."""
    outputs, _, parallel = train(rank, without, None, "rowwise_adagrad", stock=True)
    expected = looking.everything(parallel)
    logits, _, parallel = train(rank, plan, None, "rowwise_adagrad")
    differing = looking.differs(looking.everything(parallel), expected)
    differing += looking.steps_that_differ(logits, outputs)
    sizes = {
        table: group.store.cache_rows
        for group in parallel.module.tables.groups
        if isinstance(group.store, CachedStore)
        for table in [parallel.module.tables.tables.names[group.tables.start]]
    }
    asked = replace(without, settings=replace(without.settings, host_memory=1e6))
    text = message_of(lambda: reshard(parallel, asked, profiles=_profiles(), quiet=True))
    return [differing, sizes, text]


def test_a_plan_says_which_tables_have_caches() -> None:
    plan = with_caches()
    without = replace(plan, tables={name: replace(table, cache=None) for name, table in plan.tables.items()})
    cached = {name: table.cache for name, table in plan.tables.items() if table.cache is not None}
    assert cached
    for differing, sizes, text in ranks.run(1, 2, as_planned, plan, without):
        assert differing == []
        assert sizes.keys() == cached.keys()
        for name, cache in cached.items():
            assert abs(sizes[name] - cache.rows) <= 1
        assert "is behind a cache, and the plan has it without one" in text


# -- faults


def message_of(work: Callable[..., Any], *args: Any) -> str:
    try:
        work(*args)
    except FlexShardError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def too_small(rank: int, plan: Any) -> tuple[str, list[str]]:
    """The error, and what differs from training without a cache until then; the batch is trained beside it."""
    parallel, optim = looking.shard(plan, 0.01, fused("sgd"))
    stock, stock_optim = looking.shard(plan, None, fused("sgd"))
    for model, optimizer in ((parallel, optim), (stock, stock_optim)):
        optimizer.zero_grad()
        model(looking.batch_of(0, rank))[0].backward()
        optimizer.step()
    text = message_of(parallel, looking.batch_of(1, rank))
    return text, looking.differs(looking.everything(parallel), looking.everything(stock))


def test_a_cache_too_small_for_a_batch_names_the_least_size() -> None:
    ((text, differing),) = ranks.run(1, 1, too_small, looking.plan_for(1, 1))
    assert text.startswith("CacheError: rank 0: tables goods, shops: the cache has 19 rows, one batch reads 4")
    assert differing == []


FEW = {"goods": 1, "shops": 2, "days": 3}


def of_few_rows(step: int, first: int) -> models.Batch:
    """Of one row of each table, and from a batch on of all."""
    ids = [torch.arange(6) % (rows if step >= first else 1) for rows in FEW.values()]
    features = KeyedJaggedTensor(list(FEW), torch.cat(ids), lengths=torch.ones(18, dtype=torch.int64))
    return models.Batch(features, torch.ones(6))


def too_small_on_one_rank(rank: int, plan: Any, first: int, delayed: bool) -> str:
    with mock.patch.object(looking, "ROWS", FEW):
        parallel, optim = looking.shard(plan, 0.3, fused("sgd"))
    pipeline = LookaheadPipeline(parallel, optim, HOST, lookahead=2, delayed_sync=delayed)
    batches = (of_few_rows(step, first) for step in range(20))
    with mock.patch.object(looking, "ROWS", FEW):
        text = message_of(lambda: [pipeline.progress(batches) for _ in range(20)])
    assert pipeline.trained >= min(first, 1)
    looking.everything(parallel)  # to be saved
    return text


@pytest.mark.parametrize(("first", "delayed"), [(0, False), (0, True), (6, False), (6, True)])
def test_every_rank_hears_of_a_cache_that_is_too_small_on_one(first: int, delayed: bool) -> None:
    with mock.patch.object(looking, "ROWS", FEW):
        plan = looking.plan_for(1, 2)
    said = ranks.run(1, 2, too_small_on_one_rank, plan, first, delayed, timeout=30.0)
    assert all(text.startswith("CacheError: ") and "rank 1" in text for text in said), said
    assert "the cache has 1 rows, one batch reads 2; make it at least as large" in said[1]
    assert "its own message names it" in said[0]


def without_room(rank: int, plan: Any, **how: Any) -> list[Any]:
    """Losses of a dozen batches at once, forward passes beside a pipeline whose batches fill the cache, and in eval()
    with gradients: trained where the rows are.
    """
    finals = []
    for factor in (None, 0.1):
        parallel, optim = looking.shard(plan, factor, fused("adam"))
        seen = []
        losses = [parallel(looking.batch_of(step, rank))[0] for step in range(12)]
        torch.stack(losses).sum().backward()
        optim.step()
        pipeline = LookaheadPipeline(parallel, optim, HOST, lookahead=16, **(how if factor else {}))
        batches = looking.batches(rank, range(20, 50))
        for step in range(4):
            seen.append(pipeline.progress(batches).detach())
            pipeline.detach()
            parallel.train(step % 2 == 0)
            loss, logits = parallel(looking.batch_of(100 + step, rank))
            loss.backward()
            parallel.train()
            with torch.no_grad():
                seen += [logits, parallel(looking.batch_of(200 + step, rank))[1]]
            pipeline.attach()
        finals.append(
            (seen, looking.everything(parallel), [store.traffic.beside for store in looking.caches(parallel)])
        )
    (seen, state, _), (ours, our_state, beside) = finals
    differing = [f"output {i}" for i, (a, b) in enumerate(zip(seen, ours, strict=True)) if (a != b).any()]
    return [differing + looking.differs(our_state, state), beside]


def test_batches_that_find_no_room_are_trained_all_the_same() -> None:
    for differing, beside in ranks.run(1, 2, without_room, looking.plan_for(1, 2)):
        assert differing == []
        assert beside[0] > 0


def another_rate(rank: int, plan: Any, optimizer: str) -> list[str]:
    """The rate changes between forward and backward passes, of which some find no room in the cache."""
    ends = []
    for factor in (None, 0.06):
        parallel, _ = looking.shard(plan, factor, fused(optimizer))
        seen = []
        for step in range(0, 6, 3):
            losses = []
            for number in range(step, step + 3):
                loss, logits = parallel(looking.batch_of(number, rank))
                losses.append(loss)
                seen.append(logits.detach())
            for rate in (0.01 * (step + 1), 0.2):
                for group in parallel.fused_optimizer.param_groups:
                    group["lr"] = rate
                parallel.fused_optimizer.step()
                if losses:
                    torch.stack(losses).sum().backward()
                    losses.clear()
        beside = [store.traffic.beside for store in looking.caches(parallel)]
        ends.append((seen, looking.everything(parallel)))
    (expected, state), (found, ours) = ends
    assert all(beside)
    return looking.steps_that_differ(found, expected) + looking.differs(ours, state)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_batches_that_find_no_room_have_the_rate_that_they_have_without_a_cache(optimizer: str) -> None:
    assert ranks.run(1, 2, another_rate, looking.plan_for(1, 2), optimizer) == [[], []]


def other_shares(rank: int, plan: Any) -> str:
    return message_of(looking.shard, plan, {"goods": 0.3, "shops": 0.3} if rank else {"shops": 0.3}, fused("sgd"))


def test_ranks_with_different_shares() -> None:
    for text in ranks.run(1, 2, other_shares, looking.plan_for(1, 2)):
        assert text.startswith("PlanError: cache_load_factors of rank 1 are")


def twice(rank: int, plan: Any) -> str:
    parallel, _ = looking.shard(plan, 0.3, fused("sgd"))
    loss, _ = parallel(looking.batch_of(0, rank))
    loss.backward(retain_graph=True)
    return message_of(loss.backward)


def test_gradients_that_come_twice_are_refused() -> None:
    (text,) = ranks.run(1, 1, twice, looking.plan_for(1, 1))
    assert "gradients of a batch come twice" in text


def copies_fail(rank: int, plan: Any) -> str:
    """Rank 1's copies fail while it trains on the batch before."""
    parallel, optim = looking.shard(plan, 0.3, fused("sgd"))
    pipeline = LookaheadPipeline(parallel, optim, HOST, lookahead=3)
    batches = looking.batches(rank, range(30))
    for _ in range(3):
        pipeline.progress(batches)
    if rank == 1:
        for store in looking.caches(parallel):
            store._moves._host = {}
    text = message_of(lambda: [pipeline.progress(batches) for _ in range(20)])
    ranks.leave_together()
    return text


def test_copies_that_fail_stop_every_rank_with_the_cause() -> None:
    first, second = ranks.run(1, 2, copies_fail, looking.plan_for(1, 2))
    assert "rank 1 has a cache of table 'goods' that is too small for a batch, or whose rows cannot be moved" in first
    assert "AttributeError" in second


def while_rows_are_away(rank: int, plan: Any) -> list[list[bool]]:
    """Of fetches that are held up, how those ended that ended within two steps, and later ones."""
    go, asked, ended, fetch = threading.Event(), [], [], RowMoves._fetch
    parallel, optim = looking.shard(plan, 1.0, fused("sgd"))
    pipeline = LookaheadPipeline(parallel, optim, HOST, lookahead=4)
    batches = looking.batches(rank, range(30))

    def held(self: RowMoves, rows: Any, slots: Any) -> None:
        asked.append(rows)
        ended.append(go.wait(10))
        fetch(self, rows, slots)

    for _ in range(3):
        pipeline.progress(batches)
    with mock.patch.object(RowMoves, "_fetch", held):
        for _ in range(2):
            pipeline.progress(batches)
        meanwhile = list(ended)
        while not asked:
            time.sleep(0.01)
        go.set()
        for _ in range(3):
            pipeline.progress(batches)
    return [meanwhile, ended]


def test_steps_do_not_wait_for_rows_of_later_batches() -> None:
    for meanwhile, ended in ranks.run(1, 2, while_rows_are_away, looking.plan_for(1, 2)):
        assert meanwhile == []
        assert len(ended) > 2
        assert all(ended)


def written(rank: int, plan: Any) -> list[Any]:
    parallel, _ = looking.shard(plan, 0.3, fused("sgd"))
    own = {name: parameter for name, parameter in parallel.named_parameters() if "goods" in name}
    (goods,) = own.values()

    def step(number: int) -> None:
        loss, _ = parallel(looking.batch_of(number, rank))
        loss.backward()

    step(0)
    parallel.state_dict()  # the parameters are what the cache has
    with torch.no_grad():
        goods.zero_()
    parallel.eval()
    rows = parallel.module.tables(looking.batch_of(0, rank).features)["goods"].values()
    parallel.train()
    zeros = bool((rows == 0).all()) and rows.numel() > 0
    step(1)
    with torch.no_grad():
        goods.mul_(2.0)
    return [zeros, message_of(step, 2)]


def test_writing_to_parameters_counts_or_is_refused() -> None:
    ((zeros, text),) = ranks.run(1, 1, written, looking.plan_for(1, 1))
    assert zeros
    assert "parameters were written to while the cache had newer rows" in text


def written_and_asked(rank: int, plan: Any) -> list[str]:
    """What a script does after it wrote to parameters of which the cache has newer rows."""
    found = []
    for ask in ("state_dict", "table_norms", "load_state_dict", "other batches"):
        parallel, _ = looking.shard(plan, 0.1, fused("sgd"))
        (goods,) = (parameter for name, parameter in parallel.named_parameters() if "goods" in name)
        parallel(looking.batch_of(0, rank))[0].backward()
        with torch.no_grad():
            goods.zero_()
        if ask == "state_dict":
            found.append(message_of(parallel.state_dict))
        elif ask == "table_norms":
            found.append(message_of(table_norms, parallel))
        elif ask == "load_state_dict":
            shops = {"tables.embeddings.shops.weight": torch.zeros(looking.ROWS["shops"], looking.DIM)}
            found.append(message_of(lambda model=parallel, state=shops: model.load_state_dict(state, strict=False)))
        else:
            found.append(message_of(_forward_passes, parallel, rank))
    return found


def _forward_passes(parallel: Any, rank: int) -> None:
    for step in range(1, 9):
        parallel(looking.batch_of(step, rank))


def test_writes_that_would_be_lost_are_refused_whatever_comes_next() -> None:
    (found,) = ranks.run(1, 1, written_and_asked, looking.plan_for(1, 1))
    assert len(found) == 4
    for text in found:
        assert "parameters were written to while the cache had newer rows" in text


def test_bad_shares() -> None:
    for share in (0.0, 1.5, -1.0, float("nan")):
        with pytest.raises(TableError, match="cache_load_factors: 'goods'"):
            FlexShardEmbeddingCollectionSharder(cache_load_factors={"goods": share})


def of_copies_alone(rank: int, plan: Any) -> list[str]:
    return [
        message_of(looking.shard, plan, {"days": 0.5}, fused("sgd")),
        message_of(lambda: looking.shard(plan, {"good": 0.5}, fused("sgd"))[0](looking.batch_of(0, rank))),
    ]


def test_a_table_that_has_nothing_to_be_cached_or_that_nobody_has() -> None:
    from tests.executors import models

    plan = looking.plan_for(1, 2)
    split = {n: [(t.group_size, t.rows, t.reduction) for t in table.tiers] for n, table in plan.tables.items()}
    split["days"] = [(1, looking.ROWS["days"], "dense")]
    for copied, unknown in ranks.run(1, 2, of_copies_alone, models.with_tiers(plan, split)):
        assert copied.startswith(PlanError.__name__)
        assert "tables days" in copied
        assert "cache_load_factors: no table 'good'" in unknown


def test_a_pipeline_that_cannot_look_ahead() -> None:
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(CacheError, match="lookahead"):
            LookaheadPipeline(torch.nn.Linear(1, 1), None, HOST, lookahead=wrong)
    for option in ({"execute_all_batches": False}, {"enqueue_batch_after_forward": True}):
        with pytest.raises(CacheError, match=next(iter(option))):
            LookaheadPipeline(torch.nn.Linear(1, 1), None, HOST, **option)


def lookaheads_that_differ(rank: int, plan: Any) -> str:
    return message_of(lambda: train(rank, plan, 0.3, "sgd", ahead=2 + rank))


def test_ranks_with_different_lookaheads() -> None:
    for text in ranks.run(1, 2, lookaheads_that_differ, looking.plan_for(1, 2)):
        assert "rank 1 has lookahead=3, delayed_sync=False, rank 0 lookahead=2, delayed_sync=False; give" in text


def as_stock(rank: int, plan: Any) -> list[Any]:
    """The same script with TorchRec's pipeline and ours: a loader and a model that fail once, evaluation first."""
    finals = []
    for kind, factor in ((TrainPipelineSparseDist, None), (LookaheadPipeline, 0.3)):
        parallel, optim = looking.shard(plan, factor, fused("sgd"))
        seen: list[Any] = []
        pipeline = kind(parallel, optim, HOST, custom_model_fwd=_FailsOnce(parallel))
        parallel.eval()
        batches = looking.batches(rank, range(2))
        with torch.no_grad():
            seen += [pipeline.progress(batches).detach() for _ in range(2)]
        parallel.train()
        batches = looking.batches(rank, range(10, 30))
        while True:
            try:
                seen.append(pipeline.progress(batches).detach())
            except StopIteration:
                break
            except OSError:
                seen.append(torch.zeros(1))
        finals.append((seen, looking.everything(parallel)))
    (seen, state), (ours, our_state) = finals
    differing = [f"output {i}" for i, (a, b) in enumerate(zip(seen, ours, strict=True)) if (a != b).any()]
    return [len(ours), differing + looking.differs(our_state, state)]


class _FailsOnce:
    """A model whose sixth forward pass fails."""

    def __init__(self, model: Any) -> None:
        self._model, self._calls = model, 0

    def __call__(self, batch: Any) -> Any:
        self._calls += 1
        if self._calls == 6:
            raise OSError("once")
        return self._model(batch)


def test_failing_once_and_evaluating_first_are_as_with_torchrecs_pipeline() -> None:
    assert ranks.run(1, 2, as_stock, looking.plan_for(1, 2)) == [[23, []]] * 2
