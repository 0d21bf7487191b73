"""The published algorithm beside the published row counts and times (FlexShard paper, Tables 5 and 6).

By construction: ``published_table`` is fitted to the row counts (L, and p at one of them), and the preset's alpha and
beta to the times, so those tests check arithmetic. Predicted: ``predicted_table``, which takes no count for a
breakpoint.
"""

from __future__ import annotations

import pytest
from benchmarks.published import (
    MODELS,
    PUBLISHED,
    covered_points,
    elements_length,
    predicted_table,
    published_table,
    rows_seconds,
)

from flexshard import Cluster, Plan, Table, solve

SHARDINGS = [(2, "two_tier"), (3, "three_tier")]


def plan_of(table: Table, tiers: int, cluster: Cluster) -> Plan:
    return solve([table], cluster, batch_size=PUBLISHED["batch_size"], tiers=tiers, method="paper")


@pytest.mark.parametrize("model", MODELS)
def test_the_profile_passes_through_the_published_points(model: str) -> None:
    profile, spec = published_table(model).profile, MODELS[model]
    assert profile.num_rows == spec["rows"]
    assert profile.avg_length == pytest.approx(spec["reads_per_sample"], rel=1e-6)
    for rows, share in covered_points(model):
        assert profile.covered(rows) == pytest.approx(share, abs=1e-5)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tiers", "sharding"), SHARDINGS)
def test_row_counts_of_table_5_agree_by_construction(
    model: str, tiers: int, sharding: str, paper_cluster: Cluster
) -> None:
    """L and the last data-parallel p are fitted to these counts: the algorithm's arithmetic is checked, no more."""
    table = published_table(model)
    plan = plan_of(table, tiers, paper_cluster)
    found = {tier.strategy: tier.rows for tier in plan.tables[model].tiers}
    for strategy, (rows, _) in MODELS[model][sharding].items():
        assert found[strategy] == pytest.approx(rows, rel=0.01), strategy
    # Memory neutral: within the budget, by less than one replicated row.
    spare = plan.baselines["row_wise"].memory_bytes - plan.predicted.memory_bytes
    assert 0 <= spare <= 6 * table.row_bytes
    assert plan.predicted == plan.baselines[f"paper_{tiers}_tier"]


@pytest.mark.parametrize("model", MODELS)
def test_row_counts_of_table_5_as_predicted(model: str, paper_cluster: Cluster) -> None:
    """What is said of the prediction stays true: measured are -42 to -63 %, -5 to -12 % and -8 to +5 %.

    With the covered accesses alone, p at the last data-parallel row of the 3-tier sharding is 0.4 to 0.7 of the
    breakpoint, so that the tier ends early; L of Table 6 is 3 to 8 % below that which makes the counts neutral.
    """
    table, spec = predicted_table(model), MODELS[model]
    assert table.profile.avg_length == pytest.approx(elements_length(model), rel=1e-6)
    for rows, share in covered_points(model):
        assert table.profile.covered(rows) == pytest.approx(share, abs=1e-5)
    error: dict[tuple[str, str], float] = {}
    for tiers, sharding in SHARDINGS:
        plan = plan_of(table, tiers, paper_cluster)
        found = {tier.strategy: tier.rows for tier in plan.tables[model].tiers}
        error |= {(sharding, strategy): found[strategy] / rows - 1 for strategy, (rows, _) in spec[sharding].items()}
    assert -0.70 <= error["three_tier", "data_parallel"] <= -0.35
    assert -0.15 <= error["two_tier", "data_parallel"] <= -0.03
    assert -0.10 <= error["three_tier", "flex"] <= 0.07


@pytest.mark.parametrize("model", MODELS)
def test_row_wise_times_of_table_6_from_whole_plans(model: str, paper_cluster: Cluster) -> None:
    """With L fitted to Table 5, times are 3.8 to 5.8 % high; L of Table 6 is what alpha and beta were fitted at."""
    _, ms = MODELS[model]["all_to_all"]["row_wise"]
    fitted, elements = (
        1e3 * rows_seconds(plan_of(table, 3, paper_cluster).baselines["row_wise"]) / ms - 1
        for table in (published_table(model), predicted_table(model))
    )
    assert 0.03 <= fitted <= 0.07
    assert -0.03 <= elements <= 0.02


@pytest.mark.parametrize("model", MODELS)
def test_times_of_table_6_to_which_the_preset_is_fitted(model: str, paper_cluster: Cluster) -> None:
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
