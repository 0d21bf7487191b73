"""Pooled tables with rows on the host behind a cache: as the unsharded collection, and as TorchRec's to its users."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torchrec")
pytest.importorskip("numba")

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import nn
from torch.distributed.tensor import DTensor
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.optimizers import in_backward_optimizer_filter

from flexshard.errors import FlexShardError
from flexshard.executors import (
    FlexShardEmbeddingBagCollectionSharder,
    FlexShardEmbeddingCollectionSharder,
    LookaheadPipeline,
    full_state_dict,
    table_norms,
)
from flexshard.executors.sharding.row_sharding import RowSharding
from flexshard.executors.state.checkpoints import load_checkpoint, save_checkpoint
from flexshard.executors.stores.cached import CachedStore
from tests.executors import lookahead_model as looking, models, ranks
from tests.executors.test_lookahead import fused

HOST = torch.device("cpu")
STEPS, SAMPLES, DIM = 8, 12, 8
# Rows, features, pooling; "seen" is looked up in two tables, of which one is behind a cache.
TABLES: dict[str, tuple[int, list[str], PoolingType]] = {
    "goods": (1500, ["bought", "seen"], PoolingType.SUM),
    "shops": (400, ["shop"], PoolingType.MEAN),
    "hours": (24, ["hour", "seen"], PoolingType.SUM),
    "days": (1500, ["day"], PoolingType.MEAN),
}
FEATURES = ["hour", "seen", "shop", "bought", "day"]
CACHED = ("goods", "shops")


def start(weight: torch.Tensor) -> torch.Tensor:
    """Rows of a whole table, alike wherever it is made."""
    drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.shape[0])) / DIM
    with torch.no_grad():
        return weight.copy_(drawn)


class Model(nn.Module):
    def __init__(self, *, weighted: bool = False, sums: bool = False, cached_alone: bool = False) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=DIM,
                feature_names=features,
                init_fn=start,
                pooling=PoolingType.SUM if sums or weighted else pooling,
            )
            for name, (rows, features, pooling) in TABLES.items()
            if name in CACHED or not cached_alone
        ]
        self.bags = EmbeddingBagCollection(tables, is_weighted=weighted)
        self.over = nn.Linear(DIM * sum(len(table.feature_names) for table in tables), 1)

    def forward(self, batch: models.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.over(torch.tanh(self.bags(batch.features).values())).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits


def batch_of(step: int, rank: int, *, weighted: bool = False) -> models.Batch:
    """Ids of which some come again soon, empty bags, and repeats within bags."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    rows = {feature: rows for rows, features, _ in TABLES.values() for feature in features} | {"seen": 24}
    lengths, values = [], []
    for feature in FEATURES:
        length = torch.randint(0, 5, (SAMPLES,), generator=generator)
        drawn = torch.rand(int(length.sum()), generator=generator)
        lengths.append(length)
        values.append((drawn.pow(3) * rows[feature]).long().clamp_(max=rows[feature] - 1))
    ids = torch.cat(values)
    weights = torch.rand(ids.numel(), generator=generator) if weighted else None
    features = KeyedJaggedTensor(FEATURES, ids, weights, lengths=torch.cat(lengths))
    return models.Batch(features, torch.randint(0, 2, (SAMPLES,), generator=generator).float())


def shard(
    factors: dict[str, float] | None,
    optimizer: str,
    *,
    torchrec: bool = False,
    device: str = "cpu",
    **how: Any,
) -> tuple[DistributedModelParallel, Any]:
    """The model and its optimizer; TorchRec has every table on one rank."""
    torch.manual_seed(3)
    model = Model(**how)
    world = torch.distributed.get_world_size()
    constraints = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in TABLES}
    # FBGEMM's pooled kernels on CPUs leave decay out, those of single rows and of CUDA do not.
    given = {option: value for option, value in fused(optimizer).items() if not option.startswith("weight_decay")}
    sharder = (
        EmbeddingBagCollectionSharder(given)
        if torchrec
        else FlexShardEmbeddingBagCollectionSharder(given, cache_load_factors=factors)
    )
    planner = EmbeddingShardingPlanner(Topology(world, device), batch_size=SAMPLES, constraints=constraints)
    plan = planner.collective_plan(model, [sharder], torch.distributed.group.WORLD)
    parallel = DistributedModelParallel(model, plan=plan, sharders=[sharder], device=torch.device(device))
    return parallel, models.optimizer_of(parallel)


