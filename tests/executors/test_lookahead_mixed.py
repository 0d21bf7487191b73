"""Caches beside everything else: tiers, deduplicated batches, pooled tables, TorchRec's tables and a tensor train."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torchrec")
pytest.importorskip("numba")

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.streamable import Pipelineable

from flexshard.embeddings import DedupedEmbeddingCollection, InverseKeyedJaggedTensor, TTEmbedding, compress
from flexshard.executors import (
    FlexShardEmbeddingBagCollectionSharder,
    FlexShardEmbeddingCollectionSharder,
    LookaheadPipeline,
)
from flexshard.executors.sharding.row_sharding import RowSharding
from flexshard.executors.stores.cached import CachedStore
from flexshard.planner import FlexShardPlanner
from tests.executors import models, ranks
from tests.executors.test_deduped import DIM, TABLES, flex_plan, profile, sessions
from tests.executors.test_lookahead import fused
from tests.executors.test_pooled_caches import _uncached, contents

FANS, SHOWN, SAMPLES, STEPS = 5000, 60, 40, 8
HOST = torch.device("cpu")


@dataclass
class Batch(Pipelineable):
    """Sessions, bags and what a tensor train is asked for."""

    sessions: InverseKeyedJaggedTensor
    bags: KeyedJaggedTensor
    train: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        pass

    def pin_memory(self) -> Batch:
        return self


def batch_of(rank: int, step: int, how: str) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + rank)

    def lists(**rows: int) -> KeyedJaggedTensor:
        lengths = torch.randint(0, 4, (len(rows) * SAMPLES,), generator=generator)
        counts = lengths.view(len(rows), SAMPLES).sum(1).tolist()
        ids = [
            (torch.rand(n, generator=generator) ** 3 * end).long() for n, end in zip(counts, rows.values(), strict=True)
        ]
        return KeyedJaggedTensor(list(rows), torch.cat(ids), lengths=lengths)

    labels = torch.rand(SAMPLES, generator=generator)
    return Batch(sessions(rank, step, how, SAMPLES), lists(fan=FANS, show=SHOWN), lists(word=60), labels)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        configs = [
            EmbeddingConfig(name=name, num_embeddings=97, embedding_dim=DIM, feature_names=features)
            for name, features in TABLES.items()
        ]
        self.lists = DedupedEmbeddingCollection(EmbeddingCollection(tables=configs))
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name="fans", num_embeddings=FANS, embedding_dim=DIM, feature_names=["fan"]),
                EmbeddingBagConfig(name="shows", num_embeddings=SHOWN, embedding_dim=DIM, feature_names=["show"]),
            ]
        )
        words = EmbeddingConfig(name="words", num_embeddings=60, embedding_dim=8, feature_names=["word"])
        self.words = EmbeddingCollection(tables=[words])
        self.over = nn.Linear(5 * DIM + 8, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        found, words, bags = self.lists(batch.sessions), self.words(batch.train)["word"], self.bags(batch.bags)
        lists = [found[name].expand() for name in ("history", "liked", "authors")]
        sums = [torch.segment_reduce(one.values(), "sum", lengths=one.lengths()) for one in lists]
        word = torch.segment_reduce(words.values(), "sum", lengths=words.lengths())
        logits = self.over(torch.cat([*sums, bags.values(), word], 1).tanh()).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits


def train(
    rank: int, plan: Any, deduped: str, *, cached: bool, **how: Any
) -> tuple[list[np.ndarray], dict[str, np.ndarray], list[Any]]:
    """Logits, weights and states, and the caches' traffic."""
    model, _ = compress(Model(), {"words.words": {"tt_ranks": 4}}, decompose=False)
    given = fused("rowwise_adagrad")
    # The first two of three tables: a third behind the cache alone would stand before them in what is sent, and gloo
    # adds copies' gradients up in an order that depends on where they stand.
    sharders = [
        FlexShardEmbeddingCollectionSharder(
            given, cache_load_factors={"goods": 1.0, "writers": 1.0} if cached else None
        ),
        FlexShardEmbeddingBagCollectionSharder(given, cache_load_factors={"fans": 0.2}),
    ]
    chooser = FlexShardPlanner(plan, profiles={name: profile() for name in TABLES})
    whole = chooser.collective_plan(model, sharders)
    parallel = DistributedModelParallel(model, plan=whole, sharders=sharders, device=HOST)
    optimizer = models.optimizer_of(parallel)
    pipeline = (
        LookaheadPipeline(parallel, optimizer, HOST, lookahead=2, **how)
        if cached
        else TrainPipelineSparseDist(parallel, optimizer, HOST)
    )
    steps = iter([batch_of(rank, step, deduped) for step in range(STEPS)])
    logits = [pipeline.progress(steps).detach().numpy() for _ in range(STEPS)]
    (core, *_) = (part for part in parallel.modules() if isinstance(part, TTEmbedding))
    state = contents(parallel) | {"cores": core.to_dense().numpy()}
    groups = [*parallel.module.lists.collection.groups, *parallel.module.bags.groups]
    return logits, state, [group.store.traffic for group in groups if isinstance(group.store, CachedStore)]


def beside_everything(rank: int, plan: Any, deduped: str, **how: Any) -> list[str]:
    with mock.patch.object(RowSharding, "_traits", _uncached):
        expected, weights, without = train(rank, plan, deduped, cached=False)
    logits, state, traffic = train(rank, plan, deduped, cached=True, **how)
    assert without == []
    assert [one.batches for one in traffic] == [STEPS, STEPS]
    assert [one.beside for one in traffic] == [0, 0]
    differing = [f"step {i}" for i, (a, b) in enumerate(zip(logits, expected, strict=True)) if not np.array_equal(a, b)]
    assert weights.keys() == state.keys()
    return differing + [name for name, values in weights.items() if not np.array_equal(values, state[name])]


@pytest.mark.parametrize(("delayed_sync", "deduped"), [(False, "exact"), (True, "partial")])
def test_caches_beside_everything_else_change_no_bit(delayed_sync: bool, deduped: str) -> None:
    assert ranks.run(2, 2, partial(beside_everything, delayed_sync=delayed_sync), flex_plan(), deduped) == [[]] * 4
