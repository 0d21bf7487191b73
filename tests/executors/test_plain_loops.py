"""Modules that a plain loop gives the same batch one after the other share an exchange once that is known, with the
numbers of each by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torchrec")

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flexshard.errors import DataError
from flexshard.executors import Observer, reshard
from flexshard.executors.sharding.call_order import CallOrder
from tests.executors import models, ranks
from tests.executors.test_joint import WAYS, both, split_of, total

NAMES = ("wide", "narrow")


def copy_of(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(features.keys(), features.values().clone(), lengths=features.lengths().clone())


def outputs(parallel: Any, features: KeyedJaggedTensor, apart: bool) -> Callable[[str], Any]:
    """What gives a module's output; ``apart``: each gets a batch of its own, so that it goes by itself."""
    return lambda name: parallel.module.get_submodule(name)(copy_of(features) if apart else features)


def counts_of(observer: Any) -> int:
    """Exchanges of one step."""
    return int(sum(calls for (_, _, content), (calls, *_) in observer.calls()[0].items() if content == "counts"))


def separately(output: Callable[[str], Any]) -> None:
    """Each module's backward pass before the next one's forward pass."""
    for name in NAMES:
        total(output(name), ["clicked"] if name == "wide" else ["user"]).backward()


def backwards(output: Callable[[str], Any]) -> None:
    narrow, wide = output("narrow"), output("wide")
    (total(wide, ["clicked", "shop@days"]) + total(narrow, ["user"])).backward()


def one(output: Callable[[str], Any]) -> None:
    total(output("wide"), ["shown"]).backward()


def again(output: Callable[[str], Any]) -> None:
    """The same batch twice in one step."""
    found = [total(output(name), ["day"] if name == "wide" else ["user"]) for name in NAMES * 2]
    torch.stack(found).sum().backward()


def largest_difference(first: Any, second: Any) -> float:
    """Of any weight or optimizer state."""
    states, others = (model.fused_optimizer.state_dict()["state"] for model in (first, second))
    pairs = []
    for name, weight in first.state_dict().items():
        pairs.append((weight, second.state_dict()[name]))
        pairs += [(state, others[name][key]) for key, state in states.get(name, {}).items()]
    return max(float((models.whole(a).double() - models.whole(b).double()).abs().max()) for a, b in pairs)


def trained(rank: int, plan: Any, optimizer: str, ways: list[Any]) -> tuple[float, list[int]]:
    """Largest difference between modules that may go together and modules that do not, after a step each way; and how
    many exchanges each step of the former made.
    """
    found, exchanges = [], []
    for apart in (True, False):
        parallel, _ = models.shard(plan, optimizer)
        for step, way in enumerate(ways):
            with Observer() as observer:
                way(outputs(parallel, models.make_batch(step, rank, size=6).features, apart))
                observer.step()
            if not apart:
                exchanges.append(counts_of(observer))
            if step == 4:
                with torch.no_grad():  # an evaluation between steps counts for nothing
                    outputs(parallel, models.make_batch(9, rank, size=6).features, apart)("narrow")["user"].values()
        found.append(parallel)
    return largest_difference(*found), exchanges


CASES = {
    **{way.__name__: [way] * 5 for way in WAYS},
    "separately": [separately] * 4,
    "then separately": [both] * 4 + [separately, both, both, both, separately, both],
    "one only": [both] * 4 + [one, both, both, both, both],
    "other orders": [both] * 3 + [backwards] * 4 + [both] * 2,
    "again": [both] * 3 + [again] * 4 + [both] * 4,
}
EXCHANGES = {
    "both": [2, 2, 1, 1, 1],
    "one_after_the_other": [2, 2, 1, 1, 1],
    "twice": [2, 2, 1, 1, 1],
    # Without gradients and with them is not the same way.
    "frozen_first": [2] * 5,
    "frozen_last": [2] * 5,
    "separately": [2] * 4,
    # What was expected and did not come is begun anew, and two batches are seen before it is expected again.
    "then separately": [2, 2, 1, 1, 2, 2, 2, 1, 2, 2],
    "one only": [2, 2, 1, 1, 1, 2, 2, 1, 1],
    "other orders": [2, 2, 1, 2, 2, 1, 1, 1, 1],
    "again": [2, 2, 1, 2, 2, 2, 2, 1, 1, 1, 1],
}


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_each_module_by_itself(case: str, optimizer: str) -> None:
    cluster = models.small_cluster(2, 2)
    seed = list(CASES).index(case)
    plan = models.plan_of(cluster, split_of(cluster, seed), index_dedup="some" if optimizer == "adagrad" else False)
    found = ranks.run(2, 2, trained, plan, optimizer, CASES[case])
    assert max(difference for difference, _ in found) < 1e-5
    if case in EXCHANGES:
        assert [exchanges for _, exchanges in found] == [EXCHANGES[case]] * 4


