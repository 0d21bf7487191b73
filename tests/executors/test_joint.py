"""Modules whose batches are begun together are exchanged together, with the numbers of each by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flexshard.errors import DataError
from flexshard.executors import Observer, replay, reshard
from tests.executors import models, ranks
from tests.executors.test_traffic import steps_of

STEPS = 4


def split_of(cluster: Any, seed: int) -> dict[str, list[tuple[int, int, str]]]:
    """Collections with tiers of their own: one knows no rows split within a node, the other no copies on every rank."""
    split = models.random_split(cluster, np.random.default_rng(seed))
    first, node, world = 1, cluster.ranks_per_node, cluster.world_size
    for name in models.WIDE:
        rows = models.WIDE[name][0]
        split[name] = [(first, rows // 3, "dense" if seed % 2 else "sparse"), (world, rows - rows // 3, "dense")]
    split["users"] = [(node, 20, "sparse" if seed % 2 else "dense"), (world, 44, "dense")]
    return split


def copy_of(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(features.keys(), features.values().clone(), lengths=features.lengths().clone())


def begin(parallel: Any, batch: models.Batch, together: bool) -> Callable[[str], Any]:
    """Distribute a batch to both modules, and what then gives a module's output."""
    modules = {name: parallel.module.get_submodule(name) for name in ("wide", "narrow")}
    contexts = {name: module.create_context() for name, module in modules.items()}
    if not together:  # a batch of its own for each, so that a plain loop does not join them either
        return lambda name: modules[name](copy_of(batch.features))
    requests = {name: module.input_dist(contexts[name], batch.features) for name, module in modules.items()}
    tensors = {name: request.wait() for name, request in requests.items()}
    ids = {name: tensor.wait() for name, tensor in tensors.items()}
    return lambda name: modules[name].compute_and_output_dist(contexts[name], ids[name])


def total(output: Any, names: list[str]) -> torch.Tensor:
    """Something whose gradient is another one for every row."""
    found = [(output[name].values().pow(2) * 0.5 + output[name].values()).sum() for name in names]
    return 0.01 * torch.stack(found).sum()


def both(output: Callable[[str], Any]) -> None:
    wide, narrow = output("wide"), output("narrow")
    (total(wide, ["clicked", "shop@days"]) + total(narrow, ["user"])).backward()


def one_after_the_other(output: Callable[[str], Any]) -> None:
    wide, narrow = output("wide"), output("narrow")
    total(narrow, ["user"]).backward()
    total(wide, ["clicked"]).backward()


def one_only(output: Callable[[str], Any]) -> None:
    wide, narrow = output("wide"), output("narrow")
    assert len(narrow["user"].values()) >= 0
    total(wide, ["day"]).backward()


def frozen_first(output: Callable[[str], Any]) -> None:
    with torch.no_grad():
        teacher = output("narrow")
        level = total(teacher, ["user"])
    (total(output("wide"), ["shown"]) * (1 + 0.01 * level)).backward()


def frozen_last(output: Callable[[str], Any]) -> None:
    wide = output("wide")
    with torch.no_grad():
        level = total(output("narrow"), ["user"])
    (total(wide, ["shown"]) * (1 + 0.01 * level)).backward()


def looked_at_first(output: Callable[[str], Any]) -> None:
    wide, narrow = output("wide"), output("narrow")
    with torch.no_grad():  # whoever uses it first, TorchRec's too, gets it without a gradient
        level = total(narrow, ["user"])
    (total(wide, ["shop@shops"]) + level).backward()


def twice(output: Callable[[str], Any]) -> None:
    wide, narrow = output("wide"), output("narrow")
    loss = total(wide, ["clicked"]) + total(narrow, ["user"])
    loss.backward(retain_graph=True)
    loss.backward()


WAYS = [both, one_after_the_other, one_only, frozen_first, frozen_last, looked_at_first, twice]


