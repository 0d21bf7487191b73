"""What the public data sets are known to be like; skipped where they are absent."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from flexshard import AccessProfile, Cluster, Table, solve
from flexshard.errors import DataError
from tests.commands import run

DAY_MS = 86_400_000


def test_globo_items_are_skewed_and_users_are_flat(real_data: Path) -> None:
    clicks = real_data / "globo_clicks.parquet"
    items = AccessProfile.from_parquet(clicks, column="item_id", sample_key="user_id", holdout=0.1)
    users = AccessProfile.from_parquet(clicks, column="user_id")
    assert items.num_accesses + int(items.holdout.accesses.sum() if items.holdout else 0) == 2_988_181
    assert items.num_samples + (items.holdout.num_samples if items.holdout else 0) == 322_897
    read = items.rows_read
    everything = AccessProfile.from_parquet(clicks, column="item_id")
    assert everything.rows_read == 46_033
    assert everything.covered(460) == pytest.approx(0.68, abs=0.005), "top 1 % of the rows that are read"
    assert users.covered(0.01 * users.rows_read) < 0.15
    held = items.covered_held_out(0.01 * read)
    assert held == pytest.approx(items.covered(0.01 * read), abs=0.01), "samples of the same days look alike"


def test_globo_items_drift_from_day_to_day(real_data: Path, tmp_path: Path) -> None:
    table = pq.read_table(real_data / "globo_clicks.parquet", columns=["item_id", "timestamp"])
    day = pc.divide(pc.cast(table["timestamp"], "int64"), DAY_MS)
    first = int(pc.min(day).as_py())
    profiles = []
    for k in range(4, 8):
        path = tmp_path / f"day{k}.parquet"
        pq.write_table(table.filter(pc.equal(day, first + k)).select(["item_id"]), path)
        profiles.append(AccessProfile.from_parquet(path, column="item_id", num_rows=364_047))
    for before, now in pairwise(profiles):
        (point,) = before.drift(now, cuts=[460 / 364_047])
        assert point.rows == 460
        assert 0.25 <= point.kept <= 0.40, "one day's hottest 460 items share a quarter to a third with the next's"
        assert point.covered_now < point.best_now


def test_scarab_has_raw_keys_and_a_long_tail(real_data: Path) -> None:
    path = real_data / "scarab_recs.parquet"
    with pytest.raises(DataError, match=r"1,24\d,\d{3} ids are outside"):
        AccessProfile.from_parquet(path, column="key", num_rows=1000)
    profile = AccessProfile.from_parquet(path, column="key", num_rows=1 << 28, hash="splitmix64")
    assert profile.rows_read == pytest.approx(258_368, rel=1e-3), "few of the keys collide in 2^28 rows"
    once = int(profile.rows[profile.counts == 1][0])
    assert once / profile.rows_read == pytest.approx(0.48, abs=0.01)


def test_thirty_tables_of_one_file_are_planned_together(real_data: Path) -> None:
    path = real_data / "ecommerce_orm_busy.parquet"
    profiles = AccessProfile.from_parquet_by(path, column="entity_id", by="table_id")
    assert len(profiles) == 30
    assert sum(p.num_accesses for p in profiles.values()) == 5_000_000
    lookups = pq.read_table(path, columns=["table_id", "entity_id"])
    keys = lookups["table_id"].to_numpy().astype(np.int64) << 32 | lookups["entity_id"].to_numpy()
    assert sum(p.rows_read for p in profiles.values()) == np.unique(keys).size
    tables = [Table(name, p.num_rows, 256, p) for name, p in profiles.items()]
    plan = solve(tables, Cluster.preset("a100-4x8-roce"), batch_size=65_536)
    assert plan.predicted.exposed_seconds < plan.baselines["row_wise"].exposed_seconds
    # Which of thirty tables send ids once is settled to within one of them.
    assert np.isclose(plan.predicted.exposed_seconds, plan.lower_bound_seconds, rtol=1e-3)


def test_plans_of_the_page_are_those_that_are_made(real_data: Path, tmp_path: Path) -> None:
    """But for fingerprints and gaps, whose last digits are a processor's."""
    page = (Path(__file__).parents[1] / "docs" / "real_data.md").read_text()
    shown = set(page.splitlines())
    for name in ("globo_clicks.parquet", "scarab_recs.parquet", "ecommerce_orm_busy.parquet"):
        (tmp_path / name).symlink_to((real_data / name).resolve())
    plans = 0
    for command in re.findall(r"^\$ flexshard ((?:profile|job|plan) .*)", page, re.MULTILINE):
        result = run(tmp_path, *shlex.split(command))
        assert result.returncode == 0, result.stderr
        if command.startswith("plan"):
            plans += 1
            lines = [line for line in result.stdout.splitlines() if not line.startswith(("written to", "Proof:"))]
            assert [line.rstrip() for line in lines if line.rstrip() not in shown] == []
    assert plans == 3
