"""What one table of a click model is worth as a tensor train, beside everything else that makes it smaller (EL-Rec,
Table IV): held-out AUC over seeds, split at random and in time, on two logs.

    python -m benchmarks.tensor_train_accuracy globo_clicks.parquet --mind mind_sample.parquet

The table is that of the readers on Globo.com's clicks and that of the news on MIND's impressions: each log's largest.
It is dense, dense with an L2 penalty, dense with fewer dimensions (and a projection), hashed to fewer rows, rounded to
bf16 after training, a tensor train, or not there at all; sizes are a quarter and a sixteenth of the dense one's. All
have Adam at each of two constant rates (cores shorter steps, as in ``examples/elrec_compress.py``), and make six
passes. Rate, L2 penalty and pass are those that are best on a twentieth of the data that is kept for that; what is
printed is of the tenth that is held out.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from benchmarks.timing import machine
from flexshard import units
from flexshard._internal import as_text, new_grid
from flexshard.embeddings import TTEmbeddingBag, TTShape

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from elrec_compress import batch as click_batch, by_frequency, read_clicks

IntArray = npt.NDArray[np.int64]
Batch = tuple[KeyedJaggedTensor, Tensor]

DIM, STD, BATCH, PASSES, LONGEST = 32, 0.05, 2048, 6, 20
RATES, PENALTIES = (0.01, 0.03), (0.1, 1.0)
TABLES = {"history": "articles", "shown": "articles", "reader": "readers"}


class Log(Protocol):
    """Samples by number, in order of time."""

    name: str
    table: str
    rows: dict[str, int]
    samples: int

    def batch(self, chosen: IntArray, generator: np.random.Generator) -> Batch:
        """Features and labels of some samples."""


class Globo:
    """Clicks, and articles that others read just before as if they had been shown."""

    def __init__(self, path: Path, sessions: int) -> None:
        self.clicks = read_clicks(path, sessions)
        self.name, self.table, self.rows = "Globo.com", "readers", self.clicks.rows
        self.samples = len(self.clicks.place)

    def batch(self, chosen: IntArray, generator: np.random.Generator) -> Batch:
        """As :class:`Log`."""
        return click_batch(self.clicks, chosen, generator)


class Mind:
    """News of impressions, and which of them were clicked; an impression is a sample, of which five news are taken."""

    def __init__(self, path: Path) -> None:
        table = pq.read_table(path).sort_by("timestamp")
        parts = [table[name].combine_chunks() for name in ("history", "candidates", "labels")]
        news = np.concatenate([part.flatten().to_numpy(zero_copy_only=False) for part in parts[:2]])
        names, index = np.unique(news, return_inverse=True)
        index = by_frequency(index, len(names)).positions(index)
        lengths = [np.diff(part.offsets.to_numpy()) for part in parts]
        self.history, self.shown = np.split(index, [lengths[0].sum()])
        self.starts = [np.concatenate([[0], np.cumsum(each)]) for each in lengths]
        self.labels = parts[2].flatten().to_numpy()
        _, reader = np.unique(table["user_id"].to_numpy(), return_inverse=True)
        self.reader = by_frequency(reader, int(reader.max()) + 1).positions(reader)
        self.name, self.table = "MIND", "articles"
        self.rows = {"articles": len(names), "readers": int(reader.max()) + 1}
        self.samples = table.num_rows

    def batch(self, chosen: IntArray, generator: np.random.Generator) -> Batch:
        """As :class:`Log`."""
        begins, ends = self.starts[1][chosen], self.starts[1][chosen + 1]
        places = np.concatenate([np.arange(a, b) for a, b in zip(begins, ends, strict=True)])
        sample = np.repeat(np.arange(len(chosen)), ends - begins)
        if len(chosen) < 2 * BATCH:  # to train on: every click and a share of the others
            kept = (self.labels[places] > 0) | (generator.random(len(places)) < 0.15)
            places, sample = places[kept], sample[kept]
        last = self.starts[0][chosen + 1]
        first = np.maximum(self.starts[0][chosen], last - LONGEST)
        lists = [self.history[first[row] : last[row]] for row in range(len(chosen))]
        history = np.concatenate([lists[row] for row in sample])
        lengths = (last - first)[sample]
        once = np.ones(len(sample), np.int64)
        values = np.concatenate([history, self.shown[places], self.reader[chosen][sample]])
        features = KeyedJaggedTensor(
            keys=["history", "shown", "reader"],
            values=torch.from_numpy(values),
            lengths=torch.from_numpy(np.concatenate([lengths, once, once])),
        )
        return features, torch.from_numpy((self.labels[places] > 0).astype(np.float32))


def dense_bag(rows: int, dim: int) -> nn.EmbeddingBag:
    bag = nn.EmbeddingBag(rows, dim, mode="mean", sparse=True, include_last_offset=True)
    nn.init.normal_(bag.weight, std=STD)
    return bag


class Narrow(nn.Module):
    """Fewer dimensions, projected to those of the others."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.bag, self.up = dense_bag(rows, dim), nn.Linear(dim, DIM, bias=False)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Pooled rows."""
        return self.up(self.bag(ids, offsets))


