"""Profiles whose rows are other ids or values are not compared, as far as they say which."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flexshard import AccessProfile, Cluster, Table, solve
from flexshard.errors import ProfileError
from flexshard.planner import replan

OLDER = AccessProfile.from_ids([0, 0, 0, 1, 1, 2], lengths=[3, 3], num_rows=4)
NEWER = AccessProfile.from_ids([2, 2, 2, 1, 1, 0], lengths=[3, 3], num_rows=4)


def mapped(profile: AccessProfile, path: Path, text: str) -> AccessProfile:
    path.write_text(text)
    return replace(profile, mapping=str(path))


def test_mappings(tmp_path: Path) -> None:
    older = mapped(OLDER, tmp_path / "monday", "a b c")
    with pytest.raises(ProfileError, match="not the same values, which monday mapped in the older and tuesday"):
        older.drift(mapped(NEWER, tmp_path / "tuesday", "c b a"))
    copied = mapped(NEWER, tmp_path / "copy", "a b c")
    assert older.drift(copied, [0.25])[0].kept == 0.0
    assert OLDER.drift(copied, [0.25]) == older.drift(NEWER, [0.25])  # the log of one was encoded


def test_hashes() -> None:
    with pytest.raises(ProfileError, match="went through no hash in the older and splitmix64 in the newer"):
        OLDER.drift(replace(NEWER, hash="splitmix64"))


def test_planning_again(tmp_path: Path) -> None:
    older = mapped(OLDER, tmp_path / "monday", "a b c")
    plan = solve([Table("items", 4, 8, older)], Cluster.preset("dgx-a100", 1), batch_size=8)
    with pytest.raises(ProfileError, match="table 'items': the profiles' rows are not the same values"):
        replan(plan, {"items": mapped(NEWER, tmp_path / "tuesday", "c b a")}, older={"items": older})
    with pytest.raises(ProfileError, match="table 'items': the profiles' rows are not the same ids"):
        replan(plan, {"items": replace(NEWER, hash="splitmix64")}, older={"items": older})


def test_counts_of_a_series_are_of_the_rows_in_their_places() -> None:
    pd = pytest.importorskip("pandas")
    ids = pd.Series([0, 2, 2, 2, 1])
    with pytest.raises(ProfileError, match="counts has an index that is not 0, 1, 2"):
        AccessProfile.from_counts(ids.value_counts(), 5)
    counted = AccessProfile.from_counts(ids.value_counts().reindex(range(3), fill_value=0), 5)
    assert counted.ranked_rows.tolist() == [2, 0, 1]
