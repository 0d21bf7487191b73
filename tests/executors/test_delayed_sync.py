"""Rows sent early and gradients sent late change no bit of what is trained."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torchrec")
pytest.importorskip("numba")

import torch
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

from flexshard.errors import CacheError
from flexshard.executors import LookaheadPipeline
from flexshard.executors.comm.delayed import DelayedRows
from flexshard.executors.comm.delayed_sync import DelayedSync, _Order
from flexshard.executors.stores.base import AnnouncedRows, RowStore
from flexshard.tables import OPTIMIZERS
from tests.executors import lookahead_model as looking, ranks
from tests.executors.test_lookahead import HOST, SHAPES, STEPS, fused, interrupted, message_of, train, without_room
from tests.slow import first

DELAYED = {"delayed_sync": True}


def parts_of(run: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """What a run gives, and how many rows went early, on time, and after the step."""
    numbers = {"early": 0, "late": 0, "rest": 0}
    early, take = DelayedRows.send_early, DelayedRows.take_rest

    def send_early(self: DelayedRows) -> None:
        early(self)
        late, sent = self._of_before.as_holder  # type: ignore[union-attr]
        numbers["early"] += int(sent.counts.sum())
        numbers["late"] += int(late.counts.sum())

    def take_rest(self: DelayedRows) -> None:
        assert self._update is not None
        numbers["rest"] += sum(int(part.counts.sum()) for part in self._update.parts)
        take(self)

    with (
        mock.patch.object(DelayedRows, "send_early", send_early),
        mock.patch.object(DelayedRows, "take_rest", take_rest),
    ):
        return run(), numbers


def compared(rank: int, plan: Any, optimizers: list[str], factors: Any, lookaheads: Any) -> list[Any]:
    found = []
    for optimizer in optimizers:
        outputs, _, parallel = train(rank, plan, None, optimizer, stock=True)
        expected = looking.everything(parallel)
        for factor, ahead in itertools.product(factors, lookaheads):
            run = partial(train, rank, plan, factor, optimizer, ahead=ahead, **DELAYED)
            (logits, _, parallel), numbers = parts_of(run)
            assert int(parallel.module.tables.tables.steps) == STEPS
            differing = looking.differs(looking.everything(parallel), expected)
            differing += looking.steps_that_differ(logits, outputs)
            found.append((optimizer, factor, ahead, differing, numbers))
    return found


@pytest.mark.parametrize(
    "case", first(2, [(1, (1, 4, 16), False), (4, (4,), False), (2, (1, 4, 16), True), (4, (1, 16), True)])
)
def test_no_bit_changes(case: tuple[int, Sequence[int], bool]) -> None:
    world, lookaheads, every_optimizer = case
    run = partial(ranks.run, *SHAPES[world], compared, looking.plan_for(*SHAPES[world]), limit=500.0)
    every = run(["rowwise_adagrad"], (0.1, 1.0), lookaheads)
    if every_optimizer:
        every += run(list(OPTIMIZERS), (None, 0.3), (2,))
    for cases in every:
        assert [case[:4] for case in cases if case[3]] == []
        for *_, numbers in cases:
            assert all(number > 0 for number in numbers.values()) is (world > 1)


def test_evaluation_checkpoints_loading_and_resharding_between_steps(tmp_path: Any) -> None:
    plans = looking.plan_for(1, 2), looking.plan_for(1, 2, tiers=False)
    assert ranks.run(1, 2, partial(interrupted, **DELAYED), *plans, str(tmp_path)) == [[], []]


def test_batches_without_room_and_steps_of_others_in_between() -> None:
    for differing, beside in ranks.run(1, 2, partial(without_room, **DELAYED), looking.plan_for(1, 2)):
        assert differing == []
        assert beside[0] > 0


def scheduled(rank: int, plan: Any) -> list[str]:
    finals = []
    for factor, how in ((None, {}), (None, DELAYED), (0.3, DELAYED)):
        parallel, optim = looking.shard(plan, factor, fused("adam"))
        pipeline = LookaheadPipeline(parallel, optim, HOST, lookahead=3, **how)
        batches, seen = looking.batches(rank, range(20)), []
        for step in range(20):
            for group in parallel.fused_optimizer.param_groups:
                group["lr"] = 0.3 / (1 + step % 5)
            seen.append(pipeline.progress(batches).detach())
        finals.append((seen, looking.everything(parallel)))
    (expected, state), *others = finals
    differing = []
    for seen, found in others:
        differing += looking.steps_that_differ(seen, expected)
        differing += looking.differs(found, state)
    return differing


def test_every_update_has_its_own_steps_learning_rate() -> None:
    assert ranks.run(1, 2, scheduled, looking.plan_for(1, 2)) == [[], []]


def coded(rank: int, plan: Any) -> list[str]:
    """With rows and gradients in 16 bits on their way, against the same without delay."""
    kinds = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    finals = []
    for how in ({}, DELAYED):
        registry = get_qcomm_codecs_registry(kinds, device=HOST)
        parallel, optim = looking.shard(plan, None, fused("sgd"), qcomm_codecs_registry=registry)
        pipeline = LookaheadPipeline(parallel, optim, HOST, lookahead=2, **how)
        batches = looking.batches(rank, range(STEPS))
        finals.append(([pipeline.progress(batches).detach() for _ in range(STEPS)], looking.everything(parallel)))
    (expected, state), (seen, found) = finals
    differing = looking.steps_that_differ(seen, expected)
    return differing + looking.differs(found, state)


@pytest.mark.filterwarnings("ignore:.*gradients travel as")
def test_rows_in_other_types_on_their_way() -> None:
    assert ranks.run(1, 2, coded, looking.plan_for(1, 2)) == [[], []]


def ordered(rank: int, plan: Any) -> list[list[str]]:
    """What goes its way in parts, in each step, and when the layers' gradients are through."""
    parallel, optim = looking.shard(plan, None, fused("sgd"))
    pipeline = LookaheadPipeline(parallel, optim, HOST, lookahead=2, **DELAYED)
    batches, seen = looking.batches(rank, range(8)), list[str]()
    send, backward = DelayedRows._all_to_all, pipeline._backward

    def counted(self: DelayedRows, content: str, group: Any, *tensors: Any) -> Any:
        if content != "shared rows":
            seen.append(f"{content}, {'not waited for' if group is self._behind else 'waited for'}")
        return send(self, content, group, *tensors)

    def through(losses: torch.Tensor) -> None:
        backward(losses)
        seen.append("backward")

    found = []
    with mock.patch.object(DelayedRows, "_all_to_all", counted), mock.patch.object(pipeline, "_backward", through):
        for step in range(5):
            seen.clear()
            pipeline.progress(batches)
            if rank == 0 and step == 3:  # takes what is under way: nobody else has to do anything
                for joint in pipeline._joint():
                    joint.sync.settle()
            found.append(list(seen))
    return found


