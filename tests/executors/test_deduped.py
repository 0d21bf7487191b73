"""Lookups on distinct rows: the same weights as the expanded batch, unsharded and sharded, and fewer bytes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.tensor import DTensor
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan

import flexshard
from flexshard.costmodels import strategy_name
from flexshard.embeddings import (
    Deduped,
    DedupedEmbeddingBagCollection,
    DedupedEmbeddingCollection,
    DedupedJagged,
    InverseKeyedJaggedTensor,
    jagged_index_select,
)
from flexshard.errors import DataError
from flexshard.executors import (
    FlexShardEmbeddingBagCollectionSharder,
    FlexShardEmbeddingCollectionSharder,
    LookaheadPipeline,
    Observer,
)
from flexshard.planner import FlexShardPlanner, Tier
from tests.executors import models, ranks

ROWS, DIM, RATE, STEPS = 97, 4, 0.1, 4
GROUPS = [["history", "authors"], ["liked"]]
# What is deduplicated exactly, and what partially.
HOW = {"exact": (GROUPS, []), "partial": (GROUPS[1:], GROUPS[:1])}
TABLES = {"goods": ["history", "candidate"], "writers": ["authors"], "likes": ["liked"]}
POOLING = {"goods": PoolingType.SUM, "shown": PoolingType.SUM, "writers": PoolingType.MEAN, "likes": PoolingType.MEAN}
SPLIT_TABLES = {"goods": ["history"], "shown": ["candidate"], "writers": ["authors"], "likes": ["liked"]}


def sessions(rank: int, step: int, how: str = "exact", samples: int = 40) -> InverseKeyedJaggedTensor:
    """Sessions of some samples; the number of distinct rows differs by rank, and rank 1 once has hardly any."""
    generator = np.random.default_rng([rank, step])
    rows: list[dict[str, list[int]]] = []
    if rank == 1 and step == 2:
        rows = [{"candidate": [3]} for _ in range(35)]
    while len(rows) < samples:
        history, liked = (generator.integers(0, ROWS, generator.integers(0, 9)).tolist() for _ in range(2))
        for _ in range(min(int(generator.integers(1, 8)), samples - len(rows))):
            if generator.random() < 0.3:
                history = [*history[1:], int(generator.integers(0, ROWS))]
            candidate = [int(generator.integers(0, ROWS))]
            authors = [item // 2 for item in history]
            rows.append({"history": history, "authors": authors, "liked": liked, "candidate": candidate})
    groups, partial = HOW[how or "exact"]
    keys = ["liked", "history", "candidate", "authors"]
    return InverseKeyedJaggedTensor.from_rows(rows, groups, keys=keys, partial=partial)


class Sequences(nn.Module):
    """Attention-like pooling of a history, once per distinct row or once per sample."""

    def __init__(self, deduped: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        configs = [
            EmbeddingConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=features)
            for name, features in TABLES.items()
        ]
        self.deduped = deduped
        self.lookup = DedupedEmbeddingCollection(EmbeddingCollection(tables=configs))
        self.pool = Deduped(Pool())

    def forward(self, batch: InverseKeyedJaggedTensor) -> torch.Tensor:
        if self.deduped:
            found = self.lookup(batch)
            users = self.pool(found["history"], found["authors"])
            liked = found["liked"].expand()
        else:
            found = self.lookup.collection(batch.to_keyed_jagged())
            users = self.pool.module(found["history"], found["authors"])
            liked = found["liked"]
        weight = torch.arange(liked.values().shape[0], dtype=torch.float32)[:, None] / 50
        return (users * found["candidate"].values()).sum(1).square().sum() + (liked.values() * weight).sum()


class Pool(nn.Module):
    def forward(self, history: JaggedTensor, authors: JaggedTensor) -> torch.Tensor:
        both = torch.tanh(history.values() + 2 * authors.values())
        place = torch.repeat_interleave(torch.arange(history.lengths().numel()), history.lengths())
        return torch.zeros(history.lengths().numel(), both.shape[1]).index_add(0, place, both)


class Bags(nn.Module):
    """Pooled features of a batch."""

    def __init__(self, deduped: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        configs = [
            EmbeddingBagConfig(
                name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=features, pooling=POOLING[name]
            )
            for name, features in SPLIT_TABLES.items()
        ]
        self.deduped = deduped
        group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
        self.lookup: Any = (
            DedupedEmbeddingBagCollection(configs, HOW[deduped][0], partial=HOW[deduped][1], process_group=group)
            if deduped
            else EmbeddingBagCollection(tables=configs)
        )
        with torch.no_grad():
            for number, (_, weight) in enumerate(sorted(self.named_parameters(), key=table_of)):
                generator = torch.Generator().manual_seed(number)
                weight.copy_(torch.randn(weight.shape, generator=generator))

    def forward(self, batch: InverseKeyedJaggedTensor) -> torch.Tensor:
        found = self.lookup(batch if self.deduped else batch.to_keyed_jagged()).to_dict()
        pooled = torch.cat([found[key] for key in ("candidate", "history", "authors", "liked")], 1)
        weight = (torch.ones_like(pooled[:, :1]).cumsum(0) - 1) / 10
        return (torch.tanh(pooled[:, :DIM] * pooled[:, DIM : 2 * DIM]).sum(1, keepdim=True) * weight).sum() + (
            pooled.square() * weight
        ).sum() / 100


def table_of(parameter: tuple[str, Any]) -> str:
    return parameter[0].split(".")[-2]


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {table_of((name, None)): value.detach() for name, value in model.named_parameters()}


def train(model: nn.Module, world: int) -> dict[str, torch.Tensor]:
    """SGD on the expanded batches of all ranks, averaged, in this process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        how = str(model.deduped)
        (sum(model(sessions(rank, step, how)) for rank in range(world)) / world).backward()
        optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("how", ["exact", "partial"])
