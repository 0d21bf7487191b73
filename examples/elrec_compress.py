"""Tables of a click model as tensor trains (EL-Rec): size and accuracy, beside what is simpler.

A model says whether a reader clicks on an article, from the reader, the last articles read, and what was shown: the
click that came next, or an article that others read at that time. Its tables are trained dense; decomposed and trained
on; tensor trains from the start; and the readers' table is left out, which needs no tensor train at all. Each is
trained as long as any other. A tenth of the clicks is held out, at random: news of tomorrow would say more about news
than about tables.

    python examples/elrec_compress.py                                  # on generated clicks
    python examples/elrec_compress.py --log globo_clicks.parquet       # user_id, session_id, item_id, timestamp
"""

from __future__ import annotations

import argparse
import copy
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

from clicks import MAX_HISTORY, RECENT, ranges, read_log, write_log
from flexshard import units
from flexshard.embeddings import IndexBijection, TTEmbeddingBag, compress
from one_line import above_0, run_example

logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # what torch and TorchRec say of each other

IntArray = npt.NDArray[np.int64]

TABLES = ("articles", "readers")


@dataclass(frozen=True)
class Clicks:
    """Clicks to predict, in order of time, and what was there to see.

    Attributes:
        rows: of each table.
        stream: articles in order of time; ``now`` are the clicks' places in it.
        by_user: articles in order of reader, then time; those from ``start`` up to ``place`` came before a click.
        reader, place, start, now: of the clicks; shape (n,).
    """

    rows: dict[str, int]
    stream: IntArray
    by_user: IntArray
    reader: IntArray
    place: IntArray
    start: IntArray
    now: IntArray

    def split(self, held_out: float, seed: int) -> tuple[IntArray, IntArray]:
        """The clicks to train on, and those held out."""
        order = np.random.default_rng(seed).permutation(len(self.place))
        last = round(len(order) * held_out)
        return np.sort(order[last:]), np.sort(order[:last])


def read_clicks(path: Path, num_sessions: int) -> Clicks:
    """The log's last sessions; articles and readers are numbered by how often it has them."""
    log = read_log(path, num_sessions)
    places, lengths = ranges(log.opening, log.last + 1)
    session = np.repeat(np.arange(log.num_sessions), lengths)
    now = log.order[places]
    in_time = np.argsort(now, kind="stable")
    places, session, now = places[in_time], session[in_time], now[in_time]
    _, reader = np.unique(log.readers[session], return_inverse=True)
    start = np.maximum(log.start[session], places - MAX_HISTORY)
    articles, people = by_frequency(log.items, log.num_items), by_frequency(reader, int(reader.max()) + 1)
    rows = {"articles": log.num_items, "readers": int(reader.max()) + 1}
    return Clicks(
        rows,
        articles.positions(log.items),
        articles.positions(log.by_user),
        people.positions(reader),
        places,
        start,
        now,
    )


def by_frequency(reads: IntArray, rows: int) -> IndexBijection:
    """Rows numbered by how often they are read: those that a batch reads together then share prefixes."""
    return IndexBijection(np.argsort(-np.bincount(reads, minlength=rows), kind="stable"), rows)


