"""Tables in memory, of Arrow, pandas and polars, to profiles and back; plans as tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flexshard import AccessProfile, Cluster, Table, solve
from flexshard.errors import DataError

IDS = np.array([3, 1, 3, 0, 7] * 10)
LISTS = [[1, 2], [2], []]


def frames(values: Any) -> list[tuple[str, Any]]:
    """The same column in each library that is here."""
    made = [("arrow", pa.table({"x": values}))]
    for name in ("pandas", "polars"):
        try:
            library = __import__(name)
        except ImportError:
            continue
        made.append((name, library.DataFrame({"x": values})))
    return made


def test_the_same_column_gives_the_same_profile_whoever_holds_it() -> None:
    flat, lists = AccessProfile.from_ids(IDS), AccessProfile.from_ids(np.array([1, 2, 2]), lengths=np.array([2, 1, 0]))
    for values, expected in ((IDS, flat), (LISTS, lists)):
        for name, frame in frames(values):
            found = AccessProfile.from_frame(frame, column="x")
            assert found.counts.tolist() == expected.counts.tolist(), name
            assert found.ranked_rows.tolist() == expected.ranked_rows.tolist(), name
            assert (found.num_samples, found.lengths) == (expected.num_samples, expected.lengths), name
    for name, frame in frames(IDS):
        folded = AccessProfile.from_frame(frame, column="x", hash="splitmix64", num_rows=5)
        assert folded.num_rows == 5, name


def test_what_pandas_makes_of_ids_is_ids_again() -> None:
    pd = pytest.importorskip("pandas")
    for ids in (
        pd.array([1, 1, 2], dtype="Int64"),
        pd.array([1, 1, 2], dtype="int64[pyarrow]"),
        [1.0, 1.0, 2.0],  # as beside a null that was dropped
        pd.Categorical([1, 1, 2]),
        [np.array([1, 1]), np.array([2])],
    ):
        found = AccessProfile.from_frame(pd.DataFrame({"x": ids}), column="x")
        assert (found.counts.tolist(), found.rows.tolist()) == ([2, 1], [1, 1])
    for wrong, message in (
        ([1.0, np.nan], "has ids that are null; drop or fill them"),
        (pd.array([1, None], dtype="Int64"), "has 1 null ids"),
        ([1.5], "has numbers that are no ids"),
        (["a"], "not ids; number its values first, such as by pandas' factorize"),
        (pd.Categorical(["a"]), "not ids; number its values first"),
        ([1, "a"], "is of mixed values"),
    ):
        with pytest.raises(DataError, match=message):
            AccessProfile.from_frame(pd.DataFrame({"x": wrong}), column="x")
    with pytest.raises(DataError, match="no column 'x' once; there are x, x"):
        AccessProfile.from_frame(pd.DataFrame([[1, 2]], columns=["x", "x"]), column="x")


def test_what_polars_has_beside_ids() -> None:
    pl = pytest.importorskip("polars")
    fixed = pl.DataFrame({"x": [[1, 2], [2, 3]]}, schema={"x": pl.Array(pl.Int64, 2)})
    assert AccessProfile.from_frame(fixed, column="x").counts.tolist() == [2, 1]
    with pytest.raises(DataError, match="has 1 null ids"):
        AccessProfile.from_frame(pl.DataFrame({"x": [1, None]}), column="x")
    with pytest.raises(DataError, match="LazyFrame; collect it first"):
        AccessProfile.from_frame(pl.LazyFrame({"x": [1]}), column="x")


def test_profiles_and_plans_are_tables() -> None:
    profile = AccessProfile.from_ids(IDS, num_rows=20)
    frame = profile.to_frame()
    assert frame.to_pydict() == {
        "position": [0, 1, 2, 3],
        "row": [3, 0, 1, 7],
        "count": [20, 10, 10, 10],
        "reads_per_sample": [0.4, 0.2, 0.2, 0.2],
    }
    plan = solve([Table("x", 20, 8, profile)], Cluster.preset("dgx-a100"), batch_size=32)
    tiers = plan.to_frame()
    assert sum(tiers.column("rows").to_pylist()) == 20
    assert set(tiers.column("table").to_pylist()) == {"x"}
    for frame in (profile.to_frame(), tiers):
        if pd := _or_none("pandas"):
            assert isinstance(frame.to_pandas(), pd.DataFrame)
        if pl := _or_none("polars"):
            assert pl.from_arrow(frame).shape == frame.shape


def _or_none(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        return None


@pytest.mark.parametrize("wrong", [None, {"x": [1]}, IDS, "x.parquet"])
def test_other_things_are_no_tables(wrong: Any) -> None:
    with pytest.raises(DataError, match="a table is pandas', polars' or Arrow's, found"):
        AccessProfile.from_frame(wrong, column="x")
