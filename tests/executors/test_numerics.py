"""Outputs, weights and optimizer states under a plan equal those of one unsharded process on the global batch.

Tolerances: sums run in another order, and Adagrad divides by roots of small sums (eps 1e-8), which magnifies that; the
mutants below miss these tolerances a hundredfold.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.modules.embedding_configs import DataType

from flexshard.executors import Collectives, MemoryStore
from flexshard.executors.comm.collectives import Label, PendingCollective
from tests.executors import models, ranks
from tests.slow import crossed, first

TOLERANCE = {
    "sgd": {"outputs": 2e-6, "weights": 1e-6, "states": 0.0},
    "adagrad": {"outputs": 1e-4, "weights": 3e-4, "states": 1e-5},
    "adam": {"outputs": 1e-4, "weights": 1e-3, "states": 0.0},
    "rowwise_adagrad": {"outputs": 1e-4, "weights": 3e-4, "states": 1e-5},
}
STEPS = 10


def largest(found: list[dict[str, float]]) -> dict[str, float]:
    return {key: max(rank[key] for rank in found) for key in found[0]}


def assert_equal(found: list[dict[str, float]], optimizer: str) -> None:
    for key, difference in largest(found).items():
        assert difference <= TOLERANCE[optimizer][key], (key, largest(found))


def train_and_compare(rank: int, cluster: Any, split: Any, optimizer: str, options: dict[str, Any]) -> dict[str, float]:
    expected = models.reference(optimizer, STEPS, cluster.world_size)
    parallel, optim = models.shard(models.plan_of(cluster, split, **options), optimizer)
    outputs = models.train(parallel, optim, rank, range(STEPS))
    return models.differences(parallel, outputs, rank, expected)


@pytest.mark.parametrize(
    ("shape", "optimizer"), [*product([(2, 2)], models.OPTIMIZERS), *crossed([(1, 2), (2, 1)], models.OPTIMIZERS)]
)
def test_random_plans(shape: tuple[int, int], optimizer: str) -> None:
    check_random_plan(shape, optimizer)


@pytest.mark.parametrize("optimizer", first(1, models.OPTIMIZERS))
def test_random_plans_of_eight_ranks(optimizer: str) -> None:
    check_random_plan((4, 2), optimizer)


def check_random_plan(shape: tuple[int, int], optimizer: str) -> None:
    cluster = models.small_cluster(*shape)
    split = models.random_split(cluster, np.random.default_rng([*shape, len(optimizer)]))
    found = ranks.run(*shape, train_and_compare, cluster, split, optimizer, {})
    assert_equal(found, optimizer)


def uniform(size: int, reduction: str = "dense") -> dict[str, list[tuple[int, int, str]]]:
    return {name: [(size, rows, reduction)] for name, (rows, _) in (models.WIDE | models.NARROW).items()}


@pytest.mark.parametrize(("size", "reduction"), crossed([1, 2, 4], ["dense", "sparse"]))
def test_all_rows_in_one_tier(size: int, reduction: str) -> None:
    cluster = models.small_cluster(2, 2)
    assert_equal(ranks.run(2, 2, train_and_compare, cluster, uniform(size, reduction), "sgd", {}), "sgd")


def test_more_levels_than_nodes_and_ranks() -> None:
    cluster = models.small_cluster(4, 2, (4,))
    split = models.random_split(cluster, np.random.default_rng(5))
    assert len({size for tiers in split.values() for size, rows, _ in tiers if rows}) == 4
    assert_equal(ranks.run(4, 2, train_and_compare, cluster, split, "rowwise_adagrad", {}), "rowwise_adagrad")


@pytest.mark.parametrize("of_tables", [True, "some"])
def test_repeated_ids_sent_once(of_tables: bool | str) -> None:
    cluster = models.small_cluster(2, 2)
    split = models.random_split(cluster, np.random.default_rng(8))
    found = ranks.run(2, 2, train_and_compare, cluster, split, "adagrad", {"index_dedup": of_tables})
    assert_equal(found, "adagrad")


def in_memory(rank: int, cluster: Any, split: Any, optimizer: str) -> dict[str, float]:
    expected = models.reference(optimizer, STEPS, cluster.world_size)
    parallel, optim = models.shard(models.plan_of(cluster, split), optimizer, sharder={"sharded_store": MemoryStore})
    stores = [
        store
        for part in (parallel.module.wide, parallel.module.narrow)
        for store in (group.store for group in part.groups)
    ]
    assert any(isinstance(store, MemoryStore) for store in stores)
    return models.differences(parallel, models.train(parallel, optim, rank, range(STEPS)), rank, expected)


@pytest.mark.parametrize("optimizer", first(1, list(models.OPTIMIZERS)[::-1]))
def test_rows_in_plain_tensors(optimizer: str) -> None:
    cluster = models.small_cluster(2, 2)
    split = models.random_split(cluster, np.random.default_rng(3))
    assert_equal(ranks.run(2, 2, in_memory, cluster, split, optimizer), optimizer)


def copies(rank: int, cluster: Any, split: Any) -> list[np.ndarray]:
    """The replicated rows that this rank holds, after some steps."""
    parallel, optim = models.shard(models.plan_of(cluster, split), "rowwise_adagrad")
    models.train(parallel, optim, rank, range(4))
    parts = (parallel.module.wide, parallel.module.narrow)
    return [
        part.tables.group_of(table).store.values[slots].numpy()
        for part in parts
        for table in range(len(part.tables.names))
        for level, slots, _ in part.tables.held(table)
        if part.tables.layout.group_sizes[level] == 1
    ]


def test_copies_stay_equal_to_the_last_bit() -> None:
    cluster = models.small_cluster(2, 2)
    split = {
        name: [(1, rows // 2, kind), (4, rows - rows // 2, "dense")]
        for (name, (rows, _)), kind in zip((models.WIDE | models.NARROW).items(), ["dense", "sparse"] * 2, strict=True)
    }
    first, *others = ranks.run(2, 2, copies, cluster, split)
    assert [len(rows) for rows in first] == [rows // 2 for rows, _ in (models.WIDE | models.NARROW).values()]
    for other in others:
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))


# -- a plan that hypothesis draws

hypothesis = pytest.importorskip("hypothesis")


def many(rank: int, cluster: Any, splits: list[Any], optimizer: str) -> list[dict[str, float]]:
    """Several plans in one job, which is what starting the ranks costs anyway."""
    return [train_and_compare(rank, cluster, split, optimizer, {}) for split in splits]


@pytest.mark.slow
@hypothesis.settings(max_examples=2, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=hypothesis.strategies.data())
def test_drawn_plans(data: Any) -> None:
    cluster = models.small_cluster(2, 2)

    def tiers(rows: int) -> Any:
        sizes = hypothesis.strategies.permutations(cluster.group_sizes)
        cuts = hypothesis.strategies.lists(hypothesis.strategies.integers(0, rows), min_size=2, max_size=2).map(sorted)
        kinds = hypothesis.strategies.lists(
            hypothesis.strategies.sampled_from(["dense", "sparse"]), min_size=3, max_size=3
        )
        return hypothesis.strategies.builds(
            lambda order, at, kind: list(zip(order, np.diff([0, *at, rows]).tolist(), kind, strict=True)),
            sizes,
            cuts,
            kinds,
        )

    one = hypothesis.strategies.fixed_dictionaries(
        {name: tiers(rows) for name, (rows, _) in (models.WIDE | models.NARROW).items()}
    )
    splits = [data.draw(one) for _ in range(4)]
    for found in zip(*ranks.run(2, 2, many, cluster, splits, "sgd"), strict=True):
        assert_equal(list(found), "sgd")


# -- mutants: the same check has to fail


class WithoutReduction(Collectives):
    """Copies of rows keep their own gradients."""

    def all_reduce(self, tensor: torch.Tensor, group: Any, label: Label, op: Any = None) -> PendingCollective:
        return PendingCollective(None, label, group)


def with_mutant(rank: int, cluster: Any, split: Any, mutant: str) -> dict[str, float]:
    expected = models.reference("sgd", STEPS, cluster.world_size)
    sharder = {"collectives": WithoutReduction()} if mutant == "no reduction" else {}
    parallel, optim = models.shard(models.plan_of(cluster, split), "sgd", sharder=sharder)
    if mutant == "no average":
        set_gradient_division(False)
    outputs = models.train(parallel, optim, rank, range(STEPS))
    return models.differences(parallel, outputs, rank, expected)


@pytest.mark.parametrize("mutant", ["no reduction", "no average"])
def test_mutants_are_caught(mutant: str) -> None:
    cluster = models.small_cluster(2, 2)
    split = {
        name: [(1, rows // 4, "dense"), (2, rows // 4, "dense"), (4, rows - rows // 4 * 2, "dense")]
        for name, (rows, _) in (models.WIDE | models.NARROW).items()
    }
    found = largest(ranks.run(2, 2, with_mutant, cluster, split, mutant))
    assert found["outputs"] > 100 * TOLERANCE["sgd"]["outputs"]
    assert found["weights"] > 100 * TOLERANCE["sgd"]["weights"]


# -- other ways to run a model


def through_pipeline(rank: int, cluster: Any, split: Any, kind: str) -> dict[str, float]:
    from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

    expected = models.reference("sgd", STEPS, cluster.world_size)
    parallel, optim = models.shard(models.plan_of(cluster, split), "sgd")
    made = {"base": TrainPipelineBase, "sparse": TrainPipelineSparseDist}[kind](parallel, optim, torch.device("cpu"))
    batches = iter([models.make_batch(step, rank) for step in range(STEPS)])
    outputs = [made.progress(batches).detach() for _ in range(STEPS)]
    if kind == "sparse":
        assert len(made._pipelined_modules) == 2
    return models.differences(parallel, outputs, rank, expected)


@pytest.mark.parametrize("kind", ["base", "sparse"])
def test_pipelines(kind: str) -> None:
    cluster = models.small_cluster(2, 2)
    split = models.random_split(cluster, np.random.default_rng(11))
    assert_equal(ranks.run(2, 2, through_pipeline, cluster, split, kind), "sgd")


def with_half_precision(rank: int, cluster: Any, split: Any) -> dict[str, float]:
    expected = models.reference("sgd", STEPS, cluster.world_size, dtype=DataType.FP16)
    model = models.new_model(DataType.FP16)
    plan = models.plan_of(cluster, split, dtype="float16")
    parallel, optim = models.shard(plan, "sgd", dtype=DataType.FP16, model=model)
    outputs = models.train(parallel, optim, rank, range(STEPS))
    return models.differences(parallel, outputs, rank, expected)


def test_half_precision_rows() -> None:
    cluster = models.small_cluster(2, 2)
    split = models.random_split(cluster, np.random.default_rng(12))
    found = largest(ranks.run(2, 2, with_half_precision, cluster, split))
    # A weight of about 1 is kept to 1e-3, and rounded at each of ten steps.
    assert found["outputs"] < 3e-2, found
    assert found["weights"] < 1e-2, found


def small_gradients(rank: int, cluster: Any, split: Any, scale: float) -> float:
    """How far half-precision rows move under gradients of this scale; row-wise Adagrad's steps do not depend on it."""
    model = models.new_model(DataType.FP16)
    start = model.wide.embeddings["goods"].weight.detach().float().clone()
    plan = models.plan_of(cluster, split, dtype="float16")
    parallel, optim = models.shard(plan, "rowwise_adagrad", dtype=DataType.FP16, model=model)
    for step in range(4):
        optim.zero_grad()
        (parallel(models.make_batch(step, rank))[0] * scale).backward()
    moved = parallel.state_dict()["wide.embeddings.goods.weight"].full_tensor().float() - start
    return float(moved.abs().mean())


