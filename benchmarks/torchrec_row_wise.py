"""All rows row-wise: a step of our sharded module against one of TorchRec's own, in real gloo processes.

Both train the same model on the same batches in turn, ours in one block of steps and TorchRec's in the next, so that
a busy machine slows both; the figure is the median over blocks of the ratio of their medians.

    python -m benchmarks.torchrec_row_wise [--device cuda]

On CUDA there is a process for each GPU, with NCCL between them; several GPUs have not run it yet.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

import flexshard
from benchmarks.timing import paired_medians
from flexshard import FlexShardEmbeddingCollectionSharder, FlexShardPlanner
from flexshard.executors import Observer
from flexshard.topologies import CollectiveRate, Level

ROWS, DIM, TABLES, BATCH, LENGTH = 100_000, 64, 4, 256, 20
BLOCKS, STEPS = 12, 8
CPU = torch.device("cpu")
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}


def collection() -> EmbeddingCollection:
    torch.manual_seed(0)
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=f"t{i}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{i}"])
            for i in range(TABLES)
        ]
    )


def batches(rank: int, number: int) -> list[KeyedJaggedTensor]:
    generator = np.random.default_rng(rank)
    p = 1.0 / np.arange(1, ROWS + 1) ** 0.8
    made = []
    for _ in range(number):
        ids = torch.from_numpy(generator.choice(ROWS, TABLES * BATCH * LENGTH, p=p / p.sum()))
        lengths = torch.full((TABLES * BATCH,), LENGTH)
        made.append(KeyedJaggedTensor([f"f{i}" for i in range(TABLES)], ids, lengths=lengths))
    return made


def theirs(world: int, device: torch.device = CPU) -> DistributedModelParallel:
    model, sharder = collection(), EmbeddingCollectionSharder(dict(FUSED))
    how = {f"t{i}": row_wise(compute_kernel="fused") for i in range(TABLES)}
    plan = construct_module_sharding_plan(
        model, how, sharder, local_size=world, world_size=world, device_type=device.type
    )
    return DistributedModelParallel(model, plan=ShardingPlan({"": plan}), sharders=[sharder], device=device)


def ours(world: int, device: torch.device = CPU, *, ranked: bool) -> DistributedModelParallel:
    model, sharders = collection(), [FlexShardEmbeddingCollectionSharder(dict(FUSED))]
    # All-reduce is so slow here that row-wise is the best plan.
    slow, fast = CollectiveRate(1.0, 1e6), CollectiveRate(0.0, 1e12)
    levels = (Level(1, None, slow), Level(world, fast, None)) if world > 1 else (Level(1, None, None),)
    cluster = flexshard.Cluster("all row-wise", 1, world, 1e12, 0.0, levels)
    counts = np.arange(ROWS, 0, -1)
    profile = flexshard.AccessProfile.from_counts(counts, num_samples=ROWS)
    tables = [flexshard.Table(f"t{i}", ROWS, DIM, profile) for i in range(TABLES)]
    plan = flexshard.solve(tables, cluster, batch_size=BATCH, tiers=1, index_dedup=False)
    assert all(tier.strategy == "row_wise" for table in plan.tables.values() for tier in table.tiers)
    profiles = {f"t{i}": profile for i in range(TABLES)} if ranked else {}
    sharding = FlexShardPlanner(plan, profiles=profiles).collective_plan(model, sharders)
    return DistributedModelParallel(model, plan=sharding, sharders=sharders, device=device)


def step(model: Any, batch: KeyedJaggedTensor) -> None:
    found = model(batch)
    sum((found[f"f{i}"].values() ** 2).sum() for i in range(TABLES)).backward()


def rank_main(rank: int, world: int, store: str, kind: str) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_WORLD_SIZE=str(world), LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    backend, device = "gloo", torch.device(kind)
    if kind == "cuda":
        backend, device = "nccl", torch.device(kind, rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    models = {
        "TorchRec": theirs(world, device),
        "ours": ours(world, device, ranked=True),
        "ours, unranked": ours(world, device, ranked=False),
    }
    data = [batch.to(device) for batch in batches(rank, STEPS)]

    def everybody() -> None:
        if kind == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    sent = {}
    for name, model in models.items():
        with Observer() as observer:
            for batch in data:
                step(model, batch)
                observer.step()
        sent[name] = sum(c.bytes for c in observer.result().collectives)
        calls = sum(c.calls for c in observer.result().collectives)
        if rank == 0:
            print(f"{name}: {calls:.0f} collectives and {sent[name]:,.0f} bytes per rank and step", flush=True)
    medians = paired_medians(models, step, data, blocks=BLOCKS, barrier=everybody)
    if rank == 0:
        what = f"{TABLES} tables of {ROWS:,} x {DIM}, {BATCH} samples x {LENGTH} ids per table"
        print(f"{world} {backend} processes, {what}")
        for name, values in medians.items():
            ratios = [value / base for value, base in zip(values, medians["TorchRec"], strict=True)]
            ms, ratio = statistics.median(values) * 1e3, statistics.median(ratios)
            print(f"{name}: {ms:.1f} ms per step, {ratio:.3f} of TorchRec's")
    dist.barrier()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    kind = parser.parse_args().device
    if kind == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here")
    for world in (2, 4) if kind == "cpu" else (torch.cuda.device_count(),):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_main, args=(world, f"{folder}/store", kind), nprocs=world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
