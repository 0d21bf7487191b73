"""News recommendation on deduplicated batches (RecD): the same losses in a fraction of the time.

A sample is one article shown to a reader, with what the reader read before: the history is the same for all articles
of an impression. The log is clustered by impression; the reader keeps every distinct history of a batch once; the
model looks up and attends to distinct histories only. ``--plain`` trains on the same batches without any of it.

    python examples/recd_mind.py                                    # on generated sessions
    python examples/recd_mind.py --mind mind_sample.parquet         # on MIND: history, candidates, labels
    torchrun --nproc-per-node 4 examples/recd_mind.py --plain       # four processes, table split by rows
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from flexshard.embeddings import Deduped, DedupedEmbeddingCollection
from flexshard.ingestion import (
    DedupedTransform,
    SessionBatch,
    SessionReader,
    Truncate,
    cluster_sessions,
    suggest_groups,
)
from one_line import above_0, run_example
from sessions import write_generated, write_mind

DIM, HEADS, LONGEST = 64, 4, 50
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}


class Reader(nn.Module):
    """What a reader is after: self-attention over the history, then attention pooling (as NRMS has it)."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(0.02 * torch.randn(DIM))  # so that nobody has an empty history
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.query = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1))

    def forward(self, history: JaggedTensor) -> Tensor:
        """One vector per history; shape (rows, DIM)."""
        lengths = history.lengths()
        x = history.to_padded_dense(LONGEST)
        x = torch.cat([self.start.expand(x.shape[0], 1, DIM), x], 1)
        empty = torch.arange(LONGEST + 1) > lengths[:, None]
        x = x + self.attention(x, x, x, key_padding_mask=empty, need_weights=False)[0]
        weights = self.query(x).squeeze(2).masked_fill(empty, -torch.inf).softmax(1)
        return torch.einsum("rl,rld->rd", weights, x)


class News(nn.Module):
    """Whether a reader clicks on an article: the dot product of both."""

    def __init__(self, num_items: int) -> None:
        super().__init__()
        articles = EmbeddingConfig(
            name="articles",
            num_embeddings=num_items,
            embedding_dim=DIM,
            feature_names=["history", "candidate"],
            init_fn=lambda weight: nn.init.normal_(weight, std=0.05),
        )
        self.lookup = DedupedEmbeddingCollection(EmbeddingCollection(tables=[articles]))
        self.reader = Deduped(Reader())
        self.bias = nn.Parameter(torch.tensor(-2.0))

    def forward(self, batch: SessionBatch) -> tuple[Tensor, Tensor]:
        """Loss, and a logit per sample."""
        found = self.lookup(batch.features)
        readers = self.reader(found["history"])  # deduplicated or plain, as the batch is
        logits = (readers * found["candidate"].values()).sum(1) + self.bias
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.dense["label"].float()), logits


