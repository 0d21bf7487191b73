"""How many samples contain a row: rows of files and keys, held-out samples, sums, files, and what it predicts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexshard import AccessProfile, Table
from flexshard.errors import DataError, ProfileError
from flexshard.profiling import RowCounts
from flexshard.profiling.count.keyed_lengths import held_out
from flexshard.profiling.count.sample_pairs import SamplePairs

ROWS = 50


def write(path: Path, seed: int, number: int = 700) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lists of ids in which rows repeat, and keys that several of them share."""
    random = np.random.default_rng(seed)
    lengths, keys = random.integers(0, 6, number), random.integers(0, number // 3, number)
    ids = random.zipf(1.5, int(lengths.sum())) % ROWS
    lists = pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), pa.array(ids))
    pq.write_table(pa.table({"ids": lists, "key": keys}), path, row_group_size=90)
    return ids, lengths, keys


def containing(ids: np.ndarray, samples: np.ndarray) -> np.ndarray:
    pairs = np.unique(np.stack([samples, ids]), axis=1)
    return np.bincount(pairs[1], minlength=ROWS)


def known(profile: AccessProfile) -> np.ndarray:
    assert profile.row_counts is not None
    assert profile.row_counts.samples is not None
    return profile.row_counts.samples.to_dense(ROWS)


@pytest.mark.parametrize("sample_key", [None, "key"])
@pytest.mark.parametrize("holdout", [0.0, 0.3])
def test_samples_that_contain_a_row_are_counted(tmp_path: Path, sample_key: str | None, holdout: float) -> None:
    ids, lengths, keys = write(tmp_path / "a.parquet", 1)
    profile = AccessProfile.from_parquet(
        tmp_path / "a.parquet", column="ids", num_rows=ROWS, sample_key=sample_key, holdout=holdout, seed=3
    )
    samples = np.repeat(np.arange(lengths.size) if sample_key is None else keys, lengths)
    if holdout and sample_key is not None:
        seen = ~held_out(samples, holdout, 3)
        ids, samples = ids[seen], samples[seen]
    if holdout and sample_key is None:
        assert profile.samples is not None
        assert profile.rows.sum() <= profile.samples.sum() < profile.num_accesses
        return
    expected = containing(ids, samples)
    assert np.array_equal(known(profile), expected)
    assert profile.samples is not None
    counts = profile.dense_counts()
    assert profile.samples.tolist() == [expected[counts == count].sum() for count in profile.counts]
    assert profile.sample_share @ profile.rows == pytest.approx(expected.sum() / profile.num_samples)


def test_arrays_blocks_and_files_agree(tmp_path: Path) -> None:
    ids, lengths, _ = write(tmp_path / "a.parquet", 2)
    array = AccessProfile.from_ids(ids, lengths=lengths, num_rows=ROWS, table="ids")
    file = AccessProfile.from_parquet(tmp_path / "a.parquet", column="ids", num_rows=ROWS)
    assert array.digest == file.digest
    assert np.array_equal(known(array), containing(ids, np.repeat(np.arange(lengths.size), lengths)))


@pytest.mark.parametrize("kind", ["fixed", "extension"])
def test_keys_of_so_many_bytes(tmp_path: Path, kind: str) -> None:
    """They were taken for texts, which such bytes mostly are not."""
    keys = pa.array([bytes([number, 255] * 8) for number in (7, 8, 7, 7)], pa.binary(16))
    if kind == "extension":
        if not hasattr(pa, "uuid"):
            pytest.skip("this version of pyarrow has no UUIDs")
        keys = keys.cast(pa.uuid())
    pq.write_table(pa.table({"ids": [0, 1, 1, 2], "key": keys}), tmp_path / "a.parquet")
    profile = AccessProfile.from_parquet(tmp_path / "a.parquet", column="ids", sample_key="key")
    assert (profile.num_samples, profile.num_accesses) == (2, 4)


def test_where_nothing_repeats_samples_are_accesses(tmp_path: Path) -> None:
    pq.write_table(pa.table({"ids": [0, 1, 1, 2], "key": [7, 8, 9, 7]}), tmp_path / "a.parquet")
    for key in (None, "key"):
        profile = AccessProfile.from_parquet(tmp_path / "a.parquet", column="ids", sample_key=key)
        assert profile.samples is None
        assert np.allclose(profile.sample_share, profile.counts / profile.num_samples)


@pytest.mark.parametrize("sample_key", [None, "key"])
def test_sums_and_files_keep_them(tmp_path: Path, sample_key: str | None) -> None:
    for number, name in enumerate(("a", "b")):
        write(tmp_path / f"{name}.parquet", number)
    how = {"column": "ids", "num_rows": ROWS, "sample_key": sample_key}
    whole = AccessProfile.from_parquet(tmp_path / "*.parquet", **how)
    first, second = (AccessProfile.from_parquet(tmp_path / f"{name}.parquet", **how) for name in ("a", "b"))
    assert (first + second).digest == whole.digest
    whole.save(tmp_path / "whole.profile.parquet")
    again = AccessProfile.load(tmp_path / "whole.profile.parquet")
    assert again.digest == whole.digest
    assert np.array_equal(known(again), known(whole))
    histogram = AccessProfile(whole.counts, whole.rows, ROWS, whole.num_samples, samples=whole.samples)
    histogram.save(tmp_path / "histogram.parquet")
    assert AccessProfile.load(tmp_path / "histogram.parquet").digest == histogram.digest


