"""Which of many tables without pooling become tensor trains: how long the choice takes, and how close it is proven.

Tables are drawn, their rates of lookups given, not measured; all of it is predicted: nothing is run.

    python -m benchmarks.compression [--seeds 3]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from benchmarks.timing import machine
from flexshard import AccessProfile, Cluster, Problem, Table
from flexshard._internal import as_text, new_grid
from flexshard.costmodels import TableRates, TTRates
from flexshard.errors import BudgetError
from flexshard.planner import TTOption, plan_compression, solve
from flexshard.tables import TTShape

BATCH, TT_RANKS = 1_024, (8, 16, 32)
DENSE = TableRates(1, 1, (0.0, 1e-8), (1e-8, 1e-9, 0.0), (1e-8, 1e-9, 0.0))
RATES = TTRates(
    "given", (1e-4, 1e-7, 0, 0, 1e-9, 1e-10, 0, 1e-7, 2e-13, 1e-11, 3e-13, 5e-12), (1e-4, 1e-8, 1e-10), (), (DENSE,)
)
# Of the memory between what row-wise needs (1) and the least there is (0).
SHARES = (1.0, 0.5, 0.2, 0.05)


def drawn(count: int, seed: int) -> list[Table]:
    """Tables of 30,000 to 3 million rows, with 1 to 40 ids a sample, read by power laws."""
    rng = np.random.default_rng(seed)
    found = []
    for index in range(count):
        rows, exponent, length = int(10 ** rng.uniform(4.5, 6.5)), rng.uniform(0.6, 1.2), rng.uniform(1, 40)
        ranks = np.unique(np.logspace(0, np.log10(rows), 2_000).astype(np.int64))
        counts = np.repeat((1e9 / ranks**exponent).astype(np.int64), np.diff(ranks, append=rows + 1))
        values, number = np.unique(counts, return_counts=True)
        samples = int((values * number).sum() / length)
        profile = AccessProfile.from_histogram(values, number, samples, num_rows=rows)
        found.append(Table(f"t{index}", rows, 64, profile))
    return found


def main() -> None:
    """The benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    cluster = Cluster.preset("dgx-h100", nodes=4)
    print(
        f"{cluster.name}, batch {BATCH}; tensor trains of ranks {TT_RANKS} of tables above 200,000 rows; {machine()}\n"
    )
    headings = ["tables", "of row-wise's memory", "seconds", "gap", "compressed", "step"]
    grid = new_grid("Which tables become tensor trains, of each seed", headings[:1], headings[1:])
    gaps, taken = [], []
    for count in (10, 26):
        for seed in range(args.seeds):
            tables = drawn(count, seed)
            offered = {
                table.name: [TTOption(TTShape.choose(table.rows, table.dim, rank), 1 / rank) for rank in TT_RANKS]
                for table in tables
                if table.rows > 200_000
            }
            neutral = solve(Problem(tables, cluster, BATCH)).settings.budget_bytes
            try:
                plan_compression(tables, cluster, options=offered, rates=RATES, batch_size=BATCH, budget=1 - neutral)
            except BudgetError as error:
                least = error.least_bytes
            for share in SHARES:
                budget = (1 - share) * (least - neutral)
                start = time.perf_counter()
                found = plan_compression(tables, cluster, options=offered, rates=RATES, batch_size=BATCH, budget=budget)
                taken.append(time.perf_counter() - start)
                gaps.append(found.step_seconds / found.lower_bound_seconds - 1)
                grid.add_row(
                    str(count),
                    f"{100 * found.budget_bytes / neutral:.0f} %",
                    f"{taken[-1]:.1f}",
                    f"{100 * gaps[-1]:.2f} %",
                    f"{len(found.shapes)} of {len(offered)}",
                    f"{1e3 * found.step_seconds:.2f} ms",
                )
    print(as_text(grid))
    print(
        f"\nseconds: median {statistics.median(taken):.1f}, {min(taken):.1f} to {max(taken):.1f}; gap: median"
        f" {100 * statistics.median(gaps):.2f} %, at most {100 * max(gaps):.2f} %"
    )


if __name__ == "__main__":
    main()