def caches(parallel: DistributedModelParallel) -> list[CachedStore]:
    return [group.store for group in parallel.module.bags.groups if isinstance(group.store, CachedStore)]


def train(
    rank: int,
    factors: dict[str, float] | None,
    optimizer: str,
    *,
    stock: bool = False,
    device: str = "cpu",
    **how: Any,
) -> tuple[list[np.ndarray], DistributedModelParallel]:
    """Logits of every step, and the model."""
    parallel, optim = shard(factors, optimizer, device=device, **how)
    pipeline = (TrainPipelineSparseDist if stock else LookaheadPipeline)(parallel, optim, torch.device(device))
    batches = (batch_of(step, rank, weighted=how.get("weighted", False)) for step in range(STEPS))
    return [pipeline.progress(batches).detach().cpu().numpy() for _ in range(STEPS)], parallel


def contents(parallel: DistributedModelParallel) -> dict[str, np.ndarray]:
    """Whole tables and layers, and states of the tables behind caches; every rank must call it."""
    whole = [{name: value.cpu().numpy() for name, value in full_state_dict(parallel).items()}]
    torch.distributed.broadcast_object_list(whole, 0)
    found = whole[0]
    for key, values in parallel.fused_optimizer.state_dict()["state"].items():
        states = {name: value for name, value in values.items() if isinstance(value, DTensor)}
        found |= {f"{key}.{name}": value.full_tensor().cpu().numpy() for name, value in sorted(states.items())}
    return found


def unsharded(world: int, **how: Any) -> tuple[list[list[np.ndarray]], dict[str, np.ndarray]]:
    """Logits by step and rank, and weights at the end, of one process that has the ranks' batches."""
    torch.manual_seed(3)
    model = Model(**how)
    optimizer = torch.optim.SGD(model.bags.parameters(), lr=0.2)
    dense = torch.optim.SGD(model.over.parameters(), lr=models.DENSE_LEARNING_RATE)
    logits = []
    for step in range(STEPS):
        parts = [model(batch_of(step, rank, weighted=how.get("weighted", False))) for rank in range(world)]
        for one in (optimizer, dense):
            one.zero_grad()
        (sum(loss for loss, _ in parts) / world).backward()
        for one in (optimizer, dense):
            one.step()
        logits.append([out.detach().numpy() for _, out in parts])
    return logits, {name: value.detach().numpy() for name, value in model.state_dict().items()}


HOW: list[dict[str, Any]] = [{}, {"weighted": True}, {"cached_alone": True}]


def trained_with_sgd(rank: int) -> list[Any]:
    found = []
    for how in HOW:
        logits, parallel = train(rank, {"goods": 0.2, "shops": 0.5}, "sgd", **how)
        traffic = [replace(store.traffic) for store in caches(parallel)]
        found.append((logits, contents(parallel), traffic))
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_training_is_that_of_the_unsharded_collection(world: int) -> None:
    expected = [unsharded(world, **how) for how in HOW]
    for rank, results in enumerate(ranks.run(1, world, trained_with_sgd)):
        for (logits, weights), (found, state, traffic) in zip(expected, results, strict=True):
            for step in range(STEPS):
                np.testing.assert_allclose(found[step], logits[step][rank], atol=2e-6)
            for name, values in weights.items():
                np.testing.assert_allclose(state[name], values, atol=2e-6, err_msg=name)
            assert len(traffic) == 2  # of unequal shares
            assert all(one.fetched > 0 and one.batches == STEPS for one in traffic)


def _uncached(self: RowSharding, *args: Any) -> Any:
    return replace(_traits(self, *args), cache_load_factor=None)


