"""Pooled tables of a model: what ``FlexShardPlanner`` plans of them, and hands to TorchRec's sharders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams, ShardingPlan

from flexshard import (
    AccessProfile,
    Cluster,
    FlexShardEmbeddingCollectionSharder,
    FlexShardPlanner,
    Table,
    TableConstraints,
    solve,
)
from flexshard.errors import PlanError
from flexshard.topologies import CollectiveRate, Level

RATE = CollectiveRate(1e-6, 1e10)
CLUSTER = Cluster(
    "c", 2, 2, 1e9, 0.0, (Level(1, None, RATE), Level(2, RATE, RATE), Level(4, RATE, None)), host_bytes_per_s=1e9
)
SHARDERS: Any = [EmbeddingBagCollectionSharder(), FlexShardEmbeddingCollectionSharder()]
ROWS = {"a": 1_000, "b": 50, "c": 200, "d": 77}


def profile(rows: int) -> AccessProfile:
    return AccessProfile.from_counts(np.ceil(5_000 / np.arange(1, rows + 1)).astype(np.int64), 1_000)


PROFILES = {name: profile(rows) for name, rows in ROWS.items()} | {"s": profile(400)}


class Model(nn.Module):
    """Two collections of pooled tables, one of them with a table that the other has too, and a sequence."""

    def __init__(self, sequence: bool = True) -> None:
        super().__init__()
        meta = torch.device("meta")

        def bag(name: str, dim: int, *features: str, pooling: PoolingType = PoolingType.SUM) -> EmbeddingBagConfig:
            return EmbeddingBagConfig(
                name=name, embedding_dim=dim, num_embeddings=ROWS[name], feature_names=list(features), pooling=pooling
            )

        self.ads = EmbeddingBagCollection(
            [bag("a", 256, "f0", "f1"), bag("b", 16, "f2", pooling=PoolingType.MEAN), bag("c", 32, "f3")], device=meta
        )
        self.shops = EmbeddingBagCollection([bag("d", 16, "f4"), bag("c", 16, "f5")], device=meta)
        if sequence:
            config = EmbeddingConfig(name="s", embedding_dim=16, num_embeddings=400, feature_names=["f6"])
            self.history = EmbeddingCollection([config], device=meta)


def planned(model: Model, profiles: dict[str, AccessProfile], **options: Any) -> tuple[ShardingPlan, FlexShardPlanner]:
    planner = FlexShardPlanner(profiles=profiles, cluster=CLUSTER, batch_size=16, budget="500MB", **options)
    return planner.plan(model, SHARDERS), planner


def test_all_tables_in_one_problem() -> None:
    result, planner = planned(Model(), PROFILES)
    assert planner.solved is not None
    assert set(planner.solved.pooled) == {"a", "b", "ads.c", "d", "shops.c"}
    assert planner.solved.pooled["b"].pooling == "mean"
    assert planner.solved.pooled["a"].features == ("f0", "f1")
    assert set(planner.solved.tables) == {"s"}
    for fqn, name, key in (("ads", "a", "a"), ("shops", "c", "shops.c")):
        table, how = planner.solved.pooled[key], dict(result.plan[fqn])[name]
        assert (how.sharding_type, how.compute_kernel) == (table.sharding_type, table.compute_kernel)
        assert how.ranks == [shard.rank for shard in table.shards]
        if how.sharding_type == "data_parallel":
            assert how.sharding_spec is None
            continue
        for shard, data in zip(table.shards, how.sharding_spec.shards, strict=True):
            assert data.shard_sizes == [shard.rows, shard.columns]
            assert data.shard_offsets == [shard.first_row, shard.first_column]
            assert data.placement.rank() == shard.rank
    assert dict(result.plan["history"])["s"].sharding_type == "flex_shard"


def test_what_has_no_profile_or_is_left_goes_to_torchrecs_costs() -> None:
    result, planner = planned(Model(), {"a": PROFILES["a"], "d": PROFILES["d"], "s": PROFILES["s"]})
    assert planner.solved is not None
    assert set(planner.solved.pooled) == {"a", "d"}
    assert set(dict(result.plan["ads"])) == {"a", "b", "c"}
    assert set(dict(result.plan["shops"])) == {"c", "d"}
    result, planner = planned(Model(sequence=False), PROFILES, torchrec_tables=["shops", "ads.a"])
    assert planner.solved is not None
    assert set(planner.solved.pooled) == {"b", "ads.c"}
    assert set(dict(result.plan["shops"])) == {"c", "d"}
    with pytest.raises(PlanError, match="no collection and no table is called 'nothing'"):
        planned(Model(), PROFILES, torchrec_tables=["nothing"])


def test_torchrecs_constraints_are_kept() -> None:
    constraints = {
        "a": ParameterConstraints(sharding_types=["column_wise"], min_partition=64),
        "b": ParameterConstraints(compute_kernels=["fused"], sharding_types=["table_wise", "column_wise"]),
        "d": ParameterConstraints(stochastic_rounding=True),  # of which our costs know nothing
    }
    result, planner = planned(Model(), PROFILES, constraints=constraints)
    assert planner.solved is not None
    assert "d" not in planner.solved.pooled
    assert dict(result.plan["shops"])["d"].stochastic_rounding
    assert [shard.columns for shard in planner.solved.pooled["a"].shards] == [64] * 4
    assert dict(result.plan["ads"])["b"].sharding_type == "table_wise"


def test_what_is_left_of_a_plan_is_not_planned_by_it() -> None:
    _, planner = planned(Model(sequence=False), PROFILES)
    plan = planner.solved
    assert plan is not None
    for options, left in (
        ({"torchrec_tables": ["ads.a"]}, ("ads", "a")),
        ({"torchrec_tables": ["shops"]}, ("shops", "c")),
        ({"constraints": {"a": ParameterConstraints(sharding_types=["table_wise"])}}, ("ads", "a")),
    ):
        given: Any = options
        again = FlexShardPlanner(plan, **given).plan(Model(sequence=False), SHARDERS)
        assert {name for shardings in again.plan.values() for name in dict(shardings)} == set(ROWS)
        fqn, name = left
        assert dict(again.plan[fqn])[name].sharding_type in ("table_wise", "column_wise", "row_wise", "data_parallel")
    table_wise = FlexShardPlanner(plan, constraints={"a": ParameterConstraints(sharding_types=["table_wise"])})
    assert dict(table_wise.plan(Model(sequence=False), SHARDERS).plan["ads"])["a"].sharding_type == "table_wise"


def test_a_plan_of_another_model_is_refused() -> None:
    def plan_of(rows: int = ROWS["b"], dim: int = 16, pooling: str = "mean", **fields: Any) -> Any:
        table = Table("b", rows, dim, profile(min(rows, 50)), pooling=pooling, **fields)
        return FlexShardPlanner(solve([table], CLUSTER, batch_size=16, budget="500MB"))

    assert dict(plan_of().plan(Model(sequence=False), SHARDERS).plan["ads"])["b"] is not None
    for fields, message in (
        ({"rows": 60}, "table 'b': the plan is for rows 60, the model has 50"),
        ({"dim": 32}, "the plan is for dim 32, the model has 16"),
        ({"pooling": "sum"}, "the plan is for pooling sum, the model has mean"),
        ({"features": ["f9"]}, "the plan is for features f9, the model has f2"),
        ({"dtype": "float16"}, "the plan is for dtype float16, the model has float32"),
    ):
        with pytest.raises(PlanError, match=message):
            plan_of(**fields).plan(Model(sequence=False), SHARDERS)
    other = solve([Table("z", 50, 16, profile(50), pooling="sum")], CLUSTER, batch_size=16)
    with pytest.raises(PlanError, match="the plan has table 'z', which no EmbeddingBagCollection of the model has"):
        FlexShardPlanner(other).plan(Model(sequence=False), SHARDERS)


def test_kernels_with_host_memory_run_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = TableConstraints(compute_kernels=["fused_uvm_caching"], forbid=["dense"], cache_load_factors=[0.3])
    table = Table("b", 50, 16, profile(50), pooling="mean")
    plan = solve([table], CLUSTER, batch_size=16, budget="500MB", host_memory="1GiB", constraints={"b": cached})
    planner = FlexShardPlanner(plan)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlanError, match="kernel fused_uvm_caching, which runs on CUDA alone"):
        planner.plan(Model(sequence=False), SHARDERS)
    from flexshard.planner.torchrec import pooled_shardings

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shardings, _ = pooled_shardings.pooled_shardings({"ads": Model().ads.embedding_bag_configs()}, plan)
    how = shardings["ads"]["b"]
    assert how.cache_params == CacheParams(load_factor=0.3)
    assert how.sharding_spec is not None
    assert "cuda" in str(how.sharding_spec.shards[0].placement)


def test_sequences_that_are_asked_to_be_whole() -> None:
    asked = {"s": ParameterConstraints(sharding_types=["table_wise", "table_row_wise"])}
    result, planner = planned(Model(), PROFILES, constraints=asked)
    assert planner.solved is not None
    assert not planner.solved.tables
    table, how = planner.solved.pooled["s"], dict(result.plan["history"])["s"]
    assert (table.pooling, how.sharding_type, how.compute_kernel) == ("none", "table_wise", "fused")
    assert how.ranks == [shard.rank for shard in table.shards]
    either = {"s": ParameterConstraints(sharding_types=["flex_shard", "table_wise"])}
    result, planner = planned(Model(), PROFILES, constraints=either)
    assert planner.solved is not None
    assert dict(result.plan["history"])["s"].sharding_type in ("flex_shard", "table_wise")
    # What TorchRec has for pooled tables alone leaves nothing, which its own planner is told.
    with pytest.raises(RuntimeError, match=r"No available sharding type and compute kernel combination .* for s"):
        planned(Model(), PROFILES, constraints={"s": ParameterConstraints(sharding_types=["grid_shard"])})


@pytest.mark.filterwarnings("ignore:table 's'. its constraints say stochastic_rounding")
@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"sharding_types": ["flex_shard", "grid_shard"]}, "flex_shard"),
        ({"sharding_types": ["flex_shard", "column_wise"]}, "flex_shard"),  # 16 columns are not cut
        ({"sharding_types": ["column_wise"]}, "column_wise"),
        ({"sharding_types": ["data_parallel"]}, "data_parallel"),
        ({"compute_kernels": ["fused", "fused_uvm"], "sharding_types": ["table_wise"]}, "table_wise"),
        ({"sharding_types": ["flex_shard", "table_wise"], "stochastic_rounding": True}, "flex_shard"),
    ],
)
def test_what_a_plan_cannot_keep_is_left_or_in_tiers(asked: dict[str, Any], kind: str) -> None:
    result, _ = planned(Model(), PROFILES, constraints={"s": ParameterConstraints(**asked)})
    assert dict(result.plan["history"])["s"].sharding_type == kind


def test_a_plan_is_carried_out_again_and_where_tiers_are_allowed() -> None:
    either = {"s": ParameterConstraints(sharding_types=["flex_shard", "table_wise"])}
    first, planner = planned(Model(), PROFILES, constraints=either)
    again = planner.plan(Model(), SHARDERS)
    kinds = [dict(one.plan["history"])["s"].sharding_type for one in (first, again)]
    assert kinds == ["flex_shard"] * 2
    given = FlexShardPlanner(planner.solved, profiles=PROFILES, constraints=either).plan(Model(), SHARDERS)
    assert dict(given.plan["history"])["s"].sharding_type == "flex_shard"
    table_wise = {"s": ParameterConstraints(sharding_types=["table_wise"])}
    result, planner = planned(Model(), PROFILES, constraints=table_wise)
    assert planner.plan(Model(), SHARDERS).plan["history"]["s"].ranks == result.plan["history"]["s"].ranks