def test_gradients_that_nobody_waits_for_follow_those_of_the_layers() -> None:
    for steps in ranks.run(1, 2, ordered, looking.plan_for(1, 2)):
        for step in steps[1:]:
            distinct = [kind for kind, _ in itertools.groupby(step)]
            assert distinct == [
                "embeddings, not waited for",
                "gradients, waited for",
                "backward",
                "embeddings, waited for",
                "gradients, not waited for",
            ]


# -- mutants


def _everything_early(self: _Order, rows: DelayedRows) -> None:
    """Rows that the batch before trains are sent as they are before."""
    self._stamps.fill_(-1)
    _append(self, rows)


def _late_too_early(self: DelayedRows) -> None:
    """Rows that the batch before trains are sent before they are trained."""
    _early_of_rows(self)
    self.send_late()
    self.send_late = lambda: None  # type: ignore[method-assign]


def _taken_too_late(self: DelayedSync) -> None:
    """What is under way is not taken before the next batch's rows are read."""
    with mock.patch.object(DelayedSync, "settle"):
        _send_early(self)


def _present_rate(self: Any, which: Any, gradient: Any, moment: tuple[int, float]) -> None:
    _update(self, which, gradient, (moment[0], self._store.moment[1]))


def _present_step(self: Any, which: Any, gradient: Any, moment: tuple[int, float]) -> None:
    _update(self, which, gradient, (self._store.moment[0] + 1, moment[1]))


def _never_taken(self: DelayedRows) -> None:
    self._update = None


def _of_any_lookup(self: DelayedSync, *args: Any, **how: Any) -> bool:
    """What was sent early is used whatever happened since."""
    rows = args[1]
    _before_look_up(self, *args, **how)
    return rows is not None and bool(rows._early)


