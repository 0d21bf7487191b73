"""What is said twice, against counts in Python; the paper's model against what is measured."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("torchrec")

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from flexshard.embeddings import PartialJaggedTensor
from flexshard.errors import DataError
from flexshard.ingestion import cluster_sessions, measure_duplication, suggest_groups, suggest_partial
from flexshard.tables import dedup_factor, dedup_len
from tests.ingestion.data import log, written


def jagged(lists: list[tuple[int, ...]]) -> JaggedTensor:
    values = torch.tensor([value for one in lists for value in one])
    return JaggedTensor(values, lengths=torch.tensor([len(one) for one in lists]))


def test_histories_that_grow_are_proposed_together() -> None:
    rows: list[dict[str, Any]] = [
        {"user": user, "seen": [*range(user, user + n)], "liked": [user]} for user in range(9) for n in range(12)
    ]
    for row in rows:
        seen = row["seen"]
        row |= {"kind": [item // 2 for item in seen], "first": seen[::-1], "odd": [n for n in seen if n % 2]}
    table = pa.Table.from_pylist(rows)
    lists = ["seen", "kind", "first", "odd", "liked"]
    assert suggest_partial(table, features=lists, batch_size=64) == [["seen", "kind"], ["odd"]]
    assert suggest_partial(table, features=lists, batch_size=64, newest="first") == [["first"]]
    assert suggest_partial(table, features=["liked"], batch_size=64) == []
    with pytest.raises(DataError, match="newest is 'last' or 'first', found 'end'"):
        suggest_partial(table, features=lists, newest="end")


def test_section_4_2s_worked_example() -> None:
    assert dedup_len(3, 3, 3, 0.5) == pytest.approx(6)
    assert dedup_factor(3, 0.5) == pytest.approx(1.5)
    with pytest.raises(DataError, match="d is a probability, found 2"):
        dedup_factor(3, 2)
    with pytest.raises(DataError, match="at least one sample, found 0"):
        dedup_factor(0, 0.5)


def test_a_list_shifted_by_one_is_half_a_duplicate(tmp_path: Path) -> None:
    """Section 3's example: 100 ids in two samples, shifted by one: 99/200; and 15.5/16.5 if nothing changes."""
    table = pa.table({"s": [1, 1], "f": [list(range(100)), list(range(1, 101))]})
    written(table, tmp_path)
    (feature,) = measure_duplication(tmp_path, session="s").features
    assert (feature.exact, feature.partial) == (0, pytest.approx(0.495))


@pytest.mark.parametrize("clustered", [False, True])
def test_counts_are_pythons(tmp_path: Path, clustered: bool) -> None:
    table = log(200)
    written(table, tmp_path / "in", 3)
    folder = tmp_path / "in"
    if clustered:
        folder = cluster_sessions(folder, tmp_path / "out", session="session", time="time").path
        table = table.sort_by([("session", "ascending"), ("time", "ascending")])
    batch = 64
    found = measure_duplication(folder, session="session", batch_size=batch, features=["history", "liked", "item"])
    rows = table.to_pylist()
    sizes = Counter(row["session"] for row in rows)
    assert found.session_sizes.tolist() == sorted(sizes.values())
    assert found.samples_per_session == pytest.approx(len(rows) / 200)
    batches = [rows[start : start + batch] for start in range(0, len(rows), batch)]
    in_batches = [size for part in batches for size in Counter(row["session"] for row in part).values()]
    assert found.samples_per_session_in_batch == pytest.approx(np.mean(in_batches))
    for feature in found.features:

        def of(row: dict[str, object], name: str = feature.feature) -> tuple[int, ...]:
            value = row[name]
            return tuple(value) if isinstance(value, list) else (value,)  # type: ignore[return-value]

        lists = {(row["session"], of(row)) for row in rows}
        assert feature.exact == pytest.approx(1 - len(lists) / len(rows))
        most: Counter[tuple[object, int]] = Counter()
        for session, values in lists:
            for value, count in Counter(values).items():
                most[session, value] = max(most[session, value], count)
        total = sum(len(of(row)) for row in rows)
        assert feature.partial == pytest.approx(1 - sum(most.values()) / total)
        kept = sum(len(values) for part in batches for values in {of(row) for row in part})
        assert feature.measured == pytest.approx(total / kept)
        distinct = [list(dict.fromkeys(of(row) for row in part)) for part in batches]
        assert feature.lists == pytest.approx(len(rows) / sum(map(len, distinct)))
        ids = sum(len({value for row in part for value in of(row)}) for part in batches)
        assert feature.ids == pytest.approx(total / ids)
        buffers = sum(PartialJaggedTensor.from_jagged(jagged(lists)).values.numel() for lists in distinct)
        assert feature.newest == "last"
        assert feature.runs == pytest.approx(total / buffers)
        if clustered and feature.feature != "item":
            assert feature.predicted == pytest.approx(feature.measured, rel=0.1)
            assert feature.measured > 2

    def row_of(row: dict[str, object]) -> str:
        return repr([row[name] for name in ("history", "liked", "item")])

    assert found.samples_per_row == pytest.approx(len(rows) / sum(len({*map(row_of, part)}) for part in batches))
    exact, partial = found.overall(weighted=False)
    assert exact == pytest.approx(np.mean([feature.exact for feature in found.features]))
    weighted = found.overall(weighted=True)
    assert weighted[0] > exact  # the longest feature repeats most
    assert weighted[1] > partial


