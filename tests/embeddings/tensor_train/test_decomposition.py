"""Tensor trains of given tables, and the tables that cores begin with."""

from __future__ import annotations

from math import prod

import pytest

pytest.importorskip("torchrec")

import torch

from flexshard.embeddings import TTEmbedding, TTShape
from flexshard.embeddings.tensor_train.decomposition import decompose
from tests.embeddings.tensor_train.products import dense


def test_the_cores_give_the_table_the_deviation_asked_for() -> None:
    for cores in (2, 3, 4):
        table = TTEmbedding(20_000, 16, tt_ranks=8, cores=cores, std=0.05)
        assert float(table.to_dense().std()) == pytest.approx(0.05, rel=0.25)
    assert float(TTEmbedding(30_000, 16, tt_ranks=16).to_dense().std()) == pytest.approx((3 * 30_000) ** -0.5, rel=0.25)
    assert float(TTEmbedding(30_000, 16, tt_ranks=16, optimizer="sgd").to_dense().std()) == pytest.approx(0.1, rel=0.25)


@pytest.mark.parametrize("cores", [2, 3, 4])
def test_a_tensor_train_is_found_again(cores: int) -> None:
    source = TTEmbedding(3000, 24, tt_ranks=6, cores=cores, std=1.0)
    table = TTEmbedding(3000, 24, tt_ranks=6, cores=cores)
    error = table.decompose_(source.to_dense())
    # Rows beyond E are zeros in the decomposition, which the source does not have, where factors do not divide E.
    if prod(source.shape.row_factors) == 3000:
        assert error < 1e-3
    full = TTEmbedding(24, 8, row_factors=[2, 3, 4], dim_factors=[2, 2, 2], tt_ranks=[4, 8])
    weight = torch.randn(24, 8)
    assert full.decompose_(weight) < 1e-3  # ranks as large as can be: nothing is lost
    torch.testing.assert_close(full.to_dense(), weight, atol=1e-4, rtol=1e-4)


def test_the_error_of_a_decomposition_is_the_tables() -> None:
    torch.manual_seed(0)
    weight = torch.randn(360, 8) @ torch.diag(torch.logspace(0, -3, 8))
    table = TTEmbedding(360, 8, tt_ranks=6)
    error = table.decompose_(weight)
    actual = float((table.to_dense() - weight).norm() / weight.norm())
    assert 0.05 < error < 1
    assert actual == pytest.approx(error, rel=0.02)
    better = TTEmbedding(360, 8, tt_ranks=20)
    assert better.decompose_(weight) < error


def test_the_error_is_of_the_tables_own_rows() -> None:
    torch.manual_seed(0)
    weight = torch.randn(13, 1)
    table = TTEmbedding(13, 1, tt_ranks=2, cores=2)
    error = table.decompose_(weight)
    assert error == pytest.approx(float((table.to_dense() - weight).norm() / weight.norm()), rel=1e-4)


def test_the_large_unfolding_is_not_formed() -> None:
    """Blocks of it give what all of it gives, whichever side is the short one, and rows beyond E are zeros."""
    torch.manual_seed(0)

    for rows, dims, factors in ((119, [2, 3, 2], [4, 5, 6]), (119, [6, 2], [60, 2]), (23, [2, 2, 2, 2], [2, 3, 2, 2])):
        weight = torch.randn(rows, prod(dims))
        full = TTShape.choose(rows, prod(dims), 10**6, row_factors=factors, dim_factors=dims)
        cores, error = decompose(weight, full, chunk_numbers=16)
        assert error < 1e-3
        torch.testing.assert_close(dense(cores, rows), weight, atol=1e-4, rtol=1e-4)
