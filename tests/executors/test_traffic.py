"""Bytes that a plan predicts are the bytes that go over the wire: exactly for given batches, closely for a profile."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch
import torch.distributed as dist

import flexshard
from flexshard.errors import DataError
from flexshard.executors import Lookups, Observer, compare_observed, predicted_bytes, replay
from flexshard.executors.comm.collectives import Collectives, Label
from flexshard.executors.traffic import observer as observer_module
from flexshard.executors.traffic.observation import Observation, ObservedCall, ObservedCollective
from flexshard.topologies import Cluster, CollectiveRate, Level
from tests.executors import models, ranks
from tests.slow import crossed, first

STEPS = 4


def steps_of(world: int) -> list[dict[str, Lookups]]:
    """What the ranks look up in the model's batches."""
    found = []
    for step in range(STEPS):
        tables = {}
        for _, name in models.table_names():
            ids, owners = [], []
            for rank in range(world):
                features = models.make_batch(step, rank).features
                for feature in (models.WIDE | models.NARROW)[name][1]:
                    values = features[feature].values().numpy()
                    ids.append(values)
                    owners.append(np.full(len(values), rank))
            tables[name] = Lookups(np.concatenate(ids), np.concatenate(owners))
        found.append(tables)
    return found


def observed(rank: int, plan: Any) -> tuple[list[dict[Any, Any]], Any]:
    observer, parallel = models.observe(rank, plan, STEPS)
    together = parallel.module.wide.collections() + parallel.module.narrow.collections()
    return observer.calls(), together


@pytest.mark.parametrize(("shape", "index_dedup"), crossed([(2, 2), (4, 2)], [False, True, "some"]))
def test_replayed_bytes_are_those_on_the_wire(shape: tuple[int, int], index_dedup: bool | str) -> None:
    cluster = models.small_cluster(*shape)
    split = models.random_split(cluster, np.random.default_rng([3, *shape]))
    plan = models.plan_of(cluster, split, index_dedup=index_dedup)
    rankings = {name: models.profile_of(name) for _, name in models.table_names()}
    ran = ranks.run(*shape, observed, plan)
    expected = replay(plan, steps_of(cluster.world_size), rankings, collections=ran[0][1])
    planned = {(t.kind, t.group_size, t.content): t for t in expected.traffic}
    for rank, (calls, _) in enumerate(ran):
        for step, found in enumerate(calls):
            assert found.keys() == planned.keys()
            for key, counted in found.items():
                one = planned[key]
                assert counted == (one.calls, one.sent[step, rank], one.received[step, rank]), (rank, step, key)


def sequences(rank: int, step: int, p: np.ndarray, batch_size: int, length: int) -> np.ndarray:
    return np.random.default_rng([step, rank]).choice(p.size, batch_size * length, p=p / p.sum())


def run_one_table(rank: int, plan: Any, p: np.ndarray, length: int, steps: int, profile: Any) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
    from torchrec.distributed.model_parallel import DistributedModelParallel

    from flexshard import FlexShardEmbeddingCollectionSharder, FlexShardPlanner
    from flexshard.executors import Observer

    table = plan.tables["goods"]
    config = EmbeddingConfig(name="goods", num_embeddings=table.rows, embedding_dim=table.dim, feature_names=["f"])
    model = EmbeddingCollection(tables=[config])
    sharders = [FlexShardEmbeddingCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1})]
    sharding = FlexShardPlanner(plan, profiles={"goods": profile}).collective_plan(model, sharders)
    parallel = DistributedModelParallel(model, plan=sharding, sharders=sharders, device=torch.device("cpu"))
    size = plan.settings.batch_size
    with Observer() as observer:
        for step in range(steps):
            ids = torch.from_numpy(sequences(rank, step, p, size, length))
            batch = KeyedJaggedTensor(["f"], ids, lengths=torch.full((size,), length))
            parallel(batch)["f"].values().sum().backward()
            observer.step()
    return observer.result(fingerprint=plan.fingerprint)


