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
}


def expected(world: int) -> models.Reference:
    """Without states, which ranks have of TorchRec's shards only where they hold one; weights show what they were."""
    return replace(models.reference(OPTIMIZER, 3, world), states={})


def sharded(world: int, names: list[str], profiles: Any = None, kinds: dict[str, list[str]] = ASKED) -> tuple[Any, Any]:
    """The model, of which TorchRec may shard some tables, and its optimizer."""
    from torchrec.distributed.planner.types import ParameterConstraints

    return models.shard(
        None,
        OPTIMIZER,
        cluster=models.small_cluster(2, world // 2),
        batch_size=24,
        budget="1GiB",
        profiles={name: models.profile_of(name) for _, name in models.table_names()} | (profiles or {}),
        constraints={
            name: ParameterConstraints(sharding_types=kinds[name], min_partition=4 if name == "goods" else None)
            for name in names
        },
    )


def trained(rank: int, world: int, names: list[str]) -> tuple[dict[str, str], dict[str, float]]:
    parallel, optim = sharded(world, names)
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


def moved(rank: int, kind: str) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes of TorchRec's collectives a rank and step, as predicted of these batches and as seen."""
    import numpy as np

    import flexshard
    from flexshard.costmodels import PooledCosts
    from flexshard.executors import Observer

    steps, size, cluster, features = 4, 24, models.small_cluster(2, 1), models.WIDE["goods"][1]
    batches = [[models.make_batch(step, each, size=size).features for each in range(2)] for step in range(steps)]
    ids = [each[feature].values().numpy() for step in batches for each in step for feature in features]
    profile = flexshard.AccessProfile.from_counts(np.bincount(np.concatenate(ids), minlength=997), steps * 2 * size)
    table = flexshard.Table("goods", 997, models.DIMS["wide"], profile, features=tuple(features))
    (option,) = PooledCosts(cluster, size).options(table, sharding_types=[kind], min_partition=4)
    predicted: dict[str, float] = {}
    for (_, _, content), nbytes in option.moved.items():
        name = "other ids" if content == "sequence ids" else "other embeddings"
        predicted[name] = predicted.get(name, 0.0) + float(nbytes.sum()) / 2
    parallel, optim = sharded(2, ["goods"], profiles={"goods": profile}, kinds={"goods": [kind]})
    assert parallel.plan.plan["wide"]["goods"].sharding_type == kind
    with Observer() as observer:
        for step in range(steps):
            models.train(parallel, optim, rank, range(step, step + 1))
            observer.step()
    return predicted, {one.content: one.bytes for one in observer.result().collectives if "other" in one.content}


@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "row_wise"])
def test_bytes_are_those_that_torchrec_moves(kind: str) -> None:
    for predicted, seen in ranks.run(2, 1, moved, kind):
        assert seen["other embeddings"] == pytest.approx(predicted["other embeddings"])
        # Rank 1 has three samples more, whose lengths travel, and how much comes does, too.
        lengths = {"table_wise": 1, "column_wise": 4, "row_wise": 2}[kind] * 3 * 8
        assert predicted["other ids"] + lengths <= seen["other ids"] <= predicted["other ids"] + lengths + 100
