"""Modules whose batch a plain loop begins together share an exchange, with the numbers of each by itself."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torchrec")

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flexshard.errors import CheckpointError, CommunicationError, DataError, PlanError
from flexshard.executors import Observer, reshard, start_input_dist
from tests.executors import models, ranks
from tests.executors.test_joint import both, copy_of, frozen_first, split_of, total

NAMES = ("wide", "narrow")


def outputs(parallel: Any, features: KeyedJaggedTensor, together: bool) -> Callable[[str], Any]:
    """What gives a module's output."""
    if together:
        start_input_dist(parallel, features)
    return lambda name: parallel.module.get_submodule(name)(features)


def begun_when_used(parallel: Any, features: KeyedJaggedTensor, together: bool) -> Callable[[str], Any]:
    return lambda name: outputs(parallel, features, together)(name)


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


def looked_on(output: Callable[[str], Any], later: Callable[[str], Any]) -> None:
    """Before its backward pass, another batch is looked at."""
    loss = total(output("wide"), ["clicked"]) + total(output("narrow"), ["user"])
    with torch.no_grad():
        level = later("wide")["clicked"].values().sum()
    (loss * (1 + 0.001 * level)).backward()


def other_first(output: Callable[[str], Any], later: Callable[[str], Any]) -> None:
    """A batch's second module after another batch has updated the first."""
    loss = total(output("wide"), ["clicked"])
    total(later("wide"), ["clicked"]).backward()
    (loss + total(output("narrow"), ["user"])).backward()


def trained(rank: int, plan: Any, optimizer: str, ways: list[Any]) -> tuple[float, list[int]]:
    """Largest difference between modules that go together and modules that do not, after a step each way; and how many
    exchanges each step of the former made.
    """
    found, exchanges = [], []
    for together in (False, True):
        parallel, _ = models.shard(plan, optimizer)
        for step, way in enumerate(ways):
            features, other = (models.make_batch(batch, rank, size=6).features for batch in (step, 50 + step))
            with Observer() as observer:
                output = outputs(parallel, features, together)
                if way in TWO_BATCHES:
                    way(output, begun_when_used(parallel, other, together and way is not other_first))
                else:
                    way(output)
                observer.step()
            if together:
                exchanges.append(counts_of(observer))
            if step == 1:
                with torch.no_grad():  # an evaluation between steps counts for nothing
                    outputs(parallel, other, together)("narrow")["user"].values()
        found.append(parallel)
    return largest_difference(*found), exchanges


TWO_BATCHES = (looked_on, other_first)
SEVERAL = [both, separately, one, backwards, again, both, other_first, looked_on, both]


@pytest.mark.parametrize(
    ("ways", "optimizer", "exchanges"),
    [
        *([(way,) * 3, "adam", [1] * 3] for way in (both, frozen_first)),  # test_joint has the others
        ((separately,) * 3, "adam", [2] * 3),  # rows change in between
        (SEVERAL, "adam", [1, 2, 1, 1, 3, 1, 3, 2, 1]),
        (SEVERAL, "adagrad", [1, 2, 1, 1, 3, 1, 3, 2, 1]),
    ],
    ids=lambda value: value[0].__name__ + str(len(value)) if callable(value[0]) else None,
)
def test_numbers_are_those_of_each_module_by_itself(ways: Any, optimizer: str, exchanges: list[int]) -> None:
    cluster = models.small_cluster(2, 2)
    plan = models.plan_of(
        cluster, split_of(cluster, len(ways)), index_dedup="some" if optimizer == "adagrad" else False
    )
    found = ranks.run(2, 2, trained, plan, optimizer, list(ways))
    assert max(difference for difference, _ in found) < 1e-5
    assert [counted for _, counted in found] == [exchanges] * 4


def accumulating(rank: int, plan: Any) -> float:
    """Batches one after the other before one backward pass, in a pipeline's order, too."""
    found = []
    for together in (False, True):
        parallel, _ = models.shard(plan, "adam")
        for step in range(3):
            features, other = (models.make_batch(batch, rank, size=6).features for batch in (step, 50 + step))
            output = outputs(parallel, features, together)
            wide, narrow = output("wide"), output("narrow")
            later = outputs(parallel, other, together)("wide")
            loss = total(wide, ["clicked"]) + total(narrow, ["user"]) + total(later, ["clicked"])
            loss.backward()
        found.append(parallel)
    return largest_difference(*found)


def test_a_module_that_is_not_given_a_batch_is_where_it_was() -> None:
    """Adam's step of an update that is still to come is not that of rows that nobody asked for."""
    cluster = models.small_cluster(2, 2)
    assert max(ranks.run(2, 2, accumulating, models.plan_of(cluster, split_of(cluster, 1)))) < 1e-5


