"""A DLRM of 26 pooled tables and one sequence, planned and trained as a whole, and beside TorchRec's plan.

Tables have the sizes of Criteo's Kaggle data, scaled down; ids are drawn by a power law. Three plans: all tables as one
problem under FlexShard's costs; the sequence's rows by FlexShard and the pooled tables by TorchRec's costs, with
OptimalShardingPlanner; and all by TorchRec's planner. TorchRec's sharders run pooled tables, ours the sequence of the
first two plans, after which rank 0 trains the model unsharded on the same batches: weights must be equal.

    torchrun --nproc-per-node 4 examples/dlrm.py
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from flexshard import (
    AccessProfile,
    Cluster,
    FlexShardEmbeddingCollectionSharder,
    FlexShardPlanner,
    OptimalShardingPlanner,
)
from flexshard.executors import full_state_dict
from one_line import check_launched, run_example

# Distinct values of the 26 categorical columns of Criteo's Kaggle display advertising data.
CRITEO = (
    *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194),
    *(27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
NUMBERS, DIM, HISTORY = 13, 16, 20  # dense features, embedding dimension, mean length of the sequence
EXPONENT = 1.1  # of the power law that ids follow
ITEMS = 8_351_593
LEARNING_RATE = 0.05
FUSED = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE}
RANKS_PER_NODE = 2  # of the cluster that is planned for: four processes stand for two nodes


def pooled_tables(scale: int) -> dict[str, int]:
    """Rows of the pooled tables."""
    return {f"c{i}": max(rows // scale, 3) for i, rows in enumerate(CRITEO)}


def item_rows(scale: int) -> int:
    """Rows of the sequence's table."""
    return max(ITEMS // scale, 3)


class DLRM(nn.Module):
    """Dot products of what the tables and the dense features say about a sample, and a network on top."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.pooled = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
                for name, rows in pooled_tables(scale).items()
            ]
        )
        items = EmbeddingConfig(
            name="articles", embedding_dim=DIM, num_embeddings=item_rows(scale), feature_names=["items"]
        )
        self.history = EmbeddingCollection(tables=[items])
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 64), nn.ReLU(), nn.Linear(64, DIM))
        self.attention = nn.Linear(DIM, 1)
        vectors = len(CRITEO) + 2
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, 1), persistent=False)
        self.top = nn.Sequential(nn.Linear(DIM + vectors * (vectors - 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: Tensor, categories: KeyedJaggedTensor, items: KeyedJaggedTensor) -> Tensor:
        """Logits, shape (samples,)."""
        dense = self.bottom(numbers)
        looked_up = self.pooled(categories).to_dict()
        pooled = [looked_up[f"c{i}"] for i in range(len(CRITEO))]  # sharded ones come in another order
        clicked = self.history(items)["items"].to_padded_dense(2 * HISTORY)
        weights = torch.softmax(self.attention(clicked).squeeze(-1), dim=1)
        history = (weights[:, :, None] * clicked).sum(dim=1)
        vectors = torch.stack([dense, *pooled, history], dim=1)
        products = (vectors @ vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, products], dim=1)).squeeze(1)


class Data:
    """Batches that every rank can draw for any rank: ids by a power law, labels that depend on some of them."""

    def __init__(self, scale: int, batch_size: int, seed: int) -> None:
        self._rows, self._items = list(pooled_tables(scale).values()), item_rows(scale)
        self._batch_size, self._seed = batch_size, seed

    def batch(self, step: int, ranks: list[int]) -> tuple[Tensor, KeyedJaggedTensor, KeyedJaggedTensor, Tensor]:
        """Dense features, categories, sequences and labels of some ranks, one after another."""
        parts = [self._drawn(step, rank) for rank in ranks]
        size = self._batch_size * len(ranks)
        numbers = np.concatenate([part[0] for part in parts])
        categories = np.concatenate([part[1] for part in parts], axis=1)
        lengths = np.concatenate([part[2] for part in parts])
        items = np.concatenate([part[3] for part in parts])
        labels = np.concatenate([part[4] for part in parts])
        names = [f"c{i}" for i in range(len(CRITEO))]
        one_each = torch.ones(len(names) * size, dtype=torch.long)
        return (
            torch.from_numpy(numbers),
            KeyedJaggedTensor(keys=names, values=torch.from_numpy(categories.ravel()), lengths=one_each),
            KeyedJaggedTensor(keys=["items"], values=torch.from_numpy(items), lengths=torch.from_numpy(lengths)),
            torch.from_numpy(labels),
        )

    def profiles(self, batches: int) -> dict[str, AccessProfile]:
        """How often the rows of each table are read, counted over batches of rank 0."""
        drawn = [self._drawn(step, 0) for step in range(batches)]
        ids = {f"c{i}": np.concatenate([part[1][i] for part in drawn]) for i in range(len(self._rows))}
        rows = {f"c{i}": number for i, number in enumerate(self._rows)} | {"articles": self._items}
        ids["articles"] = np.concatenate([part[3] for part in drawn])
        return {
            name: AccessProfile.from_counts(np.bincount(read, minlength=rows[name]), batches * self._batch_size)
            for name, read in ids.items()
        }

    def _drawn(self, step: int, rank: int) -> tuple[np.ndarray[Any, Any], ...]:
        rng = np.random.default_rng([self._seed, step, rank])
        size = self._batch_size
        numbers = rng.standard_normal((size, NUMBERS), dtype=np.float32)
        categories = np.stack([skewed(rng, rows, size) for rows in self._rows])
        lengths = rng.integers(1, 2 * HISTORY, size)
        items = skewed(rng, self._items, int(lengths.sum()))
        labels = ((categories[0] + categories[1] + (numbers[:, 0] > 0)) % 2).astype(np.float32)
        return numbers, categories, lengths, items, labels


def skewed(rng: np.random.Generator, rows: int, number: int) -> np.ndarray[Any, Any]:
    """Ids by a power law, cut off at the number of rows."""
    power = 1 - EXPONENT
    drawn = (((rows + 1) ** power - 1) * rng.random(number) + 1) ** (1 / power)
    return np.minimum(drawn.astype(np.int64) - 1, rows - 1)


def sharders(flexshard: bool) -> list[Any]:
    """Of both kinds of collections; ours for the sequence."""
    sequence = FlexShardEmbeddingCollectionSharder if flexshard else EmbeddingCollectionSharder
    return [EmbeddingBagCollectionSharder(FUSED), sequence(FUSED)]


def train(model: DLRM, plan: ShardingPlan, kinds: list[Any], data: Data, steps: int) -> tuple[Any, Any, list[float]]:
    """The sharded model's weights before and after, on rank 0, and seconds of each step."""
    parallel = DistributedModelParallel(model, plan=plan, sharders=kinds, device=torch.device("cpu"))
    rest = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE))
    optimizer = CombinedOptimizer([parallel.fused_optimizer, dense])
    before, times = full_state_dict(parallel), []
    for step in range(steps):
        numbers, categories, items, labels = data.batch(step, [dist.get_rank()])
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        logits = parallel(numbers, categories, items)
        nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        optimizer.step()
        dist.barrier()
        times.append(time.perf_counter() - start)
    return before, full_state_dict(parallel), times


