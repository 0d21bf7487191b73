"""Whatever is done with a model between steps that reach into each other: as without, or refused by name."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torchrec")
pytest.importorskip("numba")

import torch

from flexshard._internal.messages import PendingMessages
from flexshard.errors import CheckpointError, DataError
from flexshard.executors import LookaheadPipeline, full_state_dict, load_checkpoint, reshard, save_checkpoint
from flexshard.executors.comm.delayed import DelayedRows
from flexshard.executors.state.norms import table_norms
from flexshard.executors.stores.memory import MemoryStore
from tests.executors import lookahead_model as looking, models, ranks
from tests.executors.test_lookahead import HOST, _profiles, fused, message_of

DELAYED = {"delayed_sync": True}
Outputs = list[torch.Tensor]


def goods(parallel: Any) -> torch.Tensor:
    """The parameter of a table."""
    return next(parameter for name, parameter in parallel.named_parameters() if "goods" in name)


def written_to_a_state_dict(rank: int, parallel: Any, pipeline: Any) -> Outputs:
    """What is written in place is taken by the next state_dict()."""
    batches, seen = looking.batches(rank, range(40)), []
    for step in range(8):
        seen.append(pipeline.progress(batches).detach())
        if step == 3:
            for name, value in parallel.state_dict().items():
                if "goods" in name:
                    with torch.no_grad():
                        value.to_local().mul_(2.0)
            parallel.state_dict()
    return seen


def loaded_in_part(rank: int, parallel: Any, pipeline: Any) -> Outputs:
    """A checkpoint whose second table has a wrong shape, and on it goes."""
    batches, seen = looking.batches(rank, range(40)), []
    for step in range(8):
        seen.append(pipeline.progress(batches).detach())
        if step == 3:
            state = {name: torch.from_numpy(models.whole(v).numpy()) for name, v in parallel.state_dict().items()}
            state |= {name: value * 2 for name, value in state.items() if "goods" in name}
            state |= {name: value[:-1] for name, value in state.items() if "shops" in name}
            with pytest.raises(CheckpointError):
                parallel.load_state_dict(state)
    return seen


def looked_at_in_inference_mode(rank: int, parallel: Any, pipeline: Any) -> Outputs:
    batches, seen = looking.batches(rank, range(40)), []
    for step in range(6):
        seen.append(pipeline.progress(batches).detach())
        if step == 2:
            with torch.inference_mode():
                seen += [value.clone() for _, value in sorted(full_state_dict(parallel).items())]
        if step == 4:
            with torch.inference_mode():
                seen += [torch.tensor(float(norm)) for _, norm in sorted(table_norms(parallel).items())]
    return seen


def one_backward_behind(rank: int, parallel: Any, pipeline: Any) -> Outputs:
    """Two batches are looked up before the first one's gradients come."""
    batches, seen = looking.batches(rank, range(40)), []
    seen += [pipeline.progress(batches).detach() for _ in range(3)]
    pipeline.detach()
    for step in range(4):
        first, some = parallel(looking.batch_of(100 + step, rank))
        second, others = parallel(looking.batch_of(200 + step, rank))
        first.backward()
        second.backward()
        seen += [some.detach(), others.detach()]
    pipeline.attach()
    return seen + [pipeline.progress(batches).detach() for _ in range(3)]


def another_rate_in_between(rank: int, parallel: Any, pipeline: Any) -> Outputs:
    """The learning rate changes between forward and backward."""
    batches, backward = looking.batches(rank, range(40)), pipeline._backward

    def slower(loss: torch.Tensor) -> None:
        for group in parallel.fused_optimizer.param_groups:
            group["lr"] = 0.01
        parallel.fused_optimizer.step()
        backward(loss)
        for group in parallel.fused_optimizer.param_groups:
            group["lr"] = 0.5

    pipeline._backward = slower
    return [pipeline.progress(batches).detach() for _ in range(8)]


