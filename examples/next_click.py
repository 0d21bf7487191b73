"""A SASRec-like model of the next click, trained with TorchRec; under a FlexShard plan if one is given.

The log is read once, in order of time, as a news site would train. A sample is one session, preceded by the user's
earlier clicks. The last sessions are never trained on: among the articles of the 24 hours before them, where does the
article of a session's last click rank? Two popularities rank the same articles: of the whole log, of its last clicks.

    torchrun --nproc-per-node 4 examples/next_click.py clicks.parquet          # TorchRec's row-wise sharding

docs/running.md has the commands from the log to a plan.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from clicks import MAX_HISTORY, RECENT, ClickLog, IntArray, ranges, read_log, write_lookups
from flexshard import FlexShardEmbeddingCollectionSharder, FlexShardPlanner, Plan
from flexshard.executors import Observer
from one_line import above_0, check_launched, run_example

DIM, HEADS, BLOCKS = 64, 2, 1
BATCH = 256  # sessions per step, over all ranks
NEGATIVES = 1024  # per step, over all ranks
TOP = 20
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}


class NextClick(nn.Module):
    """Tells articles by the dot product of their embedding with the state after a click."""

    def __init__(self, num_items: int) -> None:
        super().__init__()
        articles = EmbeddingConfig(
            name="articles",
            num_embeddings=num_items,
            embedding_dim=DIM,
            feature_names=["history", "candidates"],
            init_fn=lambda weight: nn.init.normal_(weight, std=0.02),
        )
        self.embeddings = EmbeddingCollection(tables=[articles])
        self.positions = nn.Parameter(0.02 * torch.randn(MAX_HISTORY + 1, DIM))
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, BLOCKS, nn.LayerNorm(DIM), enable_nested_tensor=False)
        # Padding comes after the clicks, where causal attention does not look.
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(MAX_HISTORY + 1))

    def forward(self, batch: KeyedJaggedTensor, sample: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States after the click at a place of a sample; embeddings of all clicks, then of all candidates."""
        looked_up = self.embeddings(batch)
        history, candidates = looked_up["history"], looked_up["candidates"]
        x = history.to_padded_dense(MAX_HISTORY + 1) + self.positions
        x = self.blocks(x, mask=self.causal, is_causal=True)
        return x[sample, place], history.values(), candidates.values()


