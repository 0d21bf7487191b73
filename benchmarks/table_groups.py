"""Fifty tables in 1, 10 and 50 groups (dimension, optimizer, learning rate): collectives and time of a step.

Rows and bytes are the same whatever the groups: 48 numbers a row on average, in one group all of them, in ten groups
five widths under two optimizers, in fifty each table with a learning rate of its own. Every table has a tier of copies.
TorchRec's collections have one width each, so ten groups are five modules, which share one exchange: in TorchRec's
training pipeline, which begins all modules' distribution together, and in a plain loop that calls ``start_input_dist``;
without that each has its own. One group is measured in one module and in five as well, which tells what groups cost
from what modules do; and with either optimizer, since half of ten groups have the dearer one: what groups cost is told
against the mean of both. The batch size is that which TorchRec's planner takes if it is told none.

    python -m benchmarks.table_groups [--ranks 4] [--batch-size 512] [--network]

With ``--network`` (root) nodes are network namespaces with links between them, as ``benchmarks.cluster`` makes them. To
measure another tree, put its ``src`` into PYTHONPATH.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import flexshard
from benchmarks.timing import paired_medians
from flexshard import FlexShardEmbeddingCollectionSharder, FlexShardPlanner
from flexshard.executors import Observer, start_input_dist
from flexshard.topologies import Cluster, CollectiveRate, Level

TABLES, ROWS, LENGTH = 50, 20_000, 4
WIDTHS = (16, 32, 48, 64, 80)
OPTIMIZERS = {"SGD": torch.optim.SGD, "row-wise Adagrad": RowWiseAdagrad}
BOTH = "both"
SHAPES = (  # groups, modules that they are in, optimizers
    *((1, modules, optimizer) for modules in (1, 5) for optimizer in OPTIMIZERS),
    (10, 5, BOTH),
    (50, 5, BOTH),
)
BLOCKS, STEPS = 9, 6
LINK_MBIT = (2000.0, 1000.0, 8000.0)  # of a node, to one other node, inside a node


def title(loop: str, groups: int, modules: int, optimizer: str) -> str:
    return f"{loop}, groups in modules: {groups} in {modules}, {optimizer}"


@torch.fx.wrap  # what a pipeline looks into is which modules take which part of the batch
def loss_of(outputs: list[Any]) -> torch.Tensor:
    squares = [(jagged.values() ** 2).sum() for output in outputs for jagged in output.values()]
    assert len(squares) == TABLES
    return torch.stack(squares).sum()


class Model(nn.Module):
    """Ten tables of each width in a collection of their own, as TorchRec has it; all of the mean width if they are one
    group, in one collection or as many as the others.
    """

    def __init__(self, groups: int, modules: int = len(WIDTHS), optimizer: str = BOTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        for number, width in enumerate(WIDTHS[:modules]):
            dim = 48 if groups == 1 else width
            members = [index for index in range(TABLES) if index % modules == number]
            collection: Any = EmbeddingCollection(
                tables=[
                    EmbeddingConfig(name=f"t{i}", num_embeddings=ROWS, embedding_dim=dim, feature_names=[f"f{i}"])
                    for i in members
                ]
            )
            for index in members:
                kind = list(OPTIMIZERS)[index // 5 % 2] if optimizer == BOTH else optimizer
                rate = 0.05 + (0.001 * (index // 10) if groups == TABLES else 0.0)
                weight = collection.embeddings[f"t{index}"].weight
                apply_optimizer_in_backward(OPTIMIZERS[kind], [weight], {"lr": rate})
            self.add_module(f"d{number}", collection)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, twice: as pipelines want it."""
        loss = loss_of([module(batch) for module in self.children()])
        return loss, loss


