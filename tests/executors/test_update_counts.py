"""Adam's bias correction counts updates: whatever else is looked up, the n-th update of a module is the n-th."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torchrec")

import torch
from torch.utils.checkpoint import checkpoint
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.executors import models, ranks

STEPS = 4
SPLIT = {
    name: [(1, rows // 3, "dense"), (2, rows - rows // 3, "dense")]
    for name, (rows, _) in (models.WIDE | models.NARROW).items()
}
TABLE, KEYS = "narrow.embeddings.users", ["shown", "user", "day", "clicked", "shop"]


def made(optimizer: str = "adam") -> tuple[Any, Any]:
    return models.shard(models.plan_of(models.small_cluster(1, 2), SPLIT), optimizer)


def state_of(parallel: Any) -> dict[str, torch.Tensor]:
    state = {name: models.whole(value) for name, value in parallel.state_dict().items()}
    for states in parallel.fused_optimizer.state_dict()["state"].values():
        state |= {name: models.whole(value) for name, value in states.items()}
    return state


def evaluated(parallel: Any, rank: int, step: int) -> Any:
    """With gradients, which nobody asks for; the batch before's are kept until then, as a variable in a loop is."""
    return parallel(models.make_batch(50 + step, rank))


def recomputed(parallel: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = checkpoint(lambda: parallel(batch)[0], use_reentrant=False)
    return loss


def trained(rank: int, how: str, optimizer: str = "adam") -> dict[str, torch.Tensor]:
    parallel, optim = made(optimizer)
    kept = None
    forwards: list[str] = []
    for name, module in parallel.named_modules():
        if name.endswith(("narrow", "wide")):
            module.register_forward_pre_hook(lambda *_, name=name: forwards.append(name))
    for step in range(STEPS):
        batch = models.make_batch(step, rank)
        if how == "evaluated":
            kept = evaluated(parallel, rank, step)
        optim.zero_grad()
        loss = recomputed(parallel, batch) if how == "recomputed" else parallel(batch)[0]
        loss.backward()
        optim.step()
    del kept
    assert len(forwards) == 2 * STEPS * (2 if how else 1)
    return state_of(parallel)


def compared(rank: int, how: str, optimizer: str) -> float:
    alone, other = trained(rank, "", optimizer), trained(rank, how, optimizer)
    assert alone.keys() == other.keys()
    assert all(int(value) == STEPS for name, value in other.items() if name.endswith(".step"))
    return max(float((alone[name] - other[name]).abs().max()) for name in alone)


@pytest.mark.parametrize(
    ("how", "optimizer"),
    [("evaluated", "adam"), ("recomputed", "adam"), ("recomputed", "rowwise_adagrad"), ("recomputed", "sgd")],
)
def test_looking_rows_up_is_not_updating_them(how: str, optimizer: str) -> None:
    """A step that is recomputed runs its forward pass twice, however many stores update their rows."""
    assert ranks.run(1, 2, compared, how, optimizer) == [0.0, 0.0]


FIRST, SECOND = 1.0, 0.1 / (1 - 0.9**2) / (0.001 / (1 - 0.999**2)) ** 0.5
AGAIN = (0.19 / 0.1) / (0.001999 / 0.001) ** 0.5  # by the same gradient, as the first update


def moved(rank: int, how: str) -> list[float]:
    """How far rows of two look-ups, each read once, move in learning rates; then the updates that are counted."""
    parallel, _ = made()
    before = models.whole(parallel.state_dict()[f"{TABLE}.weight"])

    def total(*ids: int) -> torch.Tensor:
        values, lengths = torch.tensor(ids), torch.tensor([0, len(ids), 0, 0, 0])
        rows = parallel.module.narrow(KeyedJaggedTensor(KEYS, values, lengths=lengths))["user"].values()
        result: torch.Tensor = rows.sum()
        return result

    if how == "again":
        loss = total(1, 40)
        loss.backward(retain_graph=True)
        loss.backward()
    elif how == "one after the other":
        total(1, 40).backward()
        total(4, 50).backward()
    else:  # as pipelines do that look a batch up before they train the one before it
        one, other = total(1, 40), total(4, 50)
        (one if how == "in order" else other).backward()
        (other if how == "in order" else one).backward()
    rows = (before - models.whole(parallel.state_dict()[f"{TABLE}.weight"]))[[1, 40, 4, 50], 0]
    state = parallel.fused_optimizer.state_dict()["state"][f"{TABLE}.weight"]
    return [*(rows / models.LEARNING_RATE).tolist(), float(models.whole(state["users.step"]))]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("one after the other", [FIRST, FIRST, SECOND, SECOND, 2]),
        ("in order", [FIRST, FIRST, SECOND, SECOND, 2]),
        ("the other way", [SECOND, SECOND, FIRST, FIRST, 2]),
        ("again", [FIRST + AGAIN, FIRST + AGAIN, 0, 0, 1]),
    ],
)
def test_updates_have_the_numbers_in_which_they_come(how: str, expected: list[float]) -> None:
    """Of one look-up all have one number, as FBGEMM's have."""
    assert ranks.run(1, 2, moved, how) == [pytest.approx(expected, abs=1e-4)] * 2
