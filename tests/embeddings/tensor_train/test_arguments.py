"""Shapes of tensor trains, checkpoints, and arguments that cannot be."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

pytest.importorskip("torchrec")

import torch
from hypothesis import given, settings, strategies as st

from flexshard.embeddings import TTEmbedding, TTEmbeddingBag, TTShape
from flexshard.errors import DataError, TableError


def test_factors_are_chosen() -> None:
    shape = TTShape.choose(10_000_000, 64, 64)
    assert shape.dim_factors == (4, 4, 4)
    assert prod(shape.row_factors) >= 10_000_000
    assert prod(shape.row_factors) < 1.02 * 10_000_000
    assert max(shape.row_factors) < 1.1 * min(shape.row_factors)
    assert TTShape.choose(10, 128, 4).dim_factors == (4, 8, 4)
    assert TTShape.choose(100, 17, 4, cores=2).dim_factors in {(17, 1), (1, 17)}
    assert TTShape.choose(1, 1, 1).parameters == 3
    # Measured beside the paper: 189 times for E = 10^7, D = 64, R = 64.
    assert TTShape.choose(10_000_000, 64, 64, row_factors=(200, 200, 250)).compression == pytest.approx(189, rel=0.01)


@given(st.integers(1, 10**12), st.integers(2, 4))
@settings(max_examples=100, deadline=None)
def test_factors_of_rows_cover_the_table(rows: int, cores: int) -> None:
    shape = TTShape.choose(rows, 8, 2, cores=cores)
    assert prod(shape.row_factors) >= rows
    assert prod(shape.row_factors) <= rows * 2 or rows < 10**4


def test_checkpoints_are_state_dicts_of_the_cores() -> None:
    table = TTEmbeddingBag(1000, 16, tt_ranks=4, optimizer="adagrad")
    table(torch.tensor([1, 2]), torch.tensor([0])).sum().backward()
    other = TTEmbeddingBag(1000, 16, tt_ranks=4, optimizer="adagrad")
    other.load_state_dict(table.state_dict())
    assert torch.equal(other.to_dense(), table.to_dense())
    assert torch.equal(other.sum_0, table.sum_0)
    with pytest.raises(
        TableError, match=r"cores of shape \[.*, 5, .*\].* does not load into cores of shape \[.*, 4, .*\]"
    ):
        table.load_state_dict(TTEmbeddingBag(1000, 16, tt_ranks=5).state_dict())


def test_arguments_that_cannot_be() -> None:
    for message, how in {
        r"factors \(2, 3, 4\) cover 24 rows only": {"row_factors": [2, 3, 4]},
        r"factors \(2, 2, 2\) of the dimension multiply to 8": {"dim_factors": [2, 2, 2]},
        "rank 99 between cores 1 and 2 is above": {"tt_ranks": [99, 4]},
        "2, 3 or 4 cores, found 5": {"cores": 5},
        "ranks must be at least 1, found 0": {"tt_ranks": 0},
        "optimizer is one of sgd, adagrad, rowwise_adagrad, adam or None, found 'lion'": {"optimizer": "lion"},
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


def test_an_eps_of_0_is_refused_later_too() -> None:
    table = TTEmbedding(60, 4, tt_ranks=2, optimizer="adam")
    with pytest.raises(TableError, match="eps must be above 0"):
        table.eps = 0.0
    table.eps = 1e-6
    assert table.eps == 1e-6


def test_values_that_cannot_be_taken() -> None:
    for wrong, message in (
        ({"optimizer": "adagrad", "eps": 0.0}, "eps must be above 0"),
        ({"optimizer": "sgd", "learning_rate": -1.0}, "learning_rate must be at least 0"),
        ({"learning_rate": 0.1}, "learning_rate goes with an optimizer of the table's own; name one"),
        ({"eps": 1e-4}, "eps goes with an optimizer of the table's own"),
        ({"process_group": object()}, "process_group goes with an optimizer of the table's own"),
        ({"std": -1.0}, "std must be at least 0"),
        ({"dtype": torch.float16}, "cores are float32, float64 or bfloat16, found torch.float16"),
        ({"backend": "triton", "dtype": torch.float64}, "compute in float32; cores of float64"),
        ({"optimizer": "sgd", "grad_scaler": 2.0}, "grad_scaler is a torch.amp.GradScaler, found float"),
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, "grad_scaler goes with an optimizer of the table's own"),
        ({"row_factors": "999"}, "whole number"),
        ({"row_factors": (None, 10, 10)}, "whole number"),
    ):
        arguments: Any = wrong
        with pytest.raises(TableError, match=message):
            TTEmbedding(1000, 16, **arguments)
    halved = TTEmbedding(1000, 16, tt_ranks=2, optimizer="sgd", learning_rate=1e-5).half()
    with pytest.raises(TableError, match=r"cores are float32, float64 or bfloat16, found torch\.float16"):
        halved(torch.arange(4))
    table: Any = TTEmbeddingBag(1000, 16, tt_ranks=2, mode="sum", max_norm=None, sparse=False)
    TTEmbedding(1000, 16, tt_ranks=2, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False)
    for name, value in {"max_norm": 1.0, "sparse": True, "scale_grad_by_freq": True, "norm_type": 1.0}.items():
        arguments = {name: value}
        for kind in (TTEmbedding, TTEmbeddingBag):
            with pytest.raises(TableError, match=f"{name}=.* is not for tensor trains"):
                kind(1000, 16, tt_ranks=2, **arguments)
    with pytest.raises(TableError, match=r"two dimensions, found \(4,\)"):
        TTEmbedding.from_pretrained(torch.zeros(4))
    ids = torch.arange(4)
    for offsets, weights in (([0, 2], None), (torch.tensor([0j]), None), (torch.tensor([0]), [1.0] * 4)):
        with pytest.raises(DataError, match=r"are a tensor|are whole numbers"):
            table(ids, offsets, weights)
    with pytest.raises(TableError, match="a table to decompose is a tensor"):
        table.decompose_([[1.0]])
    for ids in ([1, 2], torch.tensor([1 + 2j])):
        with pytest.raises(DataError, match="ids are"):
            table(ids, torch.tensor([0])) if isinstance(ids, list) else table.rows(ids)