@pytest.mark.parametrize("kind", [Sequences, Bags])
def test_unsharded_lookups_train_to_the_same_weights(kind: type[nn.Module], how: str) -> None:
    expected, found = train(kind(""), 2), train(kind(how), 2)
    start = weights_of(kind(""))
    for name, weight in expected.items():
        assert (weight - start[name]).abs().max() > 1e-2  # it did learn
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-5)


def test_a_sequence_stays_deduplicated_until_it_is_asked() -> None:
    model, batch = Sequences("exact"), sessions(0, 0)
    found = model.lookup(batch)["history"]
    assert isinstance(found, DedupedJagged)
    group = batch.group_of("history")
    assert group is not None
    assert found.values.shape[0] == group.jagged["history"].values().numel()
    plain = model.lookup.collection(batch.to_keyed_jagged())["history"]
    assert torch.equal(found.expand().values(), plain.values())
    assert torch.equal(found.expand().lengths(), plain.lengths())


def test_jagged_rows_by_index_need_no_padding() -> None:
    values = torch.arange(12.0, requires_grad=True).reshape(6, 2)
    lengths, index = torch.tensor([2, 0, 3, 1]), torch.tensor([2, 2, 1, 0, 3, 0])
    taken, sizes = jagged_index_select(values, lengths, index)
    rows = [list(range(2, 5)), list(range(2, 5)), [], [0, 1], [5], [0, 1]]
    assert sizes.tolist() == [3, 3, 0, 2, 1, 2]
    assert torch.equal(taken, values[[place for row in rows for place in row]])
    ours = torch.autograd.gradcheck(
        lambda v: jagged_index_select(v, lengths, index)[0], values.detach().double().requires_grad_()
    )
    assert ours
    assert jagged_index_select(values, lengths, index[:0])[0].shape == (0, 2)


