"""Files of every format as an earlier release wrote them: they load, and saved again they are the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexshard import AccessProfile, Cluster, Plan, load_job, solve
from flexshard.costmodels import TTRates
from flexshard.errors import JobError
from flexshard.executors import Observation
from flexshard.planner import CompressionPlan

STORED = Path(__file__).parent / "formats"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("profile.parquet", AccessProfile),
        ("cluster.yaml", Cluster),
        ("plan.json", Plan),
        ("observed.json", Observation),
        ("rates.json", TTRates),
        ("compression.json", CompressionPlan),
    ],
)
def test_what_was_stored_is_read_and_written_alike(name: str, kind: Any, tmp_path: Path) -> None:
    kind.load(STORED / name).save(tmp_path / name)
    again = (tmp_path / name).read_bytes()
    if name.endswith(".parquet"):  # Parquet notes the version of its writer
        assert kind.load(tmp_path / name).digest == kind.load(STORED / name).digest
    else:
        assert again == (STORED / name).read_bytes()


def test_a_stored_job_is_planned_as_it_was() -> None:
    stored = Plan.load(STORED / "job_plan.json")
    job = replace(load_job(STORED / "job.yaml"), index_dedup=False)  # as jobs of that release that did not say
    plan = solve(replace(job, translation="loader"))
    # Its release counted four bytes for every row beside the plan.
    budget = stored.settings.budget_bytes - 4 * job.tables[0].rows
    assert plan.settings == replace(stored.settings, translation="loader", budget_bytes=budget)
    assert solve(job).settings.budget_bytes == budget + (job.tables[0].rows // 64 + 1) * 16
    assert plan.tables["items"].tiers == stored.tables["items"].tiers
    # It priced rows and gradients as two calls, neither ids nor how many there are.
    (moved,) = (c for c in stored.predicted.collectives if c.kind == "all_to_all")
    found = {c.content: replace(c, excess_bytes=0.0) for c in plan.predicted.collectives}
    assert moved.content == ""
    assert found["embeddings"].seconds + found["gradients"].seconds == pytest.approx(moved.seconds, rel=1e-12)
    assert plan.lower_bound_seconds == pytest.approx(plan.predicted.exposed_seconds, rel=1e-12)


def test_stored_numberings_and_batches_are_read() -> None:
    pytest.importorskip("torchrec")
    from flexshard.embeddings import IndexBijection, InverseKeyedJaggedTensor

    ranking = IndexBijection.load(STORED / "bijection.parquet")
    profile = AccessProfile.load(STORED / "profile.parquet")
    assert np.array_equal(ranking.row_at[: profile.ranked_rows.size], profile.ranked_rows)
    batch = InverseKeyedJaggedTensor.load(STORED / "batch.npz").to_keyed_jagged()
    assert batch.keys() == ["a", "b"]
    assert batch.values().tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert batch.lengths().tolist() == [2, 2, 2, 1, 2, 3]


def test_a_job_is_planned_with_other_options_than_its_own(tmp_path: Path) -> None:
    """Options that do not go together are found when they are used: a command may replace one of them."""
    text = (STORED / "job.yaml").read_text() + "method: paper\ntiers: 5\nloss_limit: 0.5\n"
    (tmp_path / "job.yaml").write_text(text)
    for name in ("cluster.yaml", "profile.parquet"):
        (tmp_path / name).write_bytes((STORED / name).read_bytes())
    job = load_job(tmp_path / "job.yaml")
    with pytest.raises(JobError, match="tiers must be 2 or 3 for method 'paper', found 5"):
        solve(job)
    assert solve(replace(job, tiers=2)).settings.tiers == 2
    assert job == replace(job)
    assert job != replace(job, tiers=2)
