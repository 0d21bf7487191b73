"""Click logs in which every sample carries the history so far, shared from file to attention (RecD paper, section 7).

A sample is a click on an article (or one drawn at random instead), with the reader's last 50 clicks so far. No two
histories are the same, so exact deduplication finds next to nothing; but a history is the one before and a click, so a
batch's histories are runs of a buffer that is 10 to 15 times shorter. It is looked up once; keys and values of target
attention are computed once per click; a causal transformer runs once for all histories that begin alike. The same
batches train plain, with exact groups and with partial ones, in turn: losses are equal, times and ids are not.

    python examples/growing_histories.py                                     # on generated readers
    python examples/growing_histories.py --clicks globo_clicks.parquet       # on Globo.com's, in the order of users
    torchrun --nproc-per-node 4 examples/growing_histories.py --clicks globo_clicks.parquet     # and what is sent
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor

from flexshard.embeddings import DedupedCausal, DedupedEmbeddingCollection, DedupedPerSample, TargetAttention
from flexshard.errors import DataError
from flexshard.executors import Observer
from flexshard.ingestion import SessionBatch, SessionReader
from one_line import above_0, run_example
from recd_mind import distributed

HEADS, LONGEST = 4, 50
GROUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "exact": {"groups": [["history"], ["candidate"]]},
    "partial": {"groups": [["candidate"]], "partial": [["history"]]},
}


def write_histories(clicks: str | None, folder: Path, *, by: str, rows: int, seed: int) -> tuple[Path, int]:
    """Clicks with the history so far, stored by user or by session; and how many articles there are."""
    folder.mkdir(parents=True, exist_ok=True)
    source, path = clicks or str(folder / "clicks.parquet"), folder / f"by_{by}.parquet"
    if clicks is None:
        pq.write_table(generated(rows, seed), source)
    database = duckdb.connect()
    database.execute(
        f"""
        CREATE TABLE log AS SELECT user_id, session_id, timestamp, dense_rank() OVER (ORDER BY item_id) - 1 AS item
        FROM read_parquet('{source}') WHERE user_id IN (
            SELECT user_id FROM (SELECT user_id, sum(count(*)) OVER (ORDER BY hash(user_id, {seed})) AS so_far
            FROM read_parquet('{source}') GROUP BY user_id) WHERE so_far <= {rows});
        CREATE TABLE histories AS SELECT *, list(item) OVER (
            PARTITION BY user_id ORDER BY timestamp, item ROWS BETWEEN {LONGEST} PRECEDING AND 1 PRECEDING) AS history
        FROM log ORDER BY user_id, timestamp, item;
        """
    )
    # Sessions in no order of time: at the beginning of a log nobody has a history.
    order = {"user": "user_id", "session": f"hash(session_id, {seed}), session_id"}[by]
    (items,) = database.sql("SELECT max(item) + 1 FROM log").fetchall()[0]
    drawn = f"CASE WHEN hash(user_id, timestamp, item, {seed}) % 2 = 0"
    database.execute(
        f"""
        COPY (SELECT coalesce(history, []) AS history, {drawn} THEN item
            ELSE CAST(hash(timestamp, user_id, item, {seed} + 1) % {items} AS BIGINT) END AS candidate,
            CAST({drawn} THEN 1 ELSE 0 END AS FLOAT) AS label
        FROM histories ORDER BY {order}, timestamp, item)
        TO '{path}' (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 20000)
        """
    )
    return path, int(items)


def generated(clicks: int, seed: int) -> pa.Table:
    """Readers with 9 clicks in the mean, some with hundreds, on articles of their topics."""
    generator = np.random.default_rng(seed)
    number = np.minimum(1 + generator.pareto(1.3, clicks // 4) * 4, 500).astype(int)
    user = np.repeat(np.arange(number.size), number)[:clicks]
    topic = generator.integers(0, 50, number.size)[user]
    item = topic * 200 + np.minimum(generator.zipf(1.3, user.size), 200) - 1
    when = generator.integers(0, 86_400_000, user.size)
    return pa.table({"user_id": user, "session_id": user * 100 + when // 3_600_000, "item_id": item, "timestamp": when})


class Causal(nn.Module):
    """Two transformer layers with a causal mask; what is not attention is computed on clicks alone, without padding."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.place = nn.Parameter(0.02 * torch.randn(LONGEST, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(4))
        self.inputs = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(2))
        self.outputs = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(2)
        )

    def forward(self, history: JaggedTensor) -> Tensor:
        """A vector per click."""
        lengths, dim = history.lengths(), history.values().shape[1]
        longest = max(1, int(lengths.max())) if lengths.numel() else 1
        inside = torch.arange(longest) < lengths[:, None]
        places = inside.reshape(-1).nonzero()[:, 0]
        x = history.values() + self.place[places % longest]
        for number in range(2):
            projected = self.inputs[number](self.norms[2 * number](x))
            padded = x.new_zeros(inside.numel(), 3 * dim).index_copy(0, places, projected)
            query, key, value = padded.view(*inside.shape, 3, HEADS, dim // HEADS).permute(2, 0, 3, 1, 4)
            # Lists begin at the left, so that nothing that a click may see is padding.
            found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.outputs[number](found.transpose(1, 2).reshape(-1, dim).index_select(0, places))
            x = x + self.layers[number](self.norms[2 * number + 1](x))
        return x


class Clicks(nn.Module):
    """Whether a reader clicks on an article, from target attention over the history or from a causal transformer."""

    def __init__(self, num_items: int, dim: int, attention: str) -> None:
        super().__init__()
        articles = EmbeddingConfig(
            name="articles",
            num_embeddings=num_items,
            embedding_dim=dim,
            feature_names=["history", "candidate"],
            init_fn=lambda weight: nn.init.normal_(weight, std=0.05),
        )
        self.lookup = DedupedEmbeddingCollection(EmbeddingCollection(tables=[articles]))
        self.candidates = DedupedPerSample(nn.Identity())  # every sample's own
        self.target = TargetAttention(dim, HEADS) if attention == "target" else None
        self.causal = DedupedCausal(Causal(dim)) if attention == "causal" else None
        self.score = nn.Sequential(nn.Linear(3 * dim, dim), nn.ReLU(), nn.Linear(dim, 1))

    def forward(self, batch: SessionBatch) -> tuple[Tensor, Tensor]:
        """Loss, and a logit per sample."""
        found = self.lookup(batch.features)
        candidate = self.candidates(found["candidate"]).values()
        if self.target is not None:
            reader = self.target(candidate, found["history"])
        else:
            reader = self.causal(found["history"]).last()
        logits = self.score(torch.cat([reader, candidate, reader * candidate], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, batch.dense["label"].float()), logits


@dataclass
class Run:
    """Steps of one way to train, and what each took."""

    model: nn.Module
    optimizer: Any
    batches: Iterator[SessionBatch]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    read_seconds: list[float] = field(default_factory=list)
    # Of this rank: ids looked up, those of them that are distinct, bytes of batches, bytes that all-to-alls send.
    counts: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))

    def step(self) -> None:
        """Read a batch and train on it; as long as the slowest rank takes."""
        begin = time.perf_counter()
        batch = next(self.batches, None)
        if batch is None:
            raise DataError(f"clicks for {len(self.losses)} steps; give more --rows, fewer --steps or --batch-size")
        self.read_seconds.append(time.perf_counter() - begin)
        dist.barrier()
        with Observer() as observer:
            begin = time.perf_counter()
            self.optimizer.zero_grad()
            loss, _ = self.model(batch)
            loss.backward()
            self.optimizer.step()
            dist.barrier()
            self.seconds.append(time.perf_counter() - begin)
            observer.step()
        self.losses.append(loss.item())
        looked_up = batch.features.distinct.values()
        sent = sum(c.bytes for c in observer.result().collectives if c.kind == "all_to_all")
        numbers = [looked_up.numel(), torch.unique(looked_up).numel(), batch.features.nbytes(), sent]
        self.counts += torch.tensor(numbers, dtype=torch.float64)


