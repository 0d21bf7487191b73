"""What renumbering rows is worth to tensor-train tables: rows hashed, by frequency, by community (EL-Rec, section IV).

    python -m benchmarks.tensor_train_order [--clicks globo_clicks.parquet]

Generated: 10^7 lookups of 10^7 rows in batches of 4,096 bags of 20 ids, Zipf popularity, of which each batch takes
four fifths from rows of its hour of the day. With ``--clicks``, batches of 4,096 consecutive clicks with the reader's
last ones before. Batches that are timed are not among those that the numbering was made from.
"""

from __future__ import annotations

import argparse
import resource
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from benchmarks.timing import machine
from flexshard._internal import as_text, new_grid
from flexshard.calibration import least_seconds, train_step
from flexshard.costmodels import TTReads
from flexshard.embeddings import IndexBijection, TTEmbeddingBag, TTShape

BAGS, LENGTH, DIM, RANK = 4096, 20, 64, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clicks", type=Path)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batches", type=int, default=123, help="to number by; 123 are 10^7 lookups")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    report("generated", *generated(args.rows, args.batches + 3), args.rounds)
    if args.clicks is not None:
        report(args.clicks.name, *clicks(args.clicks), args.rounds)


def generated(rows: int, batches: int, hours: int = 24, seed: int = 0) -> tuple[list[np.ndarray], int]:
    """Batches four fifths of whose ids belong to the hour of the day they come from; ids say nothing of it."""
    generator = np.random.default_rng(seed)
    cumulative = np.cumsum(1.0 / np.arange(1, rows + 1) ** 1.05)
    names = generator.permutation(rows)
    found = []
    for batch in range(batches):
        rank = np.searchsorted(cumulative, generator.random(BAGS * LENGTH) * cumulative[-1])
        within = np.minimum(rank // hours * hours + batch % hours, rows - 1)  # a row of this hour, about as popular
        found.append(names[np.where(generator.random(rank.size) < 0.8, within, rank)])
    return found, rows


def clicks(path: Path) -> tuple[list[np.ndarray], int]:
    """Batches of consecutive clicks, each with what its reader clicked before."""
    table = pq.read_table(path, columns=["user_id", "item_id", "timestamp"])
    user, item, stamp = (column.to_numpy() for column in table.columns)
    order = np.lexsort((stamp, user))
    names, item = np.unique(item, return_inverse=True)
    by_user, user, stamp = item[order], user[order], stamp[order]
    first = np.maximum.accumulate(np.where(np.diff(user, prepend=-1) != 0, np.arange(user.size), 0))
    place = np.argsort(stamp, kind="stable")[: user.size // BAGS * BAGS].reshape(-1, BAGS)[-40:]
    found = []
    for own in place:
        lengths = np.minimum(own - first[own] + 1, LENGTH)
        back = np.repeat(own, lengths) - (np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths))
        found.append(by_user[back])
    return found, names.size


def report(title: str, batches: list[np.ndarray], rows: int, rounds: int) -> None:
    """Prefixes and times under each numbering."""
    learnt, fresh = batches[:-3], batches[-3:]
    start = time.perf_counter()
    counts = np.zeros(rows, np.int64)
    for batch in learnt:
        counts += np.bincount(batch, minlength=rows)
    by_frequency = IndexBijection(np.argsort(-counts, kind="stable"), rows)
    middle = time.perf_counter()
    by_community = IndexBijection.by_community(learnt, by_frequency, hot_share=0.001)
    seconds = time.perf_counter() - middle
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    lookups = sum(batch.size for batch in learnt)
    print(
        f"{title}: {lookups:,} lookups of {rows:,} rows; by frequency {middle - start:.0f} s, by community"
        f" {seconds:.0f} s, {peak:.1f} GiB at most in this process"
    )
    shape = TTShape.choose(rows, DIM, RANK)
    hashed = IndexBijection(np.random.default_rng(1).permutation(rows), rows)
    numberings = {"hashed": hashed, "by frequency": by_frequency, "by community": by_community}
    renumbered = [[own.positions(batch).astype(np.int64) for batch in fresh] for own in numberings.values()]
    steps = [train_step(shape, batch, 1) for own in renumbered for batch in own]
    table = TTEmbeddingBag(
        rows, DIM, tt_ranks=shape.tt_ranks, row_factors=shape.row_factors, dim_factors=shape.dim_factors, mode="sum"
    )

    @torch.no_grad()
    def look_up(batch: torch.Tensor) -> torch.Tensor:
        return table(batch)

    looks = [partial(look_up, torch.from_numpy(batch)[None]) for own in renumbered for batch in own]
    step_times = np.array(least_seconds(steps, rounds)).reshape(3, -1).mean(axis=1)
    look_times = np.array(least_seconds(looks, rounds)).reshape(3, -1).mean(axis=1)
    grid = new_grid(
        f"{title}: D = {DIM}, R = {RANK}", ["rows are numbered"], ["prefixes", "of ids", "forward", "", "step", ""]
    )
    for place, (name, own) in enumerate(zip(numberings, renumbered, strict=True)):
        reads = [TTReads.of(batch, 1, shape).prefixes for batch in own]
        forward, step = 1e3 * look_times[place], 1e3 * step_times[place]
        cells = (
            f"{np.mean([r[-2] for r in reads]):,.0f}",
            f"{np.mean([r[-1] for r in reads]):,.0f}",
            f"{forward:.1f} ms",
        )
        ratios = (look_times[0] / look_times[place], step_times[0] / step_times[place])
        grid.add_row(name, *cells, f"{ratios[0]:.2f}x", f"{step:.1f} ms", f"{ratios[1]:.2f}x")
    print(as_text(grid, 110), flush=True)


if __name__ == "__main__":
    main()
