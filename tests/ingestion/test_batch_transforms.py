"""Dense transforms and derived features, beside the same in plain Python."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest

pytest.importorskip("torchrec")
import pandas as pd
import torch
from hypothesis import given, settings, strategies as st

from flexshard.embeddings import InverseKeyedJaggedTensor
from flexshard.errors import DataError
from flexshard.ingestion import (
    BoxCox,
    Bucketize,
    Clamp,
    Cross,
    Derived,
    FillMissing,
    HashIds,
    Logarithm,
    Logit,
    MapIds,
    NGrams,
    Normalize,
    OnFeatures,
    ReaderPhases,
    SessionBatch,
    Truncate,
)

MASK = (1 << 64) - 1
ROWS = st.lists(
    st.tuples(*(st.lists(st.integers(-(2**62), 2**62), max_size=4) for _ in range(3))), min_size=1, max_size=6
)


def mixed(number: int) -> int:
    """splitmix64."""
    number = (number + 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def batch_of(rows: list[tuple[list[int], ...]], groups: list[list[str]]) -> SessionBatch:
    named = [dict(zip("abc", row, strict=True)) for row in rows]
    features = InverseKeyedJaggedTensor.from_rows(named, groups, keys=["a", "b", "c"])
    return SessionBatch(features, {"x": torch.arange(len(rows))}, ReaderPhases())


def lists(batch: SessionBatch, key: str) -> list[list[int]]:
    jagged = batch.sparse_features[key]
    return [part.tolist() for part in jagged.values().split(jagged.lengths().tolist())]


@given(rows=ROWS, groups=st.sampled_from([[], [["a"]], [["a", "b"]], [["a", "b", "c"]], [["a"], ["b", "c"]]]))
@settings(max_examples=150, deadline=None)
def test_features_of_other_features(rows: list[tuple[list[int], ...]], groups: list[list[str]]) -> None:
    rows = rows + rows[:2]
    batch = batch_of(rows, groups)

    def fold(*ids: int) -> int:
        state = mixed(ids[0] & MASK)
        for other in ids[1:]:
            state = mixed(state ^ (other & MASK))
        return state % 97

    crossed = Cross(["a", "b", "c"], "all", num_rows=97)(Cross(["b", "a"], "two", num_rows=97)(batch))
    assert lists(crossed, "two") == [[fold(y, x) for y, x in product(b, a)] for a, b, _ in rows]
    assert lists(crossed, "all") == [[fold(*three) for three in product(*row)] for row in rows]
    grams = NGrams("b", "grams", n=2, num_rows=97)(batch)
    assert lists(grams, "grams") == [[fold(*pair) for pair in pairwise(b)] for _, b, _ in rows]
    for name in "abc":  # what was there is as it was
        assert lists(crossed, name) == lists(batch, name)
    if groups == [["a", "b"]]:  # once per distinct row
        group = crossed.features.group_of("two")
        assert group is not None
        assert group.num_distinct == batch.features.groups[0].num_distinct


def test_a_users_pages_to_their_categories() -> None:
    """Section 2.2's example: favourite pages and the category of each page."""
    batch = batch_of([([1, 2], [], []), ([3], [], []), ([1, 2], [], [])], [["a"]])
    found = Derived("a", "categories", MapIds({1: 10, 2: 10, 3: 30}), Truncate(1))(batch)
    assert lists(found, "categories") == [[10], [30], [10]]
    assert lists(found, "a") == [[1, 2], [3], [1, 2]]
    assert found.features.group_of("categories") is found.features.group_of("a")
    assert lists(OnFeatures(HashIds(7, features=["a"]))(batch), "b") == [[], [], []]


def test_weights_of_what_is_derived_are_one() -> None:
    import pyarrow as pa

    table = pa.table({"a": [[1, 2]], "w": [[0.5, 0.25]]})
    features = InverseKeyedJaggedTensor.from_arrow(table, [], weights={"a": "w"})
    found = Derived("a", "copy")(SessionBatch(features, {}, ReaderPhases())).sparse_features
    assert found["copy"].weights().tolist() == [1.0, 1.0]


VALUES = [-2.0, 0.0, 0.25, 0.5, 1.0, 3.0]


@pytest.mark.parametrize(
    ("transform", "python"),
    [
        (Normalize(["x"], mean=0.5, std=2.0), lambda x: (x - 0.5) / 2),
        (Logarithm(["x"]), lambda x: math.log1p(max(x, 0))),
        (Clamp(["x"], least=0.1, most=0.9), lambda x: min(max(x, 0.1), 0.9)),
        (Logit(["x"], margin=0.01), lambda x: math.log(min(max(x, 0.01), 0.99) / (1 - min(max(x, 0.01), 0.99)))),
        (BoxCox(["x"], power=0.5, least=0.1), lambda x: (max(x, 0.1) ** 0.5 - 1) / 0.5),
        (BoxCox(["x"], power=0.0, least=0.1), lambda x: math.log(max(x, 0.1))),
    ],
)
def test_dense_columns(transform: object, python: object) -> None:
    batch = batch_of([([], [], [])] * len(VALUES), [])
    batch.dense = {"x": torch.tensor(VALUES, dtype=torch.float64), "other": torch.ones(6)}
    found = transform(batch)  # type: ignore[operator]
    assert found.dense["x"].tolist() == pytest.approx([python(x) for x in VALUES])  # type: ignore[operator]
    assert (found.dense["other"] == 1).all()
    assert batch.dense["x"].tolist() == VALUES  # as it was