def largest_difference(
    before: dict[str, Tensor], after: dict[str, Tensor], scale: int, data: Data, steps: int
) -> float:
    """Between trained weights and those of the unsharded model, trained on all ranks' batches at once."""
    model = DLRM(scale)
    model.load_state_dict(before)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        numbers, categories, items, labels = data.batch(step, list(range(dist.get_world_size())))
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(numbers, categories, items), labels).backward()
        optimizer.step()
    return max(float((after[name] - weight).abs().max()) for name, weight in model.state_dict().items())


def described(plan: ShardingPlan) -> str:
    """How many tables are sharded in what way."""
    kinds = Counter(how.sharding_type for shardings in plan.plan.values() for how in shardings.values())
    return ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan and train a DLRM with pooled tables and a sequence.")
    parser.add_argument("--scale", type=int, default=100, help="by what Criteo's tables are divided")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=256, help="per rank")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    check_launched(parser, ranks=4)
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:  # one machine's processes stand for two nodes
        os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_NODE)
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % RANKS_PER_NODE)
    dist.init_process_group("gloo")
    try:
        run(args)
    finally:
        dist.destroy_process_group()


def run(args: argparse.Namespace) -> None:
    """Plan, train and compare."""
    first, world = dist.get_rank() == 0, dist.get_world_size()
    data = Data(args.scale, args.batch_size, args.seed)
    cluster = Cluster.load(Path(__file__).with_name("cluster_2x2.yaml"))
    constraints = {name: ParameterConstraints(pooling_factors=[1.0]) for name in pooled_tables(args.scale)}
    constraints["articles"] = ParameterConstraints(pooling_factors=[float(HISTORY)])
    given: dict[str, Any] = {
        "topology": Topology(world_size=world, local_world_size=RANKS_PER_NODE, compute_device="cpu"),
        "batch_size": args.batch_size,
        "constraints": constraints,
        "storage_reservation": FixedPercentageStorageReservation(0.1),
    }

    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    rows = sum(pooled_tables(args.scale).values())
    say(f"{len(CRITEO)} pooled tables with {rows:,} rows, a sequence over {item_rows(args.scale):,}; {world} ranks")
    torch.manual_seed(args.seed)
    profiles = data.profiles(40)
    pooled = OptimalShardingPlanner(**given)
    planners = {
        "one problem": FlexShardPlanner(profiles=profiles, cluster=cluster, batch_size=args.batch_size, budget="64MiB"),
        "TorchRec's costs": FlexShardPlanner(
            profiles={"articles": profiles["articles"]},
            cluster=cluster,
            batch_size=args.batch_size,
            torchrec_planner=pooled,
            constraints={name: each for name, each in constraints.items() if name != "articles"},
        ),
    }
    medians = {}
    for name, planner in planners.items():
        kinds = sharders(flexshard=True)
        model = DLRM(args.scale)
        plan = planner.collective_plan(model, kinds)
        say(f"{name}: {described(plan)}")
        solved = planner.solved
        assert solved is not None
        tiers = ", ".join(f"{tier.strategy} {tier.rows:,}" for tier in solved.tables["articles"].tiers)
        say(f"    rows of the sequence: {tiers}")
        if solved.pooled:
            seconds, row_wise = (one.exposed_seconds for one in (solved.predicted, solved.baselines["row_wise"]))
            gap = seconds / solved.lower_bound_seconds - 1
            say(
                f"    {1e3 * seconds:.3f} ms of communication predicted, at most {100 * gap:.2f} % above the optimum;"
                f" row-wise {row_wise / seconds:.2f} times as much"
            )
        elif first:
            say(f"    pooled tables: {pooled.summary}")
        before, after, times = train(model, plan, kinds, data, args.steps)
        medians[name] = statistics.median(times)
        if first:
            moved = max(float((after[key] - weight).abs().max()) for key, weight in before.items())
            difference = largest_difference(before, after, args.scale, data, args.steps)
            say(f"    {args.steps} steps moved weights by up to {moved:.1e}, at most {difference:.1e} from unsharded")
    torchrec = EmbeddingShardingPlanner(**given)
    kinds = sharders(flexshard=False)
    model = DLRM(args.scale)
    plan = torchrec.collective_plan(model, kinds)
    say(f"TorchRec's planner: {described(plan)}")
    if first:
        options = [option for option in torchrec._best_plan or [] if option.name != "articles"]
        rating = NoopPerfModel(given["topology"]).rate(options)
        say(f"    pooled tables: {rating:.4g} ms by TorchRec's estimators, {rating / pooled.rating:.2f} times ours")
    _, _, times = train(model, plan, kinds, data, args.steps)
    medians["TorchRec's planner"] = statistics.median(times)
    shown = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in medians.items())
    say(f"median step on processes of one machine: {shown}")


if __name__ == "__main__":
    run_example(main)
