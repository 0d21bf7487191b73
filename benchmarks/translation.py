"""From ids to places of 10^9 rows, 1 % of them hot: a set of the hot rows beside a number for every row.

    python -m benchmarks.translation [--rows 1e9] [--hot 0.01]

One core, batches of 10^6 uniform ids. The list for every row takes 4 bytes each: 10^9 rows need 5 GB here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from flexshard.costmodels import Layout
from flexshard.embeddings import IndexBijection
from flexshard.executors.sharding import translation
from flexshard.planner import Tier

WORLD, BATCH, ROUNDS = 8, 1_000_000, 15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=1e9)
    parser.add_argument("--hot", type=float, default=0.01)
    args = parser.parse_args()
    rows, hot = int(args.rows), int(args.rows * args.hot)
    torch.set_num_threads(1)
    tiers = [
        Tier("data_parallel", 1, hot, 0, 0.0, None, 0.0, 0.0, 0.0),
        Tier("row_wise", WORLD, rows - hot, hot, 0.0, None, 0.0, 0.0, 0.0),
    ]
    layout = Layout.of({"t": tiers}, {"t": rows}, WORLD)
    generator = np.random.default_rng(0)
    ids = np.unique(generator.integers(0, rows, hot + hot // 50 + 1000))
    ranking = generator.permutation(ids)[:hot]
    start = time.perf_counter()
    bijection = IndexBijection(ranking, rows)
    table = translation.LocationTable(layout, 0, bijection, torch.device("cpu"))
    built = time.perf_counter() - start
    batches = [torch.from_numpy(generator.integers(0, rows, BATCH)) for _ in range(ROUNDS)]
    listed = torch.arange(rows, dtype=torch.int32)
    found = {
        "number for every row": timed(lambda batch: listed.index_select(0, batch), batches),
        "set of hot rows": timed(table.locations, batches),
    }
    base = found["number for every row"]
    print(f"{rows:,} rows, {hot:,} of them with a place: {table.nbytes / 1e9:.3f} GB instead of {4 * rows / 1e9:.1f},")
    print(f"built in {built:.1f} s from the hot rows' ids; ids of {BATCH:,} to places, one core, medians of {ROUNDS}:")
    for name, seconds in found.items():
        speed = statistics.median(one / other for one, other in zip(base, seconds, strict=True))
        print(f"{name}: {statistics.median(seconds) / BATCH * 1e9:.1f} ns an id, {speed:.2f} times as fast")
    return 0


def timed(locate: Callable[[torch.Tensor], torch.Tensor], batches: list[torch.Tensor]) -> list[float]:
    locate(batches[0])
    times = []
    for batch in batches:
        start = time.perf_counter()
        locate(batch)
        times.append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    sys.exit(main())
