"""What users write; this file only has to type-check."""

from __future__ import annotations

from typing import assert_type

import numpy as np

from flexshard import AccessProfile, Cluster, Cost, ParetoCurve, Plan, Table, pareto, plot_pareto, solve
from flexshard.executors import Observation, Replay, compare_observed, replay, split_by_rank


def whole_flow() -> None:
    profile = AccessProfile.from_parquet("clicks/*.parquet", column="items", num_rows=10_000_000)
    cluster = Cluster.preset("dgx-h100", nodes=128)
    table = Table("items", rows=10_000_000, dim=256, profile=profile)
    plan = solve(
        [table], cluster, batch_size=4096, budget="+2GiB", tiers=2, method="paper", overlap={"all_to_all@8": 1}
    )
    assert_type(plan, Plan)
    assert_type(plan.predicted, Cost)
    assert_type(plan.tables["items"].tiers[0].rows, int)
    assert_type(plan.lower_bound_seconds, float)
    curve = pareto([table], cluster, batch_size=4096)
    assert_type(curve, ParetoCurve)
    plot_pareto(curve, "pareto.png")
    assert_type(profile + profile, AccessProfile)


def after_training(plan: Plan, profile: AccessProfile) -> None:
    comparison = compare_observed(plan, Observation.load("observed.json"))
    assert_type(comparison.reduction_observed, float)
    lookups = {"items": (np.arange(10), np.array([4, 6]))}
    result = replay(plan, split_by_rank(lookups, world_size=2, batch_size=1), {"items": profile})
    assert_type(result, Replay)
    assert_type(result.peak_memory_bytes, float)