def test_small_gradients_of_half_precision_rows_are_not_lost() -> None:
    cluster = models.small_cluster(2, 2)
    split = models.random_split(cluster, np.random.default_rng(12))
    usual = ranks.run(2, 2, small_gradients, cluster, split, 1.0)[0]
    small = ranks.run(2, 2, small_gradients, cluster, split, 1e-2)[0]
    assert small == pytest.approx(usual, rel=0.02)


def with_codecs(rank: int, cluster: Any, split: Any) -> dict[str, float]:
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    registry = get_qcomm_codecs_registry(config, device=torch.device("cpu"))
    expected = models.reference("sgd", STEPS, cluster.world_size)
    parallel, optim = models.shard(models.plan_of(cluster, split), "sgd", sharder={"qcomm_codecs_registry": registry})
    outputs = models.train(parallel, optim, rank, range(STEPS))
    return models.differences(parallel, outputs, rank, expected)


def test_quantised_communication() -> None:
    cluster = models.small_cluster(2, 2)
    split = models.random_split(cluster, np.random.default_rng(13))
    found = largest(ranks.run(2, 2, with_codecs, cluster, split))
    assert 1e-6 < found["outputs"] < 5e-2, found  # not exact, and that shows that the codecs are used
    assert found["weights"] < 2e-2, found