def refused(rank: int, plan: Any) -> list[str]:
    """What is written between two modules' forward passes after both were looked up is an error, ids or rows."""
    messages = []
    for what in ("ids", "rows", "state"):
        parallel, _ = models.shard(plan, "sgd")
        for step in range(4):
            state = parallel.state_dict()
            features = models.make_batch(step, rank).features
            output = outputs(parallel, features, apart=False)
            output("wide")
            with torch.no_grad():
                if step == 3 and what == "ids":
                    features.values()[:] = 0
                if step == 3 and what == "rows":
                    dict(parallel.named_parameters())["narrow.embeddings.users.weight"].mul_(2.0)
                if step == 3 and what == "state":
                    for shard in state["narrow.embeddings.users.weight"].to_local().local_shards():
                        shard.mul_(2.0)
            try:
                output("narrow")
            except DataError as error:
                assert step == 3
                messages.append(str(error))
    return messages


def test_what_is_written_between_two_modules_is_not_missed() -> None:
    cluster = models.small_cluster(2, 2)
    for messages in ranks.run(2, 2, refused, models.plan_of(cluster, split_of(cluster, 1))):
        assert len(messages) == 3
        assert all(message.startswith("tables users: ") for message in messages)
        assert "the batch's ids were written to" in messages[0]
        assert all("these rows were written to" in message for message in messages[1:])


def broken(rank: int, plan: Any) -> list[str]:
    """A bad id of the second module, once it is begun with the first; then all goes on, under another plan."""
    parallel, _ = models.shard(plan, "sgd")
    usual, _ = models.shard(plan, "sgd")
    bad = models.make_batch(3, rank).features
    if rank == 1:
        bad["user"].values()[:] = 64
    messages = []
    for step in range(8):
        if step == 3:
            for _ in range(2):
                try:
                    both(outputs(parallel, bad, apart=False))
                except DataError as error:
                    messages.append(str(error))
            continue
        if step == 5:
            cluster = models.small_cluster(2, 2)
            profiles = {name: models.profile_of(name) for _, name in models.table_names()}
            reshard(parallel, models.plan_of(cluster, split_of(cluster, 4)), profiles=profiles)
        features = models.make_batch(step, rank).features
        both(outputs(parallel, features, apart=False))
        both(outputs(usual, features, apart=True))
    for name, weight in usual.state_dict().items():
        assert float((models.whole(weight) - models.whole(parallel.state_dict()[name])).abs().max()) < 1e-5, name
    return messages


def test_a_bad_batch_stops_every_rank_and_no_later_batch() -> None:
    cluster = models.small_cluster(2, 2)
    for rank, messages in enumerate(ranks.run(2, 2, broken, models.plan_of(cluster, split_of(cluster, 3)))):
        wanted = (
            "feature 'user': id 64 is outside table 'users'" if rank == 1 else "rank 1 has bad ids of table 'users'"
        )
        assert len(messages) == 2
        assert all(wanted in message for message in messages)


class TwoLosses(models.Model):
    """Its collections see the batch one after the other, and again without gradients."""

    def forward(self, batch: models.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        wide = self.wide(batch.features)
        user = models._pool(self.narrow(batch.features)["user"])
        with torch.no_grad():
            level = models._pool(self.narrow(batch.features)["user"]).mean()
        pooled = [models._pool(wide[name]) for name in self.outputs] + [user * (1 + 0.1 * level)]
        logits = self.over(torch.cat(pooled, 1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits


def beside_torchrec(rank: int, plan: Any) -> float:
    """Largest difference to TorchRec's sharder after the same plain loop: outputs, then weights."""
    results = []
    for make in (models.shard, models.row_wise_of_torchrec):
        torch.manual_seed(7)
        if make is models.shard:
            parallel, optim = models.shard(plan, "adagrad", model=TwoLosses())
        else:
            parallel = models.row_wise_of_torchrec("adagrad", 2, 4, model=TwoLosses())
            optim = models.optimizer_of(parallel)
        outputs = []
        for step in range(6):
            loss, logits = parallel(models.make_batch(step, rank))
            optim.zero_grad()
            loss.backward()
            optim.step()
            parallel.eval()
            with torch.no_grad():
                outputs += [logits.detach(), parallel(models.make_batch(20 + step, rank))[1]]
            parallel.train()
        results.append((outputs, {n: models.whole(w) for n, w in parallel.state_dict().items()}))
    (ours, our_weights), (theirs, their_weights) = results
    pairs = [*zip(ours, theirs, strict=True), *((our_weights[name], their_weights[name]) for name in their_weights)]
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_a_plain_loop_beside_torchrec() -> None:
    cluster = models.small_cluster(2, 2)
    assert max(ranks.run(2, 2, beside_torchrec, models.plan_of(cluster, split_of(cluster, 5)))) < 1e-5


def batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.zeros(1, dtype=torch.int64), lengths=torch.ones(1, dtype=torch.int64))


def test_what_two_runs_alike_teach() -> None:
    order, kept = CallOrder(), [batch() for _ in range(9)]
    assert [order.called(index, kept[0], True) for index in (2, 0, 1)] == [(), (), ()]
    assert [order.called(index, kept[1], True) for index in (2, 0, 1)] == [(), (), ()]
    assert order.called(2, kept[2], False) == ()  # another mode
    assert order.called(2, kept[3], True) == (0, 1)
    assert order.called(0, kept[3], True) == ()
    order.end()  # an update
    assert order.called(1, kept[3], True) == ()
    assert order.called(2, kept[4], True) == ()  # the last run was another one
    assert order.called(2, object(), True) == ()
    assert order.called(2, kept[5], True) == ()