_traits = RowSharding._traits


def with_and_without(rank: int) -> list[str]:
    differing = []
    for optimizer in ("rowwise_adagrad", "adam", "adagrad"):  # TorchRec has no Adam on CPUs
        alone = optimizer == "adam"
        with mock.patch.object(RowSharding, "_traits", _uncached):
            logits, parallel = train(rank, {"goods": 0.2, "shops": 0.2}, optimizer, stock=True, cached_alone=alone)
        assert caches(parallel) == []
        expected = contents(parallel)
        for stock in (False, True):
            found, parallel = train(rank, {"goods": 0.2, "shops": 0.2}, optimizer, stock=stock, cached_alone=alone)
            assert caches(parallel)[0].traffic.written_back > 0
            same = all(np.array_equal(a, b) for a, b in zip(found, logits, strict=True))
            differing += [] if same else [f"{optimizer}: outputs"]
            differing += looking.differs(contents(parallel), expected)
    return differing


def test_a_cache_changes_no_bit() -> None:
    assert ranks.run(1, 2, with_and_without) == [[], []]


def in_16_bits(rank: int, *, cached: bool, constrained: bool) -> dict[str, np.ndarray]:
    """Means and sums of many rows in 16 bits, of two tables of which one may be behind a cache."""
    options: Any = {} if constrained else {"output_dtype": SparseType.FP16}
    told: Any = {"output_dtype": DataType.FP16} if constrained else {}
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=4000, embedding_dim=DIM, feature_names=[name], pooling=pooling)
        for name, pooling in (("mean", PoolingType.MEAN), ("sum", PoolingType.SUM))
    ]
    model = nn.Sequential(EmbeddingBagCollection(tables))
    params = {"learning_rate": 1e-3, "optimizer": EmbOptimType.EXACT_SGD} | options
    sharder = (
        FlexShardEmbeddingBagCollectionSharder(params, cache_load_factors={"mean": 1.0, "sum": 1.0})
        if cached
        else EmbeddingBagCollectionSharder(params)
    )
    constraints = {name: ParameterConstraints(sharding_types=["table_wise"], **told) for name in ("mean", "sum")}
    planner = EmbeddingShardingPlanner(Topology(1, "cpu"), constraints=constraints)
    plan = planner.collective_plan(model, [sharder], torch.distributed.group.WORLD)
    parallel = DistributedModelParallel(model, plan=plan, sharders=[sharder], device=HOST)
    scale = {"mean": 100.0, "sum": 1.0}  # the sum of a mean's rows is more than 16 bits hold
    for name in scale:
        rows = torch.rand(4000, DIM, generator=torch.Generator().manual_seed(1)) * scale[name]
        held = parallel.state_dict()[f"0.embedding_bags.{name}.weight"]
        with torch.no_grad():
            (held.to_local() if cached else held.local_shards()[0].tensor).copy_(rows)
    ids = torch.arange(4000).repeat(2)
    lengths = torch.tensor([1500, 2500, 1500, 2500])
    result = parallel(KeyedJaggedTensor(["mean", "sum"], ids, lengths=lengths)).wait()
    assert result.values().dtype == torch.float16
    result.values().float().sum().backward()
    return contents(parallel) | {"pooled": result.values().detach().numpy()}


@pytest.mark.parametrize("constrained", [False, True])
def test_16_bits_hold_what_torchrecs_hold(constrained: bool) -> None:
    theirs, ours = (
        ranks.run(1, 1, partial(in_16_bits, cached=cached, constrained=constrained))[0] for cached in (False, True)
    )
    assert theirs.keys() == ours.keys()
    for name, values in theirs.items():
        assert np.isfinite(values).all()
        np.testing.assert_allclose(ours[name], values, rtol=1e-3)


def of_any_rank(names: Iterable[Any]) -> list[Any]:
    """Names that some rank has: TorchRec's are where the tables are."""
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, list(names))
    return sorted({name for names in every for name in names})


