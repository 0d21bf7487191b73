"""Tables without pooling that TorchRec shards beside others in tiers of rows, under one plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torchrec")

from tests.executors import models, ranks

OPTIMIZER = "adagrad"  # row-wise, column shards have states of their own, as TorchRec has them
ASKED = {
    "goods": ["column_wise"],
    "shops": ["table_wise"],
    "users": ["row_wise", "flex_shard"],
    "days": ["data_parallel"],
}


def expected(world: int) -> models.Reference:
    """Without states, which ranks have of TorchRec's shards only where they hold one; weights show what they were."""
    return replace(models.reference(OPTIMIZER, 3, world), states={})


def trained(rank: int, world: int, names: list[str]) -> tuple[dict[str, str], dict[str, float]]:
    from torchrec.distributed.planner.types import ParameterConstraints

    constraints = {
        name: ParameterConstraints(sharding_types=ASKED[name], min_partition=4 if name == "goods" else None)
        for name in names
    }
    parallel, optim = models.shard(
        None,
        OPTIMIZER,
        cluster=models.small_cluster(2, world // 2),
        batch_size=24,
        budget="1GiB",
        constraints=constraints,
    )
    kinds = {name: parallel.plan.plan[part][name].sharding_type for part, name in models.table_names()}
    outputs = models.train(parallel, optim, rank, range(3))
    return kinds, models.differences(parallel, outputs, rank, expected(world))


@pytest.mark.parametrize(("world", "names"), [(2, ["goods", "shops"]), (4, ["shops", "users"])])
def test_training_equals_that_of_whole_tables(world: int, names: list[str]) -> None:
    for kinds, found in ranks.run(2, world // 2, trained, world, names):
        for name, kind in kinds.items():
            assert kind in (ASKED[name] if name in names else ["flex_shard"])
        assert max(found.values()) < 1e-4, found


def test_a_plan_with_them_is_kept_from_file(tmp_path: Any) -> None:
    import flexshard

    cluster = models.small_cluster(2, 1)
    tables = [
        flexshard.Table(name, (models.WIDE | models.NARROW)[name][0], models.DIMS[part], models.profile_of(name))
        for part, name in models.table_names()
    ]
    asked = {"shops": flexshard.TableConstraints(sharding_types=["table_wise"])}
    plan = flexshard.solve(tables, cluster, batch_size=24, budget="1GiB", constraints=asked)
    plan.save(tmp_path / "plan.json")
    for found in ranks.run(2, 1, trained_under, str(tmp_path / "plan.json")):
        assert max(found.values()) < 1e-4, found


def trained_under(rank: int, file: str) -> dict[str, float]:
    import flexshard

    plan = flexshard.Plan.load(file)
    parallel, optim = models.shard(plan, OPTIMIZER)
    assert parallel.plan.plan["wide"]["shops"].sharding_type == "table_wise"
    outputs = models.train(parallel, optim, rank, range(3))
    return models.differences(parallel, outputs, rank, expected(2))
