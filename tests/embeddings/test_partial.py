"""Shifted lists as runs of one buffer."""

from __future__ import annotations

import pytest

pytest.importorskip("torchrec")

import torch
from hypothesis import given, settings, strategies as st
from torchrec.sparse.jagged_tensor import JaggedTensor

from flexshard.embeddings import PartialJaggedTensor
from flexshard.errors import DataError


def jagged(rows: list[list[int]]) -> JaggedTensor:
    return JaggedTensor(
        torch.tensor([v for row in rows for v in row], dtype=torch.int64), lengths=torch.tensor([len(r) for r in rows])
    )


def test_section_7s_example() -> None:
    partial = PartialJaggedTensor.from_jagged(jagged([[3, 4, 5], [4, 5, 6], [3, 4, 5]]))
    assert partial.values.tolist() == [3, 4, 5, 6]
    assert torch.stack([partial.starts, partial.lengths], 1).tolist() == [[0, 3], [1, 3], [0, 3]]
    assert partial.dedup_factor == 9 / 4


@pytest.mark.parametrize("newest", ["last", "first"])
def test_a_session_costs_its_first_list_and_what_is_new(newest: str) -> None:
    events = list(range(100, 140))
    rows = [events[start : start + 10] for start in range(0, 30, 2)] + [[7, 7], [7, 7, 7], []]
    if newest == "first":
        rows = [row[::-1] for row in rows]
    partial = PartialJaggedTensor.from_jagged(jagged(rows), newest=newest)
    assert partial.values.numel() == 10 + 14 * 2 + 3
    assert [part.tolist() for part in partial.to_jagged().to_dense()] == rows


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12),
    st.sampled_from(["last", "first"]),
    st.integers(0, 4),
)
@settings(max_examples=300, deadline=None)
def test_lists_are_never_changed(rows: list[list[int]], newest: str, max_shift: int) -> None:
    partial = PartialJaggedTensor.from_jagged(jagged(rows), newest=newest, max_shift=max_shift)
    assert partial.values.numel() <= sum(len(row) for row in {tuple(row) for row in rows})
    back = partial.to_jagged()
    assert back.lengths().tolist() == [len(row) for row in rows]
    assert back.values().tolist() == [value for row in rows for value in row]


def test_gradients_of_what_lists_share_add_up() -> None:
    rows = [[0, 1, 2], [1, 2, 3], [0, 1, 2]]
    table = torch.nn.Embedding(4, 3, dtype=torch.float64)
    partial = PartialJaggedTensor.from_jagged(jagged(rows))
    scale = torch.arange(9, dtype=torch.float64)[:, None]
    (partial.with_values(table(partial.values)).to_jagged().values() * scale).sum().backward()
    shared = table.weight.grad
    table.weight.grad = None
    (table(torch.tensor([v for row in rows for v in row])) * scale).sum().backward()
    assert shared is not None
    assert table.weight.grad is not None
    assert torch.equal(shared, table.weight.grad)


def test_the_end_at_which_ids_are_new_is_one_of_two() -> None:
    with pytest.raises(DataError, match="newest is 'last' or 'first', found 'middle'"):
        PartialJaggedTensor.from_jagged(jagged([[1]]), newest="middle")