def beside_torchrec(rank: int) -> dict[str, Any]:
    """What users see of TorchRec's sharder and of ours, and how far three optimizers' results are apart."""
    found: dict[str, Any] = {}
    for optimizer in ("rowwise_adagrad", "adagrad", "sgd"):
        stock, theirs = train(rank, None, optimizer, stock=True, torchrec=True, sums=True)
        seen, ours = train(rank, {"goods": 0.2, "shops": 0.2}, optimizer, sums=True)
        apart = [float(np.abs(a - b).max()) for a, b in zip(stock, seen, strict=True)]
        expected, state = contents(theirs), contents(ours)
        assert expected.keys() <= state.keys()
        apart += [float(np.abs(state[name] - values).max()) for name, values in expected.items() if values.size]
        found[optimizer] = max(apart)
    theirs, _ = shard(None, "adagrad", torchrec=True, sums=True)
    ours, _ = shard({"goods": 0.2, "shops": 0.2}, "adagrad", sums=True)
    same = {
        "state_dict": lambda model: list(model.state_dict()),
        "parameters": lambda model: of_any_rank(name for name, _ in model.named_parameters()),
        "states": lambda model: of_any_rank(
            (key, name) for key, states in model.fused_optimizer.state_dict()["state"].items() for name in states
        ),
        "columns": lambda model: sorted(
            zip(
                (out := model.module.bags(batch_of(0, rank).features)).keys(),
                out.length_per_key(),
                [tuple(out[key].shape) for key in out.keys()],
                strict=True,
            )
        ),
        "type": lambda model: type(model.module.bags(batch_of(0, rank).features).wait()).__name__,
        "unsharded": lambda model: model.module.bags.unsharded_module_type,
    }
    found["seen"] = {name: (of(theirs), of(ours)) for name, of in same.items()}
    return found


def test_users_see_what_torchrec_shows() -> None:
    for found in ranks.run(1, 2, beside_torchrec):
        for theirs, ours in found.pop("seen").values():
            assert theirs == ours
        assert max(found.values()) < 2e-5, found


def variable(rank: int) -> float:
    """Largest difference where samples share lists, to the samples one by one."""
    parallel, _ = shard({"goods": 0.2, "shops": 0.5}, "sgd", cached_alone=True)
    one = batch_of(0, rank).features
    shared = {feature: torch.arange(SAMPLES).flip(0) // 2 for feature in FEATURES}
    lists = {feature: one[feature] for feature in FEATURES}
    inverse = torch.stack([shared[feature] for feature in FEATURES])
    features = KeyedJaggedTensor(
        FEATURES,
        one.values(),
        lengths=one.lengths(),
        stride_per_key_per_rank=[[SAMPLES]] * len(FEATURES),
        inverse_indices=(FEATURES, inverse),
    )
    plain = KeyedJaggedTensor.from_jt_dict(lists)
    with torch.no_grad():
        expected = parallel.module.bags(plain).to_dict()
        found = parallel.module.bags(features).to_dict()
    names = {"bought": "bought", "seen": "seen", "shop": "shop"}
    return max(float((found[n] - expected[n][shared[f]]).abs().max()) for n, f in names.items())


def test_features_with_batch_sizes_of_their_own() -> None:
    assert ranks.run(1, 2, variable) == [0.0, 0.0]


def saved_and_loaded(rank: int, folder: str) -> list[str]:
    """What differs after a checkpoint from a warm cache was loaded into TorchRec's own sharding, and the other way."""
    factors = {"goods": 0.2, "shops": 0.5}
    _, ours = train(rank, factors, "rowwise_adagrad", sums=True)
    save_checkpoint(folder, ours)
    stock, _ = shard(None, "rowwise_adagrad", torchrec=True, sums=True)
    load_checkpoint(folder, stock)
    again, _ = shard({"goods": 1.0}, "rowwise_adagrad", sums=True)
    load_checkpoint(folder, again)
    saved = contents(ours)
    norms = table_norms(ours)
    own = {name: float(np.linalg.norm(values)) for name, values in saved.items() if name in norms}
    assert len(own) == 2
    assert all(np.isclose(norms[name], norm, rtol=1e-6) for name, norm in own.items())
    differing = []
    for found, number in ((contents(stock), 6), (contents(again), 7)):
        assert len(found) == number  # four tables, two tensors of the layer, and states of goods
        differing += looking.differs(found, {name: saved[name] for name in found})
    return differing


def test_checkpoints_go_to_torchrec_and_back(tmp_path: Any) -> None:
    assert ranks.run(1, 2, saved_and_loaded, str(tmp_path)) == [[], []]


def message_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except FlexShardError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(rank: int) -> list[str]:
    def weighted_mean() -> None:
        model = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name="shops", num_embeddings=40, embedding_dim=DIM, feature_names=["shop"], pooling=MEAN
                )
            ],
            is_weighted=True,
        )
        sharder = FlexShardEmbeddingBagCollectionSharder(fused("sgd"), cache_load_factors={"shops": 0.5})
        planner = EmbeddingShardingPlanner(Topology(2, "cpu"))
        plan = planner.collective_plan(model, [sharder], torch.distributed.group.WORLD)
        DistributedModelParallel(model, plan=plan, sharders=[sharder], device=HOST)

    def unknown(factors: dict[str, float]) -> None:
        parallel, _ = shard(factors, "sgd")
        parallel(batch_of(0, rank))

    return [
        message_of(weighted_mean),
        message_of(lambda: unknown({"godos": 0.5})),
        message_of(lambda: unknown({"goods": 0.5, "shosp": 0.5})),
        message_of(lambda: shard({"goods": 0.5 + 0.1 * rank}, "sgd")),
        message_of(lambda: shard({"goods": 2.0}, "sgd")),
    ]


