"""Memory that a step allocates on live ranks, beside what the plan predicts and what a replay of its batches counts.

    python -m benchmarks.step_memory

Four processes with gloo. Allocations are those of PyTorch's CPU allocator in a step (forward, backward, fused update),
as its profiler records them: rows in all their copies, gradients, ids; the model keeps the rows to the step's end.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import numpy as np
import torch
from tests.executors import ranks
from torch.profiler import ProfilerActivity, profile as profiled
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from flexshard import AccessProfile, Cluster, FlexShardEmbeddingCollectionSharder, FlexShardPlanner, Table, solve
from flexshard._internal import as_text, new_grid
from flexshard.executors import Lookups, replay
from flexshard.topologies import CollectiveRate, Level

ROWS, STEPS, LENGTH = 100_000, 12, 10
KINDS = {"row-wise": {"tiers": 1}, "tiers": {"tiers": 3, "budget": "+40MB"}, "tiers, ids once": {"index_dedup": True}}


def the_profile() -> AccessProfile:
    return AccessProfile.from_ids(ids_of(0, 60_000), lengths=np.full(60_000, LENGTH), num_rows=ROWS)


def ids_of(seed: int, samples: int) -> np.ndarray:
    return np.random.default_rng(seed).zipf(1.2, samples * LENGTH) % ROWS


def plan_of(dim: int, batch: int, kind: str) -> Any:
    rates = (CollectiveRate(1e-5, 1e9), CollectiveRate(1e-5, 1e10))
    levels = (Level(1, None, rates[0]), Level(2, rates[1], rates[0]), Level(4, rates[0], None))
    cluster = Cluster("four", 2, 2, 8e9, 0.0, levels)
    how = {"batch_size": batch, "index_dedup": False, "sample_order": "shuffled", **KINDS[kind]}
    return solve([Table("t", ROWS, dim, the_profile())], cluster, **how)


class Loss(torch.autograd.Function):
    """What comes after embeddings: gradients, and nothing else."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:  # noqa: D102 - as of torch
        ctx.shape = rows.shape
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> torch.Tensor:  # noqa: D102 - as of torch
        return torch.ones(ctx.shape)


def rank_work(rank: int, dim: int, batch: int, kind: str) -> list[int]:
    """Most bytes allocated above what a step begins with, of each step."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    collection: Any = EmbeddingCollection(
        tables=[EmbeddingConfig(name="t", num_embeddings=ROWS, embedding_dim=dim, feature_names=["f"])]
    )
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.01})
    sharders: list[Any] = [FlexShardEmbeddingCollectionSharder({})]
    model = torch.nn.Sequential(collection)
    plan = FlexShardPlanner(plan_of(dim, batch, kind), profiles={"t": the_profile()}).collective_plan(model, sharders)
    model = DistributedModelParallel(model, plan=plan, sharders=sharders, device=torch.device("cpu"))

    def step(number: int) -> None:
        ids = torch.from_numpy(ids_of(1 + number * 4 + rank, batch))
        features = KeyedJaggedTensor(["f"], ids, lengths=torch.full((batch,), LENGTH))
        rows = model(features)["f"].values()
        Loss.apply(rows).backward()

    step(0)
    found = []
    for number in range(STEPS):
        with profiled(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            step(number)
        events = sorted(
            (event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"),
            key=lambda event: event.start_ns(),
        )
        found.append(int(np.cumsum([event.nbytes() for event in events]).max(initial=0)))
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    grid = new_grid(
        f"Bytes allocated in a step, fullest rank, {STEPS} steps of 4 ranks",
        ["plan"],
        [
            "D",
            "B",
            "allocated, median",
            "counted by replay",
            "counted/allocated",
            "most allocated",
            "p99.9",
            "over most",
        ],
    )
    for dim, batch in ((32, 2048), (128, 512), (128, 2048)):
        for kind in KINDS:
            seen = np.array(ranks.run(2, 2, rank_work, dim, batch, kind)).max(axis=0)
            plan = plan_of(dim, batch, kind)
            counted = replay(plan, batches(batch), {"t": the_profile()}).fullest_memory_bytes.max(axis=1)
            said = plan.predicted.fullest_dynamic_bytes
            cells = [f"{np.median(seen) / 2**20:.2f} MiB", f"{counted.mean() / 2**20:.2f} MiB"]
            cells += [f"{counted.mean() / np.median(seen):.3f}", f"{seen.max() / 2**20:.2f} MiB"]
            grid.add_row(kind, str(dim), f"{batch:,}", *cells, f"{said / 2**20:.2f} MiB", f"{said / seen.max():.3f}")
    print(as_text(grid))


def batches(batch: int) -> list[dict[str, Lookups]]:
    rank = np.repeat(np.arange(4), batch * LENGTH)
    return [
        {"t": Lookups(np.concatenate([ids_of(1 + number * 4 + of, batch) for of in range(4)]), rank)}
        for number in range(STEPS)
    ]


if __name__ == "__main__":
    main()
