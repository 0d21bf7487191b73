"""Shifted lists as runs of one buffer."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchrec")

import numpy as np
import pyarrow as pa
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings, strategies as st
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from flexshard._internal import run_layout
from flexshard.embeddings import InverseKeyedJaggedTensor, JaggedArray, PartialJaggedTensor, Runs
from flexshard.errors import DataError
from flexshard.ingestion import (
    BatchPosition,
    DedupedTransform,
    HashIds,
    NGrams,
    ReaderPhases,
    SessionBatch,
    SortIds,
    Truncate,
    batch_hash,
)
from flexshard.ingestion.service.packing import pack


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
    for wrong in (None, -1, True, 1.5):
        with pytest.raises(DataError, match="max_shift must be"):
            PartialJaggedTensor.from_jagged(jagged([[1]]), max_shift=wrong)  # type: ignore[arg-type]
        with pytest.raises(DataError, match="max_shift must be"):  # whether or not anything is partial
            InverseKeyedJaggedTensor.from_rows([{"a": [1]}], max_shift=wrong)
    with pytest.raises(DataError, match="newest is 'last' or 'first', found 'middle'"):
        InverseKeyedJaggedTensor.from_rows([{"a": [1]}], newest="middle")


def test_a_transform_that_says_per_id_keeps_every_id() -> None:
    batch = InverseKeyedJaggedTensor.from_rows([{"a": [1, 2, 3]}, {"a": [2, 3, 4]}], partial=[["a"]])

    def drop(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(features.keys(), features.values()[1:], lengths=features.lengths() - 1)

    drop.per_id = True  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"a transform of \['a'\] says per_id, but returned more or fewer ids"):
        batch.map(drop)


@given(
    st.integers(1, 3).flatmap(
        lambda count: st.lists(st.lists(st.tuples(*[st.integers(0, 1)] * count), max_size=5), max_size=12)
    ),
    st.sampled_from(["last", "first"]),
    st.integers(0, 4),
)
@settings(max_examples=300, deadline=None)
def test_runs_of_several_features_are_pythons(rows: list[list[tuple[int, ...]]], newest: str, max_shift: int) -> None:
    """Compiled and not: the largest run that all features have in common with the row before."""
    count = next((len(value) for row in rows for value in row), 1)
    lengths = np.array([len(row) for row in rows], np.int64)
    kinds = [np.int64, np.int32, np.int16]
    columns = [
        JaggedArray.of(np.array([value[index] for row in rows for value in row], kinds[index]), lengths)
        for index in range(count)
    ]
    fresh = []
    for number, row in enumerate(rows):
        mine, before = ([*each][:: 1 if newest == "last" else -1] for each in (row, rows[number - 1] if number else []))
        shared = [
            len(before) - shift
            for shift in range(min(max_shift, len(before)) + 1)
            if len(before) - shift <= len(mine) and before[shift:] == mine[: len(before) - shift]
        ]
        fresh.append(len(mine) - (shared[0] if shared else 0))
    for compiled in (False, True):
        places, starts, found = run_layout(columns, newest=newest, max_shift=max_shift, compiled=compiled)
        assert found.tolist() == fresh
        for column in columns:
            for row, start in enumerate(starts.tolist()):
                own = column.values[column.offsets[row] : column.offsets[row + 1]]
                assert column.values[places[start : start + own.size]].tolist() == own.tolist()


ROWS = st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=5), max_size=9)


@given(ROWS, st.sampled_from(["last", "first"]))
@settings(max_examples=150, deadline=None)
def test_batches_there_and_back_are_the_same_bit_for_bit(rows: list[list[tuple[int, int]]], newest: str) -> None:
    features = {"a": [[a for a, _ in row] for row in rows], "b": [[b for _, b in row] for row in rows]}
    features["c"] = [[a + b for a, b in row[:2]] for row in rows]
    table = pa.table({name: pa.array(lists, pa.list_(pa.int64())) for name, lists in features.items()})
    plain = InverseKeyedJaggedTensor.from_arrow(table, keys=["c", "a", "b"]).to_keyed_jagged()
    batch = InverseKeyedJaggedTensor.from_arrow(table, partial=[["a", "b"]], newest=newest, keys=["c", "a", "b"])
    assert same(batch.to_keyed_jagged(), plain)
    assert same(InverseKeyedJaggedTensor.from_keyed_jagged(plain, partial=[["a", "b"]]).to_keyed_jagged(), plain)
    (group,) = batch.groups
    assert group.num_distinct == len({tuple(row) for row in rows})
    assert group.runs is not None
    # What lookups are given is the buffer, in as many pieces as there are lists.
    assert batch.distinct["a"].values().tolist() == group.jagged["a"].values().tolist()
    assert same(group.lists(), InverseKeyedJaggedTensor.from_arrow(table, [["a", "b"]]).groups[0].jagged)
    segments = group.runs.segments
    assert int(segments.lengths.sum()) == batch.distinct["a"].values().numel() == group.bags["a"].values().numel()
    ends = torch.cumsum(segments.lengths, 0)
    of_lists = (group.runs.starts, group.runs.lengths, segments.first, segments.counts)
    for start, length, first, number in zip(*(each.tolist() for each in of_lists), strict=True):
        assert int(segments.lengths[first : first + number].sum()) == length
        assert not number or int(ends[first] - segments.lengths[first]) == start
    paths, _ = pytree.tree_flatten_with_path(batch)
    assert all(leaf is other for (_, leaf), other in zip(paths, pytree.tree_leaves(batch), strict=True))
    assert len({pytree.keystr(path) for path, _ in paths}) == len(paths)
    for other in (batch.to("cpu"), pytree.tree_map(lambda leaf: leaf, batch), batch.map(lambda jagged: jagged)):
        assert same(other.to_keyed_jagged(), plain)


def same(one: KeyedJaggedTensor, other: KeyedJaggedTensor) -> bool:
    return (
        list(one.keys()) == list(other.keys())
        and one.stride() == other.stride()
        and torch.equal(one.values(), other.values())
        and torch.equal(one.lengths(), other.lengths())
    )


EVENTS = list(range(100, 160))
GROWING = [EVENTS[max(0, end - 10) : end] for end in range(1, 40)]


def growing(**how: object) -> InverseKeyedJaggedTensor:
    """Three candidates each."""
    rows = [{"seen": seen, "kind": [n % 3 for n in seen], "item": [n]} for seen in GROWING for n in range(3)]
    return InverseKeyedJaggedTensor.from_rows(rows, partial=[["seen", "kind"]], **how)  # type: ignore[arg-type]


def test_where_it_goes(tmp_path: Path) -> None:
    batch = growing()
    assert batch.distinct["seen"].values().tolist() == EVENTS[:39]
    assert batch.dedup_factor("seen") == batch.dedup_factor("kind") == 3 * sum(map(len, GROWING)) / 39
    assert batch.to("meta").device() == torch.device("meta")
    assert batch.groups[0].counted().expanded_lengths == (3 * sum(map(len, GROWING)),) * 2
    held = batch.to("meta").groups[0].runs
    assert held is not None
    assert held.held is not None  # what a device would be waited for
    assert held.sequences.total == held.held[0].total == batch.groups[0].runs.sequences.total  # type: ignore[union-attr]
    batch.save(tmp_path / "batch.npz")
    loaded = InverseKeyedJaggedTensor.load(tmp_path / "batch.npz")
    whole = SessionBatch(batch, {}, ReaderPhases(), BatchPosition())
    for other in (loaded, pack(whole).batch.features):
        assert same(other.to_keyed_jagged(), batch.to_keyed_jagged())
        assert same(other.distinct, batch.distinct)
        assert batch_hash(SessionBatch(other, {}, ReaderPhases(), BatchPosition())) == batch_hash(whole)
    exact = InverseKeyedJaggedTensor.from_keyed_jagged(batch.to_keyed_jagged(), [["seen", "kind"]])
    assert batch_hash(SessionBatch(exact, {}, ReaderPhases(), BatchPosition())) != batch_hash(whole)
    assert batch.nbytes() < exact.nbytes()


def test_transforms_run_once_per_id_or_once_per_list() -> None:
    seen: list[int] = []

    def count(jagged: KeyedJaggedTensor) -> KeyedJaggedTensor:
        seen.append(jagged.values().numel())
        return jagged

    count.per_id = True  # type: ignore[attr-defined]
    batch, plain = growing(), growing().to_keyed_jagged()
    hashed = DedupedTransform(count, HashIds(50))(batch)
    assert seen[0] == 2 * 39
    assert same(hashed.to_keyed_jagged(), HashIds(50)(plain))
    assert hashed.distinct["seen"].values().numel() == 39
    short = DedupedTransform(HashIds(1000, features=["seen"]), Truncate(4), HashIds(7, features=["kind"]))(batch)
    expected = HashIds(7, features=["kind"])(Truncate(4)(HashIds(1000, features=["seen"])(plain)))
    assert same(short.to_keyed_jagged(), expected)
    assert short.distinct["seen"].values().numel() == 39  # what lists share is found again
    # Whether groups hold must not depend on what lists a batch has.
    with pytest.raises(DataError, match="'seen' and 'kind' of one partial group lists of different lengths; put each"):
        DedupedTransform(Truncate(3, features=["kind"]))(batch)
    pairs = NGrams("seen", "pairs", n=2, num_rows=50)
    named, alone = (
        pairs(SessionBatch(features, {}, ReaderPhases(), BatchPosition())).features
        for features in (batch, InverseKeyedJaggedTensor.from_keyed_jagged(plain))
    )
    assert [group.keys for group in named.groups] == [["seen", "kind"], ["pairs"]]
    assert same(named.to_keyed_jagged(), alone.to_keyed_jagged())

    class Weighted(torch.nn.Module):
        def __init__(self, per_id: bool) -> None:
            super().__init__()
            self.per_id = per_id

        def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
            weights = torch.ones(features.values().numel())
            return KeyedJaggedTensor(features.keys(), features.values(), weights, features.lengths())

    for per_id in (False, True):
        with pytest.raises(DataError, match=r"a transform gave .* weights, which lists that share ids cannot have"):
            DedupedTransform(Weighted(per_id))(batch)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_floats_are_sorted_whatever_they_are(kind: torch.dtype) -> None:
    numbers = torch.tensor([float("inf"), 1.0, 2.0, 3.0, 0.5, float("-inf"), torch.finfo(kind).max], dtype=kind)
    for weights in (None, torch.arange(7.0)):
        features = KeyedJaggedTensor(["a"], numbers, weights, torch.tensor([1, 2, 2, 2]))
        found = SortIds()(features)
        assert found.values().tolist() == numbers[[0, 1, 2, 4, 3, 5, 6]].tolist()
        assert weights is None or found.weights().tolist() == [0, 1, 2, 4, 3, 5, 6]


def test_causal_sequences_are_the_longest_lists_of_each_start() -> None:
    partial = PartialJaggedTensor.from_jagged(jagged([*GROWING, *GROWING[3:7]]))
    sequences, lists = partial.sequences()
    # Ten lists grow to ten ids, then one list each drops the oldest.
    assert sequences.lengths().tolist() == [10] * 30
    assert lists.inverse is not None
    back = lists.to_jagged()
    assert [part.tolist() for part in back.to_dense()] == [*GROWING, *GROWING[3:7]]
    assert lists.last().tolist() == [row[-1] for row in [*GROWING, *GROWING[3:7]]]
    plain = PartialJaggedTensor(partial.values, partial.starts, partial.lengths)
    assert plain.sequences()[0].lengths().tolist() == [10] * 30
    assert PartialJaggedTensor.from_jagged(jagged([[], [5], []])).last().tolist() == [0, 5, 0]
    assert PartialJaggedTensor.from_jagged(jagged([[], []])).last().tolist() == [0, 0]


@pytest.mark.parametrize(
    ("partial", "message"),
    [
        ([["a", "b"]], "the batch: features 'a' and 'b' have 1 and 2 ids in row 0; features that share runs"),
        ([["a"], ["a"]], "feature 'a' is named twice in the groups"),
        ([["x"]], "partial group 0 names feature 'x', which is not there; there are a, b"),
        ([[]], "partial group 0 names no feature"),
        ("ab", "groups are lists of features"),
    ],
)
def test_partial_groups_that_cannot_be(partial: list[list[str]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        InverseKeyedJaggedTensor.from_rows([{"a": [1], "b": [1, 2]}], partial=partial)


def test_lists_with_weights_share_nothing() -> None:
    table = pa.table({"a": [[1]], "w": [[0.5]]})
    with pytest.raises(DataError, match="feature 'a' has weights, which lists that share ids cannot have"):
        InverseKeyedJaggedTensor.from_arrow(table, partial=[["a"]], weights={"a": "w"})


def test_runs_that_leave_their_buffer_are_named(tmp_path: Path) -> None:
    batch = growing()
    runs = Runs.of(np.array([5] * 39), np.array([39] * 39))
    wrong = InverseKeyedJaggedTensor([pytree.tree_map(lambda leaf: leaf, batch.groups[0])], batch.plain, batch.keys())
    object.__setattr__(wrong.groups[0], "runs", runs)
    wrong.save(tmp_path / "b")
    with pytest.raises(DataError, match="b: not a saved batch, or damaged: runs leave their buffer of 39 values"):
        InverseKeyedJaggedTensor.load(tmp_path / "b")


@pytest.mark.parametrize("size", [0, 3])
def test_what_stands_last_in_empty_lists_trains_what_made_it(size: int) -> None:
    """With gradients of zero, as where one list has values: an optimizer's momentum goes on, and other ranks wait for
    this one's part.
    """
    layer = torch.nn.Linear(4, 4)
    lists = PartialJaggedTensor.from_jagged(jagged([[]] * size))
    found = lists.with_values(layer(torch.zeros(0, 4))).last()
    assert found.shape == (size, 4)
    found.add_(1).sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in layer.parameters())
