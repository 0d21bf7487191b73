"""Lookups in tensor-train tables against the dense product of their cores."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional

from flexshard.embeddings import TTEmbedding, TTEmbeddingBag, TTShape
from flexshard.embeddings.tensor_train.core_optimizer import FUSED
from flexshard.embeddings.tensor_train.products import levels_of
from flexshard.errors import DataError, TableError
from tests.embeddings.tensor_train.products import dense, each_backend
from tests.host_waits import HostWaits, as_on_cuda
from tests.slow import first

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


@pytest.mark.parametrize("backend", ["numba", "torch"])
@given(**BAGS)
@settings(max_examples=60)
def test_bags_are_those_of_the_dense_product_and_so_are_gradients(
    backend: str, data: st.DataObject, case: Case, mode: str, layout: str
) -> None:
    check_bags(backend, data, case, mode, layout)


@given(**BAGS)
@settings(max_examples=15)
def test_bags_are_those_of_the_dense_product_with_triton(
    data: st.DataObject, case: Case, mode: str, layout: str
) -> None:
    check_bags("triton", data, case, mode, layout)


@given(**BAGS)
@settings(max_examples=15)
def test_bags_are_those_of_the_dense_product_without_a_wait(
    data: st.DataObject, case: Case, mode: str, layout: str
) -> None:
    with as_on_cuda():
        check_bags("triton", data, case, mode, layout, validate=False)


def check_bags(backend: str, data: st.DataObject, case: Case, mode: str, layout: str, *, validate: bool = True) -> None:
    p, q, rank, spare = case
    pytest.importorskip(backend)
    rows = max(prod(p) - spare, 1)
    padding = data.draw(st.sampled_from([None, 0, rows - 1]))
    table = TTEmbeddingBag(
        rows,
        prod(q),
        mode=mode,
        tt_ranks=rank,
        row_factors=p,
        dim_factors=q,
        std=1.0,
        padding_idx=padding,
        include_last_offset=layout == "last",
        backend=backend,
        validate=validate,
    )
    cores = [core.detach().double().requires_grad_() for core in table.cores]
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    if layout == "2d":
        lengths = [3] * len(lengths)
    count = sum(lengths)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=count, max_size=count)), dtype=torch.long)
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


@each_backend
def test_sequences_are_nn_embeddings(backend: str) -> None:
    table = TTEmbedding(1000, 16, tt_ranks=5, std=1.0, padding_idx=-1, backend=backend)
    ids = torch.randint(0, 1000, (7, 3, 2))
    ids[0, 0, 0] = 999
    expected = table.to_dense()[ids]
    assert torch.allclose(table(ids), expected, atol=1e-6)
    assert torch.allclose(table.rows(ids), expected, atol=1e-6)
    table(torch.full((4,), 999)).sum().backward()  # the padding row alone
    assert all(core.grad is not None and not core.grad.any() for core in table.cores)
    assert table(torch.zeros(0, dtype=torch.long)).shape == (0, 16)


@given(st.sampled_from([2, 3, 4]), st.integers(1, 5), st.lists(st.integers(0, 59), min_size=1, max_size=30))
@settings(max_examples=30)
def test_sequences_have_the_gradients_of_the_dense_product(cores: int, rank: int, ids: list[int]) -> None:
    torch.manual_seed(len(ids))
    for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        table = TTEmbedding(60, 12, tt_ranks=rank, cores=cores, std=1.0, dtype=dtype)
        reference = [core.detach().double().requires_grad_() for core in table.cores]
        upstream = torch.randn(len(ids), 12).to(dtype)
        table(torch.tensor(ids)).backward(upstream)
        dense(reference, 60)[torch.tensor(ids)].backward(upstream.double())
        for own, core in zip(table.cores, reference, strict=True):
            assert own.grad is not None
            assert core.grad is not None
            scale = max(float(core.grad.abs().max()), 1.0)
            torch.testing.assert_close(own.grad.double() / scale, core.grad / scale, atol=close, rtol=close)


def test_dense_rows_are_the_product_of_the_slices() -> None:
    table = TTEmbedding(60, 12, row_factors=[3, 4, 5], dim_factors=[2, 3, 2], tt_ranks=[4, 5], std=1.0)
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
    p, level = shape.row_factors, levels.inner[0]
    digits = torch.cat([torch.full((end - start,), digit) for digit, start, end in level.runs])
    for n in range(0, ids.numel(), 97):
        i = int(ids[levels.row_index[n]])
        assert int(levels.digit[n]) == i % p[2]
        place = int(levels.parent[n])
        assert (int(level.parent[place]), int(digits[place])) == (i // p[2] // p[1], i // p[2] % p[1])
    wrong = (ids.float() / p[2]).floor().long() != ids // p[2]
    assert rows < 1 << 25 or wrong.any()  # what this test would catch


@each_backend
def test_the_same_batch_gives_the_same_bits(backend: str) -> None:
    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        rows = 200 if backend == "triton" else 5000
        table = TTEmbedding(rows, 16, tt_ranks=8, backend=backend)
        table(torch.randint(0, rows, (4 * rows // 5,))).sin().sum().backward()
        return [core.grad for core in table.cores if core.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))


def test_bfloat16_cores() -> None:
    table = TTEmbeddingBag(1000, 16, tt_ranks=8, mode="sum", std=1.0, dtype=torch.bfloat16)
    found = table(torch.arange(40).view(8, 5))
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    assert table.cores[0].grad is not None
    assert table.cores[0].grad.dtype == torch.bfloat16
    whole = TTEmbeddingBag(1000, 16, tt_ranks=8, mode="sum", std=1.0)
    with torch.no_grad():
        for a, b in zip(whole.cores, table.cores, strict=True):
            a.copy_(b)
    torch.testing.assert_close(found.float(), whole(torch.arange(40).view(8, 5)), atol=0.1, rtol=0.05)


@each_backend
def test_weights_and_autocast(backend: str) -> None:
    table = TTEmbeddingBag(30, 8, tt_ranks=4, mode="sum", dtype=torch.bfloat16, backend=backend)
    found = table(torch.arange(9), torch.tensor([0, 4]), torch.rand(9))
    assert found.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        TTEmbedding(30, 8, tt_ranks=4, backend=backend)(torch.arange(9)).sum().backward()
    none = TTEmbeddingBag(30, 8, tt_ranks=4, backend=backend)(
        torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    )
    assert none.shape == (0, 8)


@each_backend
def test_cores_in_any_layout_and_frozen_ones(backend: str) -> None:
    torch.manual_seed(0)
    table = TTEmbedding(90, 24, row_factors=[3, 5, 6], dim_factors=[2, 3, 4], tt_ranks=4, std=1.0, backend=backend)
    expected = dense([core.detach() for core in table.cores], 90)
    table.to(memory_format=torch.channels_last)
    torch.testing.assert_close(table(torch.arange(90)).detach(), expected, atol=1e-5, rtol=1e-5)
    for optimizer in ("sgd", "adagrad", "rowwise_adagrad"):
        fused = TTEmbedding(50, 4, tt_ranks=2, std=1.0, optimizer=optimizer, learning_rate=0.1, backend=backend)
        fused.cores[0].requires_grad_(False)
        before = [core.detach().clone() for core in fused.cores]
        fused(torch.arange(6)).sum().backward()
        changed = [not torch.equal(core, old) for core, old in zip(fused.cores, before, strict=True)]
        assert changed == [False, True, True]


def test_the_padding_row_is_zeros_and_stays_so() -> None:
    table = TTEmbedding(100, 8, tt_ranks=2, std=1.0, padding_idx=7, optimizer="sgd", learning_rate=0.1)
    for _ in range(2):
        assert not table(torch.tensor([7, 7])).any()
        assert not table.to_dense()[7].any()
        table(torch.arange(20)).sum().backward()


@pytest.mark.parametrize("cores", [2, 3, 4])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_lookup_waits_for_its_sizes_alone(cores: int, pinned: bool) -> None:
    """On a device: once, once more for offsets, and for pinned rows; never without validation."""
    how: dict[str, Any] = {"tt_ranks": 4, "cores": cores, "std": 1.0, "padding_idx": 7}
    how |= {"backend": "triton" if cores == 3 else None, "hot_rows": 20 if pinned else 0}
    tables = [TTEmbeddingBag(400, 16, mode="sum", validate=validate, **how) for validate in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    generator = torch.Generator().manual_seed(cores)
    ids = torch.randint(0, 400, (60,), generator=generator)
    ids[3] = 7
    offsets = torch.tensor([0, 10, 10, 45])
    for table in tables:
        if pinned:
            table.pin_rows(torch.cat([ids[:8], torch.tensor([7])]))
        expected = table(ids, offsets)
        expected.sum().backward()
        gradients = [core.grad for core in table.cores]
        table.zero_grad()
        with as_on_cuda(), HostWaits() as counter:
            found = table(ids, offsets)
            found.sum().backward()
        torch.testing.assert_close(found, expected)
        for core, gradient in zip(table.cores, gradients, strict=True):
            torch.testing.assert_close(core.grad, gradient)
        if cores == 3:  # elsewhere CPUs compute, by loops of their own
            assert counter.counts == ({"numpy": 2 + pinned} if table.validate else {})
        on_device = cores == 3 and not table.validate
        for outside in (400, -1, (1 << 63) - 1):
            what = "an id is outside its table" if on_device else f"id {outside} is outside"
            with as_on_cuda(), pytest.raises(RuntimeError if on_device else DataError, match=what):
                table(torch.tensor([outside, 2]), torch.tensor([0]))
        with as_on_cuda():
            assert table(torch.zeros(0, dtype=torch.long), torch.tensor([0, 0])).tolist() == [[0.0] * 16] * 2


@pytest.mark.parametrize(
    "case",
    first(1, [(3, None), (4, "rowwise_adagrad"), (3, "sgd"), (2, "adam"), *((3, name) for name in FUSED[1:])]),
)
def test_steps_without_waits_are_the_same_steps(case: tuple[int, str | None]) -> None:
    """With pinned rows and a padding row, ids several times, batches of other sizes; cores, pinned rows, states."""
    pytest.importorskip("triton")
    cores, optimizer = case
    how: dict[str, Any] = {"tt_ranks": 3, "cores": cores, "std": 1.0, "padding_idx": 7, "hot_rows": 20}
    how |= {"optimizer": optimizer, "backend": "triton"}
    tables = [TTEmbedding(400, 8, validate=validate, **how) for validate in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    generator = torch.Generator().manual_seed(cores)
    waits: list[int] = []
    for number in (60, 520, 1, 0):
        ids = torch.randint(0, 400, (number,), generator=generator) ** 2 // 400
        upstream = torch.randn(number, 8, generator=generator)
        found = []
        for table in tables:
            if number == 60:
                table.pin_rows(torch.cat([ids[:8], torch.tensor([7])]))
            with as_on_cuda(), HostWaits() as counter:
                found.append(table(ids))
                found[-1].backward(upstream)
            waits.append(counter.counts.total())
        torch.testing.assert_close(found[1], found[0])
        for (name, own), other in zip(tables[1].named_parameters(), tables[0].parameters(), strict=True):
            torch.testing.assert_close(own, other, msg=name)
            if optimizer is None:
                torch.testing.assert_close(own.grad, other.grad, msg=name)
        for name, state in tables[1].state_dict().items():
            torch.testing.assert_close(state, tables[0].state_dict()[name], msg=name)
    assert waits[1] <= (2 if optimizer == "adam" else 0)  # its numbers of steps were loaded
    assert not any(waits[3::2])
    assert any(waits[::2])


def test_slices_of_the_padding_row_alone_move_without_waits_as_with_them() -> None:
    """Adam moves slices that were read, whatever their gradient."""
    pytest.importorskip("triton")
    how: dict[str, Any] = {"tt_ranks": 2, "row_factors": [3, 3, 3], "dim_factors": [2, 2, 2], "std": 1.0}
    how |= {"padding_idx": 26, "optimizer": "adam", "learning_rate": 0.1, "backend": "triton"}
    tables = [TTEmbedding(27, 8, validate=validate, **how) for validate in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    for ids in ([25], [0, 26], [26, 26]):  # 25 has the digits 2, 2, 1; 26 has 2, 2, 2
        for table in tables:
            with as_on_cuda():
                table(torch.tensor(ids)).sum().backward()
    for own, other in zip(tables[1].cores, tables[0].cores, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("backend", first(1, ["torch", None]))
def test_double_precision_is_computed_in_double_precision(backend: str | None) -> None:
    torch.manual_seed(0)
    table = TTEmbeddingBag(120, 12, tt_ranks=5, mode="sum", dtype=torch.float64, std=1.0, backend=backend)
    cores = [core.detach().clone().requires_grad_() for core in table.cores]
    ids, offsets = torch.randint(0, 120, (30,)), torch.arange(0, 30, 3)
    whole = torch.einsum("iaxr,jrys,kszb->ijkxyz", *cores).reshape(-1, 12)[:120]
    found, expected = table(ids, offsets), functional.embedding_bag(ids, whole, offsets, mode="sum")
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    found.sin().sum().backward()
    expected.sin().sum().backward()
    for own, core in zip(table.cores, cores, strict=True):
        torch.testing.assert_close(own.grad, core.grad, rtol=1e-11, atol=1e-12)
    later = TTEmbedding(60, 8, tt_ranks=4, optimizer="adagrad", hot_rows=2).double()
    later.pin_rows(torch.tensor([1]))
    later(torch.arange(9)).sum().backward()
    assert later.sum_0.dtype == torch.float64
    assert later(torch.arange(2)).dtype == torch.float64


def test_tables_without_numbers_get_them_later() -> None:
    how: Any = {"tt_ranks": 4, "optimizer": "adam", "hot_rows": 3}
    table = TTEmbedding(60, 8, device="meta", **how)
    assert all(parameter.is_meta for parameter in table.parameters())
    model = nn.Sequential(table).to_empty(device="cpu")
    table.reset_parameters(0.5)
    assert abs(float(table.to_dense().std()) - 0.5) < 0.2
    assert not any(state.any() for name, state in model.named_buffers() if "exp_avg" in name)
    table.pin_rows(torch.tensor([4, 5]))
    table(torch.arange(9)).sum().backward()
    other = TTEmbedding(60, 8, **how)
    other.load_state_dict(table.state_dict())
    assert torch.equal(other.to_dense(), table.to_dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("ours", "theirs"), [(TTEmbedding, torch.nn.Embedding), (TTEmbeddingBag, torch.nn.EmbeddingBag)]
)
def test_from_pretrained_is_as_torchs(ours: Any, theirs: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dense, ids = torch.randn(12, 4).to(dtype), torch.tensor([[3, 1], [0, 3]])
    table = ours.from_pretrained(dense, tt_ranks=12, padding_idx=np.int64(1)) if ours is TTEmbeddingBag else None
    if ours is TTEmbedding:  # torch reads that row as it is
        with pytest.raises(TableError, match="the row of padding_idx 1 has numbers, and would read as zeros"):
            ours.from_pretrained(dense, tt_ranks=12, padding_idx=1)
        dense[1] = 0.0
        table = ours.from_pretrained(dense, tt_ranks=12, padding_idx=1)
    expected = theirs.from_pretrained(dense, padding_idx=1)
    found = table(ids)
    assert found.dtype == expected(ids).dtype
    torch.testing.assert_close(found, expected(ids), atol=0.05 if dtype == torch.bfloat16 else 1e-5, rtol=0.02)
    assert {one.dtype for one in table.parameters()} == {dtype}
    assert not any(one.requires_grad for one in table.parameters())
    with pytest.raises(TableError, match=r"found torch\.float16; dtype= says which they are"):
        ours.from_pretrained(dense.half(), tt_ranks=12)


def test_from_pretrained_and_weight() -> None:
    torch.manual_seed(0)
    dense = TTEmbedding(125, 8, tt_ranks=4, std=1.0).to_dense()
    table = TTEmbeddingBag.from_pretrained(dense, tt_ranks=4, mode="sum")
    assert table.error is not None
    assert table.error < 1e-5
    assert not any(core.requires_grad for core in table.cores)
    torch.testing.assert_close(table.weight, dense, atol=1e-5, rtol=1e-4)
    trained = TTEmbedding.from_pretrained(dense, freeze=False, tt_ranks=4)
    trained.weight.square().sum().backward()  # a penalty on the table
    assert trained.cores[1].grad is not None
    assert trained.cores[1].grad.any()
    assert not TTEmbedding(60, 8, tt_ranks=2, optimizer="sgd").weight.requires_grad
    exact = TTEmbedding.from_pretrained(dense.double(), tt_ranks=4, dtype=torch.float64)
    torch.testing.assert_close(exact.weight, dense.double(), atol=1e-6, rtol=1e-6)
    for rows, message in (
        (dense * 1e-41, "too small or too large"),
        (dense.double() * 1e300, "too large to decompose"),
    ):
        with pytest.raises(TableError, match=message):
            TTEmbedding.from_pretrained(rows, tt_ranks=4)
    with pytest.raises(TableError, match="the table has no numbers yet"):
        TTEmbedding(60, 8, tt_ranks=2, device="meta")(torch.arange(3))
    with pytest.raises(TableError, match="a dense one of real numbers"):
        TTEmbedding.from_pretrained(dense.to_sparse(), tt_ranks=4)
    noted = TTEmbedding(60, 8, tt_ranks=2, hot_rows=2)
    _ = noted.weight, noted.rows(torch.arange(4))
    assert noted.seen is not None
    assert noted.seen.count == 0  # what was looked at, not trained on
    with pytest.warns(UserWarning, match="the table: a tensor train .* has a relative error of"):
        TTEmbedding.from_pretrained(torch.randn(600, 8), tt_ranks=1)