def test_a_module_runs_once_per_distinct_row() -> None:
    seen = []

    class Count(nn.Module):
        def forward(self, rows: JaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(rows.lengths().numel())
            return torch.segment_reduce(rows.values(), "sum", lengths=rows.lengths()), rows.lengths()

    rows = DedupedJagged(torch.tensor([24.0, 10.0, 11.0]), torch.tensor([1, 2]), torch.tensor([0, 0, 1]))
    total, lengths = Deduped(Count())(rows)
    assert seen == [2, 1]  # the other is one row by itself, as a check
    assert total.tolist() == [24, 24, 21]  # section 5's example
    assert lengths.tolist() == [1, 1, 2]
    other = DedupedJagged(rows.values, rows.lengths, torch.tensor([0, 1, 1]))
    with pytest.raises(DataError, match="sequences of different groups"):
        Deduped(Count())(rows, other)
    plain = JaggedTensor(rows.values, lengths=rows.lengths)
    assert Deduped(Count())(plain)[0].tolist() == [24, 21]  # as it would by itself
    with pytest.raises(DataError, match="a plain sequence has a row per sample"):
        Deduped(Count())(rows, plain)
    with pytest.raises(DataError, match="needs a sequence"):
        Deduped(Count())()

    class Wrong(nn.Module):
        def forward(self, rows: JaggedTensor) -> torch.Tensor:
            return rows.values()

    with pytest.raises(DataError, match=r"returned shape \(3,\) for 2 distinct rows"):
        Deduped(Wrong())(rows)


def test_tables_and_groups_must_fit() -> None:
    def config(name: str, *features: str) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(name=name, num_embeddings=9, embedding_dim=4, feature_names=list(features))

    with pytest.raises(DataError, match="table 't' has features of different groups, a, b"):
        DedupedEmbeddingBagCollection([config("t", "a", "b")], [["a"]])
    with pytest.raises(DataError, match="no table has the features of group 1, b"):
        DedupedEmbeddingBagCollection([config("t", "a")], [["a"], ["b"]])
    with pytest.raises(DataError, match="feature 'a' is named twice"):
        DedupedEmbeddingBagCollection([config("t", "a")], [["a"], ["a"]])
    collection = DedupedEmbeddingBagCollection([config("t", "a"), config("u", "b")], [["a"]])
    with pytest.raises(DataError, match="the batch has groups"):
        collection(InverseKeyedJaggedTensor.from_rows([{"a": [1], "b": [2]}], [["b"]]))


# In real processes.

SHARDED = {
    "torchrec row-wise": lambda: row_wise(compute_kernel="fused"),
    "torchrec table-wise": lambda: table_wise(rank=1, compute_kernel="fused"),
    "cached": lambda: table_wise(rank=0, compute_kernel="fused"),
    "torchrec column-wise": lambda: column_wise(ranks=[0, 1], compute_kernel="fused"),
}
PIPELINES = {"TrainPipelineSparseDist": TrainPipelineSparseDist, "LookaheadPipeline": LookaheadPipeline}
FUSED = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": RATE}


def shard(model: nn.Module, how: str, plan: Any) -> Any:
    """With TorchRec's sharding of every collection, or with a FlexShard plan."""
    device = torch.device("cpu")
    if plan is not None:
        sharders: list[Any] = [FlexShardEmbeddingCollectionSharder(dict(FUSED))]
        planned = FlexShardPlanner(plan, profiles={name: profile() for name in TABLES}).collective_plan(model, sharders)
        return DistributedModelParallel(model, plan=planned, sharders=sharders, device=device)
    bags = any(isinstance(part, Bags) for part in model.modules())
    sharder: Any = EmbeddingBagCollectionSharder(dict(FUSED)) if bags else EmbeddingCollectionSharder(dict(FUSED))
    if how == "cached":
        sharder = FlexShardEmbeddingBagCollectionSharder(dict(FUSED), cache_load_factors={"goods": 1.0, "writers": 1.0})
    kind = EmbeddingBagCollection if bags else EmbeddingCollection
    parts = {path: part for path, part in model.named_modules() if isinstance(part, kind)}
    plans = {
        path: construct_module_sharding_plan(
            part,
            {table.name: SHARDED[how]() for table in configs_of(part)},
            sharder,
            local_size=2,
            world_size=torch.distributed.get_world_size(),
            device_type="cpu",
        )
        for path, part in parts.items()
    }
    weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    parallel = DistributedModelParallel(model, plan=ShardingPlan(plans), sharders=[sharder], device=device)
    if bags:  # on the CPU, TorchRec does not load a bag's weights when it shards it (embeddingbag.py)
        state = parallel.state_dict()
        for name, tensor in state.items():
            if isinstance(tensor, DTensor):  # of our sharder, which has loaded it
                assert torch.equal(tensor.full_tensor(), weights[name])
                continue
            for local in tensor.local_shards() if hasattr(tensor, "local_shards") else [tensor]:
                meta = getattr(local, "metadata", None)
                whole = weights[name]
                if meta is None:
                    local.copy_(whole)
                else:
                    rows, columns = meta.shard_offsets
                    height, width = meta.shard_sizes
                    local.tensor.copy_(whole[rows : rows + height, columns : columns + width])
    return parallel


def configs_of(collection: Any) -> Any:
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bag_configs()
    return collection.embedding_configs()


def full_weights(parallel: Any) -> dict[str, np.ndarray]:
    found = {}
    for name, tensor in parallel.state_dict().items():
        if hasattr(tensor, "local_shards"):
            whole = torch.zeros(tuple(tensor.size()))
            for local in tensor.local_shards():
                rows, columns = local.metadata.shard_offsets
                height, width = local.metadata.shard_sizes
                whole[rows : rows + height, columns : columns + width] = local.tensor
            torch.distributed.all_reduce(whole)
        elif hasattr(tensor, "full_tensor"):
            whole = tensor.full_tensor()
        else:
            whole = tensor
        found[table_of((name, None))] = whole.detach().numpy()
    return found


def train_sharded(rank: int, kind: type[nn.Module], deduped: str, how: str, plan: Any) -> Any:
    parallel = shard(kind(deduped), how, plan)
    with Observer() as observer:
        for step in range(STEPS):
            (parallel(sessions(rank, step, deduped))).backward()
            observer.step()
    tables, kept = (SPLIT_TABLES, "embedding_bags") if kind is Bags else (TABLES, "embeddings")
    names = {f"lookup.{kept}.{table}.weight" for table in tables} if deduped else set(parallel.state_dict())
    assert set(parallel.state_dict()) == names  # those of a collection that knows nothing of deduplication
    if deduped:
        optimizer, every = parallel.fused_optimizer, [set[str]()] * 4
        torch.distributed.all_gather_object(every, {*optimizer.params, *optimizer.state_dict()["state"]})
        assert set().union(*every) == names  # of tables that a rank has
    return full_weights(parallel), observer.calls()


def profile() -> flexshard.AccessProfile:
    counts = (1000 / (1 + np.random.default_rng(5).permutation(ROWS))).astype(np.int64)
    return flexshard.AccessProfile.from_counts(counts, num_samples=100, num_rows=ROWS)


def flex_plan() -> Any:
    cluster = models.small_cluster(2, 2)
    tables = [flexshard.Table(name, ROWS, DIM, profile()) for name in TABLES]
    plan = flexshard.solve(tables, cluster, batch_size=40, budget="neutral")
    tiers = [
        Tier(strategy_name(size, 4), size, rows, first, 0.0, None, 0.0, 0.0, 0.0)
        for size, rows, first in ((1, 20, 0), (2, 30, 20), (4, ROWS - 50, 50))
    ]
    return replace(plan, tables={name: replace(table, tiers=tuple(tiers)) for name, table in plan.tables.items()})


@pytest.mark.parametrize("deduped", ["exact", "partial"])
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (Sequences, "flexshard"),
        (Sequences, "torchrec row-wise"),
        (Sequences, "torchrec table-wise"),
        (Bags, "torchrec row-wise"),
        (Bags, "torchrec table-wise"),
        (Bags, "torchrec column-wise"),
    ],
)
def test_sharded_lookups_train_to_the_same_weights(kind: type[nn.Module], how: str, deduped: str) -> None:
    plan = flex_plan() if how == "flexshard" else None
    expected = train(kind(""), 4)
    for weights, _ in ranks.run(2, 2, train_sharded, kind, deduped, how, plan):
        for name, weight in expected.items():
            np.testing.assert_allclose(weights[name], weight.numpy(), atol=2e-5, rtol=2e-5)


