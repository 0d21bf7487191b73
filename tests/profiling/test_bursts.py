"""Hottest rows of consecutive samples: counted, kept, added, read again."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexshard import AccessProfile
from flexshard.errors import ProfileError
from flexshard.profiling.bursts import MOST_WINDOWS, TOP_ROWS, Bursts
from flexshard.profiling.count.burst_counter import BurstCounter
from flexshard.profiling.moments import LENGTH_BINS, LengthMoments


def stream(samples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 5, samples)
    return random.zipf(1.3, int(lengths.sum())) % 300, lengths


def test_windows_against_counting_each() -> None:
    ids, lengths = stream(3_000)
    profile = AccessProfile.from_ids(ids, lengths=lengths, num_rows=300)
    assert profile.bursts is not None
    ends, counts = np.concatenate([[0], np.cumsum(lengths)]), np.bincount(ids, minlength=300)
    assert [(one.size, one.lengths.size) for one in profile.bursts.windows] == [(64, 46), (256, 11), (1024, 2)]
    for one in profile.bursts.windows:
        for window in range(one.lengths.size):
            part = ids[ends[window * one.size] : ends[(window + 1) * one.size]]
            often = np.bincount(part, minlength=300)
            last = window * one.size
            previous = ids[ends[max(last - one.size, 0)] : ends[last]]
            beyond = often - np.bincount(previous, minlength=300)
            hot = np.argsort(-often, kind="stable")[: TOP_ROWS // 2]
            read = set(np.flatnonzero(often).tolist())
            kept = [row for row in one.rows[window].tolist() if row >= 0]
            assert set(hot[often[hot] > 0].tolist()) <= set(kept) <= read
            assert len(kept) == min(TOP_ROWS, len(read))
            assert one.lengths[window] == part.size
            assert one.counts[window, : len(kept)].tolist() == sorted(often[kept].tolist(), reverse=True)
            assert one.counts[window, : len(kept)].tolist() == often[kept].tolist()
            assert one.totals[window, : len(kept)].tolist() == counts[kept].tolist()
            others = read - set(kept)
            if others:  # the other half is as far beyond the window before as any that is not kept
                half = [row for row in kept if row not in hot]
                assert min(beyond[half]) >= max(beyond[list(others)]) - 1e-9
            top = np.array(kept)
            assert np.all(one.rows[window, top.size :] == -1)


def test_batches_of_a_file_do_not_matter_and_files_do() -> None:
    ids, lengths = stream(2_000)
    ends = np.concatenate([[0], np.cumsum(lengths)])

    def found(cuts: list[int], files: list[str]) -> list[list[object]]:
        counter = BurstCounter()
        for first, end, file in zip([0, *cuts], [*cuts, 2_000], files, strict=True):
            counter.add(file, ids[ends[first] : ends[end]], lengths[first:end])
        bursts = counter.bursts(np.bincount(ids, minlength=300))
        assert bursts is not None
        return bursts.encoded()

    assert found([], ["a"]) == found([70, 71, 1_500], ["a"] * 4)
    in_two = found([1_000], ["a", "b"])
    assert [number for _, number, *_ in in_two] == [30, 6]  # 15 and 3 of each, none across both


def test_few_windows_of_long_data() -> None:
    counter = BurstCounter()
    counter.add("a", np.arange(64 * 2_000) // 64, None)
    bursts = counter.bursts(np.full(2_000, 64))
    assert bursts is not None
    assert MOST_WINDOWS / 2 <= bursts.windows[0].lengths.size <= MOST_WINDOWS
    assert set(np.diff(bursts.windows[0].rows[:, 0]).tolist()) == {8}  # evenly spaced


def test_few_ids_of_wide_data() -> None:
    counter, lengths = BurstCounter(), np.full(1024, 200)
    for _ in range(40):  # 8 million ids
        counter.add("a", np.arange(1024 * 200) % 77, lengths)
    windows = {one.size: one for one in counter.bursts(np.full(77, 1 << 20)).windows}
    assert windows[64].lengths.size > 128  # 512 of them have 6.5 million ids, too many by half
    assert windows[1024].lengths.size == 20
    assert all(one.lengths.sum() <= 1 << 22 or one.lengths.size <= 16 for one in windows.values())
    assert windows[1024].counts[0, 0] == -(-1024 * 200 // 77)


def test_the_hottest_rows_of_wide_windows() -> None:
    random, counter = np.random.default_rng(0), BurstCounter()
    ids = random.zipf(1.1, 1 << 18) % 1_000_000
    counter.add("a", ids, None)
    for one in counter.bursts(np.bincount(ids, minlength=1_000_000)).windows:
        often = np.bincount(ids[: one.size])
        assert one.counts[0].tolist() == sorted(often.tolist(), reverse=True)[:TOP_ROWS]
        assert one.lengths[0] == one.size


def test_saved_loaded_and_added(tmp_path: Path) -> None:
    ids, lengths = stream(2_000)
    parts = []
    for index, half in enumerate((slice(0, 1_000), slice(1_000, 2_000))):
        ends = np.concatenate([[0], np.cumsum(lengths)])
        own = pa.ListArray.from_arrays(
            pa.array(ends[half.start : half.stop + 1] - ends[half.start], pa.int32()),
            pa.array(ids[ends[half.start] : ends[half.stop]]),
        )
        pq.write_table(pa.table({"ids": own}), tmp_path / f"{index}.parquet")
        parts.append(AccessProfile.from_parquet(tmp_path / f"{index}.parquet", column="ids", num_rows=300))
    whole = AccessProfile.from_parquet(str(tmp_path / "*.parquet"), column="ids", num_rows=300)
    whole.save(tmp_path / "whole.profile")
    loaded = AccessProfile.load(tmp_path / "whole.profile")
    assert whole.bursts is not None
    assert loaded.bursts is not None
    assert (parts[0] + parts[1]).bursts is not None
    assert loaded.bursts.encoded() == whole.bursts.encoded() == (parts[0] + parts[1]).bursts.encoded()  # type: ignore[union-attr]
    assert loaded.lengths == whole.lengths == LengthMoments.of(lengths)


@pytest.mark.parametrize("field", ["bursts", "length_histogram"])
def test_damaged_metadata_are_named(tmp_path: Path, field: str) -> None:
    ids, lengths = stream(500)
    AccessProfile.from_ids(ids, lengths=lengths, num_rows=300).save(tmp_path / "p")
    table = pq.read_table(tmp_path / "p")
    metadata = dict(table.schema.metadata)
    key = next(key for key in metadata if field.encode() in key or field.encode() in metadata[key])
    value = json.loads(metadata[key])
    damaged = {"bursts": [[64, 7, "AAAA"]], "length_histogram": [[1, 2, 3]]}[field]
    metadata[key] = json.dumps(damaged if not isinstance(value, dict) else value | {field: damaged})
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "q")
    with pytest.raises(ProfileError, match=rf"q: metadata field '{field}'"):
        AccessProfile.load(tmp_path / "q")


def test_lengths_in_bins() -> None:
    random = np.random.default_rng(0)
    lengths = (random.lognormal(3, 2, 5_000)).astype(np.int64)
    parts = LengthMoments.of(lengths[:1_000]) + LengthMoments.of(lengths[1_000:])
    assert parts == LengthMoments.of(lengths)
    values = parts.values
    assert values is not None
    assert values[1].sum() == pytest.approx(1)
    assert values[0] @ values[1] == pytest.approx(lengths.mean())
    assert (values[0] ** 2 @ values[1]) == pytest.approx((lengths.astype(float) ** 2).mean(), rel=0.02)
    assert np.all(np.diff(LENGTH_BINS) > 0)
    assert LengthMoments.of(np.array([0, 1, 1])).histogram == LengthMoments(3, 2, 2, 1).histogram


def test_what_cannot_be_is_refused() -> None:
    ids, lengths = stream(2_000)
    profile = AccessProfile.from_ids(ids, lengths=lengths, num_rows=300)
    assert profile.bursts is not None
    good = profile.bursts.encoded()
    assert Bursts.decoded(good, 300).encoded() == good
    assert Bursts.decoded([], 300).windows == ()
    (size, number, packed, distinct), *_ = good
    for wrong in (
        [[True, number, packed]],
        [[10**400, number, packed]],
        [[size, number, packed], [size, number, packed]],
        [[size, 0, packed]],
        [[size, number, packed[:-8]]],
        [[size, number + 1, packed]],
        [[size, number, packed, distinct, distinct]],
        [[size, number, packed, distinct[:-8]]],
    ):
        with pytest.raises((ValueError, zlib.error)):
            Bursts.decoded(wrong, 300)
    with pytest.raises(ValueError, match="outside the table"):
        Bursts.decoded(good, 5)


def test_distinct_rows_of_windows() -> None:
    ids, lengths = stream(3_000)
    profile = AccessProfile.from_ids(ids, lengths=lengths, num_rows=300)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    assert profile.bursts is not None
    for one in profile.bursts.windows:
        parts = [ids[ends[w * one.size] : ends[(w + 1) * one.size]] for w in range(one.lengths.size)]
        assert one.distinct is not None
        assert one.distinct.tolist() == [np.unique(part).size for part in parts]
    sizes, means = profile.bursts.distinct_rows()
    assert sizes.tolist() == [64, 256, 1024]
    assert np.all(np.diff(means) > 0)
    # Of many ids a part is counted.
    random = np.random.default_rng(0)
    for most in (20_000, 10**7):
        wide = random.integers(0, most, 262_144)
        of_wide = AccessProfile.from_ids(wide, num_rows=most).bursts
        assert of_wide is not None
        last = of_wide.windows[-1]
        assert last.distinct is not None
        assert last.distinct[0] == pytest.approx(np.unique(wide).size, rel=0.02)
        assert last.distinct[0] <= most


def test_profiles_of_earlier_states_know_no_distinct_rows() -> None:
    ids, lengths = stream(2_000)
    profile = AccessProfile.from_ids(ids, lengths=lengths, num_rows=300)
    assert profile.bursts is not None
    earlier = Bursts.decoded([entry[:3] for entry in profile.bursts.encoded()], 300)
    assert earlier.windows[0].distinct is None
    assert earlier.distinct_rows()[0].size == 0
    both = earlier.merged(profile.bursts, np.bincount(ids, minlength=300) * 2)
    assert both.windows[0].distinct is None
    assert both.windows[0].lengths.size == 2 * profile.bursts.windows[0].lengths.size
    again = profile.bursts.merged(profile.bursts, np.bincount(ids, minlength=300) * 2)
    assert again.windows[0].distinct is not None


def test_a_short_profile_takes_no_bursts_away() -> None:
    ids, lengths = stream(2_000)
    long = AccessProfile.from_ids(ids, lengths=lengths, num_rows=300)
    short = AccessProfile.from_ids([1, 2, 3], num_rows=300)
    assert short.bursts is not None
    assert short.bursts.windows == ()
    both = (long + short).bursts
    assert both is not None
    assert [one.size for one in both.windows] == [one.size for one in long.bursts.windows]  # type: ignore[union-attr]