def more_slots(rank: int, parallel: Any, pipeline: Any) -> Outputs:
    """A plan under which ranks hold more rows."""
    batches = looking.batches(rank, range(6))
    seen = [pipeline.progress(batches).detach() for _ in range(6)]
    reshard(parallel, looking.plan_for(1, 2), profiles=_profiles(), quiet=True)
    again = LookaheadPipeline(parallel, pipeline._optimizer, HOST, lookahead=2, delayed_sync=pipeline._delayed_sync)
    more = looking.batches(rank, range(50, 55))
    return seen + [again.progress(more).detach() for _ in range(5)]


def evaluated_by_the_pipeline(rank: int, parallel: Any, pipeline: Any) -> Outputs:
    batches, seen = looking.batches(rank, range(60)), []
    for step in range(12):
        parallel.train(step % 3 != 2)
        with torch.set_grad_enabled(step % 3 != 2):
            seen.append(pipeline.progress(batches).detach())
    return seen


def with_another_pipeline(rank: int, parallel: Any, pipeline: Any) -> Outputs:
    """One of them exchanges all at once."""
    batches = looking.batches(rank, range(6))
    seen = [pipeline.progress(batches).detach() for _ in range(6)]
    other = LookaheadPipeline(parallel, pipeline._optimizer, HOST, lookahead=2)
    more = looking.batches(rank, range(20, 40))
    seen += [other.progress(more).detach() for _ in range(4)]
    assert not parallel.module.tables.joint.sync.on
    with torch.no_grad():
        goods(parallel).mul_(2.0)
    return seen + [other.progress(more).detach() for _ in range(4)]


SCENARIOS: list[tuple[Callable[..., Outputs], dict[str, Any]]] = [
    (written_to_a_state_dict, {}),
    (written_to_a_state_dict, {"factor": 0.3}),
    (loaded_in_part, {}),
    (looked_at_in_inference_mode, {}),
    (one_backward_behind, {"optimizer": "adam"}),
    (one_backward_behind, {"optimizer": "adam", "factor": 0.3}),
    (one_backward_behind, {}),
    (another_rate_in_between, {}),
    (another_rate_in_between, {"factor": 0.3}),
    (another_rate_in_between, {"store": True}),
    (more_slots, {"tiers": False}),
    (evaluated_by_the_pipeline, {}),
    (with_another_pipeline, {}),
]


def compared(rank: int, plans: dict[bool, Any]) -> list[list[str]]:
    found = []
    for work, case in SCENARIOS:
        finals = []
        for how in ({}, DELAYED):
            optimizer, plan = fused(case.get("optimizer", "rowwise_adagrad")), plans[case.get("tiers", True)]
            given = {"sharded_store": MemoryStore} if case.get("store") else {}
            parallel, optim = looking.shard(plan, case.get("factor"), optimizer, **given)
            pipeline = LookaheadPipeline(parallel, optim, HOST, lookahead=3, **how)
            finals.append((work(rank, parallel, pipeline), looking.everything(parallel)))
        (seen, state), (ours, our_state) = finals
        differing = [f"output {i}" for i, (a, b) in enumerate(zip(seen, ours, strict=True)) if not torch.equal(a, b)]
        found.append([f"{work.__name__} {case}: {one}" for one in differing + looking.differs(our_state, state)])
    return found


def test_nothing_differs() -> None:
    plans = {tiers: looking.plan_for(1, 2, tiers=tiers) for tiers in (True, False)}
    assert ranks.run(1, 2, compared, plans, limit=300.0) == [[[]] * len(SCENARIOS)] * 2


def begun(rank: int, plan: Any, factor: float | None = None, steps: int = 4) -> tuple[Any, Any, Iterator[Any]]:
    """A model, its pipeline, and its batches, after some steps."""
    parallel, optim = looking.shard(plan, factor, fused("rowwise_adagrad"))
    pipeline = LookaheadPipeline(parallel, optim, HOST, lookahead=3, **DELAYED)
    batches = looking.batches(rank, range(60))
    for _ in range(steps):
        pipeline.progress(batches)
    return parallel, pipeline, batches