MEAN = PoolingType.MEAN


def test_what_cannot_be_is_refused_by_name() -> None:
    for found in ranks.run(1, 2, refused):
        mean, typo, second, other, share = found
        assert mean.startswith("TableError: table 'shops': means of weighted ids")
        assert "no pooled table is named 'godos'" in typo
        assert "no table 'shosp' is under the plan" in second
        assert "cache_load_factors of rank 1 are" in other
        assert "must be above 0 and at most 1" in share


# -- what stands beside TorchRec's tables


def beside_data_parallel(rank: int) -> list[float]:
    """Largest difference to the unsharded model where TorchRec copies its tables to every rank, which the user's dense
    optimizer steps; and how far they moved.
    """
    torch.manual_seed(3)
    model = Model()
    constraints = {name: ParameterConstraints(sharding_types=["data_parallel"]) for name in TABLES}
    sharder = FlexShardEmbeddingBagCollectionSharder(fused("sgd"), cache_load_factors={"goods": 0.3, "shops": 0.5})
    planner = EmbeddingShardingPlanner(Topology(2, "cpu"), batch_size=SAMPLES, constraints=constraints)
    plan = planner.collective_plan(model, [sharder], torch.distributed.group.WORLD)
    parallel = DistributedModelParallel(model, plan=plan, sharders=[sharder], device=HOST)
    before = contents(parallel)
    listed = {name.split(".")[-2] for name in models.optimizer_of(parallel).params if "embedding_bags" in name}
    assert listed == set(TABLES)
    parameters = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    rates = {name: 0.2 if "embedding_bags" in name else models.DENSE_LEARNING_RATE for name in parameters}
    dense = torch.optim.SGD([{"params": [one], "lr": rates[name]} for name, one in parameters.items()])
    for step in range(STEPS):
        dense.zero_grad()
        parallel(batch_of(step, rank))[0].backward()
        dense.step()
    after = contents(parallel)
    _, expected = unsharded(2)
    tables_of = [name for name in expected if "embedding_bags" in name]
    moved = min(float(np.abs(after[name] - before[name]).max()) for name in tables_of)
    return [max(float(np.abs(after[name] - expected[name]).max()) for name in tables_of), moved]


