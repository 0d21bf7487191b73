"""The same user's code beside TorchRec's own sharder: what people do with parameters, optimizers and state dicts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flexshard.errors import TableError
from tests.executors import models, ranks
from tests.slow import crossed

STEPS = 4
# Two tiers of copies and one without; in each table some of everything.
SPLIT = {
    name: [(1, rows // 4, "dense"), (2, rows // 4, "sparse"), (4, rows - rows // 4 * 2, "dense")]
    for name, (rows, _) in (models.WIDE | models.NARROW).items()
}
PER_TABLE = {f"{part}.embeddings.{name}.weight" for part, name in models.table_names()}


def ours(optimizer: str = "sgd") -> Any:
    return models.shard(models.plan_of(models.small_cluster(2, 2), SPLIT), optimizer)[0]


def theirs(optimizer: str = "sgd") -> Any:
    return models.row_wise_of_torchrec(optimizer, 2, 4)


def dense_of(parallel: Any, learning_rate: float = models.DENSE_LEARNING_RATE) -> Any:
    parameters = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    assert set(parameters) == {"over.weight", "over.bias"}
    return KeyedOptimizerWrapper(parameters, lambda p: torch.optim.SGD(p, lr=learning_rate))


def whole(value: Any) -> torch.Tensor:
    """A table on every rank, TorchRec's or ours."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not hasattr(value, "local_shards"):
        return value.detach().clone()
    full = torch.zeros(value.size(), dtype=value.dtype)
    for shard in value.local_shards():
        first = shard.metadata.shard_offsets[0]
        full[first : first + shard.tensor.shape[0]] = shard.tensor
    dist.all_reduce(full)
    return full


def state_of(parallel: Any) -> dict[str, np.ndarray]:
    state = {name: whole(value).numpy() for name, value in parallel.state_dict().items()}
    for states in parallel.fused_optimizer.state_dict()["state"].values():
        state |= {name: whole(value).numpy() for name, value in states.items()}
    return state


def alone(rank: int, code: Callable[..., Any], optimizer: str, *args: Any) -> list[tuple[Any, dict[str, np.ndarray]]]:
    """The same on one rank, where nothing is sent."""
    found = []
    split = {name: [(1, rows, "dense")] for name, (rows, _) in (models.WIDE | models.NARROW).items()}
    plan = models.plan_of(models.small_cluster(1, 1), split)
    for parallel in (models.row_wise_of_torchrec(optimizer, 1, 1), models.shard(plan, optimizer)[0]):
        result = code(parallel, rank, *args)
        found.append((result, state_of(parallel)))
    return found


def on_both(rank: int, code: Callable[..., Any], optimizer: str, *args: Any) -> list[tuple[Any, dict[str, np.ndarray]]]:
    """What a user's code gives, and the state afterwards: with TorchRec's sharder, then with ours."""
    found = []
    for shard in (theirs, ours):
        parallel = shard(optimizer)
        result = code(parallel, rank, *args)
        found.append((result, state_of(parallel)))
    return found


def equal_on_both(
    code: Callable[..., Any], *args: Any, optimizer: str = "sgd", tolerance: float = 2e-6, world: int = 4
) -> Any:
    """Run a user's code with both sharders: its results and every table, state and dense weight have to be the same."""
    if world == 1:
        results = ranks.run(1, 1, alone, code, optimizer, *args)
    else:
        results = ranks.run(2, 2, on_both, code, optimizer, *args)
    for (expected, expected_state), (result, state) in results:
        assert (result or []) == pytest.approx(expected or [], rel=1e-5, abs=tolerance)
        assert state.keys() == expected_state.keys()
        for name, value in expected_state.items():
            np.testing.assert_allclose(state[name], value, atol=tolerance, err_msg=name)
    return results[0][0][0]


# -- rows


def summed(parallel: Any, rank: int) -> list[float]:
    """Gradients of a sum have no memory of their own."""
    losses = []
    for step in range(STEPS):
        batch = models.make_batch(step, rank)
        loss, _ = parallel(batch)
        loss = loss + parallel.module.narrow(batch.features)["user"].values().sum()
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(("world", "optimizer"), crossed([1, 4], ["sgd", "rowwise_adagrad"]))
def test_rows_that_are_summed_as_they_come(world: int, optimizer: str) -> None:
    equal_on_both(summed, optimizer=optimizer, world=world, tolerance=3e-5)


# -- optimizers


def train(
    parallel: Any,
    optimizer: Any,
    rank: int,
    steps: range = range(STEPS),
    changed: Callable[[KeyedJaggedTensor], Any] = lambda features: features,
) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        batch = models.make_batch(step, rank)
        loss, _ = parallel(replace(batch, features=changed(batch.features)))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def clipped(parallel: Any, rank: int, kind: str, limit: float, options: dict[str, Any]) -> list[float]:
    start = parallel.module.over.weight.detach().clone()
    both = CombinedOptimizer([("", parallel.fused_optimizer), ("", dense_of(parallel, 1.0))])
    optimizer = GradientClippingOptimizer(both, GradientClipping[kind], max_gradient=limit, **options)
    losses = train(parallel, optimizer, rank)
    moved = float((parallel.module.over.weight.detach() - start).norm())
    norm = optimizer.last_total_grad_norm
    return [*losses, moved, 0.0 if norm is None else float(norm)]


