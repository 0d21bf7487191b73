"""``torch.compile`` of models with planned tables: the numbers of the model as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch

from flexshard.planner import Plan
from tests.executors import lookahead_model, ranks

STEPS, AFTER = range(3), 5


def as_it_is(parallel: Any) -> Any:
    return parallel


def whole(parallel: Any) -> Any:
    return torch.compile(parallel, backend="aot_eager")


def inside(parallel: Any) -> Any:
    """As torch's own users compile a module in place."""
    parallel.module.compile(backend="aot_eager")
    return parallel


def tables(parallel: Any) -> Any:
    parallel.module.tables.compile(backend="aot_eager")
    return parallel


def trained(
    rank: int, plan: Plan, factor: float | None, ways: list[Callable[[Any], Any]]
) -> list[dict[str, np.ndarray]]:
    """What is left of some steps, and what is looked up then without training, each way."""
    found = []
    for way in ways:
        torch.compiler.reset()
        fused = {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.3}
        parallel, optimizer = lookahead_model.shard(plan, factor, fused)
        model = way(parallel)
        for batch in lookahead_model.batches(rank, STEPS):
            optimizer.zero_grad()
            model(batch)[0].backward()
            optimizer.step()
        with torch.no_grad():
            logits = model(lookahead_model.batch_of(AFTER, rank))[1]
        found.append({**lookahead_model.everything(parallel), "logits": logits.numpy()})
    return found


@pytest.mark.parametrize("factor", [None, 0.5])
def test_compiled_models_train_to_the_same_weights(factor: float | None) -> None:
    plan = lookahead_model.plan_for(2, 1)
    for plain, *compiled in ranks.run(2, 1, trained, plan, factor, [as_it_is, whole, inside, tables]):
        for found in compiled:
            assert found.keys() == plain.keys()
            for name, values in plain.items():
                np.testing.assert_allclose(found[name], values, rtol=2e-6, atol=2e-7, err_msg=name)