def test_tables_that_torchrec_copies_are_left_to_dense_optimizers() -> None:
    for apart, moved in ranks.run(1, 2, beside_data_parallel):
        assert apart < 5e-6
        assert moved > 1e-3


def after_refusals(rank: int) -> list[Any]:
    """A first batch without a feature, a later one without it on one rank, and what good batches give after each."""
    parallel, _ = shard({"goods": 0.5, "shops": 0.5}, "sgd")
    plain = Model()

    def without_shop(step: int) -> models.Batch:
        batch = batch_of(step, rank)
        kept = [feature for feature in FEATURES if feature != "shop"]
        return models.Batch(KeyedJaggedTensor.from_jt_dict({f: batch.features[f] for f in kept}), batch.labels)

    def apart() -> float:
        features = batch_of(9, rank).features
        with torch.no_grad():
            found, expected = parallel.module.bags(features).to_dict(), plain.bags(features).to_dict()
        return max(float((found[name] - values).abs().max()) for name, values in expected.items())

    texts = [message_of(lambda: parallel(without_shop(0)))]
    differing = [apart()]
    texts.append(message_of(lambda: parallel(without_shop(1) if rank == 1 else batch_of(1, rank))))
    return [texts, [*differing, apart()]]


def test_refused_batches_leave_torchrecs_tables_as_they_were() -> None:
    for texts, differing in ranks.run(1, 2, after_refusals):
        assert all(text.startswith("DataError: ") for text in texts)
        assert max(differing) < 1e-6


def odd_inputs(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # Weights that nobody asked for, none where they may be, and those that want gradients.
    parallel, _ = shard({"goods": 0.5, "shops": 0.5}, "sgd")
    weighted, bare = (batch_of(0, rank, weighted=given).features for given in (True, False))
    bare = KeyedJaggedTensor(FEATURES, weighted.values(), lengths=weighted.lengths())
    with torch.no_grad():
        first, second = parallel.module.bags(weighted).values(), parallel.module.bags(bare).values()
    found["weights ignored"] = bool(torch.equal(first, second))
    parallel, _ = shard({"goods": 0.5, "shops": 0.5}, "sgd", weighted=True)
    ones = KeyedJaggedTensor(FEATURES, bare.values(), torch.ones_like(weighted.weights()), lengths=bare.lengths())
    with torch.no_grad():
        first = parallel.module.bags(bare).to_dict()
        second = parallel.module.bags(ones).to_dict()
    found["ones"] = max(float((first[name] - second[name]).abs().max()) for name in second)
    weights = weighted.weights().clone().requires_grad_()
    asked = KeyedJaggedTensor(FEATURES, weighted.values(), weights, lengths=weighted.lengths())
    parallel.module.bags(asked).values().sum().backward()
    found["gradients"] = None if weights.grad is None else float(weights.grad.abs().sum())
    flat = bare.lengths().view(len(FEATURES), -1)
    square = KeyedJaggedTensor(FEATURES, bare.values(), lengths=flat)
    with torch.no_grad():
        first, second = (parallel.module.bags(one).values() for one in (bare, square))
    found["square lengths"] = float((first - second).abs().max())
    # In two steps, as TorchRec's own module may be used.
    context = parallel.module.bags.create_context()
    ids = parallel.module.bags.input_dist(context, weighted).wait().wait()
    rows = parallel.module.bags.compute(context, ids)
    with torch.no_grad():
        once = parallel.module.bags(weighted).to_dict()
    twice = parallel.module.bags.output_dist(context, rows).to_dict()
    found["two steps"] = max(float((once[name] - twice[name]).abs().max()) for name in once)
    return found


def test_weights_and_steps_as_of_torchrecs_module() -> None:
    for found in ranks.run(1, 2, odd_inputs):
        assert found == {
            "weights ignored": True,
            "ones": 0.0,
            "gradients": None,
            "square lengths": 0.0,
            "two steps": 0.0,
        }


def learned_weights(rank: int) -> dict[str, float | None]:
    """How far gradients of ids' weights are from those of the unsharded collection; None where there are none."""
    given, found = batch_of(0, rank, weighted=True).features, {}

    def gradient(bags: Any) -> torch.Tensor | None:
        weights = given.weights().clone().requires_grad_()
        features = KeyedJaggedTensor(FEATURES, given.values(), weights * 2, lengths=given.lengths())
        torch.tanh(bags(features).values()).square().sum().backward()
        return weights.grad

    torch.manual_seed(3)
    expected = gradient(Model(weighted=True).bags)
    assert expected is not None
    for name, cached in (("some", ["goods", "shops"]), ("all", list(TABLES))):
        for optimizer in ("sgd", "rowwise_adagrad"):
            parallel, _ = shard(dict.fromkeys(cached, 0.9), optimizer, weighted=True)
            got = gradient(parallel.module.bags)
            found[f"{name}, {optimizer}"] = None if got is None else float((got - expected).abs().max())
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_learned_weights_of_ids_are_trained(world: int) -> None:
    """As TorchRec's are on one rank. On several it leaves them out, so that beside its tables ours do."""
    for found in ranks.run(1, world, learned_weights):
        for name, difference in found.items():
            if world > 1 and name.startswith("some"):
                assert difference is None, found
            else:
                assert difference == pytest.approx(0.0, abs=1e-6), found


def feature_twice(rank: int) -> list[Any]:
    found = []
    for torchrec in (True, False):
        torch.manual_seed(0)
        bags = EmbeddingBagCollection(
            [EmbeddingBagConfig(name="a", num_embeddings=50, embedding_dim=4, feature_names=["x", "x"], init_fn=start)]
        )
        sharder = (
            EmbeddingBagCollectionSharder(fused("sgd"))
            if torchrec
            else FlexShardEmbeddingBagCollectionSharder(fused("sgd"), cache_load_factors={"a": 0.5})
        )
        plan = EmbeddingShardingPlanner(Topology(2, "cpu")).collective_plan(
            bags, [sharder], torch.distributed.group.WORLD
        )
        parallel = DistributedModelParallel(bags, plan=plan, sharders=[sharder])
        out = parallel(KeyedJaggedTensor(["x"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1])))
        found.append((out.keys(), out.length_per_key(), out.values().detach().numpy()))
    return found


