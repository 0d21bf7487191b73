"""Tensor-train tables against the dense product of their cores, autograd and torch's own modules."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from flexshard.embeddings import TTEmbedding, TTEmbeddingBag, TTShape
from flexshard.embeddings import _tt_function as module
from flexshard.embeddings._tt_rows import levels_of
from flexshard.errors import DataError, TableError

# "triton" is what runs on CUDA; without it, in Triton's interpreter, which is slow: small tables, few examples.
PATHS = ["numba", "torch", "triton"]


def take(path: str, patch: pytest.MonkeyPatch) -> None:
    """Compute by one path, whatever the device would choose."""
    if path != "torch":
        pytest.importorskip(path)
    patch.setattr(module, "_backend", lambda core, shape: path)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    take(request.param, monkeypatch)
    return str(request.param)


def dense(cores: list[torch.Tensor], rows: int) -> torch.Tensor:
    """The product of the cores, every row of it; differentiable."""
    table = cores[0].flatten(1).view(cores[0].shape[0], cores[0].shape[2], -1)
    for core in cores[1:]:
        table = torch.einsum("iqr,jrsk->ijqsk", table, core).flatten(0, 1).flatten(1, 2)
    return table.squeeze(2)[:rows]


SHAPES = st.integers(2, 4).flatmap(
    lambda d: st.tuples(
        st.lists(st.integers(1, 5), min_size=d, max_size=d),
        st.lists(st.integers(1, 3), min_size=d, max_size=d),
        st.integers(1, 4),
        st.integers(0, 3),
    )
)


BAGS = {
    "data": st.data(),
    "case": SHAPES,
    "mode": st.sampled_from(["sum", "mean"]),
    "layout": st.sampled_from(["offsets", "last", "2d"]),
}
Case = tuple[list[int], list[int], int, int]


@pytest.mark.parametrize("name", ["numba", "torch"])
@given(**BAGS)
@settings(max_examples=60)
def test_bags_are_those_of_the_dense_product_and_so_are_gradients(
    name: str, data: st.DataObject, case: Case, mode: str, layout: str
) -> None:
    check_bags(name, data, case, mode, layout)


@given(**BAGS)
@settings(max_examples=15)
def test_bags_are_those_of_the_dense_product_with_triton(
    data: st.DataObject, case: Case, mode: str, layout: str
) -> None:
    check_bags("triton", data, case, mode, layout)


def check_bags(name: str, data: st.DataObject, case: Case, mode: str, layout: str) -> None:
    p, q, rank, spare = case
    rows = max(prod(p) - spare, 1)
    with pytest.MonkeyPatch.context() as patch:
        take(name, patch)
        padding = data.draw(st.sampled_from([None, 0, rows - 1]))
        table = TTEmbeddingBag(
            rows,
            prod(q),
            mode=mode,
            ranks=rank,
            rows=p,
            dims=q,
            std=1.0,
            padding_idx=padding,
            include_last_offset=layout == "last",
        )
        cores = [core.detach().double().requires_grad_() for core in table.cores]
        lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
        if layout == "2d":
            lengths = [3] * len(lengths)
        count = sum(lengths)
        ids = torch.tensor(
            data.draw(st.lists(st.integers(0, rows - 1), min_size=count, max_size=count)), dtype=torch.long
        )
        ends = torch.cumsum(torch.tensor([0, *lengths]), 0)
        offsets = {"offsets": ends[:-1], "last": ends, "2d": None}[layout]
        given_ids = ids.view(-1, 3) if layout == "2d" else ids
        weights = None
        if mode == "sum" and data.draw(st.booleans()):
            weights = torch.rand(given_ids.shape, requires_grad=True)
        found = table(given_ids, offsets, weights)
        other = None if weights is None else weights.detach().double().requires_grad_()
        expected = functional.embedding_bag(
            given_ids,
            dense(cores, rows),
            offsets,
            mode=mode,
            per_sample_weights=other,
            include_last_offset=layout == "last",
            padding_idx=padding,
        )
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
        upstream = torch.randn(found.shape)
        found.backward(upstream)
        expected.backward(upstream.double())
        for own, core in zip(table.cores, cores, strict=True):
            gradient = torch.zeros_like(own) if own.grad is None else own.grad
            reference = torch.zeros_like(core) if core.grad is None else core.grad
            scale = max(float(reference.abs().max()), 1.0)
            torch.testing.assert_close(gradient.double() / scale, reference / scale, atol=1e-5, rtol=1e-5)
        if weights is not None and other is not None and count:
            assert weights.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(weights.grad.double(), other.grad, atol=1e-5, rtol=1e-5)


def test_sequences_are_nn_embeddings(path: str) -> None:
    table = TTEmbedding(1000, 16, ranks=5, std=1.0, padding_idx=-1)
    ids = torch.randint(0, 1000, (7, 3, 2))
    ids[0, 0, 0] = 999
    expected = table.to_dense()[ids]
    assert torch.allclose(table(ids), expected, atol=1e-6)
    assert torch.allclose(table.rows(ids), expected, atol=1e-6)
    table(torch.full((4,), 999)).sum().backward()  # the padding row alone
    assert all(core.grad is not None and not core.grad.any() for core in table.cores)
    assert table(torch.zeros(0, dtype=torch.long)).shape == (0, 16)


def test_dense_rows_are_the_product_of_the_slices() -> None:
    table = TTEmbedding(60, 12, rows=[3, 4, 5], dims=[2, 3, 2], ranks=[4, 5], std=1.0)
    torch.testing.assert_close(table.to_dense(), dense(list(table.cores), 60).detach(), atol=1e-6, rtol=1e-5)
    one, two, three = (core.detach() for core in table.cores)
    row = 2 * 20 + 1 * 5 + 3  # digits 2, 1, 3
    by_hand = torch.einsum("qr,rst,tu->qsu", one[2, 0], two[1], three[3, :, :, 0]).flatten()
    torch.testing.assert_close(table.to_dense()[row], by_hand, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rows", [(1 << 24) + 1, 39_979_771, 10**12])
def test_digits_are_exact_where_single_precision_is_not(rows: int) -> None:
    """The published code divides in float32, and maps 0.2 % of rows wrongly above 2^24."""
    shape = TTShape.choose(rows, 64, 8)
    generator = torch.Generator().manual_seed(0)
    ids = torch.unique(torch.cat([torch.randint(0, rows, (5000,), generator=generator), torch.tensor([0, rows - 1])]))
    levels = levels_of(ids, shape)
    p, level = shape.rows, levels.inner[0]
    digits = torch.cat([torch.full((end - start,), digit) for digit, start, end in level.runs])
    for n in range(0, ids.numel(), 97):
        i = int(ids[levels.place[n]])
        assert int(levels.digit[n]) == i % p[2]
        place = int(levels.parent[n])
        assert (int(level.parent[place]), int(digits[place])) == (i // p[2] // p[1], i // p[2] % p[1])
    wrong = (ids.float() / p[2]).floor().long() != ids // p[2]
    assert rows < 1 << 25 or wrong.any()  # what this test would catch


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_fused_updates_are_those_of_the_optimizer_after_backward(path: str, optimizer: str) -> None:
    torch.manual_seed(0)
    make: Any = lambda how: TTEmbeddingBag(  # noqa: E731
        500, 8, mode="sum", ranks=4, std=1.0, optimizer=how, learning_rate=0.1, eps=1e-8
    )
    fused, plain = make(optimizer), make(None)
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


def test_the_same_batch_gives_the_same_bits(path: str) -> None:
    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        rows = 200 if path == "triton" else 5000
        table = TTEmbedding(rows, 16, ranks=8)
        table(torch.randint(0, rows, (4 * rows // 5,))).sin().sum().backward()
        return [core.grad for core in table.cores if core.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))


def test_the_cores_give_the_table_the_deviation_asked_for() -> None:
    for cores in (2, 3, 4):
        table = TTEmbedding(20_000, 16, ranks=8, cores=cores, std=0.05)
        assert float(table.to_dense().std()) == pytest.approx(0.05, rel=0.25)
    assert float(TTEmbedding(30_000, 16, ranks=16).to_dense().std()) == pytest.approx((3 * 30_000) ** -0.5, rel=0.25)
    assert float(TTEmbedding(30_000, 16, ranks=16, optimizer="sgd").to_dense().std()) == pytest.approx(0.1, rel=0.25)


@pytest.mark.parametrize("cores", [2, 3, 4])
def test_a_tensor_train_is_found_again(cores: int) -> None:
    source = TTEmbedding(3000, 24, ranks=6, cores=cores, std=1.0)
    table = TTEmbedding(3000, 24, ranks=6, cores=cores)
    error = table.decompose_(source.to_dense())
    # Rows beyond E are zeros in the decomposition, which the source does not have, where factors do not divide E.
    if prod(source.shape.rows) == 3000:
        assert error < 1e-3
    full = TTEmbedding(24, 8, rows=[2, 3, 4], dims=[2, 2, 2], ranks=[4, 8])
    weight = torch.randn(24, 8)
    assert full.decompose_(weight) < 1e-3  # ranks as large as can be: nothing is lost
    torch.testing.assert_close(full.to_dense(), weight, atol=1e-4, rtol=1e-4)


def test_the_error_of_a_decomposition_is_the_tables() -> None:
    torch.manual_seed(0)
    weight = torch.randn(360, 8) @ torch.diag(torch.logspace(0, -3, 8))
    table = TTEmbedding(360, 8, ranks=6)
    error = table.decompose_(weight)
    actual = float((table.to_dense() - weight).norm() / weight.norm())
    assert 0.05 < error < 1
    assert actual == pytest.approx(error, rel=0.02)
    better = TTEmbedding(360, 8, ranks=20)
    assert better.decompose_(weight) < error


def test_checkpoints_are_state_dicts_of_the_cores() -> None:
    table = TTEmbeddingBag(1000, 16, ranks=4, optimizer="adagrad")
    table(torch.tensor([1, 2]), torch.tensor([0])).sum().backward()
    other = TTEmbeddingBag(1000, 16, ranks=4, optimizer="adagrad")
    other.load_state_dict(table.state_dict())
    assert torch.equal(other.to_dense(), table.to_dense())
    assert torch.equal(other.sum_0, table.sum_0)
    with pytest.raises(
        TableError, match=r"cores of shape \[.*, 5, .*\].* does not load into cores of shape \[.*, 4, .*\]"
    ):
        table.load_state_dict(TTEmbeddingBag(1000, 16, ranks=5).state_dict())


def test_bfloat16_cores() -> None:
    table = TTEmbeddingBag(1000, 16, ranks=8, mode="sum", std=1.0, dtype=torch.bfloat16)
    found = table(torch.arange(40).view(8, 5))
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    assert table.cores[0].grad is not None
    assert table.cores[0].grad.dtype == torch.bfloat16
    whole = TTEmbeddingBag(1000, 16, ranks=8, mode="sum", std=1.0)
    with torch.no_grad():
        for a, b in zip(whole.cores, table.cores, strict=True):
            a.copy_(b)
    torch.testing.assert_close(found.float(), whole(torch.arange(40).view(8, 5)), atol=0.1, rtol=0.05)


def test_factors_are_chosen() -> None:
    shape = TTShape.choose(10_000_000, 64, 64)
    assert shape.dims == (4, 4, 4)
    assert prod(shape.rows) >= 10_000_000
    assert prod(shape.rows) < 1.02 * 10_000_000
    assert max(shape.rows) < 1.1 * min(shape.rows)
    assert TTShape.choose(10, 128, 4).dims == (4, 8, 4)
    assert TTShape.choose(100, 17, 4, cores=2).dims in {(17, 1), (1, 17)}
    assert TTShape.choose(1, 1, 1).parameters == 3
    # Measured beside the paper: 189 times for E = 10^7, D = 64, R = 64.
    assert TTShape.choose(10_000_000, 64, 64, rows=(200, 200, 250)).compression == pytest.approx(189, rel=0.01)


@given(st.integers(1, 10**12), st.integers(2, 4))
@settings(max_examples=100, deadline=None)
def test_factors_of_rows_cover_the_table(rows: int, cores: int) -> None:
    shape = TTShape.choose(rows, 8, 2, cores=cores)
    assert prod(shape.rows) >= rows
    assert prod(shape.rows) <= rows * 2 or rows < 10**4


def test_arguments_that_cannot_be() -> None:
    for message, how in {
        r"factors \(2, 3, 4\) cover 24 rows only": {"rows": [2, 3, 4]},
        r"factors \(2, 2, 2\) of the dimension multiply to 8": {"dims": [2, 2, 2]},
        "rank 99 between cores 1 and 2 is above": {"ranks": [99, 4]},
        "2, 3 or 4 cores, found 5": {"cores": 5},
        "ranks must be at least 1, found 0": {"ranks": 0},
        "optimizer is one of sgd, adagrad, rowwise_adagrad or None, found 'adam'": {"optimizer": "adam"},
        "cores are float32 or bfloat16": {"dtype": torch.float16},
        "padding_idx must be within the 1,000 rows, found 1000": {"padding_idx": 1000},
    }.items():
        with pytest.raises(TableError, match=message):
            TTEmbedding(1000, 16, **how)  # type: ignore[arg-type]
    with pytest.raises(TableError, match="mode is 'sum' or 'mean', found 'max'"):
        TTEmbeddingBag(1000, 16, mode="max")
    table = TTEmbeddingBag(1000, 16, mode="sum")
    ids = torch.tensor([1, 2, 3])
    for message, call in {
        "id 1000 is outside the table's rows, 0 to 999": lambda: table(torch.tensor([[1000]])),
        "id -1 is outside": lambda: table(torch.tensor([[-1]])),
        "ids are whole numbers, found torch.float32": lambda: table(torch.rand(2, 2)),
        "offsets decrease from 2 to 1 after bag 1": lambda: table(ids, torch.tensor([0, 2, 1])),
        "offsets start at 0": lambda: table(ids, torch.tensor([1])),
        "the last offset is 4, but there are 3 ids": lambda: table(ids, torch.tensor([0, 4])),
        "need offsets": lambda: table(ids),
        "take no offsets": lambda: table(ids[None], torch.tensor([0])),
        r"per_sample_weights have shape \(2,\), ids \(3,\)": lambda: table(ids, torch.tensor([0]), torch.rand(2)),
    }.items():
        with pytest.raises(DataError, match=message):
            call()
    broken = torch.zeros(1000, 16)
    broken[7, 3] = float("nan")
    with pytest.raises(TableError, match="nan in row 7, column 3"):
        table.decompose_(broken)
    with pytest.raises(TableError, match=r"has shape \(1000, 16\), found \(5, 16\)"):
        table.decompose_(torch.zeros(5, 16))


def test_it_trains_as_a_part_of_a_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(TTEmbeddingBag(2000, 8, ranks=8, std=0.3, mode="mean"), nn.Linear(8, 1))
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
    table = TTEmbedding(30, 8, ranks=4, optimizer="sgd", std=1.0)
    ids = torch.arange(9)
    with pytest.raises(TableError, match="updated by its sgd optimizer between a lookup and its backward pass"):
        (table(ids).sum() + table(ids + 3).sum()).backward()


def test_cores_changed_between_forward_and_backward_are_noticed() -> None:
    table = TTEmbedding(30, 8, ranks=4)
    found = table(torch.arange(9)).sum()
    with torch.no_grad():
        table.cores[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()


def test_second_derivatives_are_refused() -> None:
    table = TTEmbedding(30, 8, ranks=4)
    gradients = torch.autograd.grad(table(torch.arange(9)).square().sum(), list(table.cores), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sum(gradient.square().sum() for gradient in gradients).backward()  # type: ignore[union-attr]


def test_a_frozen_table_stays_as_it_is(path: str) -> None:
    table = TTEmbedding(30, 8, ranks=4, optimizer="sgd", std=1.0)
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
    table = TTEmbedding(30, 8, ranks=4, optimizer="adagrad", std=1.0).to(torch.bfloat16)
    table(torch.arange(9)).float().sum().backward()
    assert table.sum_0.dtype == torch.float32
    assert table.sum_0.any()
    table.decompose_(torch.randn(30, 8))
    assert not table.sum_0.any()


def test_weights_and_autocast(path: str) -> None:
    table = TTEmbeddingBag(30, 8, ranks=4, mode="sum", dtype=torch.bfloat16)
    found = table(torch.arange(9), torch.tensor([0, 4]), torch.rand(9))
    assert found.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        TTEmbedding(30, 8, ranks=4)(torch.arange(9)).sum().backward()
    none = TTEmbeddingBag(30, 8, ranks=4)(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    assert none.shape == (0, 8)


def test_the_error_is_of_the_tables_own_rows() -> None:
    torch.manual_seed(0)
    weight = torch.randn(13, 1)
    table = TTEmbedding(13, 1, ranks=2, cores=2)
    error = table.decompose_(weight)
    assert error == pytest.approx(float((table.to_dense() - weight).norm() / weight.norm()), rel=1e-4)


# -- hot rows


@pytest.mark.parametrize("optimizer", [None, "sgd", "adagrad", "rowwise_adagrad"])
def test_a_row_is_trained_in_one_place(optimizer: str | None) -> None:
    torch.manual_seed(0)
    table = TTEmbeddingBag(
        900, 8, mode="sum", ranks=4, std=1.0, optimizer=optimizer, learning_rate=0.1, hot_rows=6, padding_idx=3
    )
    before = table.to_dense()
    table.hold(torch.tensor([40, 3, 7, 40]))
    assert table.hot is not None
    assert table.hot.held.tolist() == [3, 7, 40]
    assert torch.equal(table.to_dense(), before)
    params = [*table.cores, table.hot.rows]

    def step(ids: list[int]) -> torch.Tensor:
        """What a step on some ids changes; shape (E,)."""
        own = None if optimizer else torch.optim.SGD(table.parameters(), lr=0.1)
        old = table.to_dense()
        table.zero_grad()
        table(torch.tensor(ids), torch.tensor([0, 2])).square().sum().backward()
        if own is not None:
            own.step()
        return (table.to_dense() - old).abs().sum(1) > 0

    cores = [core.detach().clone() for core in table.cores]
    changed = step([7, 40, 7, 3])
    assert changed.nonzero().flatten().tolist() == [7, 40]  # 3 is left out of bags
    assert all(torch.equal(core, old) for core, old in zip(table.cores, cores, strict=True))
    rows = table.hot.rows.detach().clone()
    changed = step([8, 100])
    assert changed[8]
    assert changed[100]
    assert torch.equal(table.hot.rows, rows)
    assert all(param.grad is None for param in params) == (optimizer is not None)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_hot_rows_take_the_steps_of_a_dense_table(optimizer: str) -> None:
    """All rows are hot, so the table is a dense one."""
    torch.manual_seed(0)
    table = TTEmbedding(20, 4, ranks=2, std=1.0, optimizer=optimizer, learning_rate=0.1, hot_rows=20)
    table.hold(torch.arange(20))
    dense_rows = table.to_dense().clone()
    sums = torch.zeros(20, 4)
    for _ in range(3):
        ids = torch.randint(0, 20, (30,))
        weight = dense_rows.clone().requires_grad_()
        weight[ids].pow(3).sum().backward()
        table(ids).pow(3).sum().backward()
        gradient = weight.grad
        assert gradient is not None
        if optimizer == "sgd":
            dense_rows -= 0.1 * gradient
            continue
        sums += gradient**2 if optimizer == "adagrad" else (gradient**2).mean(1, keepdim=True)
        dense_rows -= 0.1 * gradient / (sums.sqrt() + 1e-8)
    torch.testing.assert_close(table.to_dense(), dense_rows, atol=1e-5, rtol=1e-5)


def test_hot_rows_follow_the_tables_learning_rate() -> None:
    table = TTEmbedding(20, 4, ranks=2, std=1.0, optimizer="sgd", learning_rate=0.1, hot_rows=1)
    table.hold(torch.tensor([3]))
    for rate in (0.1, 0.01):  # a schedule sets it
        table.learning_rate = rate
        before = table.rows(torch.tensor([3])).detach()
        table(torch.tensor([3])).sum().backward()
        torch.testing.assert_close(before - table.rows(torch.tensor([3])).detach(), torch.full((1, 4), rate))


def test_hot_rows_are_folded_back() -> None:
    torch.manual_seed(0)
    table = TTEmbedding(3000, 8, ranks=16, std=1.0, hot_rows=50, padding_idx=1)
    hot = torch.arange(0, 500, 10)
    table.hold(hot)
    assert table.hot is not None
    with torch.no_grad():
        table.hot.rows += 0.5 * torch.randn_like(table.hot.rows)
    wanted, others = table.rows(hot).detach(), table.to_dense()
    found = table.fold(steps=200)
    assert found.before > 0.3
    assert found.after < 0.1 * found.before
    assert found.others < 0.1
    assert table.hot.held.numel() == 0
    error = (table.rows(hot).detach() - wanted).norm() / wanted.norm()
    assert float(error) == pytest.approx(found.after, rel=1e-3)
    still = torch.ones(3000, dtype=torch.bool)
    still[hot] = False
    assert float((table.to_dense() - others)[still].norm() / others[still].norm()) < 0.3


def test_what_leaves_the_hot_rows_is_folded_and_what_stays_is_kept() -> None:
    torch.manual_seed(0)
    table = TTEmbedding(500, 8, ranks=8, std=1.0, hot_rows=4, optimizer="adagrad", learning_rate=0.1)
    table.hold(torch.tensor([1, 2, 3]))
    assert table.hot is not None
    table(torch.tensor([1, 2, 3, 3])).sum().backward()
    rows, sums = table.rows(torch.tensor([2, 3])), table.hot.sums.clone()
    places = table.hot.find(torch.tensor([2, 3]))[1]
    found = table.hold(torch.tensor([2, 3, 400]))
    assert found is not None
    assert found.after <= found.before
    assert torch.equal(table.rows(torch.tensor([2, 3])), rows)
    assert torch.equal(table.hot.find(torch.tensor([2, 3]))[1], places), "what stays, stays in its place"
    assert torch.equal(table.hot.sums[places], sums[places])
    assert table.hot.sums.any(1).sum() == 2
    again = TTEmbedding(500, 8, ranks=8, hot_rows=4, optimizer="adagrad")
    again.load_state_dict(table.state_dict())
    assert torch.equal(again.to_dense(), table.to_dense())
    table.decompose_(torch.randn(500, 8))
    assert table.hot.held.numel() == 0
    with pytest.raises(TableError, match="5 rows to hold are more than hot_rows=4"):
        table.hold(torch.arange(5))
    with pytest.raises(TableError, match="must be held"):
        table.fold(torch.tensor([9]))
    with pytest.raises(DataError, match="id 500 is outside"):
        table.hold(torch.tensor([500]))
    with pytest.raises(TableError, match="more than hot_rows=0"):
        TTEmbedding(500, 8, ranks=8).hold(torch.tensor([1]))


def test_a_lookup_is_of_one_state_of_the_hot_rows() -> None:
    for optimizer in (None, "sgd"):
        table = TTEmbedding(1000, 16, ranks=8, std=1.0, hot_rows=4, optimizer=optimizer)
        table.hold(torch.tensor([5]))
        rows = table(torch.tensor([5]))
        table.hold(torch.tensor([3, 5]))
        with pytest.raises(TableError, match="hot rows were changed between a lookup and its backward pass"):
            rows.sum().backward()
    table = TTEmbedding(1000, 16, ranks=8, std=1.0, hot_rows=4, optimizer="adagrad")
    table.hold(torch.tensor([5]))
    first, second = table(torch.tensor([5])), table(torch.tensor([5]))
    first.sum().backward()
    assert table.hot is not None
    rows = table.hot.rows.detach().clone()
    with pytest.raises(TableError, match="look up all ids of a step at once"):
        second.sum().backward()
    assert torch.equal(table.hot.rows, rows)


# -- what autograd can do with a lookup


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_activation_checkpoints(optimizer: str | None) -> None:
    from torch.utils.checkpoint import checkpoint

    ids = torch.arange(50)
    tables = []
    for how in ({}, {"use_reentrant": False}, {"use_reentrant": True}):
        torch.manual_seed(0)
        table = TTEmbedding(1000, 16, ranks=8, std=1.0, optimizer=optimizer)
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


def test_graphs_that_are_kept_and_saved_tensors_that_are_copied(path: str) -> None:
    table = TTEmbedding(300, 16, ranks=8, std=1.0)
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
    bags, rows = TTEmbeddingBag(100, 8, ranks=2, mode="sum"), TTEmbedding(100, 8, ranks=2)
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


def test_cores_in_any_layout_and_frozen_ones(path: str) -> None:
    torch.manual_seed(0)
    table = TTEmbedding(90, 24, rows=[3, 5, 6], dims=[2, 3, 4], ranks=4, std=1.0)
    expected = dense([core.detach() for core in table.cores], 90)
    table.to(memory_format=torch.channels_last)
    torch.testing.assert_close(table(torch.arange(90)).detach(), expected, atol=1e-5, rtol=1e-5)
    for optimizer in ("sgd", "adagrad", "rowwise_adagrad"):
        fused = TTEmbedding(50, 4, ranks=2, std=1.0, optimizer=optimizer, learning_rate=0.1)
        fused.cores[0].requires_grad_(False)
        before = [core.detach().clone() for core in fused.cores]
        fused(torch.arange(6)).sum().backward()
        changed = [not torch.equal(core, old) for core, old in zip(fused.cores, before, strict=True)]
        assert changed == [False, True, True]


def test_a_row_that_stays_hot_keeps_what_torchs_optimizer_remembers_of_it() -> None:
    torch.manual_seed(0)
    table = TTEmbedding(1000, 16, ranks=8, std=1.0, hot_rows=4)
    optimizer = torch.optim.Adam(table.parameters(), lr=0.1)
    table.hold(torch.tensor([5, 9]))
    for _ in range(5):
        optimizer.zero_grad()
        table(torch.tensor([5])).sum().backward()
        optimizer.step()
    table.hold(torch.tensor([3, 5]))
    before = table.rows(torch.tensor([3, 5])).detach()
    optimizer.zero_grad()
    (0 * table(torch.tensor([3, 5]))).sum().backward()
    optimizer.step()
    moved = (table.rows(torch.tensor([3, 5])) - before).abs().mean(1)
    assert moved[1] > 0.05  # Adam's momentum goes on with the row it is of
    assert moved[0] < 1e-6


def test_the_padding_row_is_zeros_and_stays_so() -> None:
    table = TTEmbedding(100, 8, ranks=2, std=1.0, padding_idx=7, optimizer="sgd", learning_rate=0.1)
    for _ in range(2):
        assert not table(torch.tensor([7, 7])).any()
        assert not table.to_dense()[7].any()
        table(torch.arange(20)).sum().backward()


@given(st.sampled_from([2, 3, 4]), st.integers(1, 5), st.lists(st.integers(0, 59), min_size=1, max_size=30))
@settings(max_examples=30)
def test_sequences_have_the_gradients_of_the_dense_product(cores: int, rank: int, ids: list[int]) -> None:
    torch.manual_seed(len(ids))
    for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        table = TTEmbedding(60, 12, ranks=rank, cores=cores, std=1.0, dtype=dtype)
        reference = [core.detach().double().requires_grad_() for core in table.cores]
        upstream = torch.randn(len(ids), 12).to(dtype)
        table(torch.tensor(ids)).backward(upstream)
        dense(reference, 60)[torch.tensor(ids)].backward(upstream.double())
        for own, core in zip(table.cores, reference, strict=True):
            assert own.grad is not None
            assert core.grad is not None
            scale = max(float(core.grad.abs().max()), 1.0)
            torch.testing.assert_close(own.grad.double() / scale, core.grad / scale, atol=close, rtol=close)


def test_the_large_unfolding_is_not_formed() -> None:
    """Blocks of it give what all of it gives, whichever side is the short one, and rows beyond E are zeros."""
    torch.manual_seed(0)
    from flexshard.embeddings import _tt_decompose

    for rows, dims, factors in ((119, [2, 3, 2], [4, 5, 6]), (119, [6, 2], [60, 2]), (23, [2, 2, 2, 2], [2, 3, 2, 2])):
        weight = torch.randn(rows, prod(dims))
        full = TTShape.choose(rows, prod(dims), 10**6, rows=factors, dims=dims)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_tt_decompose, "_CHUNK_NUMBERS", 16)
            cores, error = _tt_decompose.decompose(weight, full)
        assert error < 1e-3
        torch.testing.assert_close(dense(cores, rows), weight, atol=1e-4, rtol=1e-4)


def test_values_that_cannot_be_taken() -> None:
    for wrong, message in (
        ({"optimizer": "adagrad", "eps": 0.0}, "eps must be above 0"),
        ({"learning_rate": -1.0}, "learning_rate must be at least 0"),
        ({"std": -1.0}, "std must be at least 0"),
        ({"device": "meta"}, "device 'meta' has none"),
        ({"rows": "999"}, "whole number"),
        ({"rows": (None, 10, 10)}, "whole number"),
    ):
        arguments: Any = wrong
        with pytest.raises(TableError, match=message):
            TTEmbedding(1000, 16, **arguments)
    table: Any = TTEmbeddingBag(1000, 16, ranks=2, mode="sum", max_norm=None, sparse=False)
    for name, value in {"max_norm": 1.0, "sparse": True, "scale_grad_by_freq": True, "norm_type": 1.0}.items():
        arguments = {name: value}
        with pytest.raises(TableError, match=f"{name}=.* is not for tensor trains"):
            TTEmbeddingBag(1000, 16, ranks=2, **arguments)
    ids = torch.arange(4)
    for offsets, weights in (([0, 2], None), (torch.tensor([0j]), None), (torch.tensor([0]), [1.0] * 4)):
        with pytest.raises(DataError, match=r"are a tensor|are whole numbers"):
            table(ids, offsets, weights)
    with pytest.raises(TableError, match="a table to decompose is a tensor"):
        table.decompose_([[1.0]])
    for ids in ([1, 2], torch.tensor([1 + 2j])):
        with pytest.raises(DataError, match="ids are"):
            table(ids, torch.tensor([0])) if isinstance(ids, list) else table.rows(ids)
