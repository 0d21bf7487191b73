"""On a GPU: training with tables in the host's memory, behind our caches and behind FBGEMM's ``fused_uvm_caching``.

FBGEMM's caches run in TorchRec's prefetch pipeline, which moves the next batch's rows beside the current step; ours in
``LookaheadPipeline``.

    python -m benchmarks.lookahead.uvm_caching [--most-rows 2e6]    # of a table; 33.76 M rows in all by default

Both see the same batches of Criteo's tables (power law of 1.05, ids hashed), have caches of as many rows, the same
optimizer and the same layers. They take turns; seconds are of blocks of steps between two waits for the GPU.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from torchrec.distributed.types import CacheParams, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

import flexshard
from benchmarks.lookahead.streams import CRITEO_ROWS, zipf
from flexshard import AccessProfile, FlexShardEmbeddingCollectionSharder, FlexShardPlanner
from flexshard.executors import FlexShardEmbeddingBagCollectionSharder, LookaheadPipeline
from flexshard.topologies import Level

__all__ = ["batches_of", "in_device_memory", "main", "ours", "steps"]

DIM, WARM, BLOCKS, SETTLE, STEPS = 64, 40, 5, 5, 20
CASES = ((True, 16_384, 0.05), (True, 16_384, 0.01), (False, 4_096, 0.05))  # bags or rows, samples, share in the cache
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}


@dataclass
class Batch(Pipelineable):
    """One id of every table for each sample, and labels."""

    features: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.features.to(device, non_blocking), self.labels.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(self.features.pin_memory(), self.labels.pin_memory())


class Model(nn.Module):
    """Two layers over the rows of a sample."""

    def __init__(self, rows: tuple[int, ...], *, pooled: bool) -> None:
        super().__init__()
        self.tables: Any
        how = [
            {"name": f"t{i}", "num_embeddings": number, "embedding_dim": DIM, "feature_names": [f"f{i}"]}
            for i, number in enumerate(rows)
        ]
        meta = torch.device("meta")
        if pooled:
            self.tables = EmbeddingBagCollection([EmbeddingBagConfig(**one) for one in how], device=meta)
        else:
            self.tables = EmbeddingCollection([EmbeddingConfig(**one) for one in how], device=meta)
        self.pooled, self.names = pooled, [f"f{i}" for i in range(len(rows))]
        self.over = nn.Sequential(nn.Linear(DIM * len(rows), 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.tables(batch.features)
        rows = found.values() if self.pooled else torch.cat([found[name].values() for name in self.names], 1)
        logits = self.over(rows).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits


def batches_of(rows: tuple[int, ...], samples: int, number: int, *, pin: bool) -> list[Batch]:
    rng = np.random.default_rng(0)
    orders = [rng.permutation(table) for table in rows]
    names, lengths = [f"f{i}" for i in range(len(rows))], torch.ones(len(rows) * samples, dtype=torch.int64)
    made = []
    for _ in range(number):
        ids = np.concatenate(
            [order[zipf(rng, table, 1.05, samples)] for table, order in zip(rows, orders, strict=True)]
        )
        features = KeyedJaggedTensor(names, torch.from_numpy(ids), lengths=lengths)
        batch = Batch(features, torch.from_numpy(rng.integers(0, 2, samples)).float())
        made.append(batch.pin_memory() if pin else batch)
        made[-1].features.length_per_key()  # as data loaders give it
    return made


def _optimizer_of(parallel: Any) -> CombinedOptimizer:
    dense = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    return CombinedOptimizer(
        [parallel.fused_optimizer, KeyedOptimizerWrapper(dense, lambda p: torch.optim.SGD(p, lr=0.01))]
    )


def _on_first_rank(module: nn.Module, sharder: Any, rows: tuple[int, ...], kernel: str) -> Any:
    how = {f"t{i}": table_wise(rank=0, compute_kernel=kernel) for i in range(len(rows))}
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return construct_module_sharding_plan(module, how, sharder, local_size=1, world_size=1, device_type=kind)


def _torchrecs(
    rows: tuple[int, ...], device: torch.device, kernel: str, cache: CacheParams | None, *, pooled: bool, stats: bool
) -> Any:
    torch.manual_seed(0)
    model = Model(rows, pooled=pooled)
    fused = FUSED | ({"gather_uvm_cache_stats": True} if stats else {})
    sharder: Any = (EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder)(fused)
    planned = _on_first_rank(model.tables, sharder, rows, kernel)
    for one in planned.values():
        one.cache_params = cache
    return DistributedModelParallel(model, plan=ShardingPlan({"tables": planned}), sharders=[sharder], device=device)


def in_device_memory(rows: tuple[int, ...], device: torch.device, *, pooled: bool) -> Any:
    """TorchRec's tables without a cache, in its pipeline of two batches."""
    kernel = EmbeddingComputeKernel.FUSED.value
    parallel = _torchrecs(rows, device, kernel, None, pooled=pooled, stats=False)
    return TrainPipelineSparseDist(parallel, _optimizer_of(parallel), device, execute_all_batches=True)


def theirs(rows: tuple[int, ...], share: float, device: torch.device, *, pooled: bool, stats: bool = False) -> Any:
    """FBGEMM's cache in TorchRec's pipeline; and its lookups' kernels."""
    kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
    cache = CacheParams(load_factor=share, precision=DataType.FP32, prefetch_pipeline=True)
    parallel = _torchrecs(rows, device, kernel, cache, pooled=pooled, stats=stats)
    pipeline = PrefetchTrainPipelineSparseDist(parallel, _optimizer_of(parallel), device, execute_all_batches=True)
    kernels = [one.emb_module for lookup in parallel.module.tables._lookups for one in lookup._emb_modules]
    return pipeline, kernels