def test_a_feature_that_a_table_names_twice() -> None:
    for theirs, ours in ranks.run(1, 2, feature_twice):
        assert theirs[:2] == ours[:2]
        np.testing.assert_allclose(theirs[2], ours[2], atol=1e-6)


def unequal(rank: int) -> list[str]:
    sequences = FlexShardEmbeddingCollectionSharder(fused("sgd"), cache_load_factors={"rows": 0.5})
    lists = EmbeddingCollection(
        tables=[EmbeddingConfig(name="rows", num_embeddings=50, embedding_dim=4, feature_names=["x"])]
    )

    def by_torchrec() -> None:
        constraints = {"rows": ParameterConstraints(sharding_types=["row_wise"])}
        planner = EmbeddingShardingPlanner(Topology(2, "cpu"), constraints=constraints)
        plan = planner.collective_plan(lists, [sequences], torch.distributed.group.WORLD)
        DistributedModelParallel(lists, plan=plan, sharders=[sequences])

    return [
        message_of(lambda: shard({"goods": 0.5} if rank == 0 else None, "sgd")),
        message_of(lambda: shard({"goods": 0.5}, "adam")),
        message_of(by_torchrec),
        message_of(lambda: FlexShardEmbeddingBagCollectionSharder(cache_load_factors=["goods"])),  # type: ignore[arg-type]
    ]


def test_ranks_optimizers_and_plans_that_do_not_go_together_are_refused() -> None:
    for differing, optimizer, plan, kind in ranks.run(1, 2, unequal):
        assert "cache_load_factors of rank 1 are []" in differing
        assert "FBGEMM has no adam for pooled tables on CPUs" in optimizer
        assert "no FlexShard plan has it" in plan
        assert "cache_load_factors must be shares by table" in kind