_append, _send_early, _update = _Order.append, DelayedSync.send_early, AnnouncedRows.update
_before_look_up, _early_of_rows = DelayedSync.before_look_up, DelayedRows.send_early
MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "late rows before they are trained": (DelayedRows, "send_early", _late_too_early),
    "everything is early": (_Order, "append", _everything_early),
    "taken too late": (DelayedSync, "send_early", _taken_too_late),
    "the present learning rate": (AnnouncedRows, "update", _present_rate),
    "another step": (AnnouncedRows, "update", _present_step),
    "never taken": (DelayedRows, "take_rest", _never_taken),
    "whatever happened since": (DelayedSync, "before_look_up", _of_any_lookup),
}


def mutated(rank: int, plan: Any) -> dict[str, bool]:
    """Whether logits differ under each mutant, with another learning rate every step and steps besides."""

    def run(how: dict[str, Any]) -> list[torch.Tensor]:
        parallel, optim = looking.shard(plan, None, fused("adam"))
        held = [parallel.module.tables(looking.batch_of(step, rank).features) for step in (6, 14, 22)]
        pipeline = LookaheadPipeline(parallel, optim, HOST, lookahead=2, **how)
        batches, seen = looking.batches(rank, range(40)), []
        for step in range(24):
            for group in parallel.fused_optimizer.param_groups:
                group["lr"] = 0.3 / (1 + step % 5)
            seen.append(pipeline.progress(batches).detach())
            if step % 8 == 7:
                pipeline.detach()
                parallel(looking.batch_of(step + 1, rank))[0].backward()
                pipeline.attach()
            if step % 8 == 5:
                sum(rows.values().sum() for rows in held.pop(0).values()).backward()  # of rows that come next
        return seen

    expected, noticed = run({}), {}
    same = run(DELAYED)
    assert all(torch.equal(a, b) for a, b in zip(same, expected, strict=True))
    for name, (owner, method, wrong) in MUTANTS.items():
        with mock.patch.object(owner, method, wrong):
            noticed[name] = any((a != b).any() for a, b in zip(run(DELAYED), expected, strict=True))
    return noticed


def test_mutants_are_noticed() -> None:
    for noticed in ranks.run(1, 2, mutated, looking.plan_for(1, 2)):
        assert noticed == dict.fromkeys(MUTANTS, True)


# -- what is refused


def refused(rank: int, plan: Any) -> list[str]:
    found = []
    parallel, optim = looking.shard(plan, None, fused("sgd"))
    pipeline = LookaheadPipeline(parallel, optim, HOST, lookahead=2, **DELAYED)
    batches = looking.batches(rank, range(30))
    for _ in range(4):
        pipeline.progress(batches)
    with torch.no_grad():
        for name, parameter in parallel.named_parameters():
            if "goods" in name:
                parameter.mul_(2.0)
    found.append(message_of(pipeline.progress, batches))
    parallel, optim = looking.shard(plan, None, fused("sgd"))
    pipeline = LookaheadPipeline(parallel, optim, HOST, lookahead=2, delayed_sync=rank == 0)
    found.append(message_of(pipeline.progress, looking.batches(rank, range(30))))
    return found


def test_what_would_be_lost_or_differs_is_refused() -> None:
    for written, unequal in ranks.run(1, 2, refused, looking.plan_for(1, 2)):
        assert "parameters were written to between two steps" in written
        assert "rank 1 has lookahead=2, delayed_sync=False, rank 0 lookahead=2, delayed_sync=True" in unequal


def again(rank: int, plan: Any) -> str:
    parallel, optim = looking.shard(plan, None, fused("sgd"))
    pipeline = LookaheadPipeline(parallel, optim, HOST, lookahead=2, **DELAYED)
    with mock.patch.object(pipeline, "_backward", lambda loss: [loss.backward(retain_graph=True) for _ in range(2)]):
        batches = looking.batches(rank, range(30))
        return message_of(lambda: [pipeline.progress(batches) for _ in range(3)])


def test_gradients_that_come_twice_are_refused() -> None:
    for text in ranks.run(1, 2, again, looking.plan_for(1, 2)):
        assert "gradients of a batch come twice" in text


def test_gpus_are_refused_by_name() -> None:
    with pytest.raises(CacheError, match="delayed_sync works on CPUs so far, not on cuda"):
        LookaheadPipeline(torch.nn.Linear(1, 1), None, torch.device("cuda"), delayed_sync=True)  # type: ignore[arg-type]


def test_a_step_and_a_rate_of_another_time_are_put_back() -> None:
    store = mock.Mock(spec=RowStore, _step=3, _learning_rate=0.5)
    with RowStore.as_of(store, 2, 0.25):
        assert [call.args for call in store.mock_calls] == [(0.25,), (2,)]
    assert [call.args for call in store.mock_calls[2:]] == [(3,), (0.5,)]
