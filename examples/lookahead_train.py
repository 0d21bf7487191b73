"""A table of which a tenth fits: its rows stay in the host's memory, those of the next batches in a cache.

With a cache that knows batches ahead and with all rows in the ranks' memory, losses and weights are the same bits.
    torchrun --nproc-per-node 4 examples/lookahead_train.py
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from flexshard import AccessProfile, Cluster, FlexShardEmbeddingCollectionSharder, FlexShardPlanner
from flexshard.executors import LookaheadPipeline, full_state_dict
from one_line import check_launched, run_example

ROWS, DIM, SAMPLES, CLICKS, STEPS = 400_000, 32, 256, 20, 60


class Model(nn.Module):
    """A layer over the sum of the last clicks' rows; the label is made up."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="articles", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["clicks"])
        self.tables = EmbeddingCollection(tables=[table])
        self.over = nn.Linear(DIM, 1)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, twice: to train on, and to look at."""
        rows = self.tables(batch)["clicks"].values().view(SAMPLES, CLICKS, DIM)
        labels = (batch.values().view(SAMPLES, CLICKS)[:, -1:] % 2).float()
        loss = nn.functional.binary_cross_entropy_with_logits(self.over(rows.sum(1)), labels)
        return loss, loss.detach()


def batches(steps: int, seed: int) -> list[KeyedJaggedTensor]:
    """Ids by a power law, of rows in an order that has nothing to do with popularity."""
    order, rng = np.random.default_rng(1).permutation(ROWS), np.random.default_rng([2, seed])
    drawn = torch.from_numpy(order[(ROWS ** rng.random((steps, SAMPLES * CLICKS))).astype(np.int64) - 1])
    return [KeyedJaggedTensor(["clicks"], ids, lengths=torch.full((SAMPLES,), CLICKS)) for ids in drawn]


def train(caches: dict[str, float]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and on rank 0 the weights, with a share of some tables' rows in caches."""
    seen = np.concatenate([batch.values() for batch in batches(50, 1000)])
    profile = AccessProfile.from_counts(np.bincount(seen, minlength=ROWS), num_samples=50 * SAMPLES)
    cluster = Cluster.load(Path(__file__).with_name("cluster_2x2.yaml"))
    torch.manual_seed(0)
    model: Any = Model()
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
    sharders = [FlexShardEmbeddingCollectionSharder(fused, cache_load_factors=caches)]
    planner = FlexShardPlanner(profiles={"articles": profile}, cluster=cluster, batch_size=SAMPLES)
    model = DistributedModelParallel(model, plan=planner.collective_plan(model, sharders), sharders=sharders)
    dense = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())), torch.optim.Adam)
    optimizer: Any = CombinedOptimizer([model.fused_optimizer, dense])
    pipeline = LookaheadPipeline(model, optimizer, torch.device("cpu"), delayed_sync=bool(caches))
    source, start = iter(batches(STEPS, dist.get_rank())), time.perf_counter()
    losses = [float(pipeline.progress(source)) for _ in range(STEPS)]
    if dist.get_rank() == 0:
        milliseconds, done = (time.perf_counter() - start) / STEPS * 1e3, pipeline.traffic()
        print(f"caches {caches or 'none'}: {milliseconds:.1f} ms a step, last loss {losses[-1]:.4f}")
        if done.batches:
            read, fetched = done.distinct // done.batches, done.fetched // done.batches
            print(f"  rank 0 reads {read:,} rows a step, fetches {fetched:,}; lookahead {pipeline.lookahead}")
    return losses, full_state_dict(model)


def main() -> None:
    parser = argparse.ArgumentParser(description="A table in the host's memory behind a cache.")
    parser.add_argument("--share", type=float, default=0.1, help="of the rows without copies, in the cache")
    args = parser.parse_args()
    check_launched(parser, ranks=4)
    warnings.simplefilter("ignore")
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # one machine's processes stand for two nodes
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    (losses, weights), (ours, our_weights) = train({}), train({"articles": args.share})
    assert losses == ours, "losses differ"
    assert all(torch.equal(value, our_weights[name]) for name, value in weights.items()), "weights differ"
    print(f"rank {dist.get_rank()}: losses of {STEPS} steps, {len(weights)} weights: equal to the last bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_example(main)
