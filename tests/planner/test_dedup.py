"""Deduplicated batches in the plan: fewer reads, other tiers, less memory and time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexshard import AccessProfile, Cluster, Plan, Table, explain, pareto, solve
from flexshard.costmodels import touched_rows
from flexshard.errors import DataError, JobError, ProfileError, TableError
from flexshard.profiling import check_same_ids, power_law_probabilities
from flexshard.tables import combined_dedup_factor, expected_distinct

PROFILE = AccessProfile.from_probabilities(power_law_probabilities(200_000, 80, 0.8))
TABLE = Table("items", 200_000, 64, PROFILE)
CLUSTER = Cluster.preset("a100-4x8-roce")


def test_a_factor_is_a_smaller_batch() -> None:
    """Reads, memory, communication and what is touched: those of B / DedupFactor samples."""
    deduped = replace(TABLE, dedup_factor=4.0)
    for index_dedup, reduction in ((False, "auto"), (True, "dense")):
        a = solve([deduped], CLUSTER, batch_size=2048, index_dedup=index_dedup, reduction=reduction)
        b = solve([TABLE], CLUSTER, batch_size=512, index_dedup=index_dedup, reduction=reduction)
        assert a.predicted == b.predicted
        assert a.tables["items"].tiers == b.tables["items"].tiers
        assert a.baselines["row_wise"] == b.baselines["row_wise"]
        assert a.lower_bound_seconds == b.lower_bound_seconds
    assert np.array_equal(deduped.reads(2048), TABLE.reads(512))
    assert deduped.length_variation(2048) == TABLE.length_variation(512)
    assert touched_rows(deduped, 2048, 8, 0, 100) == touched_rows(TABLE, 512, 8, 0, 100)
    assert expected_distinct(0.5, 2.0) == pytest.approx(0.75)


def test_the_plan_says_what_deduplication_changes(tmp_path: Path) -> None:
    plan = solve([replace(TABLE, dedup_factor=4.0)], CLUSTER, batch_size=2048, index_dedup=False)
    without = solve([TABLE], CLUSTER, batch_size=2048, index_dedup=False)
    assert plan.baselines["without_deduplication"] == without.predicted
    table = plan.tables["items"]
    assert table.undeduplicated == tuple((t.group_size, t.rows) for t in without.tables["items"].tiers)
    assert plan.predicted.exposed_seconds < without.predicted.exposed_seconds
    assert plan.predicted.dynamic_memory_bytes < without.predicted.dynamic_memory_bytes
    text = str(plan)
    assert "What deduplication changes" in text
    assert "4.00" in text
    assert "without_deduplication" in text
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.fingerprint == plan.fingerprint
    assert loaded.tables["items"].undeduplicated == table.undeduplicated
    assert "a sample reads the first of them" in explain(plan).text
    boundary = explain(plan).boundaries[0]
    same = explain(solve([TABLE], CLUSTER, batch_size=512, index_dedup=False)).boundaries[0]
    assert boundary.chosen == same.chosen


def test_plans_without_deduplication_keep_their_bytes() -> None:
    plan = solve([TABLE], CLUSTER, batch_size=2048)
    assert plan.tables["items"].undeduplicated == ()
    assert "without_deduplication" not in plan.baselines
    from flexshard.planner import plan_document

    (document,) = plan_document(plan)["tables"]
    assert "dedup_factor" not in document
    assert "undeduplicated" not in document
    assert "What deduplication changes" not in str(plan)


def test_factors_of_several_features() -> None:
    assert combined_dedup_factor([4.0, 1.0], [30, 10]) == pytest.approx(40 / 17.5)
    assert combined_dedup_factor([], []) == 1.0
    with pytest.raises(DataError, match="found 1 and 2"):
        combined_dedup_factor([1.0], [1, 2])
    with pytest.raises(DataError, match="at least 1"):
        combined_dedup_factor([0.5], [1])
    for wrong in (0.5, float("nan"), "x"):
        with pytest.raises(TableError, match="table 'items': dedup_factor must be"):
            replace(TABLE, dedup_factor=wrong)  # type: ignore[arg-type]
    problem = ([replace(TABLE, dedup_factor=4.0)], CLUSTER)
    for verb in (solve, pareto):
        with pytest.raises(
            JobError, match="table 'items': a batch of 2 samples has no DedupFactor of 4; it is at most"
        ):
            verb(*problem, batch_size=2, index_dedup=True)


@pytest.mark.parametrize("scalars", [False, True])
def test_a_profile_of_distinct_lists(tmp_path: Path, scalars: bool) -> None:
    """Each list once per batch of rows, against Python, whatever the row groups."""
    generator = np.random.default_rng(0)
    sessions = [generator.integers(0, 50, generator.integers(0, 9)).tolist() for _ in range(60)]
    rows = [session for session in sessions for _ in range(int(generator.integers(1, 9)))]
    if scalars:
        rows = [[len(row)] for row in rows]
    column = pa.array([row[0] for row in rows]) if scalars else pa.array(rows, pa.list_(pa.int64()))
    pq.write_table(pa.table({"f": column}), tmp_path / "a.parquet", row_group_size=64)
    expected = np.zeros(50, np.int64)
    batch = 32
    for start in range(0, len(rows), batch):
        for row in {tuple(row) for row in rows[start : start + batch]}:
            np.add.at(expected, list(row), 1)
    found = AccessProfile.from_parquet(tmp_path, column="f", num_rows=50, distinct_batch=batch)
    assert found.num_samples == len(rows)
    assert found.num_accesses == expected.sum()
    assert sorted(np.repeat(found.counts, found.rows).tolist()) == sorted(expected[expected > 0].tolist())
    # Row groups that cut batches do not count a list twice.
    pq.write_table(pa.table({"f": column}), tmp_path / "a.parquet", row_group_size=13)
    ragged = AccessProfile.from_parquet(tmp_path, column="f", num_rows=50, distinct_batch=batch)
    assert (ragged.num_samples, ragged.num_accesses) == (len(rows), expected.sum())
    with pytest.raises(DataError, match="distinct_batch must be at least 1, found 0"):
        AccessProfile.from_parquet(tmp_path, column="f", distinct_batch=0)
    with pytest.raises(DataError, match="does not go with sample_key or holdout"):
        AccessProfile.from_parquet(tmp_path, column="f", distinct_batch=4, holdout=0.1)
    with pytest.raises(DataError, match="does not go with sample_key"):
        AccessProfile.from_parquet(tmp_path, column="f", distinct_batch=4, sample_key="f")


def test_a_profile_of_distinct_lists_says_so(tmp_path: Path) -> None:
    """It is not discounted once more, and does not go with one of all lookups."""
    pq.write_table(pa.table({"f": [[1, 2], [1, 2], [3]]}), tmp_path / "a.parquet")
    plain, distinct = (
        AccessProfile.from_parquet(tmp_path / "a.parquet", column="f", num_rows=5, distinct_batch=batch)
        for batch in (None, 4)
    )
    distinct.save(tmp_path / "distinct.parquet")
    distinct = AccessProfile.load(tmp_path / "distinct.parquet")
    assert (distinct.distinct_batch, (distinct + distinct).distinct_batch, plain.distinct_batch) == (4, 4, None)
    with pytest.raises(TableError, match=r"has dedup_factor 2, but its profile counts each distinct list once per 4"):
        Table("f", 5, 8, distinct, dedup_factor=2.0)
    assert Table("f", 5, 8, plain, dedup_factor=2.0).dedup_factor == 2
    with pytest.raises(ProfileError, match="add up where batches are of the same size"):
        _ = plain + distinct
    with pytest.raises(ProfileError, match="count all lookups in the older and distinct lists in the newer one"):
        check_same_ids(plain, distinct)