def writes(rank: int, plan: Any) -> list[str]:
    """Parameters are written to, and then something else than a step of the pipeline comes."""
    found = []
    for factor in (None, 1.0):
        for then in ("state", "evaluation", "step"):
            parallel, pipeline, batches = begun(rank, plan, factor)
            if factor:  # the host's rows are as new as the cache's, but for one step
                looking.everything(parallel)
                pipeline.progress(batches)
            with torch.no_grad():
                goods(parallel).mul_(1.0)
            pipeline.detach()
            work: Any = parallel.state_dict if then == "state" else lambda: parallel(looking.batch_of(77, rank))  # noqa: B023
            with torch.set_grad_enabled(then == "step"):
                found.append(message_of(work))
    return found


def test_writes_to_parameters_are_not_mixed_up_with_gradients_under_way() -> None:
    for texts in ranks.run(1, 2, writes, looking.plan_for(1, 2)):
        assert len(texts) == 6
        assert all("parameters were written to" in text for text in texts)


def written_and_loaded(rank: int, plan: Any, folder: str) -> list[str]:
    """A checkpoint loads after parameters were written to, and training goes on from it as it did then."""
    parallel, pipeline, _ = begun(rank, plan)
    save_checkpoint(folder, parallel)
    finals, found = [], []
    for wrong in (False, True):
        if wrong:
            with torch.no_grad():
                goods(parallel).clamp_(-1, 1)
            found += [message_of(pipeline.progress, looking.batches(rank, range(40, 60)))]
        pipeline.detach()
        pipeline = LookaheadPipeline(parallel, pipeline._optimizer, HOST, lookahead=3, **DELAYED)
        load_checkpoint(folder, parallel)
        batches = looking.batches(rank, range(20, 30))
        seen = [pipeline.progress(batches).detach() for _ in range(10)]
        finals.append((seen, looking.everything(parallel)))
        batches = looking.batches(rank, range(60, 80))
        for _ in range(4):
            pipeline.progress(batches)
    (expected, state), (again, same) = finals
    return found + looking.steps_that_differ(again, expected) + looking.differs(same, state)


def test_training_goes_on_from_a_checkpoint_after_parameters_were_written_to(tmp_path: Any) -> None:
    for texts in ranks.run(1, 2, written_and_loaded, looking.plan_for(1, 2), str(tmp_path)):
        assert len(texts) == 1
        assert "were written to between two steps" in texts[0]
        assert "load a checkpoint" in texts[0]


def alternating(rank: int, plan: Any) -> list[int]:
    """Batches in turns trained and evaluated: how many messages nobody waited for, after so many and more of them."""
    parallel, pipeline, batches = begun(rank, plan)
    kept = []
    for step in range(40):
        parallel.train(step % 2 == 0)
        with torch.set_grad_enabled(step % 2 == 0):
            pipeline.progress(batches)
        if step % 20 == 19:
            gc.collect()
            kept.append(sum(type(one) is PendingMessages for one in gc.get_objects()))
    return kept


def test_batches_that_are_evaluated_leave_nothing_behind() -> None:
    for earlier, later in ranks.run(1, 2, alternating, looking.plan_for(1, 2)):
        assert later <= earlier + 2


def failing_on_one(rank: int, plan: Any, where: str, how: dict[str, Any]) -> tuple[list[str], int]:
    """One rank's iterator fails once, or what it does after a step's backward pass; it goes on with the next batch."""
    parallel, optim = looking.shard(plan, None, fused("sgd"))
    pipeline = LookaheadPipeline(parallel, optim, HOST, lookahead=2, **how)
    failing, backward = [rank == 0], pipeline._backward

    class Source:
        """Batches, once none."""

        def __init__(self) -> None:
            self.step = 0

        def __iter__(self) -> Source:
            return self

        def __next__(self) -> Any:
            if where == "iterator" and self.step == 7 and failing[0]:
                failing[0] = False
                raise OSError("no answer")
            self.step += 1
            return looking.batch_of(self.step, rank)

    def once(losses: torch.Tensor) -> None:
        backward(losses)
        if where == "backward" and pipeline.trained == 4 and failing[0]:
            failing[0] = False
            raise OSError("no answer")

    texts, steps, batches = [], 0, Source()
    with mock.patch.object(pipeline, "_backward", once):
        while steps < 12:
            try:
                pipeline.progress(batches)
                steps += 1
            except OSError as error:
                texts.append(str(error))
                if where == "backward":
                    pipeline.dequeue_batch()
                    pipeline._begun -= 1
                    steps += 1
    return texts, steps