def test_texts_are_features_too(tmp_path: Path) -> None:
    table = pa.table({"s": ["a", "a", "b"], "f": [["x", "yy"], ["x", "yy"], None], "g": ["q", "q", "r"]})
    written(table, tmp_path)
    found = measure_duplication(tmp_path, session="s", features=["f", "g"])
    assert [feature.measured for feature in found.features] == [2, 1.5]


def test_groups_are_the_features_that_change_together(tmp_path: Path) -> None:
    table = log(300).sort_by([("session", "ascending"), ("time", "ascending")])
    assert suggest_groups(table) == [["history", "shops"], ["liked"]]
    assert suggest_groups(table, features=["liked", "item", "history"]) == [["history"], ["liked"]]
    assert suggest_groups(table, threshold=100) == []
    written(table, tmp_path)
    assert suggest_groups(tmp_path, batch_size=128) == [["history", "shops"], ["liked"]]
    shuffled = table.take(np.random.default_rng(0).permutation(table.num_rows))
    assert suggest_groups(shuffled, batch_size=128) == []  # S is about 1 in such batches


def test_features_that_hardly_ever_differ_share_a_group() -> None:
    generator = np.random.default_rng(0)
    a = np.repeat(np.arange(100), 10)
    b = a.copy()
    b[generator.choice(1000, 2)] = 1000  # rows where only one of them changed
    table = pa.table({"a": [[v] * 9 for v in a.tolist()], "b": [[v] * 9 for v in b.tolist()]})
    assert suggest_groups(table) == [["a", "b"]]
    assert suggest_groups(table, tolerance=0.0) == [["a"], ["b"]]


def test_data_that_cannot_be_measured(tmp_path: Path) -> None:
    written(log(), tmp_path / "in", 2)
    with pytest.raises(DataError, match="no column 'user'"):
        measure_duplication(tmp_path / "in", session="user")
    with pytest.raises(DataError, match="no column 'x'"):
        suggest_groups(tmp_path / "in", features=["x"])
    with pytest.raises(DataError, match="the table: no column 'x'"):
        suggest_groups(log(), features=["x"])
    written(pa.table({"s": [1], "t": [1]}), tmp_path / "flat")
    with pytest.raises(DataError, match="no columns of lists; name the features"):
        measure_duplication(tmp_path / "flat", session="s")
    table = log()
    keys = pa.array([None if number == 100 else "a" for number in range(table.num_rows)])
    written(table.set_column(0, "session", keys), tmp_path / "nulls", 2)
    with pytest.raises(DataError, match=r"log-0\.parquet: session column 'session' is null in row 100"):
        measure_duplication(tmp_path / "nulls", session="session")


def test_columns_that_are_not_asked_for_may_differ_and_nulls_are_left_out(tmp_path: Path) -> None:
    for name, other in (("a", pa.array([1, 2, 3])), ("b", pa.array(["x", "y", "z"]))):
        table = pa.table({"s": [1, 1, 1], "f": ["x", None, None], "z": other, "n": [[[1]]] * 3})
        written(table, tmp_path / name)
    (feature,) = measure_duplication([tmp_path / "a", tmp_path / "b"], session="s", features=["f"]).features
    assert (feature.exact, feature.partial) == (0.5, 0.5)
    with pytest.raises(DataError, match="no columns of lists"):  # lists of lists are no features
        measure_duplication(tmp_path / "a", session="s")
    with pytest.raises(DataError, match=r"column 'n' holds list<.*; expected numbers or texts"):
        measure_duplication(tmp_path / "a", session="s", features=["n"])
    with pytest.raises(DataError, match=r"session column 'n' holds list<.*; expected one key per row"):
        measure_duplication(tmp_path / "a", session="n", features=["f"])
    with pytest.raises(DataError, match="feature 'f' is named twice"):
        measure_duplication(tmp_path / "a", session="s", features=["f", "f"])
    written(pa.table({"s": [1, 1], "S": [1, 2]}), tmp_path / "case")
    with pytest.raises(DataError, match="columns called 's' differ by case only"):
        measure_duplication(tmp_path / "case", session="S", features=["s"])


def test_dictionaries_of_texts_within_lists(tmp_path: Path) -> None:
    lists = pa.array([["x"], ["x"], ["y"]], pa.list_(pa.string())).cast(
        pa.list_(pa.dictionary(pa.int32(), pa.string()))
    )
    assert suggest_groups(pa.table({"f": lists}), threshold=1.2) == [["f"]]


def test_null_ids_are_named_by_their_row_of_the_file(tmp_path: Path) -> None:
    written(pa.table({"s": [1] * 6, "f": [[1], [1], [1], [1], [None], [1]]}), tmp_path, row_group_size=2)
    with pytest.raises(DataError, match=r"log-0\.parquet: column 'f' has a null id in row 4"):
        measure_duplication(tmp_path, session="s", batch_size=2)
