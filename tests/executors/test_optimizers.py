"""What an update does to replicated rows, against torch's own optimizers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fbgemm_gpu")

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from flexshard.executors.stores.updates import OptimizerSpec, apply_update, new_state, rounded

KINDS: dict[str, tuple[EmbOptimType, Any]] = {
    "sgd": (EmbOptimType.EXACT_SGD, lambda p: torch.optim.SGD([p], lr=0.1)),
    "adagrad": (EmbOptimType.EXACT_ADAGRAD, lambda p: torch.optim.Adagrad([p], lr=0.1, eps=1e-6)),
    "rowwise_adagrad": (EmbOptimType.EXACT_ROWWISE_ADAGRAD, lambda p: RowWiseAdagrad([p], lr=0.1, eps=1e-6)),
    "adam": (EmbOptimType.ADAM, lambda p: torch.optim.Adam([p], lr=0.1, eps=1e-6)),
}


@pytest.mark.parametrize("name", KINDS)
def test_an_update_is_that_of_torch(name: str) -> None:
    kind, make = KINDS[name]
    fused = {"optimizer": kind, "learning_rate": 0.1, "eps": 1e-6}
    spec = OptimizerSpec.of(fused, "t", torch.device("cuda"))  # Adam is refused on CPU, its formula is not
    generator = torch.Generator().manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(7, 4, generator=generator))
    ours, state, optimizer = theirs.detach().clone(), new_state(spec, 7, 4, torch.device("cpu")), make(theirs)
    for step in range(1, 6):
        gradient = torch.randn(7, 4, generator=generator)
        theirs.grad = gradient.clone()
        optimizer.step()
        apply_update(spec, ours, gradient, state, learning_rate=0.1, step=step)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_rows_without_a_gradient_stay_as_they_are(name: str) -> None:
    fused = {"optimizer": KINDS[name][0], "learning_rate": 0.1}
    spec = OptimizerSpec.of(fused, "t", torch.device("cuda"))
    weight, state = torch.randn(5, 4), new_state(spec, 5, 4, torch.device("cpu"))
    apply_update(spec, weight, torch.randn(5, 4), state, learning_rate=0.1, step=1)
    before, old = weight.clone(), {key: value.clone() for key, value in state.items()}
    gradient = torch.randn(5, 4)
    gradient[[1, 3]] = 0
    apply_update(spec, weight, gradient, state, learning_rate=0.1, step=2)
    assert torch.equal(weight[[1, 3]], before[[1, 3]])
    assert all(torch.equal(state[key][[1, 3]], old[key][[1, 3]]) for key in state)
    assert not torch.equal(weight[0], before[0])


def test_tables_that_differ_in_an_option_differ() -> None:
    device = torch.device("cpu")
    one = OptimizerSpec.of({"optimizer": EmbOptimType.EXACT_SGD, "stochastic_rounding": False}, "t", device)
    assert one != OptimizerSpec.of({"optimizer": EmbOptimType.EXACT_SGD}, "t", device)
    assert one == OptimizerSpec.of({"optimizer": "exact_sgd", "stochastic_rounding": False}, "t", device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_by_chance_keeps_the_mean(dtype: torch.dtype) -> None:
    values = torch.full((100_000,), 1.0 + 3e-4)
    first = rounded(values, dtype, torch.Generator().manual_seed(1))
    assert first.float().mean().item() == pytest.approx(1.0 + 3e-4, abs=5e-5)
    assert len(first.unique()) == 2  # one up, one down
    assert torch.equal(first, rounded(values, dtype, torch.Generator().manual_seed(1)))
    assert rounded(values, dtype, None).float().unique().numel() == 1
    negative = rounded(-values, dtype, torch.Generator().manual_seed(2))
    assert negative.float().mean().item() == pytest.approx(-1.0 - 3e-4, abs=5e-5)
