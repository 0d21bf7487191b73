"""What an update does to replicated rows, against torch's own optimizers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("fbgemm_gpu")

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from flexshard._internal import has_triton
from flexshard.errors import TableError
from flexshard.executors.stores.updates import OptimizerSpec, apply_update, new_state, rounded
from flexshard.tables import OPTIMIZERS, StepOptions

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
    spec = OptimizerSpec.of(fused, "t", torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(7, 4, generator=generator))
    ours, state, optimizer = theirs.detach().clone(), new_state(spec, 7, 4, torch.device("cpu")), make(theirs)
    for step in range(1, 6):
        gradient = torch.randn(7, 4, generator=generator)
        theirs.grad = gradient.clone()
        optimizer.step()
        apply_update(spec, ours, gradient, state, learning_rate=0.1, step=step)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


def updated(
    spec: OptimizerSpec, weight: torch.Tensor, gradients: list[torch.Tensor], read: torch.Tensor | None = None
) -> torch.Tensor:
    result, state = weight.clone(), new_state(spec, *weight.shape, torch.device("cpu"))
    for step, gradient in enumerate(gradients, 1):
        apply_update(spec, result, gradient, state, learning_rate=spec.learning_rate, step=step, read=read)
    return result


def some_gradients(rows: int = 7, dim: int = 4) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, dim, generator=generator), [torch.randn(rows, dim, generator=generator) for _ in range(5)]


def test_lars_is_fbgemms_formula() -> None:
    """``codegen/genscript/optimizers.py::lars_sgd``, a row at a time in float64; FBGEMM has no kernel for CPUs."""
    weight, gradients = some_gradients()
    gradients[1][2] = 0  # momentum goes on
    weight[5] = 0
    gradients[0][5] = 0  # where FBGEMM has 0 / 0
    fused = {"optimizer": "lars_sgd", "learning_rate": 0.1, "momentum": 0.8, "eta": 0.5, "weight_decay": 0.2}
    expected, moved = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        for row, g in enumerate(gradient.double()):
            size, slope = float(expected[row].norm()), float(g.norm())
            rate = 0.1 * 0.5 * size / (slope + 0.2 * size) if slope or size else 0.0
            moved[row] = 0.8 * moved[row] + rate * (g + 0.2 * expected[row])
            expected[row] -= moved[row]
    spec = OptimizerSpec.of(fused, "t", torch.device("cpu"))
    assert spec.moves_at_zero
    torch.testing.assert_close(updated(spec, weight, gradients).double(), expected, rtol=1e-5, atol=1e-6)


def test_adams_weight_decay_is_that_of_adamw() -> None:
    weight, gradients = some_gradients()
    fused = {"optimizer": "adam", "learning_rate": 0.1, "eps": 1e-6, "betas": (0.8, 0.95), "weight_decay": 0.2}
    theirs = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([theirs], lr=0.1, eps=1e-6, betas=(0.8, 0.95), weight_decay=0.2)
    for gradient in gradients:
        theirs.grad = gradient.clone()
        optimizer.step()
    ours = updated(OptimizerSpec.of(fused, "t", torch.device("cpu")), weight, gradients)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_rowwise_adam_by_hand() -> None:
    weight, gradients = some_gradients()
    fused = {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM, "learning_rate": 0.1, "eps": 1e-6, "weight_decay": 0.2}
    expected, mean, square = weight.double(), torch.zeros(7, 4).double(), torch.zeros(7, 1).double()
    for step, gradient in enumerate(gradients, 1):
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * (gradient.double() ** 2).mean(1, keepdim=True)
        change = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-6)
        expected = expected - 0.1 * (change + 0.2 * expected)
    ours = updated(OptimizerSpec.of(fused, "t", torch.device("cpu")), weight, gradients)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["L2", "DECOUPLE"])
def test_weight_decay_of_rowwise_adagrad_is_fbgemms(mode: str) -> None:
    """Of the rows that were read, in the kernel for rows without copies and in the update of those with copies."""
    from flexshard.executors.stores.fused import FusedStore

    weight, gradients = some_gradients()
    fused = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": 0.1,
        "eps": 1e-6,
        "weight_decay": 0.3,
        "weight_decay_mode": WeightDecayMode[mode],
    }
    spec = OptimizerSpec.of(fused, "t", torch.device("cpu"))
    store = FusedStore(spec, 7, 4, torch.float32, torch.device("cpu"))
    store.values.copy_(weight)
    read = torch.tensor([0, 2, 3, 6])
    gradients[2][0] = 0  # read, and its gradients cancel
    for gradient in gradients:
        store.look_up(read).update(gradient[read].clone())
        gradient[[1, 4, 5]] = 0
    there = torch.isin(torch.arange(7), read)
    torch.testing.assert_close(updated(spec, weight, gradients, there), store.values, rtol=1e-5, atol=1e-6)
    without = OptimizerSpec.of(fused | {"weight_decay": 0.0}, "t", torch.device("cpu"))
    assert not torch.equal(store.values[0], updated(without, weight, gradients)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [4, 20, 64, 132])
@pytest.mark.parametrize("name", [name for name, one in OPTIMIZERS.items() if one.on_cpu and one.fbgemm])
def test_rows_one_by_one_are_those_of_fbgemms_lookups_without_pooling(name: str, dim: int, dtype: torch.dtype) -> None:
    """Which are what TorchRec calls: every optimizer that FBGEMM has here, with the options that it takes."""
    from flexshard.executors.stores.fused import FusedStore

    optimizer, device = OPTIMIZERS[name], torch.device("cpu")
    options = {"learning_rate": 0.1, "eps": 0.01} if "eps" in optimizer.takes else {"learning_rate": 0.1}
    fused = {"optimizer": EmbOptimType[optimizer.fbgemm or ""], **options}
    store = FusedStore(OptimizerSpec.of(fused, "t", device), 50, dim, dtype, device)
    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [(50, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        pooling_mode=PoolingMode.NONE,
        weights_precision=SparseType.from_dtype(dtype),
        output_dtype=SparseType.FP32,
        device=device,
        **fused,
    )
    generator = torch.Generator().manual_seed(dim)
    start = torch.randn(50, dim, generator=generator).to(dtype)
    store.values.copy_(start)
    theirs.weights_host.data.view(-1, dim).copy_(start)
    for number in (300, 1, 0, 40):  # ids several times, once, never
        ids = torch.randint(0, 50, (number,), generator=generator) ** 2 // 50
        size = 10 ** torch.empty(number, 1).uniform_(-4, 4, generator=generator)
        gradient = torch.randn(number, dim, generator=generator) * size
        found, expected = store.look_up(ids), theirs(ids, torch.arange(number + 1))
        assert torch.equal(found.rows, store.values.index_select(0, ids))
        found.update(gradient)
        expected.backward(gradient)
        ours, rows = store.values, theirs.weights_host.detach().view(-1, dim)
        # Sums of squares may be added up in another order; then a rounding to 16 bits may go the other way.
        close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(ours, rows, **close)
        assert not torch.equal(ours, start) or not number


@pytest.mark.parametrize(
    ("fused", "text"),
    [
        (
            {"optimizer": "exact_sgd", "weight_decay": 0.1},
            "sgd on cpu has no weight_decay, which FBGEMM ignores",
        ),
        ({"optimizer": "exact_adagrad", "weight_decay": 0.1}, "optimizer adagrad on cpu has no weight_decay"),
        ({"optimizer": "exact_row_wise_adagrad", "weight_decay": 0.1}, "weight_decay_mode NONE, which FBGEMM ignores"),
        ({"optimizer": "exact_sgd", "momentum": 0.9}, "sgd on cpu has no momentum, which FBGEMM ignores"),
        ({"optimizer": "adam", "gradient_clipping": True}, "optimizer adam on cpu has no gradient_clipping"),
    ],
)
def test_options_that_do_nothing_are_refused(fused: dict[str, Any], text: str) -> None:
    with pytest.raises(TableError, match=text):
        OptimizerSpec.of(fused, "t", torch.device("cpu"))


@pytest.mark.parametrize("name", KINDS)
def test_rows_that_were_not_read_stay_as_they_are(name: str) -> None:
    fused = {"optimizer": KINDS[name][0], "learning_rate": 0.1}
    spec = OptimizerSpec.of(fused, "t", torch.device("cpu"))
    weight, state = torch.randn(5, 4), new_state(spec, 5, 4, torch.device("cpu"))
    apply_update(spec, weight, torch.randn(5, 4), state, learning_rate=0.1, step=1)
    before, old = weight.clone(), {key: value.clone() for key, value in state.items()}
    gradient = torch.randn(5, 4)
    gradient[[1, 2, 3]] = 0
    read = torch.tensor([True, False, True, False, True])
    apply_update(spec, weight, gradient, state, learning_rate=0.1, step=2, read=read)
    assert torch.equal(weight[2], before[2]) != spec.moves_at_zero  # read, with a gradient of 0
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


@pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
@pytest.mark.parametrize("dim", [1, 6, 64])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("sgd", {}),
        ("adagrad", {"eps": 1e-3}),
        ("adagrad", {"eps": 0.0}),
        ("rowwise_adagrad", {"eps": 0.0, "weight_decay": 0.1}),
        ("rowwise_adagrad", {"eps": 1e-3}),
        ("rowwise_adagrad", {"weight_decay": 0.1, "decay_mode": "l2"}),
        ("rowwise_adagrad", {"weight_decay": 0.1, "decay_mode": "decoupled"}),
        ("adam", {"beta1": 0.7}),
        ("adam", {"weight_decay": 0.1}),
        ("partial_rowwise_adam", {"beta2": 0.9, "weight_decay": 0.1}),
        ("lars_sgd", {"momentum": 0.5, "eta": 0.1, "weight_decay": 0.1}),
    ],
)
def test_one_kernel_gives_what_many_do(name: str, given: dict[str, Any], dim: int) -> None:
    """In Triton's interpreter where there is no GPU."""
    from flexshard.executors.stores import update_kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec = OptimizerSpec(name, 0.1, StepOptions(**given))
    for dtype, close in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
        torch.manual_seed(dim)
        plain = torch.randn(9, dim, device=device).to(dtype)
        plain[4] = 0
        kernel, states = plain.clone(), [new_state(spec, 9, dim, device) for _ in range(2)]
        buffer = torch.randn(4, dim + 1, device=device)  # with counts of reads in the last column
        for step, slots in enumerate([slice(2, 6), torch.tensor([8, 0, 4, 3], device=device), slice(0, 4)], 1):
            buffer[:, dim] = torch.tensor([3.0, 0.0, 1.0, 2.0])
            buffer[2, :dim] = 0
            read = buffer[:, dim] > 0 if spec.moves_at_zero else None
            part = plain[slots].clone()
            state = {key: values[slots].clone() for key, values in states[0].items()}
            apply_update(
                replace(spec, fused_params={"stochastic_rounding": False}),
                *(part, buffer[:, :dim], state),
                learning_rate=0.1 / step,
                step=step,
                read=read,
            )
            plain[slots] = part
            for key, values in state.items():
                states[0][key][slots] = values
            options = replace(spec.step_options, learning_rate=0.1 / step, step=step)
            at, rows = (None, slots) if isinstance(slots, slice) else (slots, slice(None))
            update_kernels.update_rows(
                *(name, kernel[rows], buffer[:, :dim], {key: values[rows] for key, values in states[1].items()}),
                options,
                slots=at,
                read=buffer[:, dim] if spec.moves_at_zero else None,
            )
        torch.testing.assert_close(kernel, plain, rtol=close, atol=close)
        for key, values in states[0].items():
            torch.testing.assert_close(states[1][key], values, rtol=1e-4, atol=1e-5)
    assert set(update_kernels.KINDS) == {one.name for one in OPTIMIZERS.values() if one.fbgemm is not None}