def test_samples_that_cannot_be_are_refused(tmp_path: Path) -> None:
    counts, rows = np.array([5, 2]), np.array([1, 3])
    for samples in ([6, 3], [5, 2], [4], [5, 7]):
        with pytest.raises(ProfileError, match="samples"):
            AccessProfile(counts.copy(), rows.copy(), 9, 4, table="t", samples=np.array(samples))
    profile = AccessProfile.from_row_counts(
        RowCounts.dense(np.array([5, 2, 2])), 4, 9, samples=RowCounts.dense(np.array([3, 2, 1]))
    )
    profile.save(tmp_path / "p.parquet")
    table = pq.read_table(tmp_path / "p.parquet")
    broken = table.set_column(2, "samples", pa.array([3, 2, 3])).replace_schema_metadata(table.schema.metadata)
    pq.write_table(broken, tmp_path / "p.parquet")
    with pytest.raises(ProfileError, match=r"p\.parquet: 5 samples cannot contain 2 rows"):
        AccessProfile.load(tmp_path / "p.parquet")


def test_too_many_pairs_are_those_of_some_samples_whatever_their_order() -> None:
    random = np.random.default_rng(5)
    samples = np.repeat(np.arange(4_000), 25)
    rows = (random.zipf(1.4, samples.size) % 300).astype(np.int64)
    counts = np.bincount(rows, minlength=300)
    hashes = random.integers(0, 2**64, 4_000, np.uint64)[samples]
    exact, few, other = SamplePairs(), SamplePairs(most=10_000), SamplePairs(most=10_000)
    order = random.permutation(samples.size)
    for part in np.array_split(np.arange(samples.size), 30):
        exact.add(hashes[part], rows[part])
        few.add(hashes[part], rows[part])
        other.add(hashes[order[part]], rows[order[part]])
    assert exact.is_exact
    assert not few.is_exact
    expected = containing_of(samples, rows)
    assert np.array_equal(exact.samples(counts), expected)
    estimate = few.samples(counts)
    assert np.array_equal(estimate, other.samples(counts))
    assert estimate.sum() == pytest.approx(expected.sum(), rel=0.03)
    halves = [SamplePairs(most=10_000) for _ in range(2)]
    for half, part in zip(halves, np.array_split(np.arange(samples.size), 2), strict=True):
        half.add(hashes[part], rows[part])
    assert np.array_equal(halves[0].merged(halves[1]).samples(counts), estimate)


def containing_of(samples: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.bincount(np.unique(np.stack([samples, rows]), axis=1)[1], minlength=300)


@pytest.mark.parametrize("batch_size", [16, 256])
def test_distinct_rows_of_shuffled_samples_that_repeat_them(batch_size: int) -> None:
    """Taking repeats within a sample as independent overstates them; knowing how many samples have a row does not."""
    random = np.random.default_rng(6)
    number, each = 4_000, 12
    favourites = random.zipf(1.3, (number, 3)) % 5_000
    ids = np.take_along_axis(favourites, random.integers(0, 3, (number, each)), axis=1)
    profile = AccessProfile.from_ids(ids.ravel(), lengths=np.full(number, each), num_rows=5_000)
    predicted = float(Table("t", 5_000, 8, profile).reads(batch_size, index_dedup=True) @ profile.rows)
    counted = np.mean(
        [np.unique(ids[random.choice(number, batch_size, replace=False)]).size for _ in range(200)],
    )
    assert predicted == pytest.approx(counted, rel=0.03)
    independent = -np.expm1(batch_size * np.log1p(-np.minimum(profile.counts / number, 1 - 1e-16)))
    assert independent @ profile.rows > 1.15 * counted


def test_keys_that_print_alike_in_one_file_alone_are_not_counted_together(tmp_path: Path) -> None:
    """The same instant in microseconds and nanoseconds, or 1.5 and "1.5", would be two samples in some cases."""
    kinds: list[pa.Array] = [
        pa.array([10**9], pa.timestamp("us")),
        pa.array([10**12], pa.timestamp("ns")),
        pa.array([10**9], pa.timestamp("us", "UTC")),
        pa.array([1.5]),
        pa.array([1.5], pa.float32()),
        pa.array(["1.5"]),
    ]
    files = [str(tmp_path / f"{number}.parquet") for number in range(len(kinds))]
    for file, keys in zip(files, kinds, strict=True):
        pq.write_table(pa.table({"x": [1], "k": keys}), file)
    for one, other in itertools.combinations(files, 2):
        with pytest.raises(DataError, match=r"column 'k' holds .* write them alike"):
            AccessProfile.from_parquet([one, other], column="x", sample_key="k")


def test_zero_has_one_sign_as_a_key(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2, 3], "k": [-0.0, 0.0, 2.5]}), tmp_path / "a.parquet")
    assert AccessProfile.from_parquet(tmp_path / "a.parquet", column="x", sample_key="k").num_samples == 2


@pytest.mark.parametrize("keys", [["a", "b", "a"], [1, 2, 1]])
@pytest.mark.parametrize("kind", [pa.null(), pa.string(), pa.int64(), pa.bool_(), pa.list_(pa.string())])
def test_files_without_rows_have_no_keys(keys: list[Any], kind: pa.DataType, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2, 3], "k": keys}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": pa.array([], kind), "k": pa.array([], kind)}), tmp_path / "b.parquet")
    files = [tmp_path / "b.parquet", tmp_path / "a.parquet"]
    assert AccessProfile.from_parquet(files, column="x", sample_key="k").num_samples == 2
    assert set(AccessProfile.from_parquet_by(files, column="x", by="k")) == {str(key) for key in keys}
    pq.write_table(pa.table({"x": [1], "k": pa.nulls(1)}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="sample key 'k' is null in row 0"):
        AccessProfile.from_parquet(files, column="x", sample_key="k")
