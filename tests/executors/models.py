"""A model with every oddity that collections allow, its batches, and the unsharded run that sharded ones must equal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.streamable import Pipelineable

import flexshard
from flexshard.costmodels import strategy_name
from flexshard.executors import FlexShardEmbeddingCollectionSharder, Observer
from flexshard.planner import FlexShardPlanner, Plan, Tier
from flexshard.topologies import Cluster, CollectiveRate, Level

LEARNING_RATE, EPS, DENSE_LEARNING_RATE = 0.5, 1e-8, 0.1
# Rows, features: several of one table, one of two tables, a table smaller than the number of ranks.
WIDE = {"goods": (997, ["clicked", "shown"]), "shops": (211, ["shop"]), "days": (5, ["day", "shop"])}
NARROW = {"users": (64, ["user"])}
ALL_ROWS = {name: rows for name, (rows, _) in (WIDE | NARROW).items()}
DIMS = {"wide": 16, "narrow": 4}
FEATURES = ["shown", "user", "day", "unused", "clicked", "shop"]  # an order of its own, and one that nobody looks up
ROWS = {"shown": 997, "clicked": 997, "shop": 5, "day": 5, "user": 64, "unused": 3}


@dataclass
class Batch(Pipelineable):
    """Ids and labels."""

    features: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.features.to(device, non_blocking=non_blocking), self.labels.to(device, non_blocking=non_blocking)
        )

    def record_stream(self, stream: torch.Stream) -> None:
        if self.labels.is_cuda:
            self.features.record_stream(stream)
            self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        return self


def make_batch(step: int, rank: int, *, size: int = 24) -> Batch:
    """Skewed ids with repetitions; sizes differ by rank, rank 1 lacks a feature, and rank 2 now and then all."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    size = size + 3 * rank
    empty = rank == 2 and step % 3 == 1
    lengths, values = [], []
    for feature in FEATURES:
        length = torch.randint(0, 9, (size,), generator=generator)
        if empty or (rank == 1 and feature == "day"):
            length.zero_()
        lengths.append(length)
        drawn = torch.rand(int(length.sum()), generator=generator)
        values.append((drawn.pow(4) * ROWS[feature]).long().clamp_(max=ROWS[feature] - 1))
    features = KeyedJaggedTensor(FEATURES, torch.cat(values), lengths=torch.cat(lengths))
    return Batch(features, torch.randint(0, 2, (size,), generator=generator).float())


class Model(nn.Module):
    """Two collections of different width, and a linear layer over sums of their rows."""

    def __init__(self, dtype: DataType = DataType.FP32) -> None:
        super().__init__()
        self.wide = _collection(WIDE, DIMS["wide"], dtype)
        self.narrow = _collection(NARROW, DIMS["narrow"], dtype)
        self.outputs = ["clicked", "shown", "shop@shops", "day", "shop@days"]
        self.over = nn.Linear(DIMS["wide"] * len(self.outputs) + DIMS["narrow"], 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        wide, narrow = self.wide(batch.features), self.narrow(batch.features)
        pooled = [_pool(wide[name]) for name in self.outputs] + [_pool(narrow["user"])]
        logits = self.over(torch.cat(pooled, 1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits


def _pool(rows: Any) -> torch.Tensor:
    return torch.segment_reduce(rows.values(), "sum", lengths=rows.lengths())


def _collection(tables: dict[str, tuple[int, list[str]]], dim: int, dtype: DataType) -> EmbeddingCollection:
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features), data_type=dtype
            )
            for name, (rows, features) in tables.items()
        ]
    )


def new_model(dtype: DataType = DataType.FP32) -> Model:
    """The same weights every time."""
    torch.manual_seed(7)
    return Model(dtype)


class LazyAdam(torch.optim.Adam):
    """torch's Adam of the rows that a batch read (their parameter's ``read``), as tables are trained: the others stay,
    and those that were read move though their gradient is 0.
    """

    def step(self, closure: Any = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        kept = [
            (tensor, tensor.detach().clone(), ~parameter.read)
            for parameter in parameters
            for tensor in (parameter, *(self.state[parameter].get(n) for n in ("exp_avg", "exp_avg_sq")))
            if tensor is not None
        ]
        result = super().step(closure)
        with torch.no_grad():
            for tensor, before, unread in kept:
                tensor[unread] = before[unread]
        return result


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=LEARNING_RATE), EmbOptimType.EXACT_SGD),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=LEARNING_RATE, eps=EPS), EmbOptimType.EXACT_ADAGRAD),
    "adam": (lambda p: LazyAdam(p, lr=LEARNING_RATE, eps=EPS), EmbOptimType.ADAM),
    "rowwise_adagrad": (lambda p: RowWiseAdagrad(p, lr=LEARNING_RATE, eps=EPS), EmbOptimType.EXACT_ROWWISE_ADAGRAD),
}