def pooled_in_one_group(rank: int, poolings: list[PoolingType]) -> tuple[np.ndarray, np.ndarray]:
    """What a sharded collection pools of one partial group, and what a stock one does."""
    features = [f"f{number}" for number in range(len(poolings))]
    tables = [
        EmbeddingBagConfig(name=f"t{n}", num_embeddings=20, embedding_dim=4, feature_names=[f"f{n}"], pooling=pooling)
        for n, pooling in enumerate(poolings)
    ]
    torch.manual_seed(0)
    stock = EmbeddingBagCollection(tables=tables)
    ours = DedupedEmbeddingBagCollection(tables, partial=[features])
    ours.load_state_dict(stock.state_dict())
    sharder: Any = EmbeddingBagCollectionSharder(dict(FUSED))
    part = ours.collections["group_0"]
    placed = {table.name: table_wise(rank=0, compute_kernel="fused") for table in tables}
    plan = construct_module_sharding_plan(part, placed, sharder, local_size=1, world_size=1, device_type="cpu")
    sharded = DistributedModelParallel(
        ours, plan=ShardingPlan({"collections.group_0": plan}), sharders=[sharder], device=torch.device("cpu")
    )
    for name, held in sharded.state_dict().items():
        held.local_shards()[0].tensor.copy_(stock.state_dict()[name])
    rows = [{key: list(range(end)) for key in features} for end in range(6)]
    batch = InverseKeyedJaggedTensor.from_rows(rows, partial=[features])
    expected = stock(batch.to_keyed_jagged())
    assert sharded(batch).keys() == expected.keys()
    return sharded(batch).values().detach().numpy(), expected.values().detach().numpy()