def refused(rank: int, plan: Any) -> list[str]:
    """What is changed between two modules' forward passes after both were looked up is an error."""
    messages = []
    for what in ("ids", "lengths", "batch", "rows", "state", "rate"):
        parallel, _ = models.shard(plan, "sgd")
        both(outputs(parallel, models.make_batch(0, rank).features, together=True))
        state = parallel.state_dict()
        features = models.make_batch(1, rank).features
        output = outputs(parallel, features, together=True)
        output("wide")
        with torch.no_grad():
            if what == "ids":
                features.values()[:] = 0
            elif what == "lengths":
                features.lengths()[:] = features.lengths().flip(0)
            elif what == "batch":
                output = outputs(parallel, copy_of(features), together=False)
            elif what == "rows":
                dict(parallel.named_parameters())["narrow.embeddings.users.weight"].mul_(2.0)
            elif what == "state":
                for shard in state["narrow.embeddings.users.weight"].to_local().local_shards():
                    shard.mul_(2.0)
            else:
                parallel.module.narrow.fused_optimizer.param_groups[0]["lr"] = 0.01
                parallel.module.narrow.fused_optimizer.step()
        try:
            output("narrow")
        except (CommunicationError, DataError) as error:
            messages.append(str(error))
    return messages


def test_what_is_changed_between_two_modules_is_not_missed() -> None:
    cluster = models.small_cluster(2, 2)
    for rank, messages in enumerate(ranks.run(2, 2, refused, models.plan_of(cluster, split_of(cluster, 1)))):
        assert len(messages) == 6
        assert all(message.startswith(f"rank {rank}: the collection of tables users ") for message in messages[:3])
        assert all("ids were changed after start_input_dist" in message for message in messages[:2])
        assert "another batch than start_input_dist" in messages[2]
        assert all("tables users: their rows or learning rates were changed" in message for message in messages[3:])


def written_too_late(rank: int, plan: Any) -> tuple[list[str], float, bool]:
    """Writes to a ``state_dict`` after a batch was begun, in evaluation, and changed ids: an error that the next batch
    does not meet; and whether a batch that one module never asked for is gone when the other has its next one.
    """
    parallel, _ = models.shard(plan, "sgd")
    messages = []
    parallel.eval()
    with torch.no_grad():
        state, first = parallel.state_dict(), models.make_batch(1, rank).features
        before = parallel.module.wide(first)["clicked"].values()
        output = outputs(parallel, first, together=True)
        for name in [name for name in state if name.startswith("wide.")]:
            for shard in state[name].to_local().local_shards():
                shard.mul_(3.0)
        try:
            output("wide")
        except CheckpointError as error:
            messages.append(str(error))
        after = parallel.module.wide(copy_of(first))["clicked"].values()
        changed = models.make_batch(2, rank).features
        output = outputs(parallel, changed, together=True)
        changed.values()[:] = 0
        try:
            output("narrow")
        except DataError as error:
            messages.append(str(error))
        parallel.module.narrow(models.make_batch(3, rank).features)
        features = models.make_batch(4, rank).features
        gone = weakref.ref(features)
        outputs(parallel, features, together=True)("wide")
        del features, output
        parallel.module.wide(models.make_batch(5, rank).features)
        parallel.module.narrow(models.make_batch(5, rank).features)
    gc.collect()
    return messages, float((after - 3 * before).abs().sum()), gone() is None


def test_in_evaluation_too_nothing_is_missed_and_nothing_left_behind() -> None:
    cluster = models.small_cluster(2, 2)
    for messages, difference, gone in ranks.run(2, 2, written_too_late, models.plan_of(cluster, split_of(cluster, 1))):
        assert len(messages) == 2
        assert "state_dict() were written to while a batch was under way" in messages[0]
        assert "ids were changed after start_input_dist" in messages[1]
        assert difference < 1e-4
        assert gone


def replaced(rank: int, plan: Any) -> list[float]:
    """Rows that are loaded, and another plan, between two modules' forward passes: what each module by itself finds."""
    found = []
    for what in ("load", "reshard"):
        values = []
        for together in (False, True):
            parallel, _ = models.shard(plan, "sgd")
            state = {name: models.whole(weight) * 2 for name, weight in parallel.state_dict().items()}
            output = outputs(parallel, models.make_batch(1, rank).features, together)
            with torch.no_grad():
                output("wide")
                if what == "load":
                    parallel.load_state_dict(state)
                else:
                    profiles = {name: models.profile_of(name) for _, name in models.table_names()}
                    cluster = models.small_cluster(2, 2)
                    reshard(parallel, models.plan_of(cluster, split_of(cluster, 4)), profiles=profiles)
                values.append(output("narrow")["user"].values())
        found.append(float((values[0] - values[1]).abs().sum()))
    return found