def trained(rank: int, plan: Any, optimizer: str, way: Any) -> float:
    """Largest difference of any weight or state between modules that go together and modules that do not."""
    found = []
    for together in (False, True):
        parallel, _ = models.shard(plan, optimizer)
        for step in range(STEPS):
            way(begin(parallel, models.make_batch(step, rank, size=6), together))
            if step == 1:
                with torch.no_grad():  # an evaluation between steps counts for nothing
                    begin(parallel, models.make_batch(9, rank, size=6), together)("narrow")["user"].values()
        found.append(parallel)
    separate, joint = (one.fused_optimizer.state_dict()["state"] for one in found)
    largest = 0.0
    for name, weight in found[0].state_dict().items():
        other = found[1].state_dict()[name]
        pairs = [(weight, other)]
        pairs += [(state, joint[name][key]) for key, state in separate.get(name, {}).items()]
        for one, two in pairs:
            difference = models.whole(one).double() - models.whole(two).double()
            largest = max(largest, float(difference.abs().max()))
    return largest


@pytest.mark.parametrize(
    ("optimizer", "way"),
    [("adagrad" if way is both else "adam", way) for way in WAYS]
    + [
        pytest.param(optimizer, way, marks=pytest.mark.slow)
        for optimizer, way in (("adam", both), ("adagrad", one_after_the_other), ("adagrad", frozen_first))
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_numbers_are_those_of_each_module_by_itself(optimizer: str, way: Any) -> None:
    cluster = models.small_cluster(2, 2)
    plan = models.plan_of(
        cluster, split_of(cluster, WAYS.index(way)), index_dedup="some" if optimizer == "adagrad" else False
    )
    assert max(ranks.run(2, 2, trained, plan, optimizer, way)) < 1e-5


class Frozen(models.Model):
    """Its narrow collection is a teacher that does not learn."""

    def forward(self, batch: models.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            user = models._pool(self.narrow(batch.features)["user"])
        wide = self.wide(batch.features)
        pooled = [models._pool(wide[name]) for name in self.outputs] + [user]
        logits = self.over(torch.cat(pooled, 1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits


def beside_torchrec(rank: int, plan: Any) -> tuple[float, float]:
    """Largest difference of outputs and of weights to TorchRec's sharder, in TorchRec's pipeline."""
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    results = []
    for make in (models.shard, models.row_wise_of_torchrec):
        torch.manual_seed(7)
        if make is models.shard:
            parallel, optim = models.shard(plan, "adagrad", model=Frozen())
        else:
            parallel = models.row_wise_of_torchrec("adagrad", 2, 4, model=Frozen())
            optim = models.optimizer_of(parallel)
        pipeline = TrainPipelineSparseDist(parallel, optim, torch.device("cpu"))
        batches = iter([models.make_batch(step, rank) for step in range(STEPS)])
        outputs = [pipeline.progress(batches).detach() for _ in range(STEPS)]
        assert len(pipeline._pipelined_modules) == 2
        results.append((outputs, {n: models.whole(w) for n, w in parallel.state_dict().items()}))
    (ours, our_weights), (theirs, their_weights) = results
    assert our_weights.keys() == their_weights.keys()
    return (
        max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)),
        max(float((our_weights[name] - their_weights[name]).abs().max()) for name in our_weights),
    )


def test_a_frozen_module_in_a_pipeline_beside_torchrec() -> None:
    cluster = models.small_cluster(2, 2)
    found = ranks.run(2, 2, beside_torchrec, models.plan_of(cluster, split_of(cluster, 5)))
    assert max(max(pair) for pair in found) < 1e-5


def counted(rank: int, plan: Any) -> Any:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    parallel, optim = models.shard(plan, "sgd")
    pipeline = TrainPipelineSparseDist(parallel, optim, torch.device("cpu"))
    batches = iter([models.make_batch(step, rank) for step in range(STEPS)])
    with Observer() as observer:
        for _ in range(STEPS):
            pipeline.progress(batches)
        observer.step()
    return observer.calls()[0]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_pipeline_makes_the_calls_of_one_exchange(seed: int) -> None:
    """What replay counts where all tables share collectives, to the byte."""
    cluster = models.small_cluster(2, 2)
    plan = models.plan_of(cluster, split_of(cluster, seed))
    rankings = {name: models.profile_of(name) for _, name in models.table_names()}
    expected = {(t.kind, t.group_size, t.content): t for t in replay(plan, steps_of(4), rankings).traffic}
    for rank, found in enumerate(ranks.run(2, 2, counted, plan)):
        assert found.keys() == expected.keys()
        for key, one in expected.items():
            assert found[key] == (STEPS * one.calls, one.sent[:, rank].sum(), one.received[:, rank].sum()), key


def broken(rank: int, plan: Any) -> list[str]:
    """One rank's batch has a bad id for the second module; then all goes on, under another plan."""
    parallel, _ = models.shard(plan, "sgd")
    bad = models.make_batch(0, rank)
    if rank == 1:
        bad.features["user"].values()[:] = 64
    messages = []
    for _ in range(2):
        try:
            begin(parallel, bad, together=True)
        except DataError as error:
            messages.append(str(error))
    both(begin(parallel, models.make_batch(1, rank), together=True))
    cluster = models.small_cluster(2, 2)
    profiles = {name: models.profile_of(name) for _, name in models.table_names()}
    reshard(parallel, models.plan_of(cluster, split_of(cluster, 4)), profiles=profiles)
    both(begin(parallel, models.make_batch(2, rank), together=True))
    weights = {name: models.whole(weight) for name, weight in parallel.state_dict().items()}
    usual, _ = models.shard(plan, "sgd")
    for step in (1, 2):
        both(begin(usual, models.make_batch(step, rank), together=False))
    for name, weight in usual.state_dict().items():
        assert float((models.whole(weight) - weights[name]).abs().max()) < 1e-5, name
    return messages


def test_a_bad_batch_of_one_module_stops_every_rank_and_no_later_batch() -> None:
    cluster = models.small_cluster(2, 2)
    for rank, messages in enumerate(ranks.run(2, 2, broken, models.plan_of(cluster, split_of(cluster, 3)))):
        assert len(messages) == 2
        wanted = (
            "feature 'user': id 64 is outside table 'users'" if rank == 1 else "rank 1 has bad ids of table 'users'"
        )
        assert all(wanted in message for message in messages)


def written(rank: int, plan: Any) -> float:
    """What is written to a ``state_dict`` of one module counts in the next joint batch, evaluations between or not."""
    parallel, _ = models.shard(plan, "sgd")
    state = parallel.state_dict()
    with torch.no_grad():
        output = begin(parallel, models.make_batch(0, rank), together=True)
        assert len(output("wide").keys()) == len(output("narrow").keys()) + 4
        for shard in state["narrow.embeddings.users.weight"].to_local().local_shards():
            shard.fill_(2.0)
    output = begin(parallel, models.make_batch(0, rank), together=True)
    output("wide")
    return float((output("narrow")["user"].values() - 2.0).abs().max())


def test_writes_count_in_a_joint_batch() -> None:
    cluster = models.small_cluster(2, 2)
    assert ranks.run(2, 2, written, models.plan_of(cluster, split_of(cluster, 2))) == [0.0] * 4


def beside_a_pipeline(rank: int, plan: Any) -> list[int]:
    """One batch is begun for a module, then another batch is looked up in the other module, as by code that a pipeline
    does not know: they stay apart, and what was begun is looked up when its turn comes, after the update.
    """
    parallel, _ = models.shard(plan, "sgd")
    now, ahead = (models.make_batch(step, rank) for step in range(2))
    wide, context = parallel.module.wide, parallel.module.wide.create_context()
    request = wide.input_dist(context, ahead.features)
    with Observer() as observer:
        total(parallel.module.narrow(now.features), ["user"]).backward()
        total(parallel.module.wide(now.features), ["clicked"]).backward()
        observer.step()
    early = wide.compute_and_output_dist(context, request.wait().wait())["clicked"].values()
    late = wide(ahead.features)["clicked"].values()
    assert torch.equal(early, late)
    return [calls for (kind, _, content), (calls, *_) in observer.calls()[0].items() if content == "counts"]


def test_batches_of_different_steps_are_not_mixed() -> None:
    cluster = models.small_cluster(2, 2)
    found = ranks.run(2, 2, beside_a_pipeline, models.plan_of(cluster, split_of(cluster, 2)))
    assert found == [[3]] * 4  # what was begun ahead, and each module's own