@dataclass
class Reference:
    """The unsharded run: outputs by step and rank, weights and states by table at its end."""

    outputs: list[list[torch.Tensor]]
    weights: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    over: torch.Tensor


def reference(optimizer: str, steps: int, world: int, *, dtype: DataType = DataType.FP32) -> Reference:
    """Train on the batches of all ranks at once in one process, ranks averaged as data-parallel training does."""
    model = new_model(dtype)
    tables = {f"{part}.{name}": model.get_submodule(part).embeddings[name].weight for part, name in table_names()}
    sparse = OPTIMIZERS[optimizer][0](list(tables.values()))
    dense = torch.optim.SGD(model.over.parameters(), lr=DENSE_LEARNING_RATE)
    outputs = []
    for step in range(steps):
        sparse.zero_grad()
        dense.zero_grad()
        found = [model(make_batch(step, rank)) for rank in range(world)]
        (sum(loss for loss, _ in found) / world).backward()  # type: ignore[union-attr]
        for name, weight in tables.items():
            features = (WIDE | NARROW)[name.partition(".")[2]][1]
            ids = [make_batch(step, rank).features[feature].values() for rank in range(world) for feature in features]
            weight.read = torch.isin(torch.arange(len(weight)), torch.cat(ids))
        sparse.step()
        dense.step()
        outputs.append([logits.detach() for _, logits in found])
    states = {}
    for name, weight in tables.items():
        for key in ("sum",):
            if key in sparse.state.get(weight, {}):
                states[name] = sparse.state[weight][key].view(weight.shape[0], -1)
    return Reference(outputs, {n: w.detach() for n, w in tables.items()}, states, model.over.weight.detach())


def table_names() -> list[tuple[str, str]]:
    """(collection, table) of every table."""
    return [("wide", name) for name in WIDE] + [("narrow", name) for name in NARROW]


def profile_of(name: str, seed: int = 0) -> flexshard.AccessProfile:
    """Counts in an order that has nothing to do with ids; some rows are never read."""
    rows = (WIDE | NARROW)[name][0]
    generator = np.random.default_rng([seed, rows])
    counts = np.floor(1000.0 / (1 + np.arange(rows))).astype(np.int64)
    return flexshard.AccessProfile.from_counts(generator.permutation(counts), num_samples=100, num_rows=rows)


def small_cluster(nodes: int, ranks_per_node: int, sizes: tuple[int, ...] = ()) -> Cluster:
    """Levels 1, W, U and ``sizes``."""
    world = nodes * ranks_per_node
    rate = CollectiveRate(1e-5, 1e9)
    levels = tuple(
        Level(size, rate if size > 1 else None, rate if size < world else None)
        for size in sorted({1, ranks_per_node, world, *sizes})
    )
    return Cluster("test", nodes, ranks_per_node, float(1 << 30), 0.0, levels)


def plan_of(
    cluster: Cluster, split: dict[str, list[tuple[int, int, str]]], *, seed: int = 0, dtype: str = "float32", **how: Any
) -> Plan:
    """A plan with given tiers: (group size, rows, reduction) of each table, hottest first.

    With ``index_dedup="some"`` every second table's repeated ids are sent once.
    """
    some = how.get("index_dedup") == "some"
    how["index_dedup"] = how.get("index_dedup", False) is True
    tables = [
        flexshard.Table(name, (WIDE | NARROW)[name][0], DIMS[part], profile_of(name, seed), dtype=dtype)
        for part, name in table_names()
    ]
    plan = flexshard.solve(tables, cluster, batch_size=24, budget="1GiB", tiers=len(cluster.levels), **how)
    if some:
        placed = {
            name: replace(table, index_dedup=index % 2 == 0) for index, (name, table) in enumerate(plan.tables.items())
        }
        plan = replace(plan, settings=replace(plan.settings, index_dedup="auto"), tables=placed)
    return with_tiers(plan, split)


def with_tiers(plan: Plan, split: dict[str, list[tuple[int, int, str]]]) -> Plan:
    """The plan with other tiers: (group size, rows, reduction) of each table, hottest first; each with another rank."""
    placed = {}
    for index, (name, table) in enumerate(plan.tables.items()):
        tiers, first = [], 0
        for size, rows, reduction in split[name]:
            if rows:
                kind, holder = strategy_name(size, plan.cluster.world_size), (index + 1) % size
                tiers.append(Tier(kind, size, rows, first, 0.0, None, 0.0, 0.0, 0.0, reduction, first_holder=holder))
            first += rows
        placed[name] = replace(table, tiers=tuple(tiers))
    return replace(plan, tables=placed)


def random_split(cluster: Cluster, generator: np.random.Generator) -> dict[str, list[tuple[int, int, str]]]:
    """Random tiers of every table, some of them empty, in random order of group sizes."""
    split = {}
    for name, (rows, _) in (WIDE | NARROW).items():
        sizes = generator.permutation(cluster.group_sizes).tolist()
        cuts = np.sort(generator.integers(0, rows + 1, len(sizes) - 1)).tolist()
        counts = np.diff([0, *cuts, rows]).tolist()
        kinds = generator.choice(["dense", "sparse"], len(sizes)).tolist()
        split[name] = list(zip(sizes, counts, kinds, strict=True))
    return split


