"""Row-wise rows dealt to the ranks by id, beside dealt by popularity: how even the load is, and what a step takes.

The same plan trains on the same samples twice, with ids as they were logged and with ids in order of popularity, in
which dealing by id is dealing by popularity. Items of Globo.com clicks by session, and the table of an e-commerce
application with most lookups; nodes are network namespaces with links between them (root).

    python -m benchmarks.row_balance DATA [--nodes 2] [--ranks 4] [--batch-size 256]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

import flexshard
from benchmarks.timing import paired_medians
from flexshard import AccessProfile, FlexShardEmbeddingCollectionSharder, FlexShardPlanner, Table
from flexshard.executors import replay, split_by_rank
from flexshard.topologies import Cluster, CollectiveRate, Level

DIM, BLOCKS, STEPS, REPLAYED = 64, 9, 8, 50
LINK_MBIT = (2000.0, 1000.0, 8000.0)  # of a node, to one other node, inside a node
Samples = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def globo(folder: Path) -> Samples:
    """Items of each session, sessions in order of time."""
    table = pq.read_table(folder / "globo_clicks.parquet").sort_by([("timestamp", "ascending")])
    _, session = np.unique(table["session_id"].to_numpy(), return_inverse=True)
    order = np.argsort(session, kind="stable")
    return _of(table["item_id"].to_numpy()[order]), np.bincount(session)


def ecommerce(folder: Path) -> Samples:
    """Rows of the table with most lookups, in order, 20 to a sample."""
    table = pq.read_table(folder / "ecommerce_orm_busy.parquet")
    busiest = pc.mode(table["table_id"])[0]["mode"]
    ids = _of(table.filter(pc.equal(table["table_id"], busiest))["entity_id"].to_numpy())
    samples = len(ids) // 20
    return ids[: samples * 20], np.full(samples, 20)


def _of(ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.unique(ids, return_inverse=True)[1].astype(np.int64)


def by_popularity(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The same ids, renumbered from the most popular on."""
    order = np.argsort(-np.bincount(ids), kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(order.size)
    return position[ids]


def cluster_of(nodes: int, width: int) -> Cluster:
    rate = CollectiveRate(1e-5, 1e9)
    sizes = sorted({1, width, nodes * width})
    levels = tuple(Level(g, rate if g > 1 else None, rate if g < sizes[-1] else None) for g in sizes)
    return Cluster("any", nodes, width, 1e10, 0.0, levels)


def planned(samples: Samples, nodes: int, width: int, batch_size: int) -> tuple[flexshard.Plan, AccessProfile]:
    """One percent of the rows may have copies; all others are row-wise."""
    profile = AccessProfile.from_ids(samples[0], lengths=samples[1])
    spare = 0.01 * profile.num_rows * DIM * 4 * 3
    table = Table("t", profile.num_rows, DIM, profile)
    cluster = cluster_of(nodes, width)
    plan = flexshard.solve([table], cluster, batch_size=batch_size, budget=f"+{spare:.0f}B", tiers=2, index_dedup=False)
    return plan, profile


def model_of(plan: flexshard.Plan, profile: AccessProfile) -> Any:
    torch.manual_seed(0)
    config = EmbeddingConfig(name="t", num_embeddings=profile.num_rows, embedding_dim=DIM, feature_names=["f"])
    model, sharders = EmbeddingCollection(tables=[config]), [FlexShardEmbeddingCollectionSharder({})]
    sharding = FlexShardPlanner(plan, profiles={"t": profile}).collective_plan(model, sharders)
    return DistributedModelParallel(model, plan=sharding, sharders=sharders, device=torch.device("cpu"))


def batches(samples: Samples, batch_size: int) -> list[KeyedJaggedTensor]:
    """This rank's samples of the first steps, dealt to the ranks in turn."""
    made, rank, world = [], dist.get_rank(), dist.get_world_size()
    starts = np.concatenate([[0], np.cumsum(samples[1])])
    for step in range(STEPS):
        mine = np.arange(step * batch_size * world + rank, (step + 1) * batch_size * world, world)
        ids = np.concatenate([samples[0][starts[i] : starts[i + 1]] for i in mine.tolist()])
        made.append(KeyedJaggedTensor(["f"], torch.from_numpy(ids), lengths=torch.from_numpy(samples[1][mine])))
    return made


def step(run: tuple[Any, list[KeyedJaggedTensor]], number: int) -> None:
    model, data = run
    (model(data[number])["f"].values() ** 2).sum().backward()


def run_rank(data: Path, nodes: int, batch_size: int, result: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, width = dist.get_rank(), dist.get_world_size() // nodes
    found = {}
    for name, read in (("globo items", globo), ("e-commerce rows", ecommerce)):
        ids, lengths = read(data)
        runs = {}
        for dealt, numbered in (("by id", ids), ("by popularity", by_popularity(ids))):
            plan, profile = planned((numbered, lengths), nodes, width, batch_size)
            runs[dealt] = model_of(plan, profile), batches((numbered, lengths), batch_size)
        times = paired_medians(runs, step, list(range(STEPS)), blocks=BLOCKS, barrier=dist.barrier)
        found[name] = [statistics.median(a / b for a, b in zip(times["by id"], times["by popularity"], strict=True))]
        found[name] += [statistics.median(times[dealt]) for dealt in times]
    if rank == 0:
        result.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def imbalance(samples: Samples, nodes: int, width: int, batch_size: int) -> tuple[float, float, float]:
    """Ids of the busiest rank over the mean: over all steps, and in the median step; and the share of row-wise."""
    plan, profile = planned(samples, nodes, width, batch_size)
    taken = samples[1][: REPLAYED * batch_size * nodes * width]
    data = {"t": (samples[0][: int(taken.sum())], taken)}
    steps = list(split_by_rank(data, world_size=nodes * width, batch_size=batch_size))
    traffic = replay(plan, steps, {"t": profile}).find("ids", nodes * width)
    assert traffic is not None
    served = traffic.received
    in_all = served.sum(axis=0)
    row_wise = plan.tables["t"].tiers[-1].covered
    return in_all.max() / in_all.mean(), float(np.median(served.max(axis=1) / served.mean(axis=1))), row_wise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of globo_clicks.parquet and ecommerce_orm_busy.parquet")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rank-result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_result is not None:
        run_rank(args.data, args.nodes, args.batch_size, args.rank_result)
    for name, read in (("globo items", globo), ("e-commerce rows", ecommerce)):
        ids, lengths = read(args.data)
        for nodes, width in ((args.nodes, args.ranks // args.nodes), (4, 8)):
            for dealt, numbered in (("by id", ids), ("by popularity", by_popularity(ids))):
                whole, median, share = imbalance((numbered, lengths), nodes, width, args.batch_size)
                print(
                    f"{name}, {nodes} x {width} ranks, {dealt}: the busiest rank gets {whole:.3f} of the mean's"
                    f" row-wise ids, in the median step {median:.3f} ({share:.0%} of reads are row-wise)"
                )
    from benchmarks.cluster.network import Network, network

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        arguments = [args.data.resolve(), "--nodes", args.nodes, "--batch-size", args.batch_size]
        arguments += ["--rank-result", result]
        with network(Network(args.nodes, args.ranks // args.nodes, *LINK_MBIT)) as built:
            built.run("benchmarks.row_balance", [str(value) for value in arguments], timeout_s=900)
        for name, (ratio, by_id, popular) in json.loads(result.read_text()).items():
            print(f"{name}: {by_id * 1e3:.1f} ms a step by id, {popular * 1e3:.1f} by popularity: {ratio:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