@pytest.mark.parametrize("where", ["iterator", "backward"])
@pytest.mark.parametrize("how", [{}, DELAYED])
def test_one_rank_that_fails_beside_what_all_send_goes_on(where: str, how: dict[str, Any]) -> None:
    found = ranks.run(1, 2, failing_on_one, looking.plan_for(1, 2), where, how)
    assert found == [(["no answer"], 12), ([], 12)]


def written_on_one(rank: int, plan: Any) -> str:
    parallel, pipeline, batches = begun(rank, plan)
    if rank == 0:
        with torch.no_grad():
            goods(parallel).clamp_(-1, 1)
    text = message_of(pipeline.progress, batches)
    ranks.leave_together()
    return text


def test_a_write_on_one_rank_ends_all() -> None:
    first, second = ranks.run(1, 2, written_on_one, looking.plan_for(1, 2))
    assert first.startswith("CacheError: ")
    assert "parameters were written to between two steps" in first
    assert second.startswith("CacheError: rank 1: rank 0 has parameters of table")


def kept_on_one(rank: int, plan: Any) -> str:
    """A batch is refused, and one rank alone keeps the exception, and with it what was begun."""

    def source() -> Iterator[Any]:
        yield looking.batch_of(0, rank)
        yield looking.batch_of(1, rank)
        wrong = looking.batch_of(2, rank)
        wrong.features.values()[0] = 10**6
        yield wrong

    parallel, pipeline, _ = begun(rank, plan)
    kept = []
    pipeline = LookaheadPipeline(parallel, pipeline._optimizer, HOST, lookahead=3, **DELAYED)
    try:
        pipeline.progress(source())
    except DataError as error:
        kept += [error] if rank == 0 else []
    pipeline = LookaheadPipeline(parallel, pipeline._optimizer, HOST, lookahead=3, **DELAYED)
    gc.collect()
    batches = looking.batches(rank, range(50, 60))
    return message_of(lambda: [pipeline.progress(batches) for _ in range(4)])


def test_what_is_sent_does_not_depend_on_what_a_rank_has_let_go() -> None:
    assert ranks.run(1, 2, kept_on_one, looking.plan_for(1, 2)) == ["", ""]


def held(rank: int, plan: Any) -> list[tuple[int, list[int]]]:
    """How many batches live on, and what is trained beside a cache, after resets, evaluation and steps of others."""
    found = []
    for kind in ("reset", "evaluation", "step"):
        parallel, pipeline, batches = begun(rank, plan, 0.3)
        for step in range(40):
            if kind == "reset" and step == 9:
                pipeline.reset()
            if kind == "evaluation" and step == 9:
                parallel.eval()
                with torch.no_grad():
                    pipeline.progress(batches)
                parallel.train()
            if kind == "step" and step % 5 == 4:
                pipeline.detach()
                parallel(looking.batch_of(1000 + step, rank))[0].backward()
                pipeline.attach()
            pipeline.progress(batches)
        gc.collect()
        alive = sum(issubclass(type(one), DelayedRows) for one in gc.get_objects())  # not what proxies stand for
        found.append((alive, [len(store._moves._under_way) for store in looking.caches(parallel)]))
        del parallel, pipeline
    return found


@pytest.mark.slow
def test_no_batch_is_kept_for_ever() -> None:
    for cases in ranks.run(1, 2, held, looking.plan_for(1, 2)):
        for alive, under_way in cases:
            assert alive <= 8
            assert all(number <= 8 for number in under_way)
