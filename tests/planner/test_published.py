"""The published algorithm reproduces the published row counts and times (FlexShard paper, Tables 5 and 6)."""

from __future__ import annotations

import pytest
from benchmarks.published import MODELS, PUBLISHED, published_table

from flexshard import Cluster, solve

TOLERANCE = {"RM-1": 0.01, "RM-2": 0.03, "RM-3": 0.01, "RM-4": 0.01}


@pytest.mark.parametrize("model", MODELS)
def test_the_profile_passes_through_the_published_points(model: str) -> None:
    profile, spec = published_table(model).profile, MODELS[model]
    two, (dp, dp_share), (flex, flex_share) = (
        spec["two_tier"]["data_parallel"],
        spec["three_tier"]["data_parallel"],
        spec["three_tier"]["flex"],
    )
    assert profile.num_rows == spec["rows"]
    assert profile.avg_length == pytest.approx(spec["reads_per_sample"], rel=1e-6)
    assert profile.covered(two[0]) == pytest.approx(two[1], abs=1e-5)
    assert profile.covered(dp) == pytest.approx(dp_share, abs=1e-5)
    assert profile.covered(dp + flex) == pytest.approx(dp_share + flex_share, abs=1e-5)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tiers", "sharding"), [(2, "two_tier"), (3, "three_tier")])
def test_row_counts_of_table_5(model: str, tiers: int, sharding: str, paper_cluster: Cluster) -> None:
    table = published_table(model)
    plan = solve([table], paper_cluster, batch_size=PUBLISHED["batch_size"], tiers=tiers, method="paper")
    found = {tier.strategy: tier.rows for tier in plan.tables[model].tiers}
    for strategy, (rows, _) in MODELS[model][sharding].items():
        assert found[strategy] == pytest.approx(rows, rel=TOLERANCE[model]), strategy
    # Memory neutral: within the budget, by less than one replicated row.
    spare = plan.baselines["row_wise"].memory_bytes - plan.predicted.memory_bytes
    assert 0 <= spare <= 6 * table.row_bytes
    assert plan.predicted == plan.baselines[f"paper_{tiers}_tier"]


@pytest.mark.parametrize("model", MODELS)
def test_times_of_table_6(model: str, paper_cluster: Cluster) -> None:
    spec, row_bytes = MODELS[model], 4 * PUBLISHED["dim"]
    node, world = paper_cluster.level(8), paper_cluster.level(32)
    assert node.all_to_all
    assert node.all_reduce
    assert world.all_to_all
    for elements, ms in spec["all_to_all"].values():
        assert 2 * world.all_to_all.seconds(4 * elements) == pytest.approx(ms / 1e3, rel=0.05)
    flex_rows, covered = spec["three_tier"]["flex"]
    intra = 2 * node.all_to_all.seconds(4 * spec["all_to_all"]["row_wise"][0] * covered)
    assert intra == pytest.approx(spec["intra_all_to_all_ms"] / 1e3, rel=0.15)
    cross = node.all_reduce.seconds(flex_rows * row_bytes / 8)
    assert cross == pytest.approx(spec["cross_all_reduce_ms"] / 1e3, rel=0.15)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("overlap", [None, "paper"])
def test_the_optimal_plan_is_never_worse_than_the_published_one(
    model: str, overlap: str | None, paper_cluster: Cluster
) -> None:
    plan = solve([published_table(model)], paper_cluster, batch_size=PUBLISHED["batch_size"], overlap=overlap)
    for name in ("row_wise", "paper_2_tier", "paper_3_tier"):
        assert plan.predicted.exposed_seconds <= plan.baselines[name].exposed_seconds * (1 + 1e-9)


def test_an_explicit_overlap_restores_the_flex_breakpoint(paper_cluster: Cluster) -> None:
    table = published_table("RM-2")
    shown = {"all_to_all@8": 0.0, "all_reduce@8": 0.0}
    plan = solve([table], paper_cluster, batch_size=4096, method="paper", overlap=shown)
    flex = plan.tables["RM-2"].tier(8)
    assert flex is not None
    # w = 1/(8 · 12.36) / (2/25.8 - 2/77), worked out in the tests of the breakpoints.
    assert flex.coldest_p == pytest.approx(0.19599 / 4096, rel=0.01)
    assert flex.rows < 1_000_000
