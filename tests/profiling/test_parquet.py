"""Profiles built from Parquet: what is counted, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from flexshard import AccessProfile
from flexshard._internal import expand, read_chunks
from flexshard.errors import ChangedDataError, DataError, ProfileError
from flexshard.profiling import hash_to_rows
from flexshard.profiling.count.keyed_lengths import KeyedLengths


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_flat_ids(tmp_path: Path) -> None:
    profile = AccessProfile.from_parquet(
        write(tmp_path / "a.parquet", {"id": [3, 1, 3, 3, 0]}), column="id", num_rows=6
    )
    assert profile.dense_counts().tolist() == [1, 1, 0, 3, 0, 0]
    assert profile.ranked_rows.tolist() == [3, 0, 1]
    assert (profile.num_samples, profile.num_accesses, profile.rows_read, profile.num_rows) == (5, 5, 3, 6)
    assert profile.avg_length == 1.0
    assert profile.covered(1) == 0.6
    assert profile.covered(2) == 0.8


def test_lists_are_samples_and_null_lists_are_empty(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"ids": pa.array([[1, 2], [], None, [2, 2, 2]], pa.list_(pa.int32()))})
    profile = AccessProfile.from_parquet(path, column="ids")
    assert profile.dense_counts().tolist() == [0, 1, 4]
    assert profile.num_samples == 4
    assert profile.lengths is not None
    assert (profile.lengths.total, profile.lengths.total_squares, profile.lengths.maximum) == (5, 13, 3)
    assert profile.lengths.mean == 1.25
    assert profile.lengths.variance == pytest.approx(13 / 4 - 1.25**2)


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int64()),
        pa.large_list(pa.uint8()),
        pa.list_(pa.int16(), 2),
        pa.list_(pa.uint64()),
    ],
)
def test_every_kind_of_list(tmp_path: Path, kind: pa.DataType) -> None:
    path = write(tmp_path / "a.parquet", {"ids": pa.array([[1, 2], [2, 2], [0, 1]], kind)})
    assert AccessProfile.from_parquet(path, column="ids").dense_counts().tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", ["uint8", "int16", "uint32", "uint64", "int64"])
def test_every_kind_of_integer(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "a.parquet", {"id": np.array([200 if kind == "uint8" else 5, 5, 0], kind)})
    profile = AccessProfile.from_parquet(path, column="id")
    assert profile.num_accesses == 3
    assert profile.dense_counts()[0] == 1


def test_samples_by_key(tmp_path: Path) -> None:
    columns = {"user": ["a", "b", "a", "c", "a"], "id": [0, 1, 2, 0, 0]}
    profile = AccessProfile.from_parquet(write(tmp_path / "a.parquet", columns), column="id", sample_key="user")
    assert profile.num_samples == 3
    assert profile.lengths is not None
    assert (profile.lengths.total, profile.lengths.total_squares, profile.lengths.maximum) == (5, 9 + 1 + 1, 3)


def test_keys_are_compacted_on_the_way() -> None:
    random = np.random.default_rng(4)
    whole, compacted = KeyedLengths(0.2), KeyedLengths(0.2, compact_keys=120)
    for _ in range(60):
        keys, lengths = pa.chunked_array([random.integers(0, 1000, 50)]), random.integers(0, 4, 50)
        whole.add(keys, lengths, None)
        compacted.add(keys, lengths, None)
    assert compacted.moments() == whole.moments()
    assert compacted.table().sort_by("key") == whole.table().sort_by("key")


def random_table(random: np.random.Generator, rows: int, *, lists: bool) -> dict[str, Any]:
    if not lists:
        return {"key": random.integers(0, rows // 3 + 1, rows), "ids": random.zipf(1.5, rows) % 50}
    lengths = random.integers(0, 4, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = pa.array(random.zipf(1.5, int(lengths.sum())) % 50)
    return {"key": random.integers(0, rows // 3 + 1, rows), "ids": pa.ListArray.from_arrays(offsets, values)}


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("sample_key", [None, "key"])
@pytest.mark.parametrize("holdout", [0.0, 0.3])
def test_partial_profiles_add_up_to_the_same_bytes(
    tmp_path: Path, lists: bool, sample_key: str | None, holdout: float
) -> None:
    random = np.random.default_rng(7)
    for name in ("a", "b"):
        write(tmp_path / f"{name}.parquet", random_table(random, 500, lists=lists), row_group_size=64)
    options = {"column": "ids", "num_rows": 50, "sample_key": sample_key, "holdout": holdout, "seed": 3}
    parts = [AccessProfile.from_parquet(tmp_path / f"{name}.parquet", **options) for name in ("a", "b")]
    whole = AccessProfile.from_parquet(tmp_path / "*.parquet", **options, workers=3)
    (parts[0] + parts[1]).save(tmp_path / "sum.profile")
    whole.save(tmp_path / "whole.profile")
    assert (tmp_path / "sum.profile").read_bytes() == (tmp_path / "whole.profile").read_bytes()
    assert (parts[0] + parts[1]).digest == whole.digest
    loaded = AccessProfile.load(tmp_path / "whole.profile")
    assert loaded.digest == whole.digest
    assert loaded.ranked_rows.tolist() == whole.ranked_rows.tolist()


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.integers(1, 400), st.booleans(), st.sampled_from([None, "key"]))
def test_counts_equal_those_of_numpy(
    tmp_path_factory: pytest.TempPathFactory, seed: int, rows: int, lists: bool, key: str | None
) -> None:
    columns = random_table(np.random.default_rng(seed), rows, lists=lists)
    path = write(tmp_path_factory.mktemp("data") / "a.parquet", columns, row_group_size=50)
    ids = columns["ids"].flatten().to_numpy() if lists else columns["ids"]
    if ids.size == 0:
        return
    profile = AccessProfile.from_parquet(path, column="ids", num_rows=50, sample_key=key)
    expected = np.bincount(ids, minlength=50)
    assert profile.dense_counts().tolist() == expected.tolist()
    ranked = sorted((row for row in range(50) if expected[row]), key=lambda row: (-expected[row], row))
    assert profile.ranked_rows.tolist() == ranked
    assert profile.num_samples == (np.unique(columns["key"]).size if key else rows)
    for k in (1, 5, 20):
        assert profile.covered(k) == pytest.approx(np.sort(expected)[::-1][:k].sum() / ids.size)


def test_large_row_groups_are_streamed(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    path = write(tmp_path / "a.parquet", {"ids": random.integers(0, 1000, 50_000)})
    sources = expand(path)
    (whole,) = read_chunks(sources, ["ids"], 1)
    streamed = list(read_chunks(sources, ["ids"], 1, whole_group_bytes=1000, batch_rows=777))
    assert [chunk.first_row for chunk in streamed] == list(range(0, 50_000, 777))
    assert pa.concat_tables([chunk.table for chunk in streamed]).combine_chunks() == whole.table.combine_chunks()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("rows", "first", "group"), [(4000, 0, 100), (1000, 5000, 100), (1000, 0, 50)])
def test_files_that_are_replaced_meanwhile_are_not_counted(
    rows: int, first: int, group: int, streamed: bool, tmp_path: Path
) -> None:
    paths = [write(tmp_path / name, {"id": np.arange(1000)}, row_group_size=100) for name in ("a.parquet", "b.parquet")]
    other = write(tmp_path / "other", {"id": np.arange(first, first + rows)}, row_group_size=group)

    def read() -> None:
        for chunk in read_chunks(expand(paths), ["id"], 1, whole_group_bytes=0 if streamed else 1 << 20):
            if chunk.first_row == 200 and other.exists():
                other.replace(paths[1])

    with pytest.raises(ChangedDataError, match=r"b\.parquet: has changed since reading began"):
        read()


def test_progress_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"ids": np.arange(1000) % 7}, row_group_size=300)
    calls: list[tuple[int, int]] = []
    AccessProfile.from_parquet(path, column="ids", progress=lambda done, total: calls.append((done, total)))
    assert calls == [(300, 1000), (600, 1000), (900, 1000), (1000, 1000)]


def test_holdout_is_unseen_and_measured(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    # Uniform reads: what looks hot in sample is chance, and covers no more than its share of unseen samples.
    path = write(tmp_path / "a.parquet", {"ids": random.integers(0, 10_000, 50_000)})
    profile = AccessProfile.from_parquet(path, column="ids", num_rows=10_000, holdout=0.2)
    assert profile.holdout is not None
    assert profile.num_samples + profile.holdout.num_samples == 50_000
    assert profile.holdout.num_samples == pytest.approx(10_000, rel=0.05)
    assert int(profile.holdout.accesses.sum()) == profile.holdout.num_samples
    assert profile.covered(1000) > 0.18
    assert profile.covered_held_out(1000) == pytest.approx(0.1, abs=0.015)
    assert profile.covered_held_out(10_000) == pytest.approx(1.0)
    assert AccessProfile.from_parquet(path, column="ids", num_rows=10_000).covered_held_out(10) is None


def test_raw_ids_are_folded_by_a_named_hash(tmp_path: Path) -> None:
    raw = np.array([-1, 2**62, -(2**63), 5, 5])
    path = write(tmp_path / "a.parquet", {"key": raw})
    profile = AccessProfile.from_parquet(path, column="key", num_rows=1000, hash="splitmix64")
    assert profile.dense_counts().tolist() == np.bincount(hash_to_rows(raw, 1000), minlength=1000).tolist()
    # The published test vector of SplitMix64: the stream of seed 0 starts so (its state is one increment ahead).
    assert int(hash_to_rows(np.array([0]), 2**63 - 25)[0]) == 0xE220A8397B1DCDAF % (2**63 - 25)
    with pytest.raises(DataError, match="hashing needs the number of rows"):
        AccessProfile.from_parquet(path, column="key", hash="splitmix64")
    with pytest.raises(DataError, match="no hash is called 'md5'"):
        AccessProfile.from_parquet(path, column="key", num_rows=10, hash="md5")


def test_ids_outside_the_table_are_counted_and_the_first_is_shown(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"ids": pa.array([[1], [2, 9], [-3], [10]])}, row_group_size=2)
    with pytest.raises(
        DataError, match=r"3 ids are outside \[0, 5\), the first is 9 in .*a.parquet, row 1; raise num_rows"
    ):
        AccessProfile.from_parquet(path, column="ids", num_rows=5)
    with pytest.raises(
        DataError, match=r"1 ids are outside \[0, 2\^28\), the first is -3 in .*, row 2; drop negative ids"
    ):
        AccessProfile.from_parquet(path, column="ids")
    with pytest.raises(DataError, match="3 ids are outside"):
        AccessProfile.from_parquet(path, column="ids", num_rows=5, holdout=0.5)
    wide = write(tmp_path / "wide.parquet", {"ids": np.array([2**64 - 1, 1], np.uint64)})
    with pytest.raises(DataError, match=r"1 ids are outside \[0, 5\), the first is 18446744073709551615"):
        AccessProfile.from_parquet(wide, column="ids", num_rows=5)


def test_many_tables_in_one_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"table": [10, 2, 10, 2, 2], "id": [0, 1, 3, 1, 0]}, row_group_size=2)
    profiles = AccessProfile.from_parquet_by(path, column="id", by="table")
    assert list(profiles) == ["2", "10"]
    assert profiles["2"].dense_counts().tolist() == [1, 2]
    assert profiles["10"].dense_counts().tolist() == [1, 0, 0, 1]
    assert {p.num_samples for p in profiles.values()} == {5}
    lengths = profiles["10"].lengths
    assert lengths is not None
    assert (lengths.total, lengths.total_squares) == (2, 2)
    with pytest.raises(DataError, match=r"table '10': 1 ids are outside \[0, 2\), the first is 3 in .*, row 2"):
        AccessProfile.from_parquet_by(path, column="id", by="table", num_rows={"10": 2})


@pytest.mark.parametrize(
    "pattern",
    [
        "part-[!0]*.parquet",
        "part-[0^].parquet",
        "*.parquet",
        "**/*.parquet",
        "**",
        "*/**",
        "s?b/**",
        "s?b/*",
        ".h*",
        "[.]h*",
    ],
)
def test_patterns_of_urls_are_those_of_files(pattern: str, tmp_path: Path) -> None:
    names = ("part-!", "part-0", "part-1", "part-^", ".hidden", "sub/one", "sub/deep/two", ".hid/three", "sub/.four")
    for name in names:
        place = tmp_path / f"{name}.parquet"
        place.parent.mkdir(parents=True, exist_ok=True)
        write(place, {"id": [1]})

    def found(start: str) -> list[str]:
        try:
            return sorted(source.path for source in expand(f"{start}{tmp_path}/{pattern}"))
        except DataError as error:
            return [str(error).rpartition(": ")[2]]

    assert found("file://") == found("")


def test_globs_folders_and_urls(tmp_path: Path) -> None:
    import fsspec

    for k in range(3):
        write(tmp_path / f"part-{k}.parquet", {"id": [k]})
    by_glob = AccessProfile.from_parquet(tmp_path / "part-*.parquet", column="id", num_rows=3)
    assert by_glob.dense_counts().tolist() == [1, 1, 1]
    assert AccessProfile.from_parquet(tmp_path, column="id", num_rows=3).digest == by_glob.digest
    assert (
        AccessProfile.from_parquet(f"file://{tmp_path}/part-*.parquet", column="id", num_rows=3).digest
        == by_glob.digest
    )
    memory = fsspec.filesystem("memory")
    for k in range(3):
        with memory.open(f"/bucket/part-{k}.parquet", "wb") as target:
            target.write((tmp_path / f"part-{k}.parquet").read_bytes())
    for url in ("memory://bucket/part-*.parquet", "memory://bucket"):
        assert AccessProfile.from_parquet(url, column="id", num_rows=3).digest == by_glob.digest
    with pytest.raises(DataError, match="no file matches"):
        AccessProfile.from_parquet(tmp_path / "none-*.parquet", column="id")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"ids": [1.0, 2.0]},
            r"holds double, not ids .*; number its values first: flexshard encode .*a.parquet --column ids",
        ),
        ({"ids": ["a", "b"]}, "column 'ids' holds string, not ids"),
        ({"ids": [["a"], ["b"]]}, "column 'ids' holds list<.*string>, not ids"),
        ({"ids": [True]}, "holds bool"),
        ({"ids": [1, None, 3, None]}, "2 null ids in the rows from 0 on, the first in row 1; drop or fill them"),
        ({"ids": [[1], [2, None]]}, "1 null ids in the rows from 0 on, the first in row 1"),
        ({"other": [1]}, "no column 'ids'; there are other"),
        ({"ids": pa.array([], pa.int64())}, "no rows in 1 file"),
    ],
)
def test_data_that_cannot_be_counted(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "a.parquet", columns)
    with pytest.raises(DataError, match=message) as caught:
        AccessProfile.from_parquet(path, column="ids")
    assert "a.parquet" in str(caught.value)


def test_files_that_are_not_parquet(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.parquet: no such file"):
        AccessProfile.from_parquet(tmp_path / "none.parquet", column="id")
    (tmp_path / "text.parquet").write_text("hello, this is text")
    with pytest.raises(DataError, match=r"text\.parquet: not a Parquet file, or cut off"):
        AccessProfile.from_parquet(tmp_path / "text.parquet", column="id")
    whole = write(tmp_path / "whole.parquet", {"id": np.arange(100_000)}).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.parquet: not a Parquet file, or cut off"):
        AccessProfile.from_parquet(tmp_path / "cut.parquet", column="id")
    # A footer that is whole over pages that are not.
    damaged = bytearray(whole)
    damaged[1000:60_000] = bytes(59_000)
    (tmp_path / "damaged.parquet").write_bytes(damaged)
    with pytest.raises(DataError, match=r"damaged\.parquet"):
        AccessProfile.from_parquet(tmp_path / "damaged.parquet", column="id", num_rows=100_000)


def test_nothing_read_and_nothing_left(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"ids": pa.array([[], []], pa.list_(pa.int64()))})
    with pytest.raises(ProfileError, match="no row was read in 2 samples"):
        AccessProfile.from_parquet(path, column="ids", num_rows=10)
    null_key = write(tmp_path / "b.parquet", {"ids": [1, 2], "user": ["a", None]})
    with pytest.raises(DataError, match="sample key 'user' is null in row 1"):
        AccessProfile.from_parquet(null_key, column="ids", sample_key="user")
    with pytest.raises(DataError, match="holdout is a share"):
        AccessProfile.from_parquet(null_key, column="ids", holdout=1.0)


@pytest.mark.parametrize("how", [{}, {"hash": "splitmix64"}, {"sample_key": "who"}, {"holdout": 0.3}, "all"])
def test_tables_of_one_file_are_counted_as_from_files_of_their_own(how: Any, tmp_path: Path) -> None:
    """Where a row is of another table, a table's own file has a sample without ids."""
    random = np.random.default_rng(0)
    tables, ids = random.integers(0, 3, 4000), random.zipf(1.4, 4000) % 200
    who = pa.array([f"user {n}" for n in random.integers(0, 300, 4000)])
    if how == "all":
        how = {"hash": "splitmix64", "sample_key": "who", "holdout": 0.3, "seed": 4}
    for folder in ("many", *"012"):
        (tmp_path / folder).mkdir()
    for part, rows in enumerate((slice(0, 2500), slice(2500, 4000))):
        columns = {"who": who[rows.start : rows.stop], "table": tables[rows], "id": ids[rows]}
        pq.write_table(pa.table(columns), tmp_path / "many" / f"{part}.parquet", row_group_size=700)
        for table in range(3):
            own = [[value] if of == table else [] for value, of in zip(ids[rows], tables[rows], strict=True)]
            pq.write_table(
                pa.table({"who": columns["who"], "id": pa.array(own, pa.list_(pa.int64()))}),
                tmp_path / str(table) / f"{part}.parquet",
                row_group_size=700,
            )
    found = AccessProfile.from_parquet_by(tmp_path / "many", column="id", by="table", num_rows=250, **how)
    assert list(found) == ["0", "1", "2"]
    for name, profile in found.items():
        own_file = AccessProfile.from_parquet(tmp_path / name, column="id", num_rows=250, table=name, **how)
        for field in ("counts", "rows", "ranked_rows"):
            np.testing.assert_array_equal(getattr(profile, field), getattr(own_file, field))
        assert (profile.num_samples, profile.lengths) == (own_file.num_samples, own_file.lengths)
        assert (profile.num_accesses, profile.sample_key) == (own_file.num_accesses, own_file.sample_key)
        assert profile.hash == own_file.hash == how.get("hash")
        assert (profile.holdout is None) == (own_file.holdout is None) == ("holdout" not in how)
        if profile.holdout is not None and own_file.holdout is not None:
            assert profile.holdout.num_samples == own_file.holdout.num_samples
            np.testing.assert_array_equal(profile.holdout.accesses, own_file.holdout.accesses)