def distributed(model: nn.Module, plan: Path | None) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model with its table sharded, and its optimizers: row-wise Adagrad for the table, Adam for the rest."""
    sharders: list[Any]
    if plan is not None:  # all that FlexShard changes
        sharders = [FlexShardEmbeddingCollectionSharder(FUSED)]
        sharding = FlexShardPlanner(Plan.load(plan), base=plan.parent).collective_plan(model, sharders)
    else:
        sharders = [EmbeddingCollectionSharder(FUSED)]
        sharding = row_wise_plan(model, sharders[0])
    parallel = DistributedModelParallel(model, plan=sharding, sharders=sharders, device=torch.device("cpu"))
    rest = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
    return parallel, CombinedOptimizer([parallel.fused_optimizer, dense])


def row_wise_plan(model: nn.Module, sharder: Any) -> ShardingPlan:
    """TorchRec's row-wise sharding of the table."""
    world = dist.get_world_size()
    of_table = construct_module_sharding_plan(
        model.get_submodule("embeddings"),
        {"articles": row_wise(compute_kernel="fused")},
        sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    return ShardingPlan({"embeddings": of_table})


def features(history: IntArray, lengths: IntArray, candidates: IntArray) -> KeyedJaggedTensor:
    """Both features of a batch; its first sample brings the candidates, which all its samples share."""
    shared = np.zeros_like(lengths)
    shared[0] = len(candidates)
    return KeyedJaggedTensor(
        keys=["history", "candidates"],
        values=torch.from_numpy(np.concatenate([history, candidates])),
        lengths=torch.from_numpy(np.concatenate([lengths, shared])),
    )


def loss_of(model: nn.Module, log: ClickLog, chosen: IntArray, drawn: IntArray) -> Tensor:
    """Softmax of each click of the sessions against articles drawn as often as they were read just before.

    Articles drawn by popularity leave the network to learn what popularity does not say: the logarithm of how much
    likelier the history makes an article. Ranking adds the logarithm of popularity again.
    """
    start, end = log.start[chosen], log.last[chosen] + 1
    places, lengths = ranges(start, end)
    history, (targets, per_sample) = log.by_user[places], ranges(log.opening[chosen], end)
    sample = np.repeat(np.arange(len(chosen)), per_sample)
    place = targets - start[sample]
    target = (np.cumsum(lengths) - lengths)[sample] + place  # among all clicks of the batch
    batch = features(history, lengths, drawn)
    states, clicked, negatives = model(batch, torch.from_numpy(sample), torch.from_numpy(place - 1))
    right = (states * clicked[torch.from_numpy(target)]).sum(1, keepdim=True)
    wrong = (states @ negatives.T).masked_fill(torch.from_numpy(history[target][:, None] == drawn), -torch.inf)
    return nn.functional.cross_entropy(torch.cat([right, wrong], 1), torch.zeros(len(right), dtype=torch.long))


@torch.no_grad()
def evaluate(model: nn.Module, log: ClickLog, now: int, chosen: IntArray) -> dict[str, list[float]]:
    """Recall and NDCG of the sessions' last clicks, by the model and by popularity known at the place ``now``.

    Articles that a user has read are not ranked again; a last click on an article that is no candidate is a miss.
    """
    candidates = log.candidates(now)
    column = np.full(log.num_items, -1)
    column[candidates] = np.arange(len(candidates))
    places, lengths = ranges(log.start[chosen], log.last[chosen])
    history = log.by_user[places]
    target = torch.from_numpy(column[log.by_user[log.last[chosen]]])[:, None]
    read = np.zeros((len(chosen), len(candidates) + 1), dtype=np.bool_)  # one more for articles that are no candidates
    read[np.repeat(np.arange(len(chosen)), lengths), column[history]] = True
    unranked = torch.from_numpy(read[:, :-1]) & (torch.arange(len(candidates)) != target)
    every, ends = torch.arange(len(chosen)), torch.from_numpy(lengths - 1)
    states, _, embeddings = model(features(history, lengths, candidates), every, ends)
    popular, recent = (torch.from_numpy(log.recent(now, clicks)[candidates]).float() for clicks in (now, RECENT))
    rankings = {"popular": popular, "recent": recent, "model": states @ embeddings.T + (recent + 0.1).log()}
    results = {}
    for name, scores in rankings.items():
        ranked = scores.masked_fill(unranked, -torch.inf)
        own = ranked.gather(1, target.clamp(min=0))
        rank = (ranked > own).sum(1) + ((ranked == own).sum(1) - 1) / 2  # the middle one of equals
        hit = (rank < TOP) & (target[:, 0] >= 0)
        total = torch.stack([hit.sum(), (hit / torch.log2(rank + 2)).sum(), torch.tensor(len(chosen))])
        dist.all_reduce(total)
        results[name] = (total[:2] / total[2]).tolist()
    return results


def train(args: argparse.Namespace, log: ClickLog) -> None:
    """Train on all sessions but the held-out ones, and report before and after."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    rng = np.random.default_rng([args.seed, rank])
    steps = (log.num_sessions - args.held_out) // BATCH
    if steps < 1:
        raise SystemExit(
            f"{log.num_sessions:,} sessions are too few: {args.held_out:,} are held out and a step takes {BATCH}"
        )
    model, optimizer = distributed(NextClick(log.num_items), args.plan)
    began = time.perf_counter()

    def report(label: str) -> None:
        model.eval()
        chosen = np.arange(steps * BATCH + rank, steps * BATCH + args.held_out, ranks)
        found = evaluate(model, log, int(log.closes[steps * BATCH]), chosen)
        model.train()
        if rank == 0:
            figures = "".join(f"{recall:9.3f} {ndcg:.3f}" for recall, ndcg in found.values())
            print(f"{label:>9} {time.perf_counter() - began:7.0f}{figures}", flush=True)

    if rank == 0:
        print(f"{log.num_items:,} articles, {len(log.items):,} clicks, {steps:,} steps; recall and NDCG at {TOP}")
        print("     step seconds        popular         recent          model")
    report("untrained")
    with Observer() as observer:
        for step in range(steps):
            chosen = np.arange(step * BATCH + rank, (step + 1) * BATCH, ranks)
            drawn = log.negatives(chosen, NEGATIVES // ranks, rng)
            optimizer.zero_grad()
            loss_of(model, log, chosen, drawn).backward()
            optimizer.step()
            observer.step()
    report(f"{steps:,}")
    observed = observer.result(fingerprint=Plan.load(args.plan).fingerprint if args.plan else "")
    if args.observed is not None and rank == 0:
        observed.save(args.observed)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small sequence model on a log of clicks.")
    parser.add_argument("data", type=Path)
    parser.add_argument("--plan", type=Path, help="FlexShard's plan; without one TorchRec's row-wise sharding")
    parser.add_argument("--lookups", type=Path, help="only write the articles that every session looks up")
    parser.add_argument("--observed", type=Path, help="write what the collectives sent, and how long they took")
    parser.add_argument("--sessions", type=above_0, default=100_000, help="how many to train on, the last of the log")
    parser.add_argument("--held-out", type=int, default=2048, help="sessions that are only predicted")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for written in (args.lookups, args.observed):
        if (
            written is not None
            and written.exists()
            and any(written.samefile(one) for one in (args.data, args.plan) if one)
        ):
            parser.error(f"{written} is what is read, and would be lost; name another file to write")
    log = read_log(args.data, args.sessions + args.held_out)
    if args.lookups is not None:
        write_lookups(args.lookups, log, negatives_per_session=NEGATIVES // BATCH)
        print(f"written to {args.lookups}: {log.num_sessions:,} sessions, {log.num_items:,} articles")
        return
    warnings.filterwarnings("ignore", module="torch|torchrec|fbgemm_gpu")
    torch.set_num_threads(1)
    check_launched(parser, ranks=4)
    dist.init_process_group("gloo")
    try:
        train(args, log)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_example(main)