class Hashed(nn.Module):
    """Rows that share a bucket; ids are in order of frequency, so the most frequent have one each."""

    def __init__(self, buckets: int) -> None:
        super().__init__()
        self.bag, self.buckets = dense_bag(buckets, DIM), buckets

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Pooled rows."""
        return self.bag(ids % self.buckets, offsets)


class Nothing(nn.Module):
    """The same vector for every row."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(DIM))

    def forward(self, _: Tensor, offsets: Tensor) -> Tensor:
        """The vector, for every bag."""
        return self.vector.expand(offsets.numel() - 1, DIM)


class ClickModel(nn.Module):
    """A small DLRM: pooled rows, their dot products, a perceptron."""

    def __init__(self, tables: dict[str, nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(tables)
        self.over = nn.Sequential(nn.Linear(3 * DIM + 3, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """A logit per sample."""
        parts = []
        for feature, table in TABLES.items():
            jagged = features[feature]
            parts.append(self.tables[table](jagged.values(), jagged.offsets()))
        x = torch.stack(parts, 1)
        products = torch.bmm(x, x.transpose(1, 2))[:, (0, 0, 1), (1, 2, 2)]
        return self.over(torch.cat([x.flatten(1), products], 1)).squeeze(1)


@dataclass(frozen=True)
class Way:
    """What becomes of the table.

    Attributes:
        make: of its rows.
        nbytes: of it.
        penalties: on squares of the rows that are read, of which the best is taken.
        rounded: to bf16 after training.
    """

    make: Callable[[int], nn.Module]
    nbytes: Callable[[int], int]
    penalties: tuple[float, ...] = (0.0,)
    rounded: bool = False


def tensor_train(share: int) -> Way:
    """The largest rank that takes at most so large a share of the dense table."""

    def shape(rows: int) -> TTShape:
        most = rows * DIM // share
        fitting = [TTShape.choose(rows, DIM, rank) for rank in range(1, 257)]
        return max((one for one in fitting if one.parameters <= most), key=lambda one: one.parameters)

    def make(rows: int) -> nn.Module:
        return TTEmbeddingBag(rows, DIM, tt_ranks=shape(rows).tt_ranks, mode="mean", std=STD, include_last_offset=True)

    return Way(make, lambda rows: 4 * shape(rows).parameters)


WAYS: dict[str, Way] = {
    "dense": Way(lambda rows: dense_bag(rows, DIM), lambda rows: 4 * rows * DIM),
    "dense, L2": Way(lambda rows: dense_bag(rows, DIM), lambda rows: 4 * rows * DIM, PENALTIES),
    "dense, bf16 after training": Way(lambda rows: dense_bag(rows, DIM), lambda rows: 2 * rows * DIM, rounded=True),
    "8 dimensions": Way(lambda rows: Narrow(rows, 8), lambda rows: 4 * (rows * 8 + 8 * DIM)),
    "2 dimensions": Way(lambda rows: Narrow(rows, 2), lambda rows: 4 * (rows * 2 + 2 * DIM)),
    "hashed, a quarter": Way(lambda rows: Hashed(rows // 4), lambda rows: rows // 4 * 4 * DIM),
    "hashed, a sixteenth": Way(lambda rows: Hashed(rows // 16), lambda rows: rows // 16 * 4 * DIM),
    "tensor train, a quarter": tensor_train(4),
    "tensor train, a sixteenth": tensor_train(16),
    "no table": Way(lambda _: Nothing(), lambda _: 4 * DIM),
}


def optimizers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    sparse = [bag.weight for bag in model.modules() if isinstance(bag, nn.EmbeddingBag)]
    cores = [core for table in model.modules() if isinstance(table, TTEmbeddingBag) for core in table.cores]
    known = {id(parameter) for parameter in (*sparse, *cores)}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in known]
    found: list[torch.optim.Optimizer] = [torch.optim.Adam(rest, lr=0.3 * rate)]
    if sparse:
        found.append(torch.optim.SparseAdam(sparse, lr=rate))
    if cores:
        found.append(torch.optim.Adam(cores, lr=0.3 * rate))
    return found


def batches(log: Log, part: IntArray, size: int, generator: np.random.Generator) -> Iterator[Batch]:
    for chosen in np.split(part, range(size, len(part), size)):
        yield log.batch(chosen, generator)


@torch.no_grad()
def auc(model: nn.Module, log: Log, part: IntArray) -> float:
    """Chance that a click scores above what was not clicked, ties by half."""
    found = [(model(features), labels) for features, labels in batches(log, part, 4 * BATCH, np.random.default_rng(0))]
    score, label = (torch.cat(each).numpy() for each in zip(*found, strict=True))
    label = label > 0
    _, place, counts = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[place]
    positive = int(label.sum())
    return float((rank[label].sum() - positive * (positive + 1) / 2) / (positive * (len(label) - positive)))


Parts = tuple[IntArray, IntArray, IntArray]


def train(log: Log, way: Way, rate: float, penalty: float, parts: Parts, seed: int) -> tuple[float, ...]:
    """AUC on the part to choose by, that on the part held out, and the pass, of the best pass."""
    torch.manual_seed(seed)
    other = next(name for name in log.rows if name != log.table)
    tables = {other: dense_bag(log.rows[other], DIM), log.table: way.make(log.rows[log.table])}
    model, generator = ClickModel(tables), np.random.default_rng(seed)
    own, best = optimizers(model, rate), (0.0, 0.0, 0)
    size = BATCH if log.samples > 20 * BATCH else BATCH // 16
    feature = [name for name, table in TABLES.items() if table == log.table]
    for number in range(1, PASSES + 1):
        for features, labels in batches(log, generator.permutation(parts[0]), size, generator):
            for each in own:
                each.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(features), labels)
            if penalty:
                for name in feature:
                    ids = torch.unique(features[name].values())
                    rows = nn.functional.embedding(ids, tables[log.table].weight, sparse=True)
                    loss = loss + penalty * rows.square().sum() / len(labels)
            loss.backward()
            for each in own:
                each.step()
        tried = model
        if way.rounded:
            with torch.no_grad():
                kept = tables[log.table].weight.clone()
                tables[log.table].weight.copy_(kept.bfloat16().float())
        found = auc(tried, log, parts[1])
        if found > best[0]:
            best = (found, auc(tried, log, parts[2]), number)
        if way.rounded:
            with torch.no_grad():
                tables[log.table].weight.copy_(kept)
    return best


def splits(log: Log) -> dict[str, Parts]:
    """To train on, to choose by, and held out: at random, and in order of time."""
    numbers = np.arange(log.samples)
    found = {}
    for name, order in (("at random", np.random.default_rng(0).permutation(numbers)), ("in time", numbers)):
        cuts = [round(0.85 * len(order)), round(0.9 * len(order))]
        train_on, choose, held_out = np.split(order, cuts)
        found[name] = (train_on, choose, held_out)
    return found


def spread(values: list[float]) -> float:
    """Standard deviation; nothing of one."""
    return stdev(values) if len(values) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--mind", type=Path)
    parser.add_argument("--sessions", type=int, default=150_000)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(machine())
    logs: list[Log] = [Globo(args.log, args.sessions)]
    if args.mind:
        logs.append(Mind(args.mind))
    for log in logs:
        print_log(log, args.seeds)


def print_log(log: Log, seeds: int) -> None:
    rows = log.rows[log.table]
    for split, parts in splits(log).items():
        title = f"{log.name}: the {log.table}' table, {rows:,} x {DIM}; split {split}, {seeds} seeds"
        grid = new_grid(title, ["table"], ["size", "smaller", "held-out AUC", "to dense, points", "passes", "s"])
        dense: list[float] = []
        for name, way in WAYS.items():
            scores, passes, start = [], [], time.perf_counter()
            for seed in range(seeds):
                tried: list[Any] = [
                    train(log, way, rate, penalty, parts, seed) for rate in RATES for penalty in way.penalties
                ]
                _, score, number = max(tried)
                scores.append(score)
                passes.append(number)
            dense = dense or scores
            apart = [100 * (a - b) for a, b in zip(scores, dense, strict=True)]
            size = way.nbytes(rows)
            cells = (units.format_bytes(size), f"{4 * rows * DIM / size:.3g}x")
            difference = "" if scores is dense else f"{mean(apart):+.2f} ± {spread(apart):.2f}"
            seconds = f"{(time.perf_counter() - start) / seeds:.0f}"
            grid.add_row(
                name, *cells, f"{mean(scores):.4f} ± {spread(scores):.4f}", difference,
                " ".join(map(str, passes)), seconds,
            )  # fmt: skip
            print(f"{title}, {name}: {mean(scores):.4f}", file=sys.stderr, flush=True)
        print(as_text(grid, 130), flush=True)


if __name__ == "__main__":
    main()