def test_tables_that_are_rare_or_written_alike(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"table": ["big"] * 999 + ["rare"], "id": list(range(1000))})
    with pytest.warns(UserWarning, match="table 'rare' is left out: all that reads it was held out"):
        found = AccessProfile.from_parquet_by(path, column="id", by="table", holdout=0.5, seed=0)
    assert list(found) == ["big"]
    alike = write(tmp_path / "b.parquet", {"table": pa.array([b"\xff", b"\\xff"], pa.binary()), "id": [1, 2]})
    with pytest.raises(DataError, match="has two tables that are written"):
        AccessProfile.from_parquet_by(alike, column="id", by="table")
    long = write(tmp_path / "c.parquet", {"table": ["9" * 5000, "10", "9", "x"], "id": [1, 2, 3, 4]})
    assert list(AccessProfile.from_parquet_by(long, column="id", by="table")) == ["9", "10", "9" * 5000, "x"]


def test_pages_that_say_that_they_are_damaged(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    how: dict[str, Any] = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
    pq.write_table(pa.table({"x": np.arange(10_000) % 100}), file, **how)
    damaged = bytearray(file.read_bytes())
    damaged[4000] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(DataError, match=r"a\.parquet: broken at or after row 0: .*CRC checksum"):
        AccessProfile.from_parquet(file, column="x")


def test_days_without_values_have_no_types(tmp_path: Path) -> None:
    """As pandas writes them: no rows, or lists that are all empty."""
    for name, values in {
        "ids": pa.array([1, 2, 2]),
        "none": pa.array([], pa.float64()),
        "lists": pa.array([[1], [2, 2]]),
        "empty": pa.array([[], []]),
        "null": pa.array([[], [None]]),
    }.items():
        pq.write_table(pa.table({"x": values}), tmp_path / f"{name}.parquet")

    def counted(*names: str) -> tuple[int, int]:
        profile = AccessProfile.from_parquet([tmp_path / f"{name}.parquet" for name in names], column="x")
        return profile.num_samples, profile.num_accesses

    assert counted("ids", "none") == (3, 3)
    assert counted("lists", "empty") == (4, 3)
    with pytest.raises(DataError, match=r"null\.parquet: column 'x' has 1 null ids .* in row 1"):
        counted("lists", "null")


def test_a_folder_of_the_path_is_no_column(tmp_path: Path) -> None:
    (tmp_path / "day=1").mkdir()
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "day=1" / "a.parquet")
    with pytest.raises(DataError, match="no column 'day'; there are x; it is a folder of the path, of which"):
        AccessProfile.from_parquet(tmp_path, column="x", sample_key="day")
    with pytest.raises(DataError, match=r"no column 'y'; there are x$"):
        AccessProfile.from_parquet(tmp_path, column="y")