@pytest.mark.parametrize(
    ("kind", "limit", "options"),
    [
        ("NORM", 0.001, {}),
        ("NORM", 0.01, {"norm_type": "inf"}),
        ("NORM", 0.001, {"enable_global_grad_clip": True, "track_grad_norm": True}),
        ("VALUE", 0.001, {"track_grad_norm": True}),
        ("NONE", 0.001, {"track_grad_norm": True}),
    ],
)
def test_gradient_clipping(kind: str, limit: float, options: dict[str, Any]) -> None:
    *_, moved, _ = equal_on_both(clipped, kind, limit, options)
    if kind != "NONE":
        assert moved < 0.1  # without clipping it would be far more


def warmed_up(parallel: Any, rank: int, policy: str) -> list[float]:
    stage = WarmupStage(WarmupPolicy[policy], max_iters=3, value=0.1, decay_iters=8)
    fused = WarmupOptimizer(parallel.fused_optimizer, [stage], lr=models.LEARNING_RATE)
    dense = WarmupOptimizer(dense_of(parallel), [stage], lr=models.DENSE_LEARNING_RATE, param_name="__dense")
    return train(parallel, CombinedOptimizer([("", fused), ("", dense)]), rank)


@pytest.mark.parametrize("policy", ["LINEAR", "CONSTANT", "POLY", "COSINE_ANNEALING_WARM_RESTARTS"])
def test_warm_up(policy: str) -> None:
    equal_on_both(warmed_up, policy, optimizer="rowwise_adagrad", tolerance=3e-4)


def scheduled(parallel: Any, rank: int, name: str) -> list[float]:
    from torch.optim import lr_scheduler

    optimizer = CombinedOptimizer([("", parallel.fused_optimizer), ("", dense_of(parallel))])
    made = {
        "StepLR": lambda: lr_scheduler.StepLR(optimizer, 2, gamma=0.1),
        "LambdaLR": lambda: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "CosineAnnealingLR": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 4),
    }[name]()
    losses = []
    for step in range(STEPS):
        losses += train(parallel, optimizer, rank, range(step, step + 1))
        made.step()
    return [*losses, *made.get_last_lr()]


@pytest.mark.parametrize("name", ["StepLR", "LambdaLR", "CosineAnnealingLR"])
def test_schedulers(name: str) -> None:
    equal_on_both(scheduled, name)


def in_any_order(parallel: Any, rank: int, zeroed: str) -> list[float]:
    """``zero_grad`` is where fused optimizers are told of learning rates, beside ``step``."""
    optimizer = CombinedOptimizer([("", parallel.fused_optimizer), ("", dense_of(parallel))])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.2**step)
    losses = []
    for step in range(STEPS):
        loss, _ = parallel(models.make_batch(step, rank))
        if zeroed == "before backward":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if zeroed == "after step":
            optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("zeroed", "optimizer"), crossed(["before backward", "after step", "never"], ["sgd", "rowwise_adagrad", "adagrad"])
)
def test_learning_rates_count_from_where_torchrecs_do(zeroed: str, optimizer: str) -> None:
    equal_on_both(in_any_order, zeroed, optimizer=optimizer, tolerance=1e-5)


def updated_on_the_way(parallel: Any, rank: int) -> list[float]:
    """TorchRec's wrappers pass these on where an optimizer has them, and say nothing where it has not."""
    optimizer = CombinedOptimizer([("", parallel.fused_optimizer), ("", dense_of(parallel))])
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        optimizer.update_hyper_parameters({"lr": 0.3 * 0.5**step})
        optimizer.set_optimizer_step(step)
        loss, _ = parallel(models.make_batch(step, rank))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with pytest.raises(NotImplementedError, match="hyper-parameter nonsense is not supported"):
        optimizer.update_hyper_parameters({"nonsense": 1.0})
    return losses


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_learning_rates_set_past_param_groups(optimizer: str) -> None:
    equal_on_both(updated_on_the_way, optimizer=optimizer, tolerance=1e-5)


