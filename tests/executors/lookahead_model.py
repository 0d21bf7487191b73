"""A model of which some tables are larger than their cache, its batches, and what a run of it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

import flexshard
from flexshard.executors import FlexShardEmbeddingCollectionSharder
from flexshard.executors.stores.cached import CachedStore
from flexshard.planner import FlexShardPlanner, Plan
from tests.executors import models

ROWS = {"goods": 1500, "shops": 400, "days": 9}
CACHED = ("goods", "shops")
DIM, SAMPLES = 8, 12


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
                for name, rows in ROWS.items()
            ]
        )
        self.over = nn.Linear(DIM * len(ROWS), 1)

    def forward(self, batch: models.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.tables(batch.features)
        pooled = [torch.segment_reduce(rows[name].values(), "sum", lengths=rows[name].lengths()) for name in ROWS]
        logits = self.over(torch.cat(pooled, 1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits


def batch_of(step: int, rank: int) -> models.Batch:
    """Ids of which some come again in the next batches, some late, most never."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths, values = [], []
    for rows in ROWS.values():
        length = torch.randint(0, 4, (SAMPLES,), generator=generator)
        drawn = torch.rand(int(length.sum()), generator=generator)
        lengths.append(length)
        values.append((drawn.pow(3) * rows).long().clamp_(max=rows - 1))
    features = KeyedJaggedTensor(list(ROWS), torch.cat(values), lengths=torch.cat(lengths))
    return models.Batch(features, torch.randint(0, 2, (SAMPLES,), generator=generator).float())


def batches(rank: int, steps: range) -> Iterator[models.Batch]:
    for step in steps:
        yield batch_of(step, rank)


def plan_for(nodes: int, ranks_per_node: int, *, tiers: bool = True, **how: Any) -> Plan:
    """A tenth of each table copied to every rank, a tenth to every node, the others dealt to all ranks."""
    cluster = models.small_cluster(nodes, ranks_per_node)
    generator = np.random.default_rng(0)
    tables = [flexshard.Table(name, rows, DIM, _profile(rows, generator)) for name, rows in ROWS.items()]
    plan = flexshard.solve(tables, cluster, batch_size=SAMPLES, budget="1GiB", tiers=len(cluster.levels), **how)
    sizes = cluster.group_sizes if tiers else (cluster.world_size,)
    split = {}
    for name, rows in ROWS.items():
        upper = [(size, rows // 10, kind) for size, kind in zip(sizes[:-1], ("dense", "sparse"), strict=False)]
        split[name] = [*upper, (sizes[-1], rows - sum(number for _, number, _ in upper), "dense")]
    return models.with_tiers(plan, split)


def _profile(rows: int, generator: np.random.Generator) -> flexshard.AccessProfile:
    counts = np.floor(1000.0 / (1 + np.arange(rows))).astype(np.int64)
    return flexshard.AccessProfile.from_counts(generator.permutation(counts), num_samples=100, num_rows=rows)


def shard(
    plan: Plan, factors: dict[str, float] | float | None, fused: dict[str, Any], device: str = "cpu", **sharder: Any
) -> tuple[DistributedModelParallel, Any]:
    """The model under a plan, and its optimizer; ``factors`` of the caches, None for none."""
    torch.manual_seed(3)
    if isinstance(factors, float):
        factors = dict.fromkeys(CACHED, factors)
    sharders = [FlexShardEmbeddingCollectionSharder(fused, cache_load_factors=factors, **sharder)]
    generator = np.random.default_rng(0)
    profiles = {name: _profile(rows, generator) for name, rows in ROWS.items()}
    chooser = FlexShardPlanner(plan, profiles=profiles)
    model = Model()
    parallel = DistributedModelParallel(
        model, plan=chooser.collective_plan(model, sharders), sharders=sharders, device=torch.device(device)
    )
    return parallel, models.optimizer_of(parallel)


def caches(parallel: DistributedModelParallel) -> list[CachedStore]:
    """Of this rank."""
    return [group.store for group in parallel.module.tables.groups if isinstance(group.store, CachedStore)]


def everything(parallel: DistributedModelParallel) -> dict[str, np.ndarray]:
    """Weights and states of all tables and layers; every rank must call it."""
    state = dict(parallel.state_dict())
    for key, values in parallel.fused_optimizer.state_dict()["state"].items():
        state |= {f"{key}.{name}": value for name, value in values.items() if torch.is_tensor(value)}
    return {name: models.whole(value).cpu().numpy() for name, value in state.items()}


def differs(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> list[str]:
    """What is not equal to the last bit."""
    assert found.keys() == expected.keys()
    return [name for name, values in expected.items() if not np.array_equal(values, found[name])]


def steps_that_differ(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> list[str]:
    """Of outputs, step by step, those that are not equal to the last bit."""
    return [f"step {i}" for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)]