def test_rows_that_are_replaced_between_two_modules_are_looked_up_again() -> None:
    cluster = models.small_cluster(2, 2)
    assert ranks.run(2, 2, replaced, models.plan_of(cluster, split_of(cluster, 1))) == [[0.0, 0.0]] * 4


def left_alone(rank: int, plan: Any) -> tuple[int, list[str]]:
    """Collections without features in the batch go by themselves; one without some of them, and a model without any,
    is an error.
    """
    parallel, _ = models.shard(plan, "sgd")
    batch = models.make_batch(1, rank).features

    def without(*names: str) -> KeyedJaggedTensor:
        return batch.permute([index for index, key in enumerate(batch.keys()) if key not in names])

    with Observer() as observer:
        output = outputs(parallel, without("user"), together=True)
        wide, narrow = output("wide"), parallel.module.narrow(batch)
        (total(wide, ["clicked"]) + total(narrow, ["user"])).backward()
        observer.step()
    messages = []
    for model, features in ((nn.Linear(1, 1), batch), (parallel, without("clicked"))):
        try:
            outputs(model, features, together=True)("narrow")
        except (PlanError, DataError) as error:
            messages.append(str(error))
    return counts_of(observer), messages


def test_collections_of_other_batches_are_left_alone() -> None:
    cluster = models.small_cluster(2, 2)
    for exchanges, messages in ranks.run(2, 2, left_alone, models.plan_of(cluster, split_of(cluster, 1))):
        assert exchanges == 2
        assert "no collection of the model is under a FlexShard plan" in messages[0]
        assert "the batch has no feature 'clicked'" in messages[1]


def deleted(rank: int, plan: Any) -> list[bool]:
    """Whether a model is gone that is deleted while a module has not asked for its rows, and its batch."""
    gone = []
    for train in (True, False):
        parallel = models.shard(plan, "sgd")[0]
        features = models.make_batch(1, rank).features
        with torch.set_grad_enabled(train):
            start_input_dist(parallel, features)
            parallel.module.wide(features)
        store, batch = weakref.ref(parallel.module.narrow.groups[0].store), weakref.ref(features)
        del parallel, features
        gc.collect()
        gone += [store() is None, batch() is None]
    return gone


def test_a_model_is_deleted_whatever_was_begun() -> None:
    cluster = models.small_cluster(2, 2)
    assert ranks.run(2, 2, deleted, models.plan_of(cluster, split_of(cluster, 1))) == [[True] * 4] * 4


def broken(rank: int, plan: Any) -> list[str]:
    """A bad id of the second module stops the first one, too; then all goes on."""
    parallel, _ = models.shard(plan, "sgd")
    usual, _ = models.shard(plan, "sgd")
    bad = models.make_batch(3, rank).features
    if rank == 1:
        bad["user"].values()[:] = 64
    messages = []
    for step in range(4):
        if step == 2:
            for _ in range(2):
                try:
                    both(outputs(parallel, bad, together=True))
                except DataError as error:
                    messages.append(str(error))
            with torch.no_grad():  # what was begun and failed is in nobody's way
                parallel.module.narrow(models.make_batch(9, rank).features)
            continue
        features = models.make_batch(step, rank).features
        both(outputs(parallel, features, together=True))
        both(outputs(usual, features, together=False))
    assert largest_difference(parallel, usual) < 1e-5
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
        found = []
        for step in range(4):
            batch = models.make_batch(step, rank)
            if make is models.shard:
                start_input_dist(parallel, batch.features)
            loss, logits = parallel(batch)
            optim.zero_grad()
            loss.backward()
            optim.step()
            parallel.eval()
            with torch.no_grad():
                found += [logits.detach(), parallel(models.make_batch(20 + step, rank))[1]]
            parallel.train()
        results.append((found, {n: models.whole(w) for n, w in parallel.state_dict().items()}))
    (ours, our_weights), (theirs, their_weights) = results
    pairs = [*zip(ours, theirs, strict=True), *((our_weights[name], their_weights[name]) for name in their_weights)]
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_a_plain_loop_beside_torchrec() -> None:
    cluster = models.small_cluster(2, 2)
    assert max(ranks.run(2, 2, beside_torchrec, models.plan_of(cluster, split_of(cluster, 5)))) < 1e-5