def ours(rows: tuple[int, ...], share: float, device: torch.device, *, pooled: bool, lookahead: int) -> Any:
    """Our cache and pipeline."""
    torch.manual_seed(0)
    model = Model(rows, pooled=pooled)
    factors = {f"t{i}": share for i in range(len(rows))}
    sharder: Any
    if pooled:
        sharder = FlexShardEmbeddingBagCollectionSharder(FUSED, cache_load_factors=factors)
        plan = ShardingPlan({"tables": _on_first_rank(model.tables, sharder, rows, "fused")})
    else:
        sharder = FlexShardEmbeddingCollectionSharder(FUSED, cache_load_factors=factors)
        uniform = {f"t{i}": AccessProfile.from_counts(np.ones(table), num_samples=1) for i, table in enumerate(rows)}
        tables = [flexshard.Table(f"t{i}", table, DIM, uniform[f"t{i}"]) for i, table in enumerate(rows)]
        level = Level(1, None, None)
        cluster = flexshard.Cluster("one GPU", 1, 1, float(1 << 40), 0.0, (level,))
        chosen = flexshard.solve(tables, cluster, batch_size=1, budget="1TiB")
        plan = FlexShardPlanner(chosen, profiles=uniform).collective_plan(model, [sharder])
    parallel = DistributedModelParallel(model, plan=plan, sharders=[sharder], device=device)
    return LookaheadPipeline(parallel, _optimizer_of(parallel), device, lookahead=lookahead)


def steps(pipeline: Any, batches: Iterator[Batch], number: int) -> None:
    """So many of them."""
    for _ in range(number):
        pipeline.progress(batches)


def compare(rows: tuple[int, ...], samples: int, share: float, *, pooled: bool, lookahead: int) -> None:
    """One line: milliseconds a step of both, and what their caches found."""
    device, total = torch.device("cuda"), sum(rows)
    every = batches_of(rows, samples, WARM + BLOCKS * (SETTLE + STEPS) + 8, pin=True)
    theirs_piped, kernels = theirs(rows, share, device, pooled=pooled)
    ours_piped = ours(rows, share, device, pooled=pooled, lookahead=lookahead)
    feeds = {"fbgemm": iter(every), "ours": iter(every)}
    pipelines = {"fbgemm": theirs_piped, "ours": ours_piped}
    for name, pipeline in pipelines.items():
        steps(pipeline, feeds[name], WARM)
    seconds: dict[str, list[float]] = {name: [] for name in pipelines}
    before = ours_piped.traffic()
    for _ in range(BLOCKS):
        for name, pipeline in pipelines.items():
            steps(pipeline, feeds[name], SETTLE)
            torch.cuda.synchronize()
            start = time.perf_counter()
            steps(pipeline, feeds[name], STEPS)
            torch.cuda.synchronize()
            seconds[name].append((time.perf_counter() - start) / STEPS)
    after = ours_piped.traffic()
    distinct, fetched = after.distinct - before.distinct, after.fetched - before.fetched
    seen = after.batches - before.batches
    for pipeline in pipelines.values():
        pipeline.reset()
    times = {name: 1e3 * median(found) for name, found in seconds.items()}
    ratios = sorted(a / b for a, b in zip(seconds["fbgemm"], seconds["ours"], strict=True))
    cache_rows = sum(kernel.lxu_cache_weights.shape[0] for kernel in kernels)
    print(
        f"{'bags' if pooled else 'rows'} of {len(rows)} tables, {total:,} rows x {DIM}, {samples:,} samples, caches of"
        f" {share:.0%} (FBGEMM's {cache_rows:,} rows): FBGEMM's {times['fbgemm']:.2f} ms a step, ours"
        f" {times['ours']:.2f} (lookahead {lookahead}), {median(ratios):.2f} times as fast ({ratios[0]:.2f} to"
        f" {ratios[-1]:.2f})",
        flush=True,
    )
    del pipelines, theirs_piped, ours_piped, kernels
    hits = _hits(rows, share, every, pooled=pooled)
    print(
        f"  of the {distinct / seen:,.0f} distinct rows of a batch, FBGEMM's cache had {hits:.1%}, ours"
        f" {1 - fetched / distinct:.1%}",
        flush=True,
    )


def _hits(rows: tuple[int, ...], share: float, every: list[Batch], *, pooled: bool) -> float:
    """Of a batch's distinct rows, how many FBGEMM's cache had."""
    pipeline, kernels = theirs(rows, share, torch.device("cuda"), pooled=pooled, stats=True)
    feed = iter(every)
    steps(pipeline, feed, WARM)
    for kernel in kernels:
        kernel.reset_uvm_cache_stats()
    steps(pipeline, feed, BLOCKS * STEPS)
    counts = sum(kernel.get_uvm_cache_stats().cpu().double() for kernel in kernels)
    assert isinstance(counts, torch.Tensor)
    pipeline.reset()
    return float(1 - counts[3] / counts[2])


def main(most_rows: int) -> None:
    """Every case, with no table of more rows than that."""
    if not torch.cuda.is_available():
        print("FBGEMM's caches need a GPU, and there is none here")
        return
    rows = tuple(min(number, most_rows) for number in CRITEO_ROWS)
    print(torch.cuda.get_device_name())
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            for pooled, samples, share in CASES:
                compare(rows, samples, share, pooled=pooled, lookahead=4)
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--most-rows", type=float, default=1e9)
    main(int(parser.parse_args().most_rows))