def plan_of(model: Any, nodes: int, width: int, batch_size: int) -> DistributedModelParallel:
    world = nodes * width
    rate = CollectiveRate(1e-5, 1e9)
    levels = tuple(Level(g, rate if g > 1 else None, rate if g < world else None) for g in sorted({1, width, world}))
    cluster = Cluster("any", nodes, width, 1e10, 0.0, levels)
    counts = np.maximum(1, (1e6 / np.arange(1, ROWS + 1)).astype(np.int64))
    profile = flexshard.AccessProfile.from_counts(counts, num_samples=int(counts.sum() // LENGTH))
    profiles = {f"t{index}": profile for index in range(TABLES)}
    sharders: list[Any] = [FlexShardEmbeddingCollectionSharder({})]
    budget = 0.1 * TABLES * ROWS * 4 * 48
    planner = FlexShardPlanner(
        profiles=profiles,
        cluster=cluster,
        batch_size=batch_size,
        budget=f"+{budget:.0f}B",
        tiers=2,
        reduction="dense",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = planner.collective_plan(model, sharders)
    return DistributedModelParallel(model, plan=plan, sharders=sharders, device=torch.device("cpu"))


def batches(rank: int, batch_size: int) -> list[KeyedJaggedTensor]:
    generator = np.random.default_rng(rank)
    p = 1.0 / np.arange(1, ROWS + 1)
    made = []
    for _ in range(STEPS):
        ids = torch.from_numpy(generator.choice(ROWS, TABLES * batch_size * LENGTH, p=p / p.sum()))
        lengths = torch.full((TABLES * batch_size,), LENGTH)
        made.append(KeyedJaggedTensor([f"f{i}" for i in range(TABLES)], ids, lengths=lengths))
    return made


class Plain:
    """A loop without a pipeline."""

    def __init__(self, model: Any, *, together: bool) -> None:
        """``together``: whether all modules' batch is begun before the first one's forward pass."""
        self._model, self._together = model, together

    def progress(self, batches: Iterator[KeyedJaggedTensor]) -> None:
        """A step."""
        batch = next(batches)
        if self._together:
            start_input_dist(self._model, batch)
        self._model(batch)[0].backward()


def run_rank(nodes: int, batch_size: int, result: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = batches(rank, batch_size)
    runs: dict[str, Any] = {}
    for shape in SHAPES:
        plain, model = (plan_of(Model(*shape), nodes, world // nodes, batch_size) for _ in range(2))
        loops = {
            "pipeline": TrainPipelineSparseDist(model, model.fused_optimizer, torch.device("cpu")),
            "plain loop": Plain(plain, together=False),
            "plain loop, begun together": Plain(plain, together=True),
        }
        for name, run in loops.items():
            runs[title(name, *shape)] = run, itertools.cycle(data)
    calls = {}
    for name, (run, stream) in runs.items():
        run.progress(stream)  # fills the pipeline
        with Observer() as observer:
            for _ in range(STEPS):
                run.progress(stream)
                observer.step()
        seen = observer.result().collectives
        calls[name] = sum(c.calls for c in seen), sum(c.bytes for c in seen)
    times = paired_medians(runs, lambda run, _: run[0].progress(run[1]), data, blocks=BLOCKS, barrier=dist.barrier)
    if rank == 0:
        result.write_text(json.dumps({name: [*calls[name], times[name]] for name in runs}))
    dist.barrier()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--network", action="store_true", help="nodes are network namespaces (root)")
    parser.add_argument("--rank-result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_result is not None:
        run_rank(args.nodes, args.batch_size, args.rank_result)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        arguments = ["--nodes", args.nodes, "--batch-size", args.batch_size, "--rank-result", result]
        if args.network:
            from benchmarks.cluster.network import Network, network

            with network(Network(args.nodes, args.ranks // args.nodes, *LINK_MBIT)) as built:
                built.run("benchmarks.table_groups", [str(value) for value in arguments], timeout_s=900)
        else:
            run_here(args.nodes, args.ranks, [str(value) for value in arguments], folder)
        found = json.loads(result.read_text())
    print(f"{TABLES} tables of {ROWS:,} rows, {args.ranks} ranks on {args.nodes} nodes, {args.batch_size} samples of")
    print(f"{LENGTH} ids a table and rank; medians of {BLOCKS} blocks; one group's: the mean of both optimizers")
    for name, (calls, nbytes, times) in found.items():
        shares = []
        for modules in (1, 5):
            one = [found[title(name.split(", groups")[0], 1, modules, optimizer)][2] for optimizer in OPTIMIZERS]
            base = [statistics.fmean(times) for times in zip(*one, strict=True)]
            shares.append(statistics.median(time / one for time, one in zip(times, base, strict=True)))
        print(
            f"{name:>72}: {calls:3.0f} collectives, {nbytes / 1e6:.2f} MB a rank and step,"
            f" {statistics.median(times) * 1e3:.1f} ms, {shares[0]:.2f} of one group's in one module,"
            f" {shares[1]:.2f} in five"
        )
    return 0


def run_here(nodes: int, ranks: int, arguments: list[str], folder: str) -> None:
    processes = []
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank % (ranks // nodes)),
            "LOCAL_WORLD_SIZE": str(ranks // nodes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29533",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "-m", "benchmarks.table_groups", *arguments]
        processes.append(subprocess.Popen(command, env=environment))
    if any(process.wait() for process in processes):
        raise SystemExit(f"a rank failed; its message is above ({folder})")


if __name__ == "__main__":
    sys.exit(main())
