"""Steps of two trainers whose rows are on embedding servers, on one machine: fetched ahead into a cache, or as they are
needed.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.cluster.lookahead_rank import DLRM, FUSED, HOST, Model, Stream, as_row_wise, collection
from flexshard import Cluster, CollectiveRate, FlexShardEmbeddingCollectionSharder, FlexShardPlanner, Level, solve
from flexshard.executors import EmbeddingServers, LookaheadPipeline

__all__ = ["main"]

TRAINERS, SERVERS, MOST_ROWS, BATCH, SHARE = 2, 2, 200_000, 512, 0.1
BLOCK, ROUNDS = 5, 6


def _trained(stream: Stream, plan: Any, profiles: Any, *, ahead: int, **sharder: Any) -> Callable[[], object]:
    """A step; ``ahead`` of 0 for a plain loop, which tells nobody of its batches."""
    torch.manual_seed(0)
    sharders: list[Any] = [FlexShardEmbeddingCollectionSharder(dict(FUSED), **sharder)]
    model: Any = Model(collection(stream), DLRM(len(stream.rows)), list(stream.rows))
    planned = FlexShardPlanner(plan, profiles=profiles).collective_plan(model, sharders)
    model = DistributedModelParallel(model, plan=planned, sharders=sharders, device=HOST)
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    optimizer: Any = CombinedOptimizer([model.fused_optimizer, dense])
    batches = stream.batches(0, 64)
    if ahead:
        return partial(LookaheadPipeline(model, optimizer, HOST, lookahead=ahead).progress, batches)

    def step() -> None:
        optimizer.zero_grad()
        model(next(batches))[0].backward()
        optimizer.step()

    return step


def rank_main(rank: int, store: str, exponent: float) -> None:
    """One trainer."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(TRAINERS), GLOO_SOCKET_IFNAME="lo")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=TRAINERS)
    stream = Stream(BATCH, MOST_ROWS, exponent)
    tables = stream.tables()
    rate = CollectiveRate(1e-5, 1e9)
    cluster = Cluster("one machine", 1, TRAINERS, 1e12, 0.0, (Level(1, None, rate), Level(TRAINERS, rate, None)))
    plan = as_row_wise(solve(tables, cluster, batch_size=BATCH, index_dedup=True), TRAINERS)
    factors = {table.name: SHARE for table in tables if table.rows >= MOST_ROWS}
    train = partial(_trained, stream, plan, {table.name: table.profile for table in tables})
    with EmbeddingServers(SERVERS) as servers:
        runs = {
            "all rows in the trainers": train(ahead=2),
            f"cache of {SHARE:.0%}, the rest in the trainers": train(ahead=4, cache_load_factors=factors),
            f"cache of {SHARE:.0%}, the rest on servers": train(ahead=4, cache_load_factors=factors, servers=servers),
            "on servers, fetched as needed": train(ahead=0, cache_load_factors=factors, servers=servers),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(ROUNDS + 1):
            for name, step in list(runs.items())[:: -1 if number % 2 else 1]:
                dist.barrier()
                start = time.perf_counter()
                for _ in range(BLOCK):
                    step()
                dist.barrier()
                if number:  # the first round fills the caches
                    seconds[name].append((time.perf_counter() - start) / BLOCK)
        if rank == 0:
            peer = statistics.median(next(iter(seconds.values())))
            for name, times in seconds.items():
                middle = statistics.median(times)
                print(
                    f"  Zipf {exponent:g}, {name}: {middle * 1e3:.0f} ms a step ({min(times) * 1e3:.0f} to"
                    f" {max(times) * 1e3:.0f}), {middle / peer:.2f} of the first",
                    flush=True,
                )


def main() -> None:
    """At two skews."""
    print(
        f"Embedding servers: {TRAINERS} trainers and {SERVERS} servers on one machine without limits between them, a"
        f" DLRM with Criteo's 26 tables of at most {MOST_ROWS:,} rows, {BATCH} samples per trainer; the large tables'"
        f" rows (median of {ROUNDS} rounds of {BLOCK} steps in turns):",
        flush=True,
    )
    for exponent in (0.5, 1.05):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_main, args=(str(Path(folder) / "store"), exponent), nprocs=TRAINERS)
