"""Which rows are the same: compiled and plain, against Python, and where hashes do not help."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from flexshard.embeddings import JaggedArray, distinct_rows
from flexshard.errors import DataError

PATHS = ["compiled", "plain"]


@pytest.fixture(params=PATHS)
def compiled(request: pytest.FixtureRequest) -> bool:
    if request.param == "compiled":
        pytest.importorskip("numba")
    return bool(request.param == "compiled")


def python(*columns: JaggedArray) -> tuple[list[int], list[int]]:
    """Inverse and first rows, by a dictionary of bytes."""
    seen: dict[object, int] = {}
    inverse, first = [], []
    for row in range(len(columns[0])):
        key = tuple(
            (
                c.values[c.offsets[row] : c.offsets[row + 1]].tobytes(),
                b"" if c.weights is None else c.weights[c.offsets[row] : c.offsets[row + 1]].tobytes(),
            )
            for c in columns
        )
        if key not in seen:
            first.append(row)
        inverse.append(seen.setdefault(key, len(seen)))
    return inverse, first


def check(*columns: JaggedArray, compiled: bool) -> None:
    found = distinct_rows(*columns, compiled=compiled)
    inverse, first = python(*columns)
    assert found.inverse.tolist() == inverse
    assert found.first.tolist() == first
    for column in columns:
        taken = column.take(found.first)
        assert taken.lengths.tolist() == column.lengths[first].tolist()
        expected = [column.values[column.offsets[row] : column.offsets[row + 1]] for row in first]
        assert taken.values.tolist() == np.concatenate([*expected, column.values[:0]]).tolist()
        assert taken.values.dtype == column.values.dtype
        assert taken.values.flags.writeable


COLUMNS = st.integers(1, 3).flatmap(
    lambda count: st.lists(
        st.tuples(*[st.lists(st.integers(-1, 1), max_size=4) for _ in range(count)]), max_size=20
    ).map(lambda rows: (count, rows))
)


@pytest.mark.parametrize("name", PATHS)
@given(case=COLUMNS, dtype=st.sampled_from([np.int64, np.int32, np.int16]), weighted=st.booleans())
@settings(max_examples=60, deadline=None)
def test_rows_are_the_same_if_python_says_so(
    name: str, case: tuple[int, list[tuple[list[int], ...]]], dtype: type, weighted: bool
) -> None:
    if name == "compiled":
        pytest.importorskip("numba")
    count, rows = case
    columns = []
    for number in range(count):
        lists = [row[number] for row in rows]
        values = np.array([v for each in lists for v in each], dtype)
        weights = (values % 2).astype(np.float32) * np.float32(-0.0) if weighted else None
        columns.append(JaggedArray.of(values, np.array([len(each) for each in lists], np.int64), weights))
    check(*columns, compiled=name == "compiled")


def test_rows_that_differ_in_the_middle_alone(compiled: bool) -> None:
    """The ends are all that the first hash reads."""
    generator = np.random.default_rng(0)
    values = np.zeros((3000, 9), np.int64)
    values[:, 4] = generator.integers(0, 40, 3000)
    check(JaggedArray.of(values.ravel(), np.full(3000, 9)), compiled=compiled)
    other = np.zeros((3000, 5), np.int64)
    other[:, 2] = generator.integers(0, 3, 3000)
    columns = JaggedArray.of(values.ravel(), np.full(3000, 9)), JaggedArray.of(other.ravel(), np.full(3000, 5))
    check(*columns, compiled=compiled)


def mixed(hashes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One step of the compiled hash, which takes 64 bits to 64 bits one to one."""
    product = (hashes ^ values) * np.uint64(0x9E3779B97F4A7C15)
    return product ^ (product >> np.uint64(32))


def test_hashes_that_are_no_use_at_all(compiled: bool) -> None:
    """Six different rows of one hash, of some values and of all of them: the plain path still tells them apart."""
    rows = np.zeros((6, 12), np.uint64)
    rows[:, 4] = np.arange(6)  # neither at an end nor in the middle, where rows are looked at first
    begun = mixed(np.zeros(6, np.uint64), np.full(6, 12, np.uint64))
    for position in range(5):
        begun = mixed(begun, rows[:, position])
    rows[:, 5] = begun  # so that nothing but zeros is mixed in next
    column = JaggedArray.of(rows[[0, 1, 0, 2, 3, 4, 5, 1]].view(np.int64).ravel(), np.full(8, 12))
    if compiled:
        from flexshard._internal import duplicate_kernels

        assert duplicate_kernels.first_rows([(column.values.view(np.uint64), column.offsets)], 8) is None
    check(column, compiled=compiled)


def test_large_batches(compiled: bool) -> None:
    generator = np.random.default_rng(1)
    lists = [generator.integers(0, 1 << 40, generator.integers(0, 30)) for _ in range(700)]
    rows = generator.integers(0, 700, 5000)
    lengths = np.array([lists[row].size for row in rows])
    check(JaggedArray.of(np.concatenate([lists[row] for row in rows]), lengths), compiled=compiled)


def test_columns_of_one_batch_have_as_many_rows() -> None:
    one = JaggedArray.of(np.arange(3), np.array([1, 2]))
    with pytest.raises(DataError, match=r"have as many rows, found \[2, 3\]"):
        distinct_rows(one, JaggedArray.of(np.arange(3), np.array([1, 1, 1])))
    with pytest.raises(DataError, match=r"found \[\]"):
        distinct_rows()
