"""Profiles from counts, histograms, probabilities and texts; their files, sums and drift."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from flexshard import AccessProfile
from flexshard.errors import DataError, FlexShardError, ProfileError
from flexshard.profiling import (
    RowCounts,
    load_ranking,
    power_law_probabilities,
    profile_file,
    read_reuse_histogram,
    write_power_law_sequences,
)
from flexshard.profiling.row_counts import histogram


@given(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 10**9)), min_size=1, max_size=200))
def test_histogram_and_ranking_equal_a_plain_sort(counts: list[int]) -> None:
    array = np.array(counts, np.int64)
    values, rows = histogram(array)
    expected = sorted({c for c in counts if c}, reverse=True)
    assert values.tolist() == expected
    assert rows.tolist() == [counts.count(value) for value in expected]
    ranked, ranked_counts = RowCounts.dense(array).ranked()
    order = sorted((row for row in range(len(counts)) if counts[row]), key=lambda row: (-counts[row], row))
    assert ranked.tolist() == order
    assert ranked_counts.tolist() == [counts[row] for row in order]


def test_from_counts() -> None:
    profile = AccessProfile.from_counts([0, 4, 4, 1], num_samples=3, num_rows=10)
    assert (profile.counts.tolist(), profile.rows.tolist()) == ([4, 1], [2, 1])
    assert profile.avg_length == 3.0
    assert profile.covered(1.5) == pytest.approx(6 / 9)


def test_from_histogram_in_any_order() -> None:
    profile = AccessProfile.from_histogram([1, 0, 4], [1, 7, 2], num_samples=3)
    assert profile.num_rows == 10
    known = AccessProfile.from_counts([0, 4, 4, 1], num_samples=3, num_rows=10)
    assert (profile.counts.tolist(), profile.rows.tolist()) == (known.counts.tolist(), known.rows.tolist())
    assert profile.digest != known.digest, "one of them knows its rows"
    with pytest.raises(ProfileError, match="does not know which rows"):
        _ = profile.ranked_rows


def test_from_probabilities_keeps_them() -> None:
    p = power_law_probabilities(1000, 50.0, 1.1)
    assert p.sum() == pytest.approx(50.0)
    profile = AccessProfile.from_probabilities(p)
    assert profile.avg_length == pytest.approx(50.0, rel=1e-12)
    assert profile.counts / profile.num_samples == pytest.approx(p, rel=1e-9)
    grouped = AccessProfile.from_probabilities([0.5, 0.25], rows=[10, 100], num_rows=1000)
    assert grouped.avg_length == pytest.approx(30.0)
    assert grouped.num_rows == 1000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AccessProfile.from_counts([1, -1], 1), r"counts\[1\] is -1; expected at least 0"),
        (lambda: AccessProfile.from_counts([1.5], 1), r"counts\[0\] is 1.5; expected a whole number"),
        (lambda: AccessProfile.from_counts([float("nan")], 1), r"counts\[0\] is nan"),
        (lambda: AccessProfile.from_counts(["a"], 1), "counts must be whole numbers"),
        (lambda: AccessProfile.from_counts([[1]], 1), "counts must be one-dimensional"),
        (lambda: AccessProfile.from_counts([], 1), "no row was read"),
        (lambda: AccessProfile.from_counts([0, 0], 1), "no row was read in 1 samples"),
        (lambda: AccessProfile.from_counts([1], 0), "num_samples must be at least 1, found 0"),
        (lambda: AccessProfile.from_counts([1, 1], 1, 1), "num_rows is 1, but counts are given for 2"),
        (lambda: AccessProfile.from_counts([2.0**63], 1), "2\\^63 or more"),
        (lambda: AccessProfile.from_counts([2**62, 2**62, 2**62], 1), "more than 2\\^63 accesses"),
        (lambda: AccessProfile.from_histogram([3, 3], [1, 1], 1), "count 3 is given twice"),
        (lambda: AccessProfile.from_histogram([3], [1, 1], 1), "differ in length: 1 and 2"),
        (lambda: AccessProfile.from_histogram([3], [5], 1, 4), "num_rows is 4, but 5 rows were read"),
        (lambda: AccessProfile.from_probabilities([0.5, float("nan")]), "probability 1 is nan"),
        (lambda: AccessProfile.from_probabilities([0.5, -0.1]), "probability 1 is -0.1"),
        (lambda: AccessProfile.from_probabilities([0.1, 0.5]), "must not ascend, but 1 is 0.5 after 0.1"),
        (lambda: AccessProfile.from_probabilities([0.0]), "is never read"),
        (lambda: AccessProfile.from_ids([0.5]), "array of integers"),
        (lambda: AccessProfile.from_ids([[1, 2], [3]]), "ids must be an array of numbers"),  # type: ignore[list-item]
        (lambda: AccessProfile.from_ids([1, 2], lengths=[2, [1]]), "lengths must be an array"),  # type: ignore[list-item]
        (lambda: AccessProfile.from_counts([[1, 2], [3]], 2), "counts must be an array"),  # type: ignore[list-item]
        (lambda: AccessProfile.from_probabilities(["a"]), "probabilities must be an array of numbers"),
        (lambda: AccessProfile.from_ids([1, 2], lengths=[1]), "lengths add up to 1, but there are 2 ids"),
        (
            lambda: AccessProfile.from_ids([1, 7], num_rows=5),
            r"1 ids are outside \[0, 5\), the first is 7 in the array, row 1",
        ),
    ],
)
def test_wrong_values(make: object, message: str) -> None:
    with pytest.raises(FlexShardError, match=message):
        make()  # type: ignore[operator]


def test_profiles_that_do_not_add_up() -> None:
    known = AccessProfile.from_ids([0, 1, 1], num_rows=3)
    other = AccessProfile.from_histogram([1], [1], 1, 3)
    with pytest.raises(ProfileError, match="one is a histogram"):
        _ = known + other
    with pytest.raises(ProfileError, match="lengths of samples"):
        _ = known + AccessProfile.from_counts([1, 0, 0], 1)
    total = known + AccessProfile.from_ids([2, 2], num_rows=3)
    assert total.dense_counts().tolist() == [1, 2, 2]


def test_the_file_is_parquet_that_any_tool_reads(tmp_path: Path) -> None:
    profile = AccessProfile.from_ids([5, 5, 1, 9, 9], num_rows=12, table="items")
    profile.save(tmp_path / "p.parquet")
    table = pq.read_table(tmp_path / "p.parquet")
    assert table.to_pydict() == {"row": [5, 9, 1], "count": [2, 2, 1]}
    loaded = AccessProfile.load(tmp_path / "p.parquet")
    assert (loaded.table, loaded.num_rows, loaded.num_samples) == ("items", 12, 5)
    assert loaded.path == str(tmp_path / "p.parquet")
    assert loaded.digest == profile.digest
    shape = AccessProfile.from_histogram([4, 1], [2, 3], 7, 100)
    shape.save(tmp_path / "h.parquet")
    assert AccessProfile.load(tmp_path / "h.parquet").digest == shape.digest
    assert not list(tmp_path.glob(".*")), "no temporary files are left"


def edited(path: Path, **changes: object) -> Path:
    """The profile file with other columns or metadata."""
    import json

    table = pq.read_table(path)
    meta = json.loads(table.schema.metadata[b"flexshard"])
    for name, value in changes.items():
        if name in table.column_names:
            table = table.set_column(table.column_names.index(name), name, pa.array(value))
        else:
            meta[name] = value
    target = path.with_name("edited.parquet")
    pq.write_table(table.replace_schema_metadata({"flexshard": json.dumps(meta)}), target)
    return target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 9}, "version 9 of profiles is unknown"),
        ({"format": "x"}, "not a profile but other Parquet data"),
        ({"num_rows": "many"}, "'num_rows' must be a whole number, found 'many'"),
        ({"count": [2.0, 2.0, 1.0]}, "column 'count' holds double"),
        ({"count": [2.0, float("nan"), 1.0]}, "column 'count' holds double"),
        ({"count": [1, 2, 2]}, "counts must not ascend, but position 1 has 2 after 1"),
        ({"count": [2, 2, -1]}, "has -1 at position 2"),
        ({"count": [2, 2, None]}, "1 nulls"),
        ({"count": [3, 2, 1]}, "counts add up to 6, but its metadata says 5"),
        ({"row": [5, 9, 12]}, r"row id 12 at position 2 is outside \[0, 12\)"),
        ({"row": [5, 9, 2]}, "its rows and counts are not those of its metadata"),
        ({"digest": 3}, "'digest' must be a text, found 3"),
        ({"row": [5, 5, 1]}, "row id 5 appears more than once"),
        ({"row": [9, 5, 1]}, "rows of equal count must ascend"),
    ],
)
def test_broken_profile_files(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    AccessProfile.from_ids([5, 5, 1, 9, 9], num_rows=12, table="items").save(tmp_path / "p.parquet")
    path = edited(tmp_path / "p.parquet", **changes)
    with pytest.raises(ProfileError, match=message) as caught:
        AccessProfile.load(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 9])
def test_a_ranking_is_read_as_far_as_it_is_needed(tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_file, "_BATCH", 2)  # rows of a row group
    profile = AccessProfile.from_counts([0, 5, 3, 0, 3, 1, 9], num_samples=7)
    path = tmp_path / "p.parquet"
    profile.save(path)
    digest, ids = load_ranking(path, rows)
    assert (digest, ids.tolist()) == (profile.digest, profile.ranked_rows[:rows].tolist())
    older = edited(path, digest=None)  # as an earlier release wrote it
    assert load_ranking(older, rows)[1].tolist() == ids.tolist()
    # The last row group's page is damaged: what lies before it can be read still.
    data = bytearray(path.read_bytes())
    last = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    data[last + 20] ^= 0xFF
    path.write_bytes(data)
    if rows <= 4:
        assert load_ranking(path, rows)[1].tolist() == ids.tolist()
        return
    with pytest.raises(ProfileError, match="not a readable Parquet file"):
        load_ranking(path, rows)


def test_files_that_are_no_profiles(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no such file; build it with"):
        AccessProfile.load(tmp_path / "none.parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ProfileError, match="not a profile but other Parquet data"):
        AccessProfile.load(tmp_path / "other.parquet")
    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(ProfileError, match="not a readable Parquet file"):
        AccessProfile.load(tmp_path / "text.parquet")


def test_a_stored_file_of_version_1_still_loads() -> None:
    profile = AccessProfile.load(Path(__file__).parent / "profile_v1.parquet")
    assert profile.table == "items"
    assert profile.ranked_rows.tolist() == [7, 2, 4]
    assert (profile.num_rows, profile.num_samples, profile.num_accesses) == (10, 4, 8)
    assert profile.covered_held_out(1) == 0.5


def test_drift_by_hand() -> None:
    before = AccessProfile.from_counts([10, 5, 1, 0, 0, 0, 0, 0, 0, 0], 1)
    now = AccessProfile.from_counts([1, 1, 10, 8, 0, 0, 0, 0, 0, 0], 1)
    first, second = before.drift(now, cuts=[0.1, 0.2])
    assert (first.rows, first.covered_before, first.covered_now, first.best_now, first.kept) == (1, 0.625, 0.05, 0.5, 0)
    assert (second.covered_before, second.covered_now, second.best_now) == (0.9375, 0.1, 0.9)
    with pytest.raises(ProfileError, match="10 and 3 rows"):
        before.drift(AccessProfile.from_counts([1, 1, 1], 1))


REUSE = """\
first
Locality stats after processing 1 batches of size 100
Avg # of indices: 1000
Avg # of unique cols: 500
Avg col size: 2.0
Histogram of col sizes:
(0, 1]: 0.800
(1, 2]: 0.100
(2, 4]: 0.100
(4+: 0.000
Ratio of index distribution at different column sizes:
(0, 1]: 0.400
(1, 2]: 0.100
(2, 4]: 0.175
(4+: 0.325
"""


def test_reuse_statistics_by_hand(tmp_path: Path) -> None:
    (tmp_path / "reuse.txt").write_text(REUSE)
    profile = read_reuse_histogram(tmp_path / "reuse.txt", num_rows=1000)
    # 400 lookups of rows read once, 100 of 50 rows read twice; 175 over 50 rows: 25 read 3 times and 25 read 4 times;
    # 325 lookups of rows read over 4 times, whose share of rows rounds to nothing: about sqrt(5·8) = 6.3 lookups each.
    assert dict(zip(profile.counts.tolist(), profile.rows.tolist(), strict=True)) == {
        7: 19,
        6: 32,
        4: 25,
        3: 25,
        2: 50,
        1: 400,
    }
    assert profile.num_accesses == 1000
    assert (profile.num_samples, profile.num_rows) == (100, 1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "not reuse statistics"),
        (REUSE[: REUSE.index("Ratio")], "without 'Ratio of index distribution'"),
        (REUSE.replace("Avg # of indices: 1000\n", ""), "cut off"),
        (REUSE.replace("(4+: 0.325\n", ""), "different bins"),
    ],
)
def test_broken_reuse_statistics(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "reuse.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        read_reuse_histogram(tmp_path / "reuse.txt")


def test_real_reuse_statistics(real_data: Path) -> None:
    profile = read_reuse_histogram(real_data / "meta_reuse_2021.txt", num_rows=10**9)
    assert profile.num_accesses == pytest.approx(887_017_990, rel=2e-3)
    assert profile.rows_read == pytest.approx(128_435_723, rel=5e-3)
    with pytest.raises(DataError, match="no block 17; the file has 17"):
        read_reuse_histogram(real_data / "meta_reuse_2021.txt", batch=17)


def test_generated_sequences_follow_their_law(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_power_law_sequences(
            tmp_path / f"{name}.parquet", rows=1000, samples=20_000, mean_length=20, exponent=1.2, seed=5
        )
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    profile = AccessProfile.from_parquet(tmp_path / "a.parquet", column="items", num_rows=1000)
    assert profile.avg_length == pytest.approx(20, rel=0.02)
    # The continuous law: P(rank <= k) = (1 - (k + 1)^-0.2) / (1 - 1001^-0.2).
    for k in (1, 10, 100):
        expected = (1 - (k + 1) ** -0.2) / (1 - 1001**-0.2)
        assert profile.covered(k) == pytest.approx(expected, rel=0.02)
    with pytest.raises(DataError, match="exponent must be above 0"):
        write_power_law_sequences(tmp_path / "c.parquet", rows=10, samples=1, mean_length=1, exponent=0)
    for column in ("", "a\nb"):
        with pytest.raises(DataError, match="a column's name is a text of one line"):
            write_power_law_sequences(
                tmp_path / "c.parquet", rows=10, samples=1, mean_length=1, exponent=1, column=column
            )
    assert not (tmp_path / "c.parquet").exists()


def test_ids_that_are_masked_are_not_counted() -> None:
    with pytest.raises(DataError, match="ids has masked entries; drop or fill them"):
        AccessProfile.from_ids(np.ma.array([1, 2, 2, 5], mask=[0, 1, 0, 0]))


@pytest.mark.parametrize("name", [3, ["x"], None])
def test_a_name_that_could_not_be_read_again(name: Any) -> None:
    with pytest.raises(ProfileError, match="table is the name of a profile, a text"):
        AccessProfile.from_ids([1, 2, 2], table=name)
