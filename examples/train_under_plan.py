"""Train a model under a plan on two processes of this machine, without a launcher: its tables split and copied by row.

python examples/train_under_plan.py [--steps 20]
"""

import argparse

import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from flexshard import AccessProfile, Cluster, FlexShardEmbeddingCollectionSharder, FlexShardPlanner
from one_line import run_example
from two_ranks import run_ranks

ROWS, BATCH = 5_000, 64


def batch(seed: int) -> KeyedJaggedTensor:
    ids = (ROWS ** torch.rand(5 * BATCH, generator=torch.Generator().manual_seed(seed))).long() - 1
    return KeyedJaggedTensor(["clicks"], ids, lengths=torch.full((BATCH,), 5))


def train(rank: int, steps: int) -> None:
    table = EmbeddingConfig(name="articles", num_embeddings=ROWS, embedding_dim=16, feature_names=["clicks"])
    model = nn.Sequential(EmbeddingCollection([table], device=torch.device("meta")))
    profile = AccessProfile.from_ids(torch.cat([batch(seed).values() for seed in range(99)]).numpy(), num_rows=ROWS)
    cluster = Cluster.preset("gloo-localhost", 1)
    sharders = [FlexShardEmbeddingCollectionSharder({"learning_rate": 0.1})]
    planner = FlexShardPlanner(profiles={"articles": profile}, cluster=cluster, batch_size=BATCH)
    model = DistributedModelParallel(model, plan=planner.collective_plan(model, sharders), sharders=sharders)
    for step in range(steps):
        loss = (model(batch(1_000 * rank + step))["clicks"].values().sum(1) - 1).square().mean()
        loss.backward()  # which updates the tables, too
        if rank == 0 and step in (0, steps - 1):
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    run_example(lambda: run_ranks(train, parser.parse_args().steps))