class ClickModel(nn.Module):
    """A small DLRM: pooled rows, their dot products, a perceptron."""

    def __init__(self, rows: dict[str, int], dim: int, tables: Sequence[str] = TABLES) -> None:
        super().__init__()
        features = {"articles": ["history", "shown"], "readers": ["reader"]}
        self.nobody = None if "readers" in tables else nn.Parameter(torch.zeros(dim))
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=rows[name],
                    embedding_dim=dim,
                    feature_names=features[name],
                    pooling=PoolingType.MEAN,
                    init_fn=lambda weight: nn.init.normal_(weight, std=0.05),
                )
                for name in tables
            ]
        )
        for bag in self.tables.embedding_bags.values():
            bag.sparse = True  # a step updates the rows that it read
        self.over = nn.Sequential(nn.Linear(3 * dim + 3, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """A logit per sample; shape (samples,)."""
        found = self.tables(features).values()
        if self.nobody is not None:  # every reader alike
            found = torch.cat([found, self.nobody.expand(found.shape[0], -1)], 1)
        x = found.unflatten(1, (3, -1))
        products = torch.bmm(x, x.transpose(1, 2))[:, (0, 0, 1), (1, 2, 2)]
        return self.over(torch.cat([x.flatten(1), products], 1)).squeeze(1)


def batch(clicks: Clicks, chosen: IntArray, generator: np.random.Generator) -> tuple[KeyedJaggedTensor, Tensor]:
    """Features and labels: every click, and an article that somebody read just before, as if it had been shown."""
    places, lengths = ranges(clicks.start[chosen], clicks.place[chosen])
    other = clicks.stream[np.maximum(clicks.now[chosen] - generator.integers(1, RECENT + 1, len(chosen)), 0)]
    n = len(chosen)
    history, once = clicks.by_user[places], np.ones(2 * n, np.int64)
    values = [
        history,
        history,
        clicks.by_user[clicks.place[chosen]],
        other,
        clicks.reader[chosen],
        clicks.reader[chosen],
    ]
    features = KeyedJaggedTensor(
        keys=["history", "shown", "reader"],
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate([lengths, lengths, once, once])),
    )
    return features, torch.cat([torch.ones(n), torch.zeros(n)])


def batches(
    clicks: Clicks, part: IntArray, size: int, generator: np.random.Generator
) -> Iterator[tuple[KeyedJaggedTensor, Tensor]]:
    """A pass over a part of the clicks."""
    for chosen in np.split(part, range(size, len(part), size)):
        yield batch(clicks, chosen, generator)


def optimizers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Adam for all, sparse where gradients are; cores get shorter steps, since each is in many rows."""
    dense = [bag.weight for bag in model.modules() if isinstance(bag, nn.EmbeddingBag)]
    cores = [core for table in model.modules() if isinstance(table, TTEmbeddingBag) for core in table.cores]
    rest = [*model.over.parameters(), *(() if model.nobody is None else (model.nobody,))]
    found = [torch.optim.Adam(rest, lr=0.3 * rate)]
    if dense:
        found.append(torch.optim.SparseAdam(dense, lr=rate))
    if cores:
        found.append(torch.optim.Adam(cores, lr=0.3 * rate))
    return found


def train(
    model: nn.Module, clicks: Clicks, part: IntArray, *, size: int, seed: int, rate: float = 0.01, epochs: int = 2
) -> float:
    """Passes over the clicks in any order, with steps that rise, then fall to none; seconds that they took."""
    generator = np.random.default_rng(seed)
    own = optimizers(model, rate)
    total, warm = epochs * -(-len(part) // size), 50
    falls = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: min(1.0, (step + 1) / warm) * (1 - step / total))
        for each in own
    ]
    start = time.perf_counter()
    for _ in range(epochs):
        for features, labels in batches(clicks, generator.permutation(part), size, generator):
            for each in own:
                each.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(features), labels).backward()
            for each in (*own, *falls):
                each.step()
    return time.perf_counter() - start


@torch.no_grad()
def auc(model: nn.Module, clicks: Clicks, part: IntArray) -> float:
    """Chance that a click that happened scores above an article that was not clicked, ties by half."""
    scores, labels = [], []
    for features, label in batches(clicks, part, 8192, np.random.default_rng(0)):
        scores.append(model(features))
        labels.append(label)
    score, label = torch.cat(scores).numpy(), torch.cat(labels).numpy() > 0
    values, place, counts = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[place]  # mean rank of equal scores, from 1 on
    positive = int(label.sum())
    return float((rank[label].sum() - positive * (positive + 1) / 2) / (positive * (len(values[place]) - positive)))


def size_of(model: nn.Module) -> int:
    """Bytes of the tables."""
    return sum(weight.nbytes for weight in model.tables.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, help="Parquet file of clicks; else they are generated")
    parser.add_argument("--sessions", type=above_0, default=60_000)
    parser.add_argument("--dim", type=above_0, default=32)
    parser.add_argument("--rank", type=above_0, default=32)
    parser.add_argument("--batch-size", type=above_0, default=2048)
    parser.add_argument("--epochs", type=above_0, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")  # of its own sparse gradients
    torch.manual_seed(args.seed)
    log = args.log or Path("clicks.parquet")
    if args.log is None:
        write_log(log, items=20_000, sessions=args.sessions, seed=args.seed)
    clicks = read_clicks(log, args.sessions)
    training, held_out = clicks.split(0.1, seed=0)
    print(f"{len(training):,} clicks to train on, {len(held_out):,} held out; rows {clicks.rows}")
    train_all(clicks, (training, held_out), args)


def train_all(clicks: Clicks, parts: tuple[IntArray, IntArray], args: argparse.Namespace) -> None:
    """Train every kind of model, and print what each takes and scores."""
    training, held_out = parts

    def taught(model: nn.Module, seed: int) -> nn.Module:
        train(model, clicks, training, size=args.batch_size, seed=seed, epochs=args.epochs)
        return model

    def report(name: str, model: nn.Module) -> None:
        size = size_of(model)
        score = auc(model, clicks, held_out)
        print(f"{name}: {units.format_bytes(size)}, {dense / size:.3g} times smaller, held-out AUC {score:.4f}")

    first, second = args.seed, args.seed + 1
    model = taught(ClickModel(clicks.rows, args.dim), first)
    dense = size_of(model)
    report("dense, half as long", model)
    longer = copy.deepcopy(model)
    model, tables = compress(model, dict.fromkeys(TABLES, args.rank))
    for table in tables:
        print(f"  {table}")
    report("decomposed", model)
    report("decomposed and trained on", taught(model, second))
    report("dense", taught(longer, second))
    torch.manual_seed(first)
    how = {name: {"tt_ranks": args.rank, "std": 0.05} for name in TABLES}
    fresh, _ = compress(ClickModel(clicks.rows, args.dim), how, decompose=False)
    report("tensor trains from the start", taught(taught(fresh, first), second))
    torch.manual_seed(first)
    less = ClickModel(clicks.rows, args.dim, ["articles"])
    report("dense, without the readers' table", taught(taught(less, first), second))


if __name__ == "__main__":
    run_example(main)