def counted_from(rank: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Adam of ours after steps that it was told of, with what it says of a hyper-parameter that cannot change."""
    parallel = ours("adam")
    optimizer = CombinedOptimizer([("", parallel.fused_optimizer), ("", dense_of(parallel))])
    before = state_of(parallel)
    optimizer.set_optimizer_step(10)
    train(parallel, optimizer, rank, range(1))
    after = state_of(parallel)
    with pytest.raises(TableError, match="eps of tables under a FlexShard plan cannot change while they train"):
        optimizer.update_hyper_parameters({"eps": 1.0})
    return [float(value.item()) for name, value in after.items() if name.endswith(".step")], {
        name: np.abs(after[name] - before[name]) for name in PER_TABLE
    }


def test_steps_that_an_optimizer_is_told_of_count() -> None:
    for steps, moved in ranks.run(2, 2, counted_from):
        assert steps
        assert set(steps) == {11.0}
        for change in moved.values():
            # What Adam's eleventh step moves weights by that have had one gradient.
            share = (1 - 0.9) / (1 - 0.9**11) / np.sqrt((1 - 0.999) / (1 - 0.999**11))
            assert change.max() == pytest.approx(models.LEARNING_RATE * share, rel=1e-2)


def groups_saved(parallel: Any, rank: int) -> list[float]:
    """Parameter groups in checkpoints; TorchRec has one group a table, so its names are compared, not how many."""
    optimizer = CombinedOptimizer([("", parallel.fused_optimizer), ("", dense_of(parallel))])
    optimizer.save_param_groups(True)
    saved = optimizer.state_dict()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.load_state_dict(saved)
    assert {name for group in saved["param_groups"] for name in group["params"]} == set(optimizer.params)
    return train(parallel, optimizer, rank)


def test_parameter_groups_in_checkpoints() -> None:
    equal_on_both(groups_saved)


def initialised(parallel: Any, rank: int) -> list[float]:
    """What loading into a fresh optimizer asks for must not leave gradients behind."""
    optimizer = CombinedOptimizer([("", parallel.fused_optimizer), ("", dense_of(parallel))])
    optimizer.init_state()
    left = [name for name, p in parallel.named_parameters() if p.grad is not None and name in PER_TABLE]
    return [float(len(left)), *train(parallel, optimizer, rank)]


def test_optimizers_that_initialise_their_state() -> None:
    equal_on_both(initialised)


def of_features_and_samples(parallel: Any, rank: int) -> list[float]:
    """Lengths of two dimensions."""

    def square(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        lengths = features.lengths().view(len(features.keys()), -1)
        return KeyedJaggedTensor(features.keys(), features.values(), lengths=lengths)

    optimizer = CombinedOptimizer([("", parallel.fused_optimizer), ("", dense_of(parallel))])
    return train(parallel, optimizer, rank, changed=square)


def test_lengths_by_feature_and_sample() -> None:
    equal_on_both(of_features_and_samples)


# -- parameters


def names_of(parallel: Any, rank: int) -> None:
    named = dict(parallel.named_parameters())
    assert set(named) == PER_TABLE | {"over.weight", "over.bias"}
    assert len(list(parallel.parameters())) == len(named)
    assert {name for name, p in named.items() if hasattr(p, "_in_backward_optimizers")} == PER_TABLE
    assert set(parallel.fused_optimizer.params) == PER_TABLE
    assert set(parallel.state_dict()) == set(named)
    for name in PER_TABLE:
        assert named[name].requires_grad
        with pytest.raises(RuntimeError, match="leaf"):
            named[name].requires_grad_(False)  # freezing is refused, not ignored


def test_names_of_parameters() -> None:
    equal_on_both(names_of)


def frozen_before(rank: int) -> tuple[float, float]:
    moved = []
    plan = models.plan_of(models.small_cluster(1, 2), {name: [(2, rows, "dense")] for name, rows in rows_of_tables()})
    for ours_ in (False, True):
        model = models.new_model()
        model.wide.requires_grad_(False)
        if ours_:
            with pytest.warns(UserWarning, match="requires_grad=False is not heeded by fused optimizers"):
                parallel, _ = models.shard(plan, model=model)
        else:
            parallel = models.row_wise_of_torchrec("sgd", 1, 2, model=model)
        before = state_of(parallel)
        models.train(parallel, dense_of(parallel), rank, range(2))
        after = state_of(parallel)
        moved.append(max(float(np.abs(after[name] - before[name]).max()) for name in PER_TABLE if "wide" in name))
    return moved[0], moved[1]


def rows_of_tables() -> list[tuple[str, int]]:
    return [(name, rows) for name, (rows, _) in (models.WIDE | models.NARROW).items()]


def test_tables_frozen_before_they_are_sharded_are_trained_as_torchrecs_are_with_a_word() -> None:
    for theirs_, ours_ in ranks.run(1, 2, frozen_before):
        assert theirs_ > 0
        assert ours_ == pytest.approx(theirs_, rel=1e-4)


def zeroed(parallel: Any, rank: int, which: str) -> None:
    found = parallel.parameters() if which == "model" else parallel.fused_optimizer.params.values()
    with torch.no_grad():
        for parameter in found:
            if hasattr(parameter, "local_shards"):
                for shard in parameter.local_shards():
                    shard.tensor.zero_()
            else:
                parameter.zero_()
    tables = {name: value for name, value in state_of(parallel).items() if name in PER_TABLE}
    assert len(tables) == 4
    assert not any(value.any() for value in tables.values())


@pytest.mark.parametrize("which", ["model", "optimizer"])
def test_zeroing_all_parameters(which: str) -> None:
    equal_on_both(zeroed, which)


def scaled(parallel: Any, rank: int) -> list[float]:
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.mul_(0.5).clamp_(-0.1, 0.1)
    return train(parallel, CombinedOptimizer([("", parallel.fused_optimizer), ("", dense_of(parallel))]), rank)


def test_parameters_changed_in_place() -> None:
    equal_on_both(scaled)


def norms(rank: int) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    from flexshard.executors import table_norms

    parallel = ours()
    weights = {name: value.full_tensor() for name, value in parallel.state_dict().items() if name in PER_TABLE}
    expected = {name: float(value.norm()) for name, value in weights.items()}
    largest = {name: float(value.abs().max()) for name, value in weights.items()}
    assert table_norms(parallel, norm_type=float("inf")) == pytest.approx(largest)
    mine = {name: float(p.detach().norm() ** 2) for name, p in parallel.named_parameters() if name in PER_TABLE}
    return expected, table_norms(parallel), mine


def test_norms_of_logical_tables() -> None:
    found = ranks.run(2, 2, norms)
    expected = found[0][0]
    for name, value in expected.items():
        assert found[0][1][name] == pytest.approx(value, rel=1e-5)
        # What the documentation says: rows with copies count once for each.
        assert sum(rank[2][name] for rank in found) > 1.5 * value**2


# -- state dicts


def loaded_in_place(parallel: Any, rank: int, folder: str) -> list[float]:
    """``dcp.load`` into a state dict, and nothing else, as TorchRec's tensors allow it."""
    import torch.distributed.checkpoint as dcp

    optimizer = CombinedOptimizer([("", parallel.fused_optimizer), ("", dense_of(parallel))])
    path = f"{folder}/{type(parallel.module.wide).__name__}"
    train(parallel, optimizer, rank)
    dcp.save({"m": parallel.state_dict(), "o": parallel.fused_optimizer.state_dict()}, checkpoint_id=path)
    train(parallel, optimizer, rank, range(10, 12))
    dcp.load({"m": parallel.state_dict(), "o": parallel.fused_optimizer.state_dict()}, checkpoint_id=path)
    return train(parallel, optimizer, rank, range(20, 22))


def test_loading_in_place(tmp_path: Path) -> None:
    equal_on_both(loaded_in_place, str(tmp_path), optimizer="rowwise_adagrad", tolerance=3e-4)


def copied_state(parallel: Any, rank: int, evaluates_first: bool) -> list[float]:
    """TorchRec's own helper for its tests, which imports models that its wheel leaves out."""
    import sys
    from unittest.mock import MagicMock

    missing = "torchrec.distributed.tests"
    sys.modules.update({missing: MagicMock(), f"{missing}.test_sequence_model": MagicMock()})
    from torchrec.distributed.test_utils.test_sharding import copy_state_dict

    torch.manual_seed(3)
    other = models.Model()
    copy_state_dict(parallel.state_dict(), other.state_dict())
    if evaluates_first:
        with torch.no_grad():
            parallel(models.make_batch(7, rank))
    return train(parallel, CombinedOptimizer([("", parallel.fused_optimizer), ("", dense_of(parallel))]), rank)


@pytest.mark.parametrize("evaluates_first", [False, True])
def test_copying_into_a_state_dict(evaluates_first: bool) -> None:
    equal_on_both(copied_state, evaluates_first)


WAYS: dict[str, Callable[[Any], Any]] = {
    "mul": lambda shard: shard.mul_(2.0),
    "part": lambda shard: shard[:, :2].zero_(),
    "transposed": lambda shard: shard.t().mul_(0.5),
    "many": lambda shard: torch._foreach_mul_([shard], 3.0),
    "copied": lambda shard: shard.copy_(torch.ones(shard.shape)),
    "detached": lambda shard: shard.detach().add_(1.0),
}


def written(parallel: Any, rank: int, way: str, twice: bool) -> list[float]:
    """Operations in place on what ``state_dict`` gives, on the whole tensor or on the rank's shards."""
    for _ in range(1 + twice):
        state, other = parallel.state_dict(), parallel.state_dict()
        for name in PER_TABLE:
            if hasattr(state[name], "local_shards"):
                for shard in state[name].local_shards():
                    WAYS[way](shard.tensor)
            else:
                WAYS[way](state[name].to_local())
        del other
    return train(parallel, CombinedOptimizer([("", parallel.fused_optimizer), ("", dense_of(parallel))]), rank)


@pytest.mark.parametrize(("twice", "way"), crossed([False, True], WAYS))
def test_writing_to_a_state_dict(way: str, twice: bool) -> None:
    equal_on_both(written, way, twice, tolerance=3e-5)


def alive_at_once(rank: int) -> list[float]:
    """Two state dicts are of one tensor, and see parameters that were changed between them."""
    parallel = ours()
    name = "wide.embeddings.goods.weight"
    first = parallel.state_dict()[name]
    with torch.no_grad():
        dict(parallel.named_parameters())[name].fill_(2.0)
    second = parallel.state_dict()[name]
    seen = float(first.to_local().local_shards()[0].mean())
    first.to_local().fill_(5.0)
    found = float(parallel.state_dict()[name].full_tensor().mean())
    return [seen, found, float(second.to_local().local_shards()[0].mean())]


def test_state_dicts_that_live_at_once() -> None:
    assert ranks.run(2, 2, alive_at_once) == [[2.0, 5.0, 5.0]] * 4


def half_precision_state(rank: int) -> tuple[bool, bool]:
    from torchrec.modules.embedding_configs import DataType

    from flexshard.executors import full_state_dict

    plan = models.plan_of(models.small_cluster(2, 1), two_tiers(), dtype="float16")
    parallel, _ = models.shard(plan, dtype=DataType.FP16, model=models.new_model(DataType.FP16))
    with torch.inference_mode():
        state = parallel.state_dict()
    exported = full_state_dict(parallel)
    kinds = {value.dtype for name, value in state.items() if name in PER_TABLE}
    return kinds == {torch.float16}, all(exported[name].dtype == torch.float16 for name in PER_TABLE if exported)


def test_state_dicts_have_the_tables_types() -> None:
    assert ranks.run(2, 1, half_precision_state) == [(True, True)] * 2


def exported_alone(rank: int) -> float:
    """One process gets tensors of its own."""
    from flexshard.executors import full_state_dict

    whole_rows = {name: [(1, rows, "dense")] for name, (rows, _) in SPLIT_ROWS.items()}
    parallel, _ = models.shard(models.plan_of(models.small_cluster(1, 1), whole_rows))
    for value in full_state_dict(parallel).values():
        value.zero_()
    return float(parallel.state_dict()["wide.embeddings.goods.weight"].full_tensor().abs().max())


def test_what_is_exported_is_not_the_model() -> None:
    assert ranks.run(1, 1, exported_alone)[0] > 0


def written_too_late(rank: int) -> None:
    parallel = ours()
    state = parallel.state_dict()
    optimizer = CombinedOptimizer([("", parallel.fused_optimizer), ("", dense_of(parallel))])
    train(parallel, optimizer, rank, range(1))
    if rank == 1:
        state["wide.embeddings.goods.weight"].to_local().local_shards()[0].zero_()
    train(parallel, optimizer, rank, range(1, 2))


def test_writing_to_a_state_dict_of_before_a_step_stops_every_rank() -> None:
    from flexshard.errors import CheckpointError

    for error in ranks.run(2, 2, written_too_late, expect_failures=True):
        assert isinstance(error, CheckpointError), error
        assert "on rank 1 tensors of a state_dict() from before a training step" in str(error)


def kept_for_nothing(rank: int) -> tuple[int, int]:
    """A state dict that nobody holds any more takes no memory."""
    parallel = ours()
    logical = parallel.module.wide._logical
    state = parallel.state_dict()
    held = len(logical._handed_out)
    del state
    with torch.no_grad():
        parallel(models.make_batch(0, rank))
    train(parallel, CombinedOptimizer([("", parallel.fused_optimizer), ("", dense_of(parallel))]), rank, range(1))
    return held, len(logical._handed_out)


def test_state_dicts_are_let_go() -> None:
    assert set(ranks.run(2, 2, kept_for_nothing)) == {(3, 0)}


def test_a_state_dict_on_one_rank_says_who_is_missing(tmp_path: Path) -> None:
    import time

    from flexshard.errors import CheckpointError

    start = time.monotonic()
    found = ranks.run(2, 1, saved_alone, str(tmp_path), timeout=12.0, expect_failures=True)
    assert isinstance(found[0], CheckpointError), found[0]
    assert "rank 1 has not come" in str(found[0])
    assert "full_state_dict" in str(found[0])
    after, text = found[1]
    assert after < 10
    assert "rank 0 waits in state_dict(): rank 1 has not come; every rank has to call it" in text
    assert time.monotonic() - start < 60


def saved_alone(rank: int, folder: str) -> Any:
    """Rank 0 saves alone; rank 1 sees what it says meanwhile."""
    import time

    parallel = models.shard(models.plan_of(models.small_cluster(2, 1), two_tiers()), "sgd")[0]
    said = Path(folder) / "said"
    start = time.monotonic()
    if rank == 0:
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: said.write_text(f"{time.monotonic() - start} {message}")
        torch.save(parallel.state_dict(), f"{folder}/model.pt")
    while not said.exists() or not said.read_text():
        time.sleep(0.1)
    time.sleep(9)
    after, _, text = said.read_text().partition(" ")
    return float(after), text


def two_tiers() -> dict[str, list[tuple[int, int, str]]]:
    return {n: [(1, rows // 2, "dense"), (2, rows - rows // 2, "dense")] for n, (rows, _) in SPLIT_ROWS.items()}


SPLIT_ROWS = models.WIDE | models.NARROW


def saved_to_a_file(rank: int, folder: str) -> tuple[list[str], bool]:
    """A state dict that every rank calls for and one writes; and what loads it again."""
    parallel = ours()
    state = parallel.state_dict()
    path = f"{folder}/{rank}.pt"
    torch.save(state, path)
    again = torch.load(path)
    same = all(torch.equal(whole(again[name]), whole(value)) for name, value in state.items())
    return sorted(again), same


def test_state_dicts_are_pickled(tmp_path: Path) -> None:
    for names, same in ranks.run(2, 2, saved_to_a_file, str(tmp_path)):
        assert set(names) == PER_TABLE | {"over.weight", "over.bias"}
        assert same


# -- inputs


def tensor_dicts(parallel: Any, rank: int) -> list[float]:
    from tensordict import TensorDict

    def nested(features: KeyedJaggedTensor) -> TensorDict:
        return TensorDict(
            {
                name: torch.nested.nested_tensor_from_jagged(part.values(), offsets=part.offsets())
                for name, part in features.to_dict().items()
            }
        )

    optimizer = CombinedOptimizer([("", parallel.fused_optimizer), ("", dense_of(parallel))])
    return train(parallel, optimizer, rank, changed=nested)


def test_tensor_dicts() -> None:
    equal_on_both(tensor_dicts)


# -- steps of other shapes


def looked_up_twice(parallel: Any, rank: int, how: str) -> list[float]:
    """Two lookups before one backward pass, as in two-tower models; or one lookup and two backward passes."""
    optimizer = CombinedOptimizer([("", parallel.fused_optimizer), ("", dense_of(parallel))])
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss, _ = parallel(models.make_batch(step, rank))
        if how == "two lookups":
            loss = loss + parallel(models.make_batch(step + 50, rank))[0]
        elif how == "retained":
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("how", ["two lookups", "retained"])
def test_more_lookups_or_backward_passes_than_one(how: str) -> None:
    equal_on_both(looked_up_twice, how, tolerance=1e-5)


def mixed(rank: int, code: Callable[..., Any], *args: Any) -> Any:
    """A collection of which TorchRec shards one table."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise

    from flexshard.executors import FlexShardEmbeddingCollectionSharder
    from flexshard.planner import FlexShardPlanner

    model = models.new_model()
    sharders: list[Any] = [
        FlexShardEmbeddingCollectionSharder({"optimizer": models.OPTIMIZERS["sgd"][1], "learning_rate": 0.1})
    ]
    profiles = {name: models.profile_of(name) for _, name in models.table_names()}
    plan = models.plan_of(models.small_cluster(2, 1), two_tiers())
    sharding = FlexShardPlanner(plan, profiles=profiles).collective_plan(model, sharders)
    how = {name: row_wise(compute_kernel="fused") for name in models.WIDE}
    stock = construct_module_sharding_plan(model.wide, how, sharders[0], local_size=1, world_size=2, device_type="cpu")
    sharding.plan["wide"]["shops"] = stock["shops"]
    parallel = DistributedModelParallel(model, plan=sharding, sharders=sharders, device=torch.device("cpu"))
    return code(parallel, rank, *args)


def mixed_names(parallel: Any, rank: int) -> None:
    from flexshard.executors import full_state_dict

    names_of(parallel, rank)
    start = {name: whole(value) for name, value in parallel.state_dict().items()}
    exported = full_state_dict(parallel)
    if rank == 0:
        assert all(torch.equal(exported[name], value) for name, value in start.items())
    saved = {name: value.clone() for name, value in parallel.state_dict().items() if not name.startswith("over")}
    saved |= dict(parallel.module.over.state_dict(prefix="over."))
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()
    parallel.module.load_state_dict(saved)  # as of any nn.Module
    for name, value in parallel.state_dict().items():
        if not name.startswith("over"):
            assert torch.equal(whole(value), start[name]), name


def test_names_where_torchrec_shards_a_table() -> None:
    ranks.run(2, 1, mixed, mixed_names)


def mixed_and_skipped(parallel: Any, rank: int) -> list[bool]:
    """A batch with a bad id is skipped, and training goes on."""
    from flexshard.errors import DataError

    finished = []
    for step in range(3):
        batch = models.make_batch(step, rank)
        if step == 1 and rank == 1:
            batch.features.values()[0] = 997
        try:
            parallel(batch)[0].backward()
            finished.append(True)
        except DataError:
            finished.append(False)
    return finished


def test_skipping_a_bad_batch() -> None:
    assert ranks.run(2, 1, mixed, mixed_and_skipped) == [[True, False, True]] * 2


# -- tables that are left to TorchRec by a word


def left_out(rank: int, how: dict[str, Any]) -> tuple[dict[str, str], dict[str, float], list[str]]:
    from torchrec.distributed.planner.types import ParameterConstraints

    if "constraints" in how:
        how = how | {"constraints": {n: ParameterConstraints(**given) for n, given in how["constraints"].items()}}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plan = models.plan_of(models.small_cluster(2, 1), two_tiers())
        parallel, optim = models.shard(plan, "rowwise_adagrad", **how)
    kinds = {f"{part}.{name}": parallel.plan.plan[part][name].sharding_type for part, name in models.table_names()}
    outputs = models.train(parallel, optim, rank, range(3))
    expected = models.reference("rowwise_adagrad", 3, 2)
    worst = max(float((mine - e[rank]).abs().max()) for mine, e in zip(outputs, expected.outputs, strict=True))
    names = {name for name, _ in parallel.named_parameters()}
    assert names == PER_TABLE | {"over.weight", "over.bias"}
    assert set(parallel.state_dict()) == names
    return (
        kinds,
        {"outputs": worst},
        [str(warning.message) for warning in said if "constraints" in str(warning.message)],
    )


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ({"torchrec_tables": ["shops"]}, {"wide.shops"}),
        ({"torchrec_tables": ["wide.days", "narrow"]}, {"wide.days", "narrow.users"}),
        ({"constraints": {"goods": {"sharding_types": ["table_wise"]}}}, {"wide.goods"}),
    ],
)
def test_tables_left_to_torchrec(how: dict[str, Any], left: set[str]) -> None:
    for kinds, found, _ in ranks.run(2, 1, left_out, how):
        assert {name for name, kind in kinds.items() if kind != "flex_shard"} == left
        assert found["outputs"] < 1e-4
        if "constraints" in how:
            assert kinds["wide.goods"] == "table_wise"


def test_constraints_that_decide_nothing_are_named() -> None:
    *_, said = ranks.run(2, 1, left_out, {"constraints": {"goods": {"min_partition": 8}}})[0]
    assert len(said) == 1
    assert "table 'goods': its constraints say min_partition, which decides nothing" in said[0]


def test_what_is_left_has_to_be_there() -> None:
    from flexshard.errors import PlanError

    found = ranks.run(2, 1, left_out, {"torchrec_tables": ["shop"]}, expect_failures=True)
    assert all(isinstance(error, PlanError) and "is called 'shop'" in str(error) for error in found), found


def models_that_differ(rank: int) -> tuple[float, bool]:
    """Ranks that draw weights of their own, as scripts without a seed do: TorchRec's row-wise takes every row from one
    of them, and so do copies.
    """
    import torch.distributed as dist

    cluster = models.small_cluster(2, 2)
    plan = models.plan_of(cluster, models.random_split(cluster, np.random.default_rng(31)))
    torch.manual_seed(rank)
    parallel, optim = models.shard(plan, "adagrad", model=models.Model())
    drawn: list[Any] = [None] * 4
    torch.manual_seed(rank)
    own = {name: value for name, value in models.Model().state_dict().items() if "embeddings" in name}
    dist.all_gather_object(drawn, own)
    state = parallel.state_dict()
    from_somebody = all(
        bool(torch.stack([(models.whole(state[name]) == rows[name]).all(1) for rows in drawn]).any(0).all())
        for name in own
    )
    models.train(parallel, optim, rank, range(2))
    worst = 0.0
    for module in (parallel.module.wide, parallel.module.narrow):
        tables = module.tables
        for table in range(len(tables.names)):
            for level, slots, _ in tables.held(table):
                across = tables.process_groups[tables.layout.group_sizes[level]].across
                if across is None:
                    continue
                values = tables.group_of(table).store.values[slots]
                copies = [torch.empty_like(values) for _ in range(dist.get_world_size(across))]
                dist.all_gather(copies, values.contiguous(), group=across)
                worst = max([worst, *(float((copy - values).abs().max()) for copy in copies if copy.numel())])
    return worst, from_somebody


def test_copies_start_alike_though_models_differ() -> None:
    assert ranks.run(2, 2, models_that_differ) == [(0.0, True)] * 4


def gradients_of_zero(rank: int, optimizer: str, reduction: str) -> list[int]:
    """How many rows of each tier moved, of those that were read with gradients of 0 and of the others."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

    cluster = models.small_cluster(2, 1)
    split = {name: [(1, n // 2, reduction), (2, n - n // 2, "dense")] for name, n in models.ALL_ROWS.items()}
    fused = {"optimizer": models.OPTIMIZERS[optimizer][1], "learning_rate": 0.5, "weight_decay": 0.1}
    if optimizer != "adam":
        fused["weight_decay_mode"] = WeightDecayMode.DECOUPLE
    parallel, _ = models.shard(models.plan_of(cluster, split), fused=fused)
    before = models.whole(parallel.state_dict()["narrow.embeddings.users.weight"])
    batch = models.make_batch(0, rank)
    (parallel.module.narrow(batch.features)["user"].values().sum() * 0.0).backward()
    moved = (models.whole(parallel.state_dict()["narrow.embeddings.users.weight"]) != before).any(1)
    read = torch.zeros(64, dtype=torch.bool)
    for other in range(2):
        read[models.make_batch(0, other).features["user"].values()] = True
    hot = torch.zeros(64, dtype=torch.bool)
    hot[torch.from_numpy(models.profile_of("users").ranked_rows[:32].astype(np.int64))] = True
    return [int((moved & part).sum() - (wanted & part).sum()) for part in (hot, ~hot) for wanted in (read,)]


@pytest.mark.parametrize("reduction", ["dense", "sparse"])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_weight_decay_reaches_every_row_that_was_read_in_every_tier(optimizer: str, reduction: str) -> None:
    assert ranks.run(2, 1, gradients_of_zero, optimizer, reduction) == [[0, 0], [0, 0]]


def variable_batch(rank: int, step: int, *, written_out: bool = False) -> Any:
    """Features with batch sizes of their own, whose lists several samples share; or the same samples one by one."""
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(100 * step + rank)
    sizes = torch.randint(1, 9, (len(models.FEATURES),), generator=generator).tolist()
    lists = [
        [
            torch.randint(0, models.ROWS[name], (int(n),), generator=generator)
            for n in torch.randint(0, 5, (size,), generator=generator)
        ]
        for name, size in zip(models.FEATURES, sizes, strict=True)
    ]
    shares = [torch.randint(0, size, (5 + rank,), generator=generator) for size in sizes]
    if written_out:
        lists = [[of[int(one)] for one in share] for of, share in zip(lists, shares, strict=True)]
    flat = [values for of in lists for values in of]
    flat_lengths = torch.tensor([len(values) for values in flat])
    if written_out:
        return KeyedJaggedTensor(models.FEATURES, torch.cat(flat), lengths=flat_lengths)
    return KeyedJaggedTensor(
        models.FEATURES,
        torch.cat(flat),
        lengths=flat_lengths,
        stride_per_key_per_rank=[[size] for size in sizes],
        inverse_indices=(models.FEATURES, torch.stack(shares)),
    )


def loss_of_variable(model: Any, batch: Any) -> torch.Tensor:
    found = [*model.wide(batch).values(), *model.narrow(batch).values()]
    weights = [torch.arange(len(jagged.values())).view(-1, 1) + index for index, jagged in enumerate(found)]
    parts = [(one * jagged.values() ** 2).sum() for one, jagged in zip(weights, found, strict=True)]
    assert all(int(jagged.lengths().sum()) == len(jagged.values()) for jagged in found)
    return 0.001 * torch.stack(parts).sum()


def train_variable(rank: int) -> float:
    """Largest difference to the unsharded model with the samples one by one."""
    cluster = models.small_cluster(2, 2)
    plan = models.plan_of(cluster, models.random_split(cluster, np.random.default_rng(41)))
    plain = models.new_model()
    optimizer = torch.optim.SGD([*plain.wide.parameters(), *plain.narrow.parameters()], lr=models.LEARNING_RATE)
    parallel, _ = models.shard(plan, "sgd")
    for step in range(3):
        optimizer.zero_grad()
        losses = [loss_of_variable(plain, variable_batch(other, step, written_out=True)) for other in range(4)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        loss = loss_of_variable(parallel.module, variable_batch(rank, step))
        assert abs(float(loss - losses[rank])) < 1e-4
        loss.backward()
    weights = parallel.state_dict()
    return max(
        float((models.whole(weights[name]) - value).abs().max())
        for name, value in plain.state_dict().items()
        if "embeddings" in name
    )


def test_features_with_batch_sizes_of_their_own_train_as_unsharded() -> None:
    assert max(ranks.run(2, 2, train_variable)) < 1e-5


def variable_with_tables_of_torchrec(rank: int) -> str:
    from flexshard.errors import DataError

    cluster = models.small_cluster(2, 1)
    plan = models.plan_of(cluster, models.random_split(cluster, np.random.default_rng(42)))
    parallel, _ = models.shard(plan, "sgd", torchrec_tables=["shops"])
    batch = variable_batch(rank, 0) if rank else models.make_batch(0, rank).features
    try:
        parallel.module.wide(batch)
    except DataError as error:
        return str(error)
    return ""


def test_such_batches_stop_every_rank_where_torchrec_would_not_train_them() -> None:
    found = ranks.run(2, 1, variable_with_tables_of_torchrec)
    assert "rank 1 has a variable batch" in found[0]
    assert "which on CPUs loses their gradients" in found[1]
