"""What ``FlexShardPlanner`` is told of single tables, and of collections inside modules that other sharders take."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("torchrec")

from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from flexshard import FlexShardEmbeddingCollectionSharder, FlexShardPlanner, Table, solve
from flexshard.errors import JobError, PlanError
from flexshard.executors import FlexShardEmbeddingBagCollectionSharder
from tests.planner.test_pooled_shardings import CLUSTER, profile

ROWS = 40
BAGS = EmbeddingBagCollectionSharder()
SHARDERS: Any = [FlexShardEmbeddingCollectionSharder(), BAGS]
WITH_PROCESSORS: Any = [*SHARDERS, FeatureProcessedEmbeddingBagCollectionSharder(BAGS)]


class Model(nn.Module):
    """A sequence, and two pooled tables whose features are weighted by their positions."""

    def __init__(self) -> None:
        super().__init__()
        sequence = EmbeddingConfig(name="s", embedding_dim=16, num_embeddings=ROWS, feature_names=["a"])
        self.history = EmbeddingCollection([sequence])
        pooled = [
            EmbeddingBagConfig(name=name, embedding_dim=16, num_embeddings=ROWS, feature_names=[feature])
            for name, feature in (("p", "a"), ("q", "b"))
        ]
        weights = PositionWeightedModuleCollection({"a": 10, "b": 10})
        self.processed = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(pooled, is_weighted=True), weights
        )


def planner_of(*tables: str, **options: Any) -> FlexShardPlanner:
    known = {name: profile(ROWS) for name in ("s", *tables)}
    return FlexShardPlanner(profiles=known, cluster=CLUSTER, batch_size=16, budget="500MB", **options)


def kinds(planner: FlexShardPlanner, model: nn.Module, sharders: Any) -> dict[str, dict[str, str]]:
    plan = planner.plan(model, sharders).plan
    return {fqn: {name: how.sharding_type for name, how in dict(tables).items()} for fqn, tables in plan.items()}


@pytest.mark.parametrize("tables", [[], ["p"], ["p", "q"]])
def test_what_is_inside_a_module_that_is_sharded_is_not_planned_twice(tables: list[str]) -> None:
    model = Model()
    before = dict(model.named_parameters())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        planner = planner_of(*tables)
        found = kinds(planner, model, WITH_PROCESSORS)
    assert set(found) == {"history", "processed"}
    assert set(found["processed"]) == {"p", "q"}
    assert planner.solved is not None
    assert not planner.solved.pooled
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is weights for name, weights in before.items())
    told = (
        "table 'p' is inside processed, which FeatureProcessedEmbeddingBagCollectionSharder shards: its profile decides"
    )
    assert any(str(one.message).startswith(told) for one in said) is bool(tables)


def test_without_its_sharder_it_is_planned() -> None:
    planner = planner_of("p", "q")
    found = kinds(planner, Model(), SHARDERS)
    assert set(found) == {"history", "processed._embedding_bag_collection"}
    assert planner.solved is not None
    assert set(planner.solved.pooled) == {"p", "q"}


def test_it_may_be_named(recwarn: pytest.WarningsRecorder) -> None:
    for name in ("p", "processed", "processed.p", "processed._embedding_bag_collection.p"):
        assert "processed" in kinds(planner_of("p", torchrec_tables=[name]), Model(), WITH_PROCESSORS)
    assert not [one for one in recwarn if "is inside" in str(one.message)]


def test_a_plan_that_has_it_is_refused() -> None:
    tables = [Table("s", ROWS, 16, profile(ROWS)), Table("p", ROWS, 16, profile(ROWS), pooling="sum")]
    plan = solve(tables, CLUSTER, batch_size=16)
    with pytest.raises(PlanError, match="table 'p', which no EmbeddingBagCollection of the model has but processed;"):
        FlexShardPlanner(plan, profiles={"s": profile(ROWS)}).plan(Model(), WITH_PROCESSORS)


@pytest.mark.filterwarnings("ignore:HeuristicalStorageReservation")
def test_names_that_the_model_has_not() -> None:
    with pytest.raises(PlanError, match=r"dedup_factors: the model has no table 'a'; there are history\.s, processed"):
        planner_of(dedup_factors={"a": 2.0}).plan(Model(), SHARDERS)
    row_wise = ParameterConstraints(sharding_types=["row_wise"])
    with pytest.warns(
        UserWarning, match="constraints: the model has no table 'history.s', so that they decide nothing"
    ):
        planner_of(constraints={"history.s": row_wise}).plan(Model(), SHARDERS)
    for known in ("s", "history.s"):
        planner_of(dedup_factors={known: 2.0}).plan(Model(), SHARDERS)


def test_arguments_that_would_decide_nothing() -> None:
    plan = solve([Table("s", ROWS, 16, profile(ROWS))], CLUSTER, batch_size=16)
    given: dict[str, Any]
    for given in ({"cluster": CLUSTER}, {"batch_size": 16}, {"dedup_factors": {"s": 2.0}}, {"budget": "1GiB"}):
        with pytest.raises(JobError, match=f"beside which {min(given)} would decide nothing"):
            FlexShardPlanner(plan, **given)
    unknown: Any = {"foo": 1}
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        planner_of(**unknown)
    with pytest.raises(JobError, match=r"torchrec_tables is a list of names, not 's'; give \['s'\]"):
        planner_of(torchrec_tables="s")


def test_tables_behind_caches_have_modules_of_their_sharder() -> None:
    model = nn.Module()
    model.history = Model().history
    bags: Any = [SHARDERS[0], FlexShardEmbeddingBagCollectionSharder(cache_load_factors={"s": 0.5})]
    with pytest.raises(PlanError, match=r"cache_load_factors of FlexShardEmbeddingBag.* 's', and the model has no Emb"):
        planner_of().plan(model, bags)
    assert planner_of().plan(model, [FlexShardEmbeddingCollectionSharder(cache_load_factors={"s": 0.5}), BAGS])


def test_a_plan_of_a_table_that_torchrec_could_not_have() -> None:
    with pytest.raises(KeyError, match="items"):
        EmbeddingCollection([EmbeddingConfig(name="items", embedding_dim=16, num_embeddings=ROWS)])
    plan = solve([Table("items", ROWS, 16, profile(ROWS))], CLUSTER, batch_size=16, budget="500MB")
    planner = FlexShardPlanner(plan)
    with (
        pytest.warns(UserWarning, match="table 's' of history has no profile in the plan"),
        pytest.raises(PlanError, match=r"table 'items', .* takes no name of a method of nn\.ModuleDict"),
    ):
        planner.plan(Model(), SHARDERS)