@pytest.mark.parametrize("case", first(1, [("sparse", False), ("dense", False), ("dense", True)]))
def test_a_profile_predicts_within_two_percent_over_100_steps(case: tuple[str, bool]) -> None:
    reduction, once = case
    rows, length, batch_size = 2000, 5, 64
    p = 1.0 / (1 + np.random.default_rng(0).permutation(rows)) ** 0.8
    # A profile of other samples than those that run.
    counts = np.bincount(np.random.default_rng(9).choice(rows, 1_000_000, p=p / p.sum()), minlength=rows)
    profile = flexshard.AccessProfile.from_counts(counts, num_samples=1_000_000 // length)
    fast, slow = CollectiveRate(0.0, 8e9), CollectiveRate(0.0, 1e9)
    levels = Level(1, None, slow), Level(2, fast, slow), Level(4, slow, None)
    cluster = Cluster("three tiers pay", 2, 2, float(1 << 30), 0.0, levels)
    table = flexshard.Table("goods", rows, 8, profile, optimizer="sgd")
    how = {"batch_size": batch_size, "budget": "+8KiB", "reduction": reduction}
    plan = flexshard.solve([table], cluster, index_dedup=once, **how)
    assert len(plan.tables["goods"].tiers) == (2 if once else 3)
    found = ranks.run(2, 2, run_one_table, plan, p, length, 100, profile)[0]
    expected = predicted_bytes(plan)
    assert {(c.kind, c.group_size, c.content) for c in found.collectives} == expected.keys()
    comparison = compare_observed(plan, found)
    for line in comparison.lines:
        if line.unit == "bytes":
            assert line.error is not None
            assert abs(line.error) < 0.02, (line, line.error)
    assert abs(comparison.reduction_predicted - comparison.reduction_observed) < 0.01


def row_wise_bytes(rank: int, steps: int) -> tuple[float, float]:
    """Bytes per step of TorchRec's own row-wise sharding, and of ours with all rows row-wise."""
    from flexshard.executors import Observer

    def total(parallel: Any) -> float:
        with Observer() as observer:
            for step in range(steps):
                parallel(models.make_batch(step, rank))[0].backward()
                observer.step()
        return sum(c.bytes for c in observer.result().collectives)

    cluster = models.small_cluster(2, 2)
    whole = {name: [(4, rows, "dense")] for name, (rows, _) in (models.WIDE | models.NARROW).items()}
    ours, _ = models.shard(models.plan_of(cluster, whole), "sgd")
    return total(models.row_wise_of_torchrec("sgd", 2, 4)), total(ours)


def test_all_row_wise_sends_less_than_torchrecs_own() -> None:
    theirs, ours = ranks.run(2, 2, row_wise_bytes, STEPS)[0]
    assert ours < theirs


class FakeEvent:
    """A CUDA event by the host's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.when = 0.0

    def record(self) -> None:
        self.when = time.perf_counter()

    def synchronize(self) -> None:
        assert self.when

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.when - self.when) * 1e3


def timed_by_events(rank: int) -> dict[str, tuple[float, float]]:
    """Collectives as under NCCL: their time is told by events, recorded on a stream that waits for them."""
    streams: list[str] = []

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        streams.append("entered")
        yield

    found = {}
    with ExitStack() as patches:
        gpu = torch.device("cuda", 0)
        patches.enter_context(mock.patch.object(observer_module, "_clock_of", return_value=gpu))
        patches.enter_context(mock.patch.object(torch.cuda, "Event", FakeEvent))
        patches.enter_context(mock.patch.object(torch.cuda, "Stream"))
        patches.enter_context(mock.patch.object(torch.cuda, "stream", stream))
        observer = patches.enter_context(Observer())
        if rank == 1:
            time.sleep(0.3)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        assert work is not None
        work.wait()
        observer.step()
    assert streams == ["entered"]
    (one,) = observer.result().collectives
    found[one.kind] = one.seconds, one.exposed_seconds
    return found


def test_collectives_under_nccl_are_timed_by_events() -> None:
    for found in ranks.run(1, 2, timed_by_events):
        seconds, exposed = found["all_reduce"]
        assert 0.25 < seconds < 5.0  # rank 0 waits for rank 1
        assert exposed < 0.1  # the stream on the side has waited by then: gloo's wait holds the host


def kept(rank: int) -> tuple[bool, bool]:
    """Whether what is sent is there before and after its sender has waited."""
    sent = torch.ones(4)
    known, label = weakref.ref(sent), Label(2, "rows", ("t",))
    pending = Collectives().all_to_all(torch.empty(4), sent, None, None, None, label)
    del sent
    before = known() is not None
    pending.wait()
    deadline = time.monotonic() + 10.0
    while known() is not None and time.monotonic() < deadline:  # gloo's own thread may be about to let go of it
        time.sleep(0.01)
    return before, known() is not None


def test_what_is_sent_is_kept_until_its_sender_has_waited() -> None:
    """NCCL lets go of it as soon as anybody has, such as an observer on a stream of its own."""
    assert ranks.run(1, 2, kept) == [(True, False)] * 2


def test_a_plan_of_format_1_is_compared_with_what_it_priced() -> None:
    """Rows and gradients as one all-to-all of two calls, and what copies' gradients took."""
    from pathlib import Path

    plan = flexshard.Plan.load(Path(__file__).parents[1] / "planner" / "plan_v1.json")
    assert {c.content for c in plan.predicted.collectives} == {""}
    world = plan.cluster.world_size
    seen = [
        ObservedCollective(kind, size, content, 1.0, 100.0, 100.0, seconds, seconds / 2, (100.0,))
        for kind, size, content, seconds in (
            ("all_to_all", 8, "ids", 1.0),
            ("all_to_all", 8, "embeddings", 2.0),
            ("all_to_all", 8, "gradients", 3.0),
            ("all_reduce", 1, "replicas", 4.0),
        )
    ]
    comparison = compare_observed(plan, Observation("", world, (1.0,), tuple(seen)))
    times = {line.name: line.observed for line in comparison.lines if line.unit == "seconds"}
    assert times["all_to_all@8"] == 5.0
    assert times["all_reduce@1"] == 4.0
    assert comparison.overlap == {"all_to_all@8": 0.5, "all_reduce@1": 0.5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bytes": -5.0}, "bytes must be at least 0"),
        ({"kind": "foo"}, "kind must be one of all_to_all"),
        ({"exposed_seconds": -1.0}, "exposed_seconds must be at least 0"),
        ({"mean_seconds": -1.0}, "mean_seconds must be at least 0"),
    ],
)
def test_observations_of_nonsense_are_refused(changes: dict[str, Any], message: str) -> None:
    one = ObservedCollective("all_to_all", 2, "ids", 1.0, 8.0, 8.0, 0.1, 0.1, (8.0,))
    with pytest.raises(DataError, match=message):
        replace(one, **changes)
    with pytest.raises(DataError, match="collectives has 'all_to_all@2 ids' twice"):
        Observation("", 2, (0.1,), (one, one))
    with pytest.raises(DataError, match="step_seconds must be at least 0"):
        Observation("", 2, (-0.1,), (one,))
    call = ObservedCall(2, "all_to_all", 2, "ids", 8, 0.0, 0.1, ())
    with pytest.raises(DataError, match="calls has one of rank 2 of 2"):
        Observation("", 2, (0.1,), (one,), (call,))
