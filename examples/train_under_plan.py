"""Train a model under a plan on two processes of this machine, without a launcher: its tables split and copied by row.

python examples/train_under_plan.py [--steps 20]
"""

from __future__ import annotations

import argparse
import gc
import tempfile

import torch
from torch import distributed, multiprocessing, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from flexshard import AccessProfile, Cluster, FlexShardEmbeddingCollectionSharder, FlexShardPlanner
from one_line import run_example

ROWS = 5_000


def batch(seed: int) -> KeyedJaggedTensor:
    ids = (ROWS ** torch.rand(320, generator=torch.Generator().manual_seed(seed))).long() - 1
    return KeyedJaggedTensor(["clicks"], ids, lengths=torch.full((64,), 5))


def train(rank: int, store: str, steps: int) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    take_steps(rank, steps)
    distributed.destroy_process_group()
    gc.collect()  # gloo's threads end with their group, which models hold in cycles; later they may abort it all


def take_steps(rank: int, steps: int) -> None:
    torch.manual_seed(0)
    table = EmbeddingConfig(name="articles", num_embeddings=ROWS, embedding_dim=16, feature_names=["clicks"])
    model = nn.Sequential(EmbeddingCollection([table], device=torch.device("meta")))
    profile = AccessProfile.from_ids(torch.cat([batch(seed).values() for seed in range(99)]).numpy(), num_rows=ROWS)
    sharders = [FlexShardEmbeddingCollectionSharder({"learning_rate": 0.1})]
    planner = FlexShardPlanner(
        profiles={"articles": profile}, cluster=Cluster.preset("gloo-localhost", 1), batch_size=64
    )
    model = DistributedModelParallel(model, plan=planner.collective_plan(model, sharders), sharders=sharders)
    for step in range(steps):
        rows = model(batch(1_000 * rank + step))["clicks"].values()
        loss = (rows.sum(1) - 1).square().mean()
        loss.backward()  # which updates the tables, too
        if rank == 0 and step in (0, steps - 1):
            print(f"step {step}: loss {float(loss):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train, (f"{folder}/store", parser.parse_args().steps), nprocs=2)


if __name__ == "__main__":
    run_example(main)
