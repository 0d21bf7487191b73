"""A node of two: the first trains, the second has the embedding servers."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.cluster.lookahead_rank import DLRM, FUSED, HOST, Model, Stream, as_row_wise, collection
from flexshard import Cluster, FlexShardEmbeddingCollectionSharder, FlexShardPlanner, solve
from flexshard._internal import write_text
from flexshard.embeddings import compress
from flexshard.executors import EmbeddingServers, LookaheadPipeline
from flexshard.executors.stores.cached import CachedStore
from flexshard.topologies import Level

PORT, MEMORY = 6379, 400_000_000
BLOCK, SHARES = 5, (0.1, 0.3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("addresses", nargs=2)
    parser.add_argument("--exponent", type=float, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--most-rows", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--tt-rank", type=int)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_DEDUP_LOGS="0")
    node = int(os.environ["RANK"])
    head = ["--head", f"--port={PORT}"] if node == 0 else [f"--address={args.addresses[0]}:{PORT}"]
    start = [Path(sys.executable).with_name("ray"), "start", *head, f"--node-ip-address={args.addresses[node]}"]
    start += [f"--temp-dir={args.result.parent / 'ray'}"]  # nobody else is to find this cluster
    start += [f"--object-store-memory={MEMORY}", f'--resources={{"node{node}": 100}}', "--num-cpus=2"]
    begun = args.result.with_suffix(".begun")
    while node and not begun.exists():
        time.sleep(0.2)
    subprocess.run(start, check=True, stdout=subprocess.DEVNULL)
    begun.touch()
    if node:
        while not args.result.exists():
            time.sleep(0.2)
    else:
        results = measure(args)
        write_text(args.result, json.dumps(results))
    os._exit(0)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step of every way."""
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        stream = Stream(args.batch_size, args.most_rows, f"zipf:{args.exponent}")
        tables = stream.tables()
        cluster = Cluster("two machines", 1, 1, 1e12, 0.0, (Level(1),))
        largest = max(tables, key=lambda table: table.rows)
        compressed = {}
        if args.tt_rank:
            compressed = {f"tables.{largest.name}": {"tt_ranks": args.tt_rank}}
            tables = [table for table in tables if table is not largest]
        plan = as_row_wise(solve(tables, cluster, batch_size=args.batch_size, index_dedup=True), 1)
        large = [table.name for table in tables if table.rows >= args.most_rows]
        train = partial(_trained, stream, plan, {table.name: table.profile for table in tables}, compressed)
        servers = EmbeddingServers(
            2, address=f"{args.addresses[0]}:{PORT}", options={"num_cpus": 0, "resources": {"node1": 1}}
        )
        ways: dict[str, dict[str, Any]] = {
            "all rows in the trainer": {"ahead": 2},
            "fetched as needed": {"ahead": 0, "factors": dict.fromkeys(large, SHARES[0]), "servers": servers},
        }
        for share in SHARES:
            how = {"ahead": 4, "factors": dict.fromkeys(large, share), "servers": servers}
            ways[f"cache of {share:.0%}, known ahead"] = how
        runs = {name: train(**how) for name, how in ways.items()}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(args.rounds + 1):
            for name, (step, store) in list(runs.items())[:: -1 if number % 2 else 1]:
                start = time.perf_counter()
                for _ in range(BLOCK):
                    step()
                if isinstance(store, CachedStore):
                    store.drained()
                if number:  # the first round fills the caches
                    seconds[name].append((time.perf_counter() - start) / BLOCK)
        results: dict[str, Any] = {
            name: {"step_seconds": statistics.median(times), "rounds": times} for name, times in seconds.items()
        }
        for name, (_, store) in runs.items():
            if isinstance(store, CachedStore) and store.traffic.batches:
                traffic = store.traffic
                results[name]["rows"] = traffic.distinct / traffic.batches
                results[name]["fetched"] = traffic.fetched / traffic.batches
                held = [values for part in (store, store._cache) for values in (part.flat, *part.states().values())]
                results[name]["here"] = sum(values.nbytes for values in held)
        results["fetched as needed"]["there"] = sum(servers.nbytes()) / (len(SHARES) + 1)  # as many models
        return results


def _trained(
    stream: Stream,
    plan: Any,
    profiles: Any,
    compressed: Any,
    *,
    ahead: int,
    factors: dict[str, float] | None = None,
    **sharder: Any,
) -> tuple[Callable[[], object], Any]:
    """A step, and the store of rows; ``ahead`` of 0 for a plain loop, which tells nobody of its batches."""
    torch.manual_seed(0)
    sharders: list[Any] = [FlexShardEmbeddingCollectionSharder(dict(FUSED), cache_load_factors=factors, **sharder)]
    model: Any = Model(collection(stream), DLRM(len(stream.rows)), list(stream.rows))
    if compressed:
        model, _ = compress(model, compressed, decompose=False)
    planned = FlexShardPlanner(plan, profiles=profiles).collective_plan(model, sharders)
    model = DistributedModelParallel(model, plan=planned, sharders=sharders, device=HOST)
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    optimizer: Any = CombinedOptimizer([model.fused_optimizer, dense])
    batches = stream.batches(0, 64)
    rows = model.module.tables.collection if compressed else model.module.tables
    stores = [group.store for group in rows.groups]
    store = next((one for one in stores if isinstance(one, CachedStore)), stores[0])
    if ahead:
        return partial(LookaheadPipeline(model, optimizer, HOST, lookahead=ahead).progress, batches), store

    def step() -> None:
        optimizer.zero_grad()
        model(next(batches))[0].backward()
        optimizer.step()

    return step, store


if __name__ == "__main__":
    main()