def evaluate(rank: int, cluster: Any, split: Any) -> tuple[float, bool]:
    expected = models.reference("sgd", 1, cluster.world_size)
    parallel, _ = models.shard(models.plan_of(cluster, split), "sgd")
    before = parallel.state_dict()["wide.embeddings.goods.weight"].full_tensor()
    parallel.eval()
    with torch.no_grad():
        _, logits = parallel(models.make_batch(0, rank))
    after = parallel.state_dict()["wide.embeddings.goods.weight"].full_tensor()
    return float((logits - expected.outputs[0][rank]).abs().max()), torch.equal(before, after)


def test_evaluation_without_gradients() -> None:
    cluster = models.small_cluster(2, 2)
    split = models.random_split(cluster, np.random.default_rng(14))
    for difference, unchanged in ranks.run(2, 2, evaluate, cluster, split):
        assert difference < 1e-6
        assert unchanged


def weighted(rank: int, cluster: Any, split: Any) -> bool:
    """Weights of features are not an EmbeddingCollection's business; they must not disturb it either."""
    from torchrec import KeyedJaggedTensor

    parallel, _ = models.shard(models.plan_of(cluster, split), "sgd")
    plain = models.make_batch(0, rank).features
    heavy = KeyedJaggedTensor(plain.keys(), plain.values(), plain.values().float(), lengths=plain.lengths())
    one, other = parallel.module.wide(plain), parallel.module.wide(heavy)
    return all(torch.equal(one[name].values(), other[name].values()) for name in models.new_model().outputs)