def shard(
    plan: Plan | None,
    optimizer: str = "sgd",
    *,
    seed: int = 0,
    dtype: DataType = DataType.FP32,
    sharder: dict[str, Any] | None = None,
    fused: dict[str, Any] | None = None,
    model: Model | None = None,
    device: str = "cpu",
    **planner: Any,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model under a plan, as a user's script would have it."""
    if fused is None:
        fused = {"optimizer": OPTIMIZERS[optimizer][1], "learning_rate": LEARNING_RATE, "eps": EPS}
    if dtype is not DataType.FP32:
        fused["stochastic_rounding"] = False
    sharders = [FlexShardEmbeddingCollectionSharder(fused, **(sharder or {}))]
    model = new_model(dtype) if model is None else model
    profiles = {name: profile_of(name, seed) for _, name in table_names()}
    chooser = FlexShardPlanner(plan, **({"profiles": profiles} | planner))
    parallel = DistributedModelParallel(
        model, plan=chooser.collective_plan(model, sharders), sharders=sharders, device=torch.device(device)
    )
    return parallel, optimizer_of(parallel)


def optimizer_of(parallel: DistributedModelParallel) -> CombinedOptimizer:
    """Of all parameters, as a user's script would have it."""
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(parallel.named_parameters())),
        lambda p: torch.optim.SGD(p, lr=DENSE_LEARNING_RATE),
    )
    return CombinedOptimizer([parallel.fused_optimizer, dense])


def whole(tensor: Any) -> torch.Tensor:
    """Of a ``DTensor`` or one of TorchRec's ``ShardedTensor``, every rank's rows; every rank must call it."""
    if isinstance(tensor, ShardedTensor):
        full = torch.zeros(tensor.size())
        tensor.gather(0, full if dist.get_rank() == 0 else None)
        dist.broadcast(full, 0)
        return full
    found: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def row_wise_of_torchrec(
    optimizer: str, ranks_per_node: int, world_size: int, *, model: Model | None = None
) -> DistributedModelParallel:
    """The model under TorchRec's own row-wise sharding."""
    fused = {"optimizer": OPTIMIZERS[optimizer][1], "learning_rate": LEARNING_RATE, "eps": EPS}
    model, sharder = new_model() if model is None else model, EmbeddingCollectionSharder(fused)
    how = {
        part: construct_module_sharding_plan(
            model.get_submodule(part),
            {name: row_wise(compute_kernel="fused") for of, name in table_names() if of == part},
            sharder,
            local_size=ranks_per_node,
            world_size=world_size,
            device_type="cpu",
        )
        for part in DIMS
    }
    return DistributedModelParallel(model, plan=ShardingPlan(how), sharders=[sharder], device=torch.device("cpu"))


def train(parallel: Any, optimizer: Any, rank: int, steps: range, *, device: str = "cpu") -> list[torch.Tensor]:
    """An ordinary loop; the logits of every step."""
    outputs = []
    for step in steps:
        optimizer.zero_grad()
        loss, logits = parallel(make_batch(step, rank).to(torch.device(device)))
        loss.backward()
        optimizer.step()
        outputs.append(logits.detach())
    return outputs


def differences(parallel: Any, outputs: list[torch.Tensor], rank: int, expected: Reference) -> dict[str, float]:
    """Largest absolute difference of outputs, weights and states to the reference's."""
    found = {"outputs": 0.0, "weights": 0.0, "states": 0.0}
    for mine, theirs in zip(outputs, expected.outputs, strict=True):
        found["outputs"] = max(found["outputs"], float((mine - theirs[rank]).abs().max()))
    weights = {n: w for n, w in parallel.state_dict().items() if "embeddings" in n}
    states = parallel.fused_optimizer.state_dict()["state"]
    for name, weight in expected.weights.items():
        part, table = name.split(".")
        key = f"{part}.embeddings.{table}.weight"
        found["weights"] = max(found["weights"], float((whole(weights[key]) - weight).abs().max()))
        if name in expected.states:
            state = whole(states[key][f"{table}.momentum1"])
            found["states"] = max(found["states"], float((state - expected.states[name].view(state.shape)).abs().max()))
    found["weights"] = max(found["weights"], float((parallel.module.over.weight - expected.over).abs().max()))
    return found


def observe(rank: int, plan: Plan, steps: int) -> tuple[Observer, Any]:
    """What went over the wire while the model trained under a plan, and the model."""
    parallel, optim = shard(plan, "sgd")
    with Observer() as observer:
        for step in range(steps):
            optim.zero_grad()
            parallel(make_batch(step, rank))[0].backward()
            optim.step()
            observer.step()
    return observer, parallel
