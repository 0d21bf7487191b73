"""Deduplicated batches: the same as the batch they were made from, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("torchrec")

import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings, strategies as st
from torchrec import KeyedJaggedTensor

from flexshard.embeddings import DedupedGroup, DedupedJagged, InverseKeyedJaggedTensor
from flexshard.errors import DataError

# Figure 5 of the RecD paper.
FIGURE_5 = [
    {"a": [1, 2], "b": [3, 4, 5], "c": [7, 8], "d": [9]},
    {"a": [6], "b": [4, 5, 6], "c": [7, 8], "d": [9]},
    {"a": [1, 2], "b": [3, 4, 5], "c": [10], "d": [11]},
]


def same(a: KeyedJaggedTensor, b: KeyedJaggedTensor) -> bool:
    """Bit for bit: keys, values, lengths, weights and types."""
    if list(a.keys()) != list(b.keys()) or a.stride() != b.stride():
        return False
    if (a.weights_or_none() is None) != (b.weights_or_none() is None):
        return False
    pairs = [(a.values(), b.values()), (a.lengths(), b.lengths())]
    if a.weights_or_none() is not None:
        pairs.append((a.weights().view(torch.int32), b.weights().view(torch.int32)))
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def test_figure_5() -> None:
    batch = InverseKeyedJaggedTensor.from_rows(FIGURE_5, [["b"], ["c", "d"]])
    b, cd = batch.groups
    assert b.inverse.tolist() == [0, 1, 0]
    assert b.jagged["b"].values().tolist() == [3, 4, 5, 4, 5, 6]
    assert b.jagged["b"].offsets().tolist() == [0, 3, 6]
    assert cd.inverse.tolist() == [0, 0, 1]
    assert cd.jagged["c"].values().tolist() == [7, 8, 10]
    assert cd.jagged["d"].values().tolist() == [9, 11]
    assert batch.plain is not None
    assert batch.plain.keys() == ["a"]
    assert batch.keys() == ["a", "b", "c", "d"]
    assert batch.dedup_factor("b") == 9 / 6  # section 4.2's worked example
    assert batch.dedup_factor("a") == 1
    assert [jagged.to_dense() for jagged in batch.to_keyed_jagged().to_dict().values()][1][1].tolist() == [4, 5, 6]
    assert repr(batch) == "InverseKeyedJaggedTensor(b: 2 of 3, c+d: 2 of 3; plain a)"


def test_rows_of_a_group_are_the_same_only_if_all_features_are() -> None:
    rows = [{"c": [7], "d": [1]}, {"c": [7], "d": [2]}, {"c": [7], "d": [1]}]
    (group,) = InverseKeyedJaggedTensor.from_rows(rows, [["c", "d"]]).groups
    assert group.inverse.tolist() == [0, 1, 0]
    assert group.jagged["c"].values().tolist() == [7, 7]


def test_values_that_could_be_split_otherwise_are_told_apart() -> None:
    rows = [{"c": [1], "d": [2, 3]}, {"c": [1, 2], "d": [3]}, {"c": [], "d": [1, 2, 3]}]
    (group,) = InverseKeyedJaggedTensor.from_rows(rows, [["c", "d"]]).groups
    assert group.num_distinct == 3


@st.composite
def batches(draw: st.DrawFn) -> tuple[KeyedJaggedTensor, list[list[str]]]:
    keys = ["a", "b", "c", "d"][: draw(st.integers(1, 4))]
    stride = draw(st.integers(0, 9))
    lists = st.lists(st.integers(0, 2), max_size=3)
    rows = [[draw(lists) for _ in range(stride)] for _ in keys]
    flat = [value for feature in rows for row in feature for value in row]
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    weighted = draw(st.booleans())
    weights = torch.tensor([draw(st.sampled_from([0.0, -0.0, 1.0])) for _ in flat]) if weighted else None
    features = KeyedJaggedTensor(
        keys=keys,
        values=torch.tensor(flat, dtype=dtype),
        lengths=torch.tensor([len(row) for feature in rows for row in feature], dtype=draw(st.just(torch.int32))),
        weights=weights,
        stride=stride,
    )
    place = [draw(st.integers(-1, 2)) for _ in keys]
    groups = [[key for key, p in zip(keys, place, strict=True) if p == number] for number in range(3)]
    return features, [group for group in groups if group]


@given(batches())
@settings(max_examples=200, deadline=None)
def test_there_and_back_is_the_same_bit_for_bit(case: tuple[KeyedJaggedTensor, list[list[str]]]) -> None:
    features, groups = case
    batch = InverseKeyedJaggedTensor.from_keyed_jagged(features, groups)
    assert same(batch.to_keyed_jagged(), features)
    for group in batch.groups:  # as few rows as there are, against Python's own equality
        weights = features.weights_or_none()
        seen: dict[object, int] = {}
        for row in range(features.stride()):
            own = []
            for key in group.keys:
                place = features.keys().index(key) * features.stride() + row
                span = slice(int(features.offsets()[place]), int(features.offsets()[place + 1]))
                own.append(tuple(features.values()[span].tolist()))
                own.append(None if weights is None else weights[span].numpy().tobytes())
            assert int(group.inverse[row]) == seen.setdefault(tuple(own), len(seen))
        assert group.num_distinct == len(seen)
    assert batch.distinct.stride() == features.stride()
    for key in features.keys():
        group = batch.group_of(key)
        kept = batch.distinct[key]
        if group is not None:
            assert torch.equal(kept.values(), group.jagged[key].values())
            assert not kept.lengths()[group.num_distinct :].any()


def test_a_group_whose_rows_never_repeat_loses_nothing() -> None:
    rows = [{"a": [number], "b": [number, 1]} for number in range(50)]
    batch = InverseKeyedJaggedTensor.from_rows(rows, [["a", "b"]])
    assert batch.groups[0].num_distinct == 50
    assert batch.dedup_factor("a") == batch.dedup_factor("b") == 1
    assert batch.to_keyed_jagged()["b"].values().tolist() == [v for row in rows for v in row["b"]]


def test_an_empty_batch() -> None:
    empty = pa.table({"a": pa.array([], pa.list_(pa.int64())), "b": pa.array([], pa.list_(pa.int64()))})
    batch = InverseKeyedJaggedTensor.from_arrow(empty, [["a"]])
    assert batch.stride() == batch.groups[0].num_distinct == 0
    assert batch.to_keyed_jagged().lengths().tolist() == []
    assert batch.distinct.values().tolist() == []
    assert batch.dedup_factor("a") == 1


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.int64(), pa.list_(pa.int16(), 2)])
def test_arrow_columns_of_every_kind_sliced_and_chunked(kind: pa.DataType) -> None:
    values = [5, 6, 5, 5, 7] if kind == pa.int64() else [[1, 2], [3, 4], [1, 2], [5, 6], [1, 2]]
    column = pa.chunked_array([pa.array([*values, values[0]], kind).slice(1, 2), pa.array(values, kind)])
    batch = InverseKeyedJaggedTensor.from_arrow(pa.table({"a": column}), [["a"]])
    back = [jagged.tolist() for jagged in batch.to_keyed_jagged()["a"].to_dense()]
    assert back == [v if isinstance(v, list) else [v] for v in column.to_pylist()]
    assert batch.groups[0].num_distinct == 3


def test_finding_rows_of_arrow_lists_copies_no_values() -> None:
    column = pa.array([[1, 2], [3]] * 10_000, pa.list_(pa.int64()))
    table = pa.table({"a": column})
    before = pa.total_allocated_bytes()
    pool = pa.default_memory_pool()
    high = pool.max_memory()
    InverseKeyedJaggedTensor.from_arrow(table, [["a"]])
    assert pool.max_memory() - max(high, before) < column.nbytes
    assert np.shares_memory(
        column.flatten().to_numpy(), np.frombuffer(column.values.buffers()[1], np.int64)
    )  # what is read


def test_null_lists_are_empty_and_plain_features_stay() -> None:
    table = pa.table({"a": [[1], None, [1]], "b": [7, 8, 9]})
    batch = InverseKeyedJaggedTensor.from_arrow(table, [["a"]])
    assert batch.groups[0].jagged["a"].lengths().tolist() == [1, 0]
    assert batch.plain is not None
    assert batch.plain["b"].values().tolist() == [7, 8, 9]


def test_weights_come_along_and_tell_rows_apart() -> None:
    table = pa.table({"a": [[1, 2], [1, 2], [1, 2]], "w": [[0.5, 1.0], [0.5, 2.0], [0.5, 1.0]]})
    batch = InverseKeyedJaggedTensor.from_arrow(table, [["a"]], weights={"a": "w"})
    assert batch.groups[0].inverse.tolist() == [0, 1, 0]
    assert batch.to_keyed_jagged().weights().tolist() == [0.5, 1.0, 0.5, 2.0, 0.5, 1.0]


def test_where_it_goes(tmp_path: Path) -> None:
    batch = InverseKeyedJaggedTensor.from_rows(FIGURE_5, [["b"], ["c", "d"]])
    for other in (
        batch.to("cpu"),
        batch.to(torch.device("cpu"), non_blocking=True),
        pytree.tree_map(lambda leaf: leaf, batch),
    ):
        assert same(other.to_keyed_jagged(), batch.to_keyed_jagged())
    leaves, _ = pytree.tree_flatten(batch)
    assert batch.to("meta").device() == torch.device("meta")
    batch.save(tmp_path / "batch.npz")
    loaded = InverseKeyedJaggedTensor.load(tmp_path / "batch.npz")
    assert same(loaded.to_keyed_jagged(), batch.to_keyed_jagged())
    assert [g.inverse.tolist() for g in loaded.groups] == [[0, 1, 0], [0, 0, 1]]
    assert batch.nbytes() == sum(t.numel() * t.element_size() for t in leaves if t is not None)
    with np.load(tmp_path / "batch.npz", allow_pickle=False) as file:
        assert "about" in file.files


def test_bfloat16_weights_survive_a_file(tmp_path: Path) -> None:
    jagged = KeyedJaggedTensor(
        keys=["a"], values=torch.tensor([1, 2]), lengths=torch.tensor([1, 1]), weights=torch.rand(2).bfloat16()
    )
    batch = InverseKeyedJaggedTensor([DedupedGroup(jagged, torch.tensor([0, 1, 1]))])
    batch.save(tmp_path / "b")
    weights = InverseKeyedJaggedTensor.load(tmp_path / "b").groups[0].jagged.weights()
    assert weights.dtype == torch.bfloat16
    assert torch.equal(weights, jagged.weights())


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "batch.npz"
    with pytest.raises(DataError, match=r"batch\.npz: no such file"):
        InverseKeyedJaggedTensor.load(path)
    InverseKeyedJaggedTensor.from_rows(FIGURE_5, [["b"]]).save(path)
    whole = path.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"batch\.npz: not a saved batch, or damaged"):
            InverseKeyedJaggedTensor.load(path)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([["z"]], "group 0 names feature 'z', which is not there; there are a, b, c, d"),
        ([["a"], ["b", "a"]], "feature 'a' is named twice in the groups; a feature belongs to one group"),
        ([["a", "a"]], "feature 'a' is named twice"),
        ([[]], "group 0 names no feature"),
        (["ab"], "groups are lists of features"),
    ],
)
def test_groups_that_cannot_be(groups: list[list[str]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        InverseKeyedJaggedTensor.from_rows(FIGURE_5, groups)
    with pytest.raises(DataError, match=message):
        InverseKeyedJaggedTensor.from_keyed_jagged(
            InverseKeyedJaggedTensor.from_rows(FIGURE_5, []).to_keyed_jagged(), groups
        )


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [["x"]]}, r"column 'a' holds list<.*string>, not numbers; expected integers or lists of integers"),
        ({"a": [[1.5]]}, r"column 'a' holds list<.*double>, not ids"),
        ({"a": [[1], [2, None]]}, "column 'a' has a null id in row 101; drop or fill it"),
    ],
)
def test_columns_that_cannot_be_read(columns: dict[str, list[object]], message: str) -> None:
    with pytest.raises(DataError, match=rf"f\.parquet: {message}"):
        InverseKeyedJaggedTensor.from_arrow(pa.table(columns), [["a"]], where="f.parquet", first_row=100)


def test_rows_of_mixed_types_are_named() -> None:
    rows = [{"a": [1]}, {"a": ["x"]}]
    with pytest.raises(DataError, match=r"feature 'a' of row 1 is \['x'\], not a list of ids"):
        InverseKeyedJaggedTensor.from_rows(rows, [["a"]])  # type: ignore[arg-type]


def test_weights_of_other_lengths_are_named() -> None:
    table = pa.table({"a": [[1], [1, 2]], "w": [[0.5], [1.0]]})
    with pytest.raises(DataError, match="column 'w' has 1 weights for 2 ids of 'a' in row 1"):
        InverseKeyedJaggedTensor.from_arrow(table, [["a"]], weights={"a": "w"})
    with pytest.raises(DataError, match="no column 'v'"):
        InverseKeyedJaggedTensor.from_arrow(table, [["a"]], weights={"a": "v"})


def test_batches_that_do_not_fit_together() -> None:
    b = InverseKeyedJaggedTensor.from_rows(FIGURE_5, [["b"]]).groups[0]
    with pytest.raises(DataError, match="feature 'b' is in the batch twice"):
        InverseKeyedJaggedTensor([b, b])
    other = DedupedGroup(InverseKeyedJaggedTensor.from_rows(FIGURE_5, [["c"]]).groups[0].jagged, torch.zeros(5).long())
    with pytest.raises(DataError, match=r"as many samples, found \[3, 5\]"):
        InverseKeyedJaggedTensor([b, other])
    with pytest.raises(DataError, match="are not the features"):
        InverseKeyedJaggedTensor([b], keys=["x"])
    with pytest.raises(DataError, match="no feature 'x' in the batch; there are b"):
        InverseKeyedJaggedTensor([b]).dedup_factor("x")


def test_transforms_run_on_distinct_rows_and_keep_them() -> None:
    batch = InverseKeyedJaggedTensor.from_rows(FIGURE_5, [["b"], ["c", "d"]])
    seen = []

    def double(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        seen.append((features.keys(), features.stride()))
        return KeyedJaggedTensor(
            keys=features.keys(), values=features.values() * 2, lengths=features.lengths(), stride=features.stride()
        )

    doubled = batch.map(double)
    assert seen == [(["b"], 2), (["c", "d"], 2), (["a"], 3)]
    assert same(doubled.to_keyed_jagged(), double(batch.to_keyed_jagged()))

    def lose(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values()[:0],
            lengths=features.lengths()[: len(features.keys())] * 0,
            stride=1,
        )

    with pytest.raises(DataError, match=r"a transform of \['b'\] returned 1 rows for 2"):
        batch.map(lose)


def test_bfloat16_weights_and_dictionaries_of_lists() -> None:
    features = KeyedJaggedTensor(
        keys=["a"],
        values=torch.tensor([1, 2, 1, 2, 1, 2]),
        lengths=torch.tensor([2, 2, 2]),
        weights=torch.tensor([0.5, 1, 0.5, 1, 0.5, 2]).bfloat16().requires_grad_(),
    )
    batch = InverseKeyedJaggedTensor.from_keyed_jagged(features, [["a"]])
    assert batch.groups[0].inverse.tolist() == [0, 0, 1]
    assert batch.groups[0].jagged.weights().dtype == torch.bfloat16
    assert torch.equal(batch.to_keyed_jagged().weights(), features.weights().detach())
    lists = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array([[1, 2], [3]]))
    assert InverseKeyedJaggedTensor.from_arrow(pa.table({"a": lists}), [["a"]]).groups[0].inverse.tolist() == [0, 1, 0]


def test_numbers_that_do_not_fit_are_named() -> None:
    large = pa.table({"a": pa.array([[1], [2**63 + 1]], pa.list_(pa.uint64()))})
    with pytest.raises(DataError, match="column 'a' has 9223372036854775809 in row 11, more than ids of 63 bits hold"):
        InverseKeyedJaggedTensor.from_arrow(large, [["a"]], first_row=10)
    heavy = pa.table({"a": [[1], [2]], "w": [[0.5], [1e300]]})
    with pytest.raises(DataError, match=r"column 'w' has a weight of 1e\+300 in row 1, which float32 does not hold"):
        InverseKeyedJaggedTensor.from_arrow(heavy, [["a"]], keys=["a"], weights={"a": "w"})
    endless = pa.table({"a": [[1]], "w": [[float("inf")]]})
    assert InverseKeyedJaggedTensor.from_arrow(endless, [["a"]], keys=["a"], weights={"a": "w"}) is not None


def test_on_a_device_nothing_has_to_be_asked_for() -> None:
    """Tensors on the meta device have no numbers, so whatever asks for one fails."""
    batch = InverseKeyedJaggedTensor.from_rows(FIGURE_5, [["a", "b"]])
    there = batch.to("meta")
    whole = batch.to_keyed_jagged()
    assert there.distinct.offset_per_key() == batch.distinct.offset_per_key()
    for key in ("a", "b"):
        group = there.group_of(key)
        assert group is not None
        lists = DedupedJagged(torch.empty(9, 4, device="meta"), group.jagged.lengths()[:2], group.inverse, 7)
        assert lists.expand().values().shape == (7, 4)
        assert group.expanded_lengths is not None
        assert group.expanded_lengths[group.keys.index(key)] == whole[key].values().numel()
    flat, spec = pytree.tree_flatten(there)
    assert pytree.tree_unflatten(flat, spec).groups[0].expanded_lengths == there.groups[0].expanded_lengths


def test_copies_on_a_stream_lie_in_memory_of_the_current_one() -> None:
    batch = InverseKeyedJaggedTensor.from_rows(FIGURE_5, [["a"]])
    events: list[str] = []

    class Stream(torch.cpu.Stream):
        def wait_stream(self, stream: object) -> None:
            events.append(f"wait {stream is not self}")

    copied = batch.to("cpu", non_blocking=True, data_copy_stream=Stream())
    assert events == ["wait True"]
    assert same(copied.to_keyed_jagged(), batch.to_keyed_jagged())
    _ = batch.groups[0].jagged.offsets()  # which it then remembers
    again = batch.to("cpu", data_copy_stream=Stream())
    assert same(again.to_keyed_jagged(), batch.to_keyed_jagged())
    assert copied.groups[0].inverse.data_ptr() != batch.groups[0].inverse.data_ptr()