def test_sums_and_means_of_one_group_keep_their_pooling_when_sharded() -> None:
    """TorchRec's sharded collections have the tables of one pooling together, whatever the order they were given in."""
    sums, means = PoolingType.SUM, PoolingType.MEAN
    for order in ([sums, means, sums], [means, sums, means]):
        ((found, expected),) = ranks.run(1, 1, pooled_in_one_group, order)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_what_is_sent_falls_by_the_dedup_factor() -> None:
    plan = flex_plan()
    whole = Tier("row_wise", 4, ROWS, 0, 1.0, None, 0.0, 0.0, 0.0)
    plan = replace(plan, tables={name: replace(table, tiers=(whole,)) for name, table in plan.tables.items()})
    for deduped in ("", "exact", "partial"):
        runs = ranks.run(2, 2, train_sharded, Sequences, deduped, "flexshard", plan)
        for step in range(STEPS):
            batches = [sessions(rank, step, deduped) for rank in range(4)]
            ids = sum((b.distinct if deduped else b.to_keyed_jagged()).values().numel() for b in batches)
            sent: dict[str, int] = {}
            for _, calls in runs:
                for (kind, size, content), (_, nbytes, _) in calls[step].items():
                    assert (kind, size) == ("all_to_all", 4)
                    sent[content] = sent.get(content, 0) + nbytes
            # Every id is an int32 and every row DIM floats; inverse indices are sent nowhere.
            assert sent.keys() == {"counts", "ids", "embeddings", "gradients"}
            assert (sent["ids"], sent["embeddings"], sent["gradients"]) == (4 * ids, 4 * DIM * ids, 4 * DIM * ids)


def test_torchrecs_variable_batches_lose_gradients_on_the_cpu() -> None:
    """Why distinct rows travel as an ordinary batch: this fails when FBGEMM has mended it, and VBE can be used."""
    moved = ranks.run(1, 2, train_variable_batches)
    assert all(change == 0 for change in moved)


def train_variable_batches(rank: int) -> float:
    """The largest change of a weight after a step on TorchRec's own variable batches."""
    configs = [EmbeddingConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])]
    model = EmbeddingCollection(tables=configs)
    sharder = EmbeddingCollectionSharder(dict(FUSED))
    plan = construct_module_sharding_plan(
        model, {"t": row_wise(compute_kernel="fused")}, sharder, local_size=2, world_size=2, device_type="cpu"
    )
    parallel = DistributedModelParallel(
        model, plan=ShardingPlan({"": plan}), sharders=[sharder], device=torch.device("cpu")
    )
    before = {name: tensor.local_shards()[0].tensor.clone() for name, tensor in parallel.state_dict().items()}
    batch = KeyedJaggedTensor(
        keys=["f"],
        values=torch.tensor([1, 2, 5]),
        lengths=torch.tensor([2, 1]),
        stride_per_key_per_rank=[[2]],
        inverse_indices=(["f"], torch.tensor([[0, 1, 0]])),
    )
    parallel(batch)["f"].values().sum().backward()
    after = {name: tensor.local_shards()[0].tensor for name, tensor in parallel.state_dict().items()}
    return max(float((after[name] - before[name]).abs().max()) for name in before)


@pytest.mark.parametrize(
    ("kind", "how", "pipeline"),
    [
        (Sequences, "flexshard", "TrainPipelineSparseDist"),
        (Bags, "torchrec row-wise", "TrainPipelineSparseDist"),
        (Bags, "cached", "LookaheadPipeline"),
    ],
)
def test_a_pipeline_prefetches_deduplicated_batches(kind: type[nn.Module], how: str, pipeline: str) -> None:
    expected = train(kind(""), 4)
    plan = flex_plan() if how == "flexshard" else None
    for weights, prefetched in ranks.run(2, 2, train_in_a_pipeline, kind, how, plan, pipeline):
        assert prefetched
        for name, weight in expected.items():
            np.testing.assert_allclose(weights[name], weight.numpy(), atol=2e-5, rtol=2e-5)


def train_in_a_pipeline(rank: int, kind: type[nn.Module], how: str, plan: Any, pipeline_name: str) -> Any:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = kind("partial")

        def forward(self, batch: InverseKeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss = self.model(batch)
            return loss, loss.detach()

    parallel = shard(Loss(), how, plan)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    pipeline = PIPELINES[pipeline_name](parallel, optimizer, torch.device("cpu"))
    steps = iter([sessions(rank, step, "partial") for step in range(STEPS)])
    with contextlib.suppress(StopIteration):
        while True:
            pipeline.progress(steps)
    return full_weights(parallel), bool(pipeline._pipelined_modules)
