"""Rows that a tensor-train table keeps densely."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest

pytest.importorskip("torchrec")

import torch

import flexshard
from flexshard.embeddings import TTEmbedding, TTEmbeddingBag
from flexshard.errors import DataError, TableError
from tests.slow import first


@pytest.mark.parametrize("optimizer", [None, "sgd", "adagrad", "rowwise_adagrad"])
def test_a_row_is_trained_in_one_place(optimizer: str | None) -> None:
    torch.manual_seed(0)
    rate = None if optimizer is None else 0.1
    table = TTEmbeddingBag(
        900, 8, mode="sum", tt_ranks=4, std=1.0, optimizer=optimizer, learning_rate=rate, hot_rows=6, padding_idx=3
    )
    before = table.to_dense()
    table.pin_rows(torch.tensor([40, 3, 7, 40]))
    assert table.hot is not None
    assert table.hot.pinned.tolist() == [3, 7, 40]
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
    table = TTEmbedding(20, 4, tt_ranks=2, std=1.0, optimizer=optimizer, learning_rate=0.1, hot_rows=20)
    table.pin_rows(torch.arange(20))
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
    table = TTEmbedding(20, 4, tt_ranks=2, std=1.0, optimizer="sgd", learning_rate=0.1, hot_rows=1)
    table.pin_rows(torch.tensor([3]))
    for rate in (0.1, 0.01):  # a schedule sets it
        table.learning_rate = rate
        before = table.rows(torch.tensor([3])).detach()
        table(torch.tensor([3])).sum().backward()
        torch.testing.assert_close(before - table.rows(torch.tensor([3])).detach(), torch.full((1, 4), rate))


def test_hot_rows_are_folded_back() -> None:
    torch.manual_seed(0)
    table = TTEmbedding(3000, 8, tt_ranks=16, std=1.0, hot_rows=50, padding_idx=1)
    hot = torch.arange(0, 500, 10)
    table.pin_rows(hot)
    assert table.hot is not None
    with torch.no_grad():
        table.hot.rows += 0.5 * torch.randn_like(table.hot.rows)
    wanted, others = table.rows(hot).detach(), table.to_dense()
    found = table.unpin_rows(steps=200)
    assert found.before > 0.3
    assert found.after < 0.4 * found.before
    assert found.others < 0.15
    assert table.hot.pinned.numel() == 0
    error = (table.rows(hot).detach() - wanted).norm() / wanted.norm()
    assert float(error) == pytest.approx(found.after, rel=1e-3)
    still = torch.ones(3000, dtype=torch.bool)
    still[hot] = False
    assert float((table.to_dense() - others)[still].norm() / others[still].norm()) == pytest.approx(
        found.others, rel=0.2
    )


@pytest.mark.parametrize("rows", [1000, 50_000])
@pytest.mark.parametrize("tolerance", [0.2, math.inf])
def test_what_is_said_of_other_rows_holds_for_those_that_the_fit_was_not_told_of(rows: int, tolerance: float) -> None:
    torch.manual_seed(0)
    table = TTEmbedding(rows, 16, tt_ranks=8, hot_rows=20, std=1.0)
    table.pin_rows(torch.arange(10))
    assert table.hot is not None
    with torch.no_grad():
        table.hot.rows.add_(1.0)  # cores of this rank cannot hold that
    before = table.to_dense()
    with nullcontext() if tolerance == math.inf else pytest.warns(UserWarning, match="rows stay pinned"):
        found = table.unpin_rows(tolerance=tolerance)
    moved = (table.to_dense() - before)[10:].norm() / before[10:].norm()
    assert found.others == pytest.approx(float(moved), rel=0.25)
    assert found.others <= tolerance
    assert found.kept < 10


def test_what_leaves_the_hot_rows_is_folded_and_what_stays_is_kept() -> None:
    torch.manual_seed(0)
    table = TTEmbedding(500, 8, tt_ranks=8, std=1.0, hot_rows=4, optimizer="adagrad", learning_rate=0.1)
    table.pin_rows(torch.tensor([1, 2, 3]))
    assert table.hot is not None
    table(torch.tensor([1, 2, 3, 3])).sum().backward()
    rows, sums = table.rows(torch.tensor([2, 3])), table.hot.sums.clone()
    slots = table.hot.find(torch.tensor([2, 3]))[1]
    found = table.pin_rows(torch.tensor([2, 3, 400]))
    assert found is not None
    assert found.after <= found.before
    assert torch.equal(table.rows(torch.tensor([2, 3])), rows)
    assert torch.equal(table.hot.find(torch.tensor([2, 3]))[1], slots), "what stays, stays in its slot"
    assert torch.equal(table.hot.sums[slots], sums[slots])
    assert table.hot.sums.any(1).sum() == 2
    again = TTEmbedding(500, 8, tt_ranks=8, hot_rows=4, optimizer="adagrad")
    again.load_state_dict(table.state_dict())
    assert torch.equal(again.to_dense(), table.to_dense())
    table.decompose_(torch.randn(500, 8))
    assert table.hot.pinned.numel() == 0
    with pytest.raises(TableError, match="5 rows to pin are more than hot_rows=4"):
        table.pin_rows(torch.arange(5))
    with pytest.raises(TableError, match="must be pinned"):
        table.unpin_rows(torch.tensor([9]))
    with pytest.raises(DataError, match="id 500 is outside"):
        table.pin_rows(torch.tensor([500]))
    with pytest.raises(TableError, match="more than hot_rows=0"):
        TTEmbedding(500, 8, tt_ranks=8).pin_rows(torch.tensor([1]))


def test_a_lookup_is_of_one_state_of_the_hot_rows() -> None:
    for optimizer in (None, "sgd"):
        table = TTEmbedding(1000, 16, tt_ranks=8, std=1.0, hot_rows=4, optimizer=optimizer)
        table.pin_rows(torch.tensor([5]))
        rows = table(torch.tensor([5]))
        table.pin_rows(torch.tensor([3, 5]))
        with pytest.raises(TableError, match="hot rows were changed between a lookup and its backward pass"):
            rows.sum().backward()
    table = TTEmbedding(1000, 16, tt_ranks=8, std=1.0, hot_rows=4, optimizer="adagrad")
    table.pin_rows(torch.tensor([5]))
    first, second = table(torch.tensor([5])), table(torch.tensor([5]))
    first.sum().backward()
    assert table.hot is not None
    rows = table.hot.rows.detach().clone()
    with pytest.raises(TableError, match="look up all ids of a step at once"):
        second.sum().backward()
    assert torch.equal(table.hot.rows, rows)


def test_a_row_that_stays_hot_keeps_what_torchs_optimizer_remembers_of_it() -> None:
    torch.manual_seed(0)
    table = TTEmbedding(1000, 16, tt_ranks=8, std=1.0, hot_rows=4)
    optimizer = torch.optim.Adam(table.parameters(), lr=0.1)
    table.pin_rows(torch.tensor([5, 9]))
    for _ in range(5):
        optimizer.zero_grad()
        table(torch.tensor([5])).sum().backward()
        optimizer.step()
    table.pin_rows(torch.tensor([3, 5]))
    before = table.rows(torch.tensor([3, 5])).detach()
    optimizer.zero_grad()
    (0 * table(torch.tensor([3, 5]))).sum().backward()
    optimizer.step()
    moved = (table.rows(torch.tensor([3, 5])) - before).abs().mean(1)
    assert moved[1] > 0.05  # Adam's momentum goes on with the row it is of
    assert moved[0] < 1e-6


@pytest.mark.parametrize("source", first(1, ["profile", "lookups"]))
def test_folding_protects_rows_by_how_often_they_are_read(source: str) -> None:
    """Of 20,000 rows 1,000 are ever read; rows drawn uniformly would nearly all be others, which nobody misses."""
    torch.manual_seed(0)
    read, hot = 1000, 100
    table = TTEmbedding(20_000, 16, tt_ranks=16, hot_rows=hot, optimizer="sgd", learning_rate=0.02)
    counts = (1e6 / torch.arange(1, read + 1)).long()
    p, target = counts / counts.sum(), torch.randn(read, 16)
    table.pin_rows(torch.arange(hot))
    for _ in range(300):
        ids = torch.multinomial(p, 512, replacement=True)
        ((table(ids) - target[ids]) ** 2).sum().div(512).backward()

    def rows() -> torch.Tensor:
        return table.rows(torch.arange(read)).detach()

    def loss() -> float:
        return float((p[:, None] * (rows() - target) ** 2).sum())

    held, before = loss(), rows()
    profile = flexshard.AccessProfile.from_counts(counts.numpy(), num_samples=1000) if source == "profile" else None
    found = table.unpin_rows(profile=profile, tolerance=math.inf)
    assert found.weights == source
    assert found.kept == 0
    assert loss() < 1.03 * held  # with uniformly drawn rows it is 1.06
    weights = p[hot:, None]
    moved = (weights * (rows() - before)[hot:] ** 2).sum().sqrt() / (weights * before[hot:] ** 2).sum().sqrt()
    assert found.others == pytest.approx(float(moved), rel=0.3)


@pytest.mark.slow  # a minute each
@pytest.mark.parametrize("source", ["profile", "lookups"])
def test_rows_that_the_cores_cannot_hold_stay_pinned(source: str) -> None:
    """300 of 2,000 rows that training reads alike and users do not; all given back are worse than never pinned."""
    torch.manual_seed(0)
    read, hot = 2000, 300
    counts = (1e6 / torch.arange(1, read + 1)).long()
    p, target = counts / counts.sum(), torch.randn(read, 16)

    def loss(table: TTEmbedding) -> float:
        return float((p[:, None] * (table.rows(torch.arange(read)).detach() - target) ** 2).sum())

    def trained(hot_rows: int) -> TTEmbedding:
        torch.manual_seed(0)
        table = TTEmbedding(200_000, 16, tt_ranks=14, hot_rows=hot_rows, optimizer="adagrad", learning_rate=0.03)
        if hot_rows:
            table.pin_rows(torch.arange(hot_rows))
        for _ in range(460):
            ids = torch.randint(read, (512,))
            ((table(ids) - target[ids]) ** 2).sum().div(512).backward()
        return table

    table, never = trained(hot), loss(trained(0))
    profile = flexshard.AccessProfile.from_counts(counts.numpy(), num_samples=1000) if source == "profile" else None
    pinned = loss(table)
    assert pinned < 8.2
    assert never > 12
    with pytest.warns(UserWarning, match="rows stay pinned: the cores cannot hold them within tolerance=0.2"):
        found = table.unpin_rows(profile=profile)
    assert loss(table) < 1.05 * pinned
    assert table.hot is not None
    assert 0 < found.kept == table.hot.pinned.numel() < hot
    assert found.after <= 0.2
    found = table.unpin_rows(profile=profile, tolerance=math.inf)
    assert found.kept == table.hot.pinned.numel() == 0
    with pytest.raises(TableError, match="a tolerance is a relative error"):
        table.unpin_rows(tolerance=-1.0)


def test_a_profile_of_a_larger_table_says_nothing_about_rows() -> None:
    table = TTEmbedding(500, 8, tt_ranks=4, hot_rows=2)
    table.pin_rows(torch.tensor([1]))
    profile = flexshard.AccessProfile.from_counts([1] * 501, num_samples=10)
    with pytest.raises(TableError, match="profile is of 501 rows, the table has 500"):
        table.unpin_rows(profile=profile)


def test_ids_that_are_refused_are_not_taken_for_seen() -> None:
    table = TTEmbedding(60, 8, tt_ranks=2, hot_rows=3)
    assert table.seen is not None
    for wrong in ([1, 2], torch.tensor([1, 60]), torch.tensor([0.5])):
        with pytest.raises(DataError):
            table(wrong)
    assert table.seen.count == 0
    table(torch.tensor([1, 59]))
    assert table.seen.count == 2