def batches_of(path: Path, batch_size: int, **groups: Any) -> SessionReader:
    """Batches of a file of :func:`write_histories`."""
    ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    columns: dict[str, Any] = {"features": ["history", "candidate"], "dense": ["label"]}
    return SessionReader(path, batch_size=batch_size, drop_last=True, **columns, **ranks, **groups)


def train(path: Path, items: int, attention: str, dim: int, batch_size: int, steps: int) -> dict[str, Run]:
    """Steps on the same batches from the same weights in each way, in turn."""
    runs = {}
    for way, groups in GROUPS.items():
        torch.manual_seed(0)
        model, optimizer = distributed(Clicks(items, dim, attention))
        runs[way] = Run(model, optimizer, iter(batches_of(path, batch_size, **groups)))
    for _ in range(steps):
        for run in runs.values():
            run.step()
    for run in runs.values():
        dist.all_reduce(run.counts)
    return runs


def report(runs: dict[str, Run]) -> None:
    """What each way took, against plain."""
    plain = runs["plain"]
    for way, run in runs.items():
        faster = statistics.median(a / b for a, b in zip(plain.seconds[2:], run.seconds[2:], strict=True))
        differs = max(abs(a / b - 1) for a, b in zip(run.losses, plain.losses, strict=True))
        ids, _, batches, sent = (plain.counts / run.counts).tolist()
        step, reading = (1e3 * statistics.median(each[2:]) for each in (run.seconds, run.read_seconds))
        print(
            f"  {way:8} {step:5.0f} ms a step ({faster:.2f} times as fast), read in {reading:.1f} ms; times fewer:"
            f" {ids:.1f} ids looked up, {batches:.1f} bytes of batches{f', {sent:.1f} sent' if run.counts[3] else ''};"
            f" loss {run.losses[0]:.6f} to {np.mean(run.losses[-5:]):.6f}, differs by {differs:.0e}",
            flush=True,
        )
    by_id = float(plain.counts[0] / plain.counts[1])
    print(f"  (each distinct id once, as TorchRec's use_index_dedup has it on GPUs: {by_id:.1f} times fewer ids)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clicks", help="Parquet file of clicks: user_id, session_id, item_id, timestamp")
    parser.add_argument("--by", choices=["user", "session"], default="user", help="order in which samples are stored")
    parser.add_argument("--rows", type=above_0, default=200_000, help="clicks to take, of whole users")
    parser.add_argument("--attention", choices=["target", "causal"], nargs="+", default=["target", "causal"])
    parser.add_argument("--dim", type=above_0, default=64)
    parser.add_argument("--batch-size", type=above_0, default=2048, help="samples of a rank")
    parser.add_argument("--steps", type=above_0, default=12)
    parser.add_argument("--folder", type=Path, default=Path("histories"), help="for the data")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.dim % HEADS:
        parser.error(f"argument --dim: must be a multiple of {HEADS}, one part for each attention head")
    if args.steps < 3:
        parser.error("argument --steps: must be at least 3, of which two warm up")
    warnings.simplefilter("ignore")
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:  # by itself, which needs no port
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        box = [write_histories(args.clicks, args.folder, by=args.by, rows=args.rows, seed=args.seed)]
    dist.broadcast_object_list(box)
    path, items = box[0]
    for attention in args.attention:
        runs = train(path, items, attention, args.dim, args.batch_size, args.steps)
        if dist.get_rank() == 0:
            print(f"{attention} attention, by {args.by}, {dist.get_world_size()} x {args.batch_size} samples:")
            report(runs)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_example(main)
