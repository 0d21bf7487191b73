"""``flexshard plan --observed``: of what kinds of jobs an observation says what other work hides."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchrec")

from flexshard import AccessProfile, Cluster, Plan
from flexshard.executors import Observation, ObservedCollective
from flexshard.profiling import power_law_probabilities
from flexshard.topologies import CollectiveRate, Level
from tests.commands import run

SLOW, FAST = CollectiveRate(1e-3, 1e6, "measured"), CollectiveRate(1e-4, 1e7, "measured")
CLUSTERS = {
    "ran": Cluster("ran", 2, 4, 1e9, 0.0, (Level(1, None, SLOW), Level(4, FAST, SLOW), Level(8, SLOW, None))),
    "other": Cluster("other", 1, 4, 1e9, 0.0, (Level(1, None, SLOW), Level(4, FAST, None))),
}


def job(folder: Path, name: str, cluster: str, poolings: tuple[str, ...]) -> None:
    tables = "".join(
        f"- {{name: t{i}, rows: 5000, dim: 8, profile: p.parquet, pooling: {pooling}}}\n"
        for i, pooling in enumerate(poolings)
    )
    how = "batch_size: 64\nbudget: neutral\nindex_dedup: true\n"
    head = f"format: flexshard.job\nversion: 1\ncluster: {cluster}.yaml\n"
    (folder / f"{name}.yaml").write_text(f"{head}{how}tables:\n{tables}")


def good(folder: Path, *arguments: object) -> None:
    done = run(folder, *arguments)
    assert done.returncode == 0, done.stderr


def seen(plan: Plan) -> Observation:
    """Ranks waited for three tenths of every collective."""
    collectives = tuple(
        ObservedCollective(
            one.kind, one.group_size, one.content, one.calls, one.nbytes, one.nbytes, one.seconds, 0.3 * one.seconds,
            (one.nbytes,),
        )
        for one in plan.predicted.collectives
    )  # fmt: skip
    return Observation(plan.fingerprint, plan.cluster.world_size, (1.0,), collectives)


@pytest.mark.parametrize(
    ("ran", "planned", "hidden"),
    [
        (("none",), ("ran", ("none",)), {0.7}),
        (("none",), ("other", ("none",)), {0.0}),
        (("sum",), ("ran", ("sum",)), {0.0}),
        (("none", "sum"), ("ran", ("none", "sum")), {0.0}),
    ],
)
def test_overlap_is_of_such_clusters_and_modules(
    tmp_path: Path, ran: tuple[str, ...], planned: tuple[str, tuple[str, ...]], hidden: set[float]
) -> None:
    for name, cluster in CLUSTERS.items():
        cluster.save(tmp_path / f"{name}.yaml")
    AccessProfile.from_probabilities(power_law_probabilities(5000, 12, 1.1)).save(tmp_path / "p.parquet")
    job(tmp_path, "first", "ran", ran)
    good(tmp_path, "plan", "first.yaml", "-o", "first.json")
    seen(Plan.load(tmp_path / "first.json")).save(tmp_path / "seen.json")
    job(tmp_path, "then", *planned)
    good(tmp_path, "plan", "then.yaml", "-o", "then.json", "--observed", "first.json", "seen.json")
    plan = Plan.load(tmp_path / "then.json")
    assert {one.overlap for one in plan.predicted.collectives if one.kind == "all_to_all"} == hidden
    assert plan.settings.dense_seconds is not None