def distributed(model: nn.Module) -> tuple[nn.Module, CombinedOptimizer]:
    """The model with its table split over all ranks by rows, and its optimizers."""
    sharder, world = EmbeddingCollectionSharder(FUSED), dist.get_world_size()
    of_table = construct_module_sharding_plan(
        model.get_submodule("lookup.collection"),
        {"articles": row_wise(compute_kernel="fused")},
        sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    plan = ShardingPlan({"lookup.collection": of_table})
    parallel = DistributedModelParallel(model, plan=plan, sharders=[sharder], device=torch.device("cpu"))
    rest = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
    return parallel, CombinedOptimizer([parallel.fused_optimizer, dense])


def reader_of(
    path: Path, groups: list[list[str]], batch_size: int, *, session: str | None = "session", **how: Any
) -> SessionReader:
    """Batches of a clustered log; of one in another order without a session."""
    return SessionReader(
        path,
        batch_size=batch_size,
        features=["history", "candidate"],
        groups=groups,
        dense=["label", "session"],
        session=session,
        transform=DedupedTransform(Truncate(LONGEST, features=["history"])),
        **how,
    )


@torch.no_grad()
def auc(model: nn.Module, reader: SessionReader) -> float:
    """Mean over impressions of the chance that a clicked article stands before one that was not."""
    scores, labels, sessions = [], [], []
    for batch in reader:
        scores.append(model(batch)[1].numpy())
        labels.append(batch.dense["label"].numpy())
        sessions.append(batch.dense["session"].numpy())
    score, label, session = (np.concatenate(parts) for parts in (scores, labels, sessions))
    found = []
    for rows in np.split(np.arange(score.size), np.flatnonzero(np.diff(session)) + 1):
        right, wrong = score[rows][label[rows] == 1], score[rows][label[rows] == 0]
        if right.size and wrong.size:
            pairs = right[:, None] - wrong
            found.append(float(((pairs > 0) + 0.5 * (pairs == 0)).mean()))
    return float(np.mean(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mind", help="Parquet file of MIND's impressions; else sessions are generated")
    parser.add_argument("--sessions", type=above_0, default=3000, help="to generate")
    parser.add_argument("--plain", action="store_true", help="train without deduplication")
    parser.add_argument("--folder", type=Path, default=Path("recd"), help="for the data")
    parser.add_argument("--batch-size", type=above_0, default=512, help="samples of a rank")
    parser.add_argument("--epochs", type=above_0, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:  # by itself, which needs no port
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    # Data: a log in order of time, clustered by session, and which features to deduplicate together.
    box: list[Any] = [None]
    if rank == 0:
        log, held_out, items = (
            write_mind(args.mind, args.folder)
            if args.mind
            else write_generated(args.folder, sessions=args.sessions, seed=args.seed)
        )
        paths = []
        for file in (log, held_out):
            target = args.folder / f"{file.stem}.by_session"
            for old in target.glob("*"):
                old.unlink()
            # Row groups are dealt to the ranks: small ones, so that all have about as much.
            found = cluster_sessions(file, target, session="session", time="time", row_group_rows=4096)
            paths.append(target)
            print(
                f"{file.name}: {found.rows:,} rows, {found.samples_per_session:.1f} per session;"
                f" {found.storage_ratio:.2f} times smaller by session than by time"
            )
        groups = suggest_groups(paths[0], batch_size=args.batch_size)
        print(f"features to deduplicate: {groups}{' (not done: --plain)' if args.plain else ''}")
        box = [(*paths, items, [] if args.plain else groups)]
    dist.broadcast_object_list(box)
    log, held_out, items, groups = box[0]

    torch.manual_seed(args.seed)
    model, optimizer = distributed(News(items))
    reader = reader_of(log, groups, args.batch_size, rank=rank, world_size=world, shuffle=True, seed=args.seed)
    held_out_reader = reader_of(held_out, groups, args.batch_size)
    samples, seconds, kept, ids = 0, 0.0, 0, 0
    for epoch in range(args.epochs):
        reader.set_epoch(epoch)
        batches, losses = iter(reader), []
        while True:
            batch = next(batches, None)
            more = torch.tensor(int(batch is not None))
            dist.all_reduce(more, dist.ReduceOp.MIN)  # ranks stop together
            if not more or batch is None:
                break
            begin = time.perf_counter()
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()
            seconds += time.perf_counter() - begin
            losses.append(loss.item())
            samples += batch.features.stride()
            kept += batch.features.distinct.values().numel()
            ids += batch.features.to_keyed_jagged().values().numel()
        score = auc(model, held_out_reader)  # every rank reads all of it: lookups are collectives
        if rank == 0:
            speed = samples * world / seconds
            print(
                f"epoch {epoch}: loss {losses[0]:.6f} to {np.mean(losses[-20:]):.6f}, held-out AUC {score:.4f},"
                f" {speed:,.0f} samples/s, {ids / kept:.2f} ids of the batch per id looked up"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    run_example(main)
