"""Tensor-train tables in training: updates within backward, frozen cores, what autograd can do with a lookup."""

from __future__ import annotations

import copy
import pickle
from math import prod
from typing import Any

import pytest

pytest.importorskip("torchrec")

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from flexshard._internal import has_triton
from flexshard.embeddings import TTEmbedding, TTEmbeddingBag
from flexshard.embeddings.tensor_train.products import levels_of, product_sizes
from flexshard.errors import TableError
from flexshard.tables import KEPT_SHARE
from tests.embeddings.tensor_train.products import each_backend, each_backend_and
from tests.slow import crossed


@each_backend_and("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_fused_updates_are_those_of_the_optimizer_after_backward(backend: str, optimizer: str) -> None:
    torch.manual_seed(0)
    how: Any = {"mode": "sum", "tt_ranks": 4, "std": 1.0, "backend": backend}
    fused = TTEmbeddingBag(500, 8, **how, optimizer=optimizer, learning_rate=0.1, eps=1e-8)
    plain = TTEmbeddingBag(500, 8, **how)
    plain.load_state_dict({k: v for k, v in fused.state_dict().items() if not k.startswith("sum_")})
    steps: Any = {
        "sgd": lambda: torch.optim.SGD(plain.parameters(), lr=0.1),
        "adagrad": lambda: torch.optim.Adagrad(plain.parameters(), lr=0.1, eps=1e-8),
        "rowwise_adagrad": lambda: None,
    }[optimizer]()
    sums = [torch.zeros(core.shape[0]) for core in plain.cores]
    for step in range(5):
        ids = torch.randint(0, 500, (30,), generator=torch.Generator().manual_seed(step))
        offsets = torch.arange(0, 30, 3)
        for table in (fused, plain):
            table(ids, offsets).square().mean().backward()
        assert all(core.grad is None for core in fused.cores)
        if steps is not None:
            steps.step()
            steps.zero_grad()
        else:
            with torch.no_grad():
                for core, total in zip(plain.cores, sums, strict=True):
                    assert core.grad is not None
                    total += core.grad.square().flatten(1).mean(1)
                    scale = total.sqrt() + 1e-8
                    core -= torch.where(total > 0, 0.1 / scale, 0.0).view(-1, 1, 1, 1) * core.grad
                    core.grad = None
    for a, b in zip(fused.cores, plain.cores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@each_backend
@pytest.mark.parametrize("cores", [2, 3, 4])
def test_fused_adam_is_torchs_of_the_slices_that_are_read(backend: str, cores: int) -> None:
    """``torch.optim.SparseAdam`` on cores whose gradients hold the slices that a batch reads."""
    torch.manual_seed(0)
    how: Any = {"tt_ranks": 3, "std": 1.0, "cores": cores, "backend": backend}
    fused = TTEmbedding(300, 8, optimizer="adam", learning_rate=0.1, eps=1e-12, **how)
    plain = TTEmbedding(300, 8, **how)
    plain.load_state_dict({name: value for name, value in fused.state_dict().items() if name.startswith("cores")})
    steps: Any = torch.optim.SparseAdam(list(plain.parameters()), lr=0.1, eps=1e-12)
    for step in range(4):
        ids = torch.randint(0, 300, (9,), generator=torch.Generator().manual_seed(step))
        for table in (fused, plain):
            (table(ids).square().mean() * (step + 1)).backward()
        factors = fused.shape.row_factors
        for k, core in enumerate(plain.cores):
            below = int(np.prod(factors[k + 1 :]))
            read = torch.unique(ids // below % factors[k])
            assert core.grad is not None
            core.grad = torch.sparse_coo_tensor(read[None], core.grad[read], core.shape, check_invariants=True)
        steps.step()
        steps.zero_grad()
        if step == 1:  # states and step go with a checkpoint
            other = TTEmbedding(300, 8, optimizer="adam", learning_rate=0.1, eps=1e-12, **how)
            other.load_state_dict(fused.state_dict())
            fused = other
    for a, b in zip(fused.cores, plain.cores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_a_scaler_that_the_table_knows_is_taken_off() -> None:
    ids = torch.arange(40)
    tables = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        torch.manual_seed(0)
        table = TTEmbedding(60, 8, tt_ranks=4, std=1.0, optimizer="adagrad", grad_scaler=scaler, hot_rows=2)
        table.pin_rows(torch.tensor([3]))
        loss = table(ids).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        tables.append(table)
    for a, b in zip(tables[0].parameters(), tables[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)
    kept = [core.detach().clone() for core in tables[1].parameters()]
    (table(ids).mean() * float("inf")).backward()  # a scaler leaves such a step out
    assert all(torch.equal(a, b) for a, b in zip(table.parameters(), kept, strict=True))
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(TableError, match="GradScaler has scaled gradients of float16; give the table grad_scaler"),
    ):
        tables[0](ids)
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        tables[0](ids)


def test_copies_have_the_scaler_and_pickles_ask_for_it() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    table = TTEmbedding(60, 8, tt_ranks=4, optimizer="adam", grad_scaler=scaler, hot_rows=2)
    copied = copy.deepcopy(table)
    for one in (table, copied):
        scaler.scale(one(torch.arange(9)).square().mean()).backward()
    assert all(torch.equal(a, b) for a, b in zip(table.parameters(), copied.parameters(), strict=True))
    loaded = pickle.loads(pickle.dumps(table))
    with pytest.raises(TableError, match=r"pickled with grad_scaler, .*; set them again, as table.grad_scaler"):
        loaded(torch.arange(9))
    loaded.grad_scaler = scaler
    for one in (table, loaded):
        scaler.scale(one(torch.arange(9)).square().mean()).backward()
    assert all(torch.equal(a, b) for a, b in zip(table.parameters(), loaded.parameters(), strict=True))


def test_a_scaler_hears_of_gradients_that_overflow_in_the_table_alone() -> None:
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=10_000)
    table = TTEmbedding(60, 8, tt_ranks=4, std=0.1, optimizer="sgd", learning_rate=0.1, grad_scaler=scaler)
    over = nn.Linear(8, 1)
    nn.init.constant_(over.weight, 5.0)
    optimizer, before = torch.optim.SGD(over.parameters(), lr=1e-6), table.to_dense()
    for _ in range(40):
        optimizer.zero_grad()
        rows = table(torch.arange(9))
        with torch.autocast("cpu", torch.float16):
            loss = over(rows).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**14
    assert not torch.equal(table.to_dense(), before)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_any_memory_format_trains_the_same(optimizer: str) -> None:
    torch.manual_seed(0)
    table = TTEmbedding(60, 8, tt_ranks=4, std=1.0, optimizer=optimizer, learning_rate=0.1)
    other = copy.deepcopy(table).to(memory_format=torch.channels_last)
    for step in range(4):
        ids = torch.randint(0, 60, (20,), generator=torch.Generator().manual_seed(step))
        for one in (table, other):
            one(ids).square().mean().backward()
    for a, b in zip(table.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(b.contiguous(), a)


def test_states_that_are_written_to_in_place_count() -> None:
    torch.manual_seed(0)
    how: Any = {"tt_ranks": 4, "std": 1.0, "optimizer": "adam", "learning_rate": 0.1, "hot_rows": 2}
    table, other = TTEmbedding(60, 8, **how), TTEmbedding(60, 8, **how)
    table.pin_rows(torch.tensor([3]))
    for _ in range(5):
        table(torch.arange(9)).square().sum().backward()
    for own, given in zip(other.state_dict().values(), table.state_dict().values(), strict=True):
        own.copy_(given)
    for one in (table, other):
        one(torch.arange(9)).square().sum().backward()
    for own, given in zip(other.state_dict().values(), table.state_dict().values(), strict=True):
        assert torch.equal(own, given)


def test_gradients_that_are_not_finite_do_not_reach_the_cores() -> None:
    table = TTEmbedding(60, 8, tt_ranks=4, optimizer="sgd", hot_rows=1)
    table.pin_rows(torch.tensor([3]))
    kept = [core.detach().clone() for core in table.parameters()]
    upstream = torch.ones(4, 8)
    upstream[1, 2] = float("nan")
    with pytest.raises(TableError, match="numbers that are not finite, which every row would get through the cores"):
        table(torch.arange(4)).backward(upstream)
    assert all(torch.equal(a, b) for a, b in zip(table.parameters(), kept, strict=True))
    table(torch.arange(4)).sum().backward()
    assert not torch.equal(table.cores[0], kept[0])


def test_memory_of_products_belongs_to_the_table() -> None:
    table = TTEmbedding(10_000, 16, tt_ranks=8, optimizer="adagrad", hot_rows=5)
    held = sum(tensor.nbytes for tensor in (*table.parameters(), *table.buffers()))
    assert table.nbytes == held
    table(torch.arange(0, 10_000, 3)).sum().backward()
    kept = table.nbytes - held
    products = 4 * sum(
        prod(size) for size in product_sizes(levels_of(torch.arange(0, 10_000, 3), table.shape), table.shape)
    )
    assert products <= kept <= KEPT_SHARE * products
    table.eval()
    assert table.nbytes == held
    table(torch.arange(100)).sum().backward()  # a step without training mode keeps nothing
    assert table.nbytes == held
    table.train()
    table(torch.arange(100)).sum().backward()
    assert table.nbytes > held
    with torch.no_grad():
        copied = copy.deepcopy(table)
    assert copied.nbytes == held


def test_it_trains_as_a_part_of_a_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(TTEmbeddingBag(2000, 8, tt_ranks=8, std=0.3, mode="mean"), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    ids = torch.randint(0, 2000, (256, 6))
    labels = (ids.float().mean(1) > 1000).float()
    for _ in range(60):
        optimizer.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(model(ids).squeeze(1), labels)
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.3


def test_a_fused_table_is_looked_up_once_per_step() -> None:
    table = TTEmbedding(30, 8, tt_ranks=4, optimizer="sgd", std=1.0)
    ids = torch.arange(9)
    with pytest.raises(TableError, match="updated by its sgd optimizer between a lookup and its backward pass"):
        (table(ids).sum() + table(ids + 3).sum()).backward()


@each_backend
def test_a_frozen_table_stays_as_it_is(backend: str) -> None:
    table = TTEmbedding(30, 8, tt_ranks=4, optimizer="sgd", std=1.0, backend=backend)
    before = table.to_dense()
    head = nn.Linear(8, 1)
    table.requires_grad_(False)
    head(table(torch.arange(9))).sum().backward()
    assert torch.equal(table.to_dense(), before)
    assert not table(torch.arange(9)).requires_grad
    table.requires_grad_(True)
    head(table(torch.arange(9))).sum().backward()
    assert not torch.equal(table.to_dense(), before)


def test_states_stay_in_float32_and_start_anew() -> None:
    table = TTEmbedding(30, 8, tt_ranks=4, optimizer="adagrad", std=1.0).to(torch.bfloat16)
    table(torch.arange(9)).float().sum().backward()
    assert table.sum_0.dtype == torch.float32
    assert table.sum_0.any()
    table.decompose_(torch.randn(30, 8))
    assert not table.sum_0.any()


def test_cores_changed_between_forward_and_backward_are_noticed() -> None:
    table = TTEmbedding(30, 8, tt_ranks=4)
    found = table(torch.arange(9)).sum()
    with torch.no_grad():
        table.cores[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()


def test_second_derivatives_are_refused() -> None:
    table = TTEmbedding(30, 8, tt_ranks=4)
    gradients = torch.autograd.grad(table(torch.arange(9)).square().sum(), list(table.cores), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sum(gradient.square().sum() for gradient in gradients).backward()  # type: ignore[union-attr]


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_activation_checkpoints(optimizer: str | None) -> None:
    from torch.utils.checkpoint import checkpoint

    ids = torch.arange(50)
    tables = []
    for how in ({}, {"use_reentrant": False}, {"use_reentrant": True}):
        torch.manual_seed(0)
        table = TTEmbedding(1000, 16, tt_ranks=8, std=1.0, optimizer=optimizer)
        scale = torch.ones(1, requires_grad=True)
        work = lambda x, table=table: (table(ids) * x).square().sum()  # noqa: E731
        (checkpoint(work, scale, **how) if how else work(scale)).backward()
        tables.append(table)
    for other in tables[1:]:
        for a, b in zip(tables[0].cores, other.cores, strict=True):
            torch.testing.assert_close(b, a)
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(b.grad, a.grad)


@each_backend
def test_graphs_that_are_kept_and_saved_tensors_that_are_copied(backend: str) -> None:
    table = TTEmbedding(300, 16, tt_ranks=8, std=1.0, backend=backend)
    ids, other = torch.arange(50), torch.arange(30, 90)
    rows = table(ids)
    rows.square().sum().backward(retain_graph=True)
    once = [core.grad.clone() for core in table.cores if core.grad is not None]
    table(other).sum().backward()
    table.zero_grad()
    rows.square().sum().backward()
    for core, gradient in zip(table.cores, once, strict=True):
        torch.testing.assert_close(core.grad, gradient)
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            found = table(ids)
        table.zero_grad()
        found.square().sum().backward()
        for core, gradient in zip(table.cores, once, strict=True):
            torch.testing.assert_close(core.grad, gradient)


def test_gradients_that_arrive_sparse() -> None:
    torch.manual_seed(0)
    bags, rows = TTEmbeddingBag(100, 8, tt_ranks=2, mode="sum"), TTEmbedding(100, 8, tt_ranks=2)
    ids = torch.arange(6)
    for table, arguments, count in ((bags, (ids, torch.tensor([0, 3])), 2), (rows, (ids,), 6)):
        upstream = torch.zeros(count, 8)
        upstream[1] = torch.arange(8.0)
        found = []
        for gradient in (upstream, upstream.to_sparse(1)):
            table.zero_grad()
            table(*arguments).backward(gradient)
            found.append([core.grad.clone() for core in table.cores if core.grad is not None])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        assert found[0][0].any()


@pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
@pytest.mark.parametrize(("optimizer", "cores"), crossed([None, "sgd", "adagrad", "rowwise_adagrad"], [3, 4, 2]))
def test_segments_in_pieces(optimizer: str | None, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As sums of whole segments; most digits are one in common, others have no ids at all."""
    from flexshard.embeddings.tensor_train import triton_products

    table = TTEmbedding(60, 8, tt_ranks=3, cores=cores, std=1.0, optimizer=optimizer, backend="triton")
    other = copy.deepcopy(table)
    ids = torch.cat([torch.arange(0, 20), torch.tensor([21, 22, 40, 41, 59])])
    for one, piece in ((table, 1 << 20), (other, 2)):
        monkeypatch.setattr(triton_products, "_PIECE", piece)
        (one(ids) * torch.arange(8.0)).pow(2).sum().backward()
    for core, same in zip(table.cores, other.cores, strict=True):
        torch.testing.assert_close(same.detach(), core.detach(), rtol=1e-5, atol=1e-5)
        if optimizer is None:
            torch.testing.assert_close(same.grad, core.grad, rtol=1e-5, atol=1e-4)