def test_weighted_features() -> None:
    cluster = models.small_cluster(2, 1)
    split = models.random_split(cluster, np.random.default_rng(15))
    assert all(ranks.run(2, 1, weighted, cluster, split))


def ahead(rank: int, cluster: Any, split: Any) -> float:
    """Ids translated ahead, by an object that went through pickle as a data loader's worker would get it."""
    import pickle
    from dataclasses import replace as changed

    from torchrec import KeyedJaggedTensor

    parallel, _ = models.shard(models.plan_of(cluster, split), "sgd", sharder={"translated_ids": True})
    usual, _ = models.shard(models.plan_of(cluster, split), "sgd")
    translate = pickle.loads(pickle.dumps(parallel.module.narrow.translator()))
    batch = models.make_batch(0, rank)
    moved = parallel.module.narrow(translate(batch.features))["user"].values()
    assert changed(batch) is not batch
    assert isinstance(translate(batch.features), KeyedJaggedTensor)
    assert 0 < translate.nbytes <= 4 * models.NARROW["users"][0]
    return float((moved - usual.module.narrow(batch.features)["user"].values()).abs().max())


def test_ids_translated_ahead() -> None:
    cluster = models.small_cluster(2, 2)
    split = models.random_split(cluster, np.random.default_rng(16))
    assert ranks.run(2, 2, ahead, cluster, split) == [0.0] * 4


def mixed(rank: int, cluster: Any, split: Any, pipelined: bool) -> dict[str, float]:
    """One collection with tables of ours and tables that TorchRec shards."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    from flexshard.executors import FlexShardEmbeddingCollectionSharder
    from flexshard.planner import FlexShardPlanner

    expected = models.reference("rowwise_adagrad", STEPS, cluster.world_size)
    fused = {
        "optimizer": models.OPTIMIZERS["rowwise_adagrad"][1],
        "learning_rate": models.LEARNING_RATE,
        "eps": models.EPS,
    }
    model = models.new_model()
    sharders: list[Any] = [FlexShardEmbeddingCollectionSharder(fused)]
    profiles = {name: models.profile_of(name) for _, name in models.table_names()}
    planner = FlexShardPlanner(models.plan_of(cluster, split), profiles=profiles)
    sharding = planner.collective_plan(model, sharders)
    stock = construct_module_sharding_plan(
        model.wide,
        {name: table_wise(rank=1, compute_kernel=EmbeddingComputeKernel.FUSED.value) for name in models.WIDE},
        sharders[0],
        local_size=cluster.ranks_per_node,
        world_size=cluster.world_size,
        device_type="cpu",
    )
    sharding.plan["wide"]["shops"] = stock["shops"]
    parallel = DistributedModelParallel(model, plan=sharding, sharders=sharders, device=torch.device("cpu"))
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(parallel.named_parameters())),
        lambda p: torch.optim.SGD(p, lr=models.DENSE_LEARNING_RATE),
    )
    optim = CombinedOptimizer([parallel.fused_optimizer, dense])
    if pipelined:
        made = TrainPipelineSparseDist(parallel, optim, torch.device("cpu"))
        batches = iter([models.make_batch(step, rank) for step in range(STEPS)])
        outputs = [made.progress(batches).detach() for _ in range(STEPS)]
    else:
        outputs = models.train(parallel, optim, rank, range(STEPS))
    found = max(
        float((mine - theirs[rank]).abs().max()) for mine, theirs in zip(outputs, expected.outputs, strict=True)
    )
    return {"outputs": found}


@pytest.mark.parametrize("pipelined", [False, True])
def test_collections_of_both_kinds(pipelined: bool) -> None:
    cluster = models.small_cluster(2, 2)
    split = models.random_split(cluster, np.random.default_rng(17))
    assert_equal(ranks.run(2, 2, mixed, cluster, split, pipelined), "rowwise_adagrad")