def test_missing_numbers_and_buckets() -> None:
    batch = batch_of([([], [], [])] * 4, [])
    batch.dense = {"x": torch.tensor([1.0, math.nan, math.inf, -3.0]), "n": torch.arange(4)}
    assert FillMissing(["x"], value=7.0)(batch).dense["x"].tolist() == [1.0, 7.0, math.inf, -3.0]
    assert lists(Bucketize("n", "bucket", boundaries=[1.0, 2.5])(batch), "bucket") == [[0], [1], [1], [2]]
    assert Normalize(["n"])(batch).dense["n"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_whole_numbers_are_what_pandas_makes_of_them(dtype: torch.dtype) -> None:
    """They were rounded to 32 bits before anything was computed: seconds since 1970 to two minutes."""
    first = {torch.int64: 1_700_000_000, torch.int32: (1 << 30) + 1, torch.uint8: 100}.get(dtype, 30_000)
    own = pd.Series(np.arange(8) + first).astype(str(dtype).removeprefix("torch."))
    batch = batch_of([([], [], [])] * 8, [])
    batch.dense = {"n": torch.from_numpy(own.to_numpy().copy())}
    for transform, expected in (
        (Normalize(["n"], mean=float(first), std=10.0), (own - float(first)) / 10),
        (Clamp(["n"], least=first + 2, most=4e9), own.clip(first + 2)),
        (Clamp(["n"], least=-math.inf, most=first + 3.0), own.clip(upper=first + 3)),
        (Clamp(["n"], least=first + 2.5, most=math.inf), own.astype(float).clip(first + 2.5)),
        (FillMissing(["n"], value=3.0), own),
        (Logarithm(["n"]), np.log1p(own.astype(float))),
        (BoxCox(["n"], power=2.0), (own.astype(float) ** 2 - 1) / 2),
    ):
        found = transform(batch).dense["n"]
        assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-7, abs=1e-6)
        if isinstance(transform, FillMissing | Clamp):
            assert found.tolist() == expected.tolist(), "to the last digit"


def test_whole_numbers_beyond_what_floats_tell_apart() -> None:
    batch = batch_of([([], [], [])] * 2, [])
    batch.dense = {"n": torch.tensor([(1 << 60) + 1, -5])}
    assert Clamp(["n"], least=0, most=1e30)(batch).dense["n"].tolist() == [(1 << 60) + 1, 0]
    assert FillMissing(["n"])(batch).dense["n"].tolist() == [(1 << 60) + 1, -5]
    batch.dense = {"n": torch.tensor([1, 200], dtype=torch.uint8)}
    assert Clamp(["n"], least=300, most=400)(batch).dense["n"].tolist() == [300, 300]
    batch.dense = {"n": torch.tensor([1.0, -2.0], dtype=torch.float16)}
    assert Clamp(["n"], least=-1e300, most=0.5)(batch).dense["n"].tolist() == [0.5, -2.0]
    with pytest.raises(DataError, match="numbers cannot be clamped to nan to 1"):
        Clamp(["n"], least=math.nan, most=1)


def test_what_cannot_be_transformed() -> None:
    batch = batch_of([([1], [2], [3])], [])
    for make, message in (
        (lambda: Normalize(["y"])(batch), "no dense column 'y' to transform; there are x"),
        (lambda: Normalize([]), "columns are a list of at least one name"),
        (lambda: Normalize(["x"], std=0.0), "std is above 0"),
        (lambda: Clamp(["x"], least=2, most=1), "cannot be clamped to 2 to 1"),
        (lambda: Logit(["x"], margin=0.5), "margin is between"),
        (lambda: BoxCox(["x"], power=1, least=0), "least is above 0"),
        (lambda: Cross(["a"], "z", num_rows=3), "of two features or more"),
        (lambda: Cross(["a", "b"], "c", num_rows=3)(batch), "feature 'c' is in the batch already"),
        (lambda: Cross(["a", "q"], "z", num_rows=3)(batch), "no feature 'q' in the batch"),
        (lambda: NGrams("a", "z", n=1, num_rows=3), "n must be at least 2"),
        (lambda: Bucketize("x", "z", boundaries=[2.0, 1.0]), "boundaries ascend"),
        (lambda: Bucketize("y", "z", boundaries=[1.0])(batch), "no dense column 'y'"),
    ):
        with pytest.raises(DataError, match=message):
            make()
