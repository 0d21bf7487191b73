"""10^8 lookups of a table of 10^7 rows replayed on 1,024 ranks, on one core.

python -m benchmarks.replay
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.timing import machine, on_one_core
from flexshard import AccessProfile, Cluster, Table, solve
from flexshard.executors import Lookups, replay

ROWS, RANKS, LOOKUPS, BATCH, LENGTH = 10_000_000, 1024, 100_000_000, 512, 190


def main() -> None:
    on_one_core()
    generator = np.random.default_rng(0)
    place = generator.permutation(ROWS)
    p = 1.0 / np.arange(1, ROWS + 1) ** 0.9
    cumulative = np.cumsum(p) / p.sum()
    counts = np.zeros(ROWS, np.int64)
    counts[place] = np.round(p / p.sum() * LENGTH * 1_000_000)
    profile = AccessProfile.from_counts(counts, num_samples=1_000_000)
    cluster = Cluster.preset("dgx-h100", nodes=RANKS // 8)
    plan = solve([Table("items", ROWS, 128, profile)], cluster, batch_size=BATCH, index_dedup=False)
    ids = place[np.minimum(np.searchsorted(cumulative, generator.random(LOOKUPS)), ROWS - 1)]
    ranks = np.repeat(np.arange(RANKS, dtype=np.int32), -(-LOOKUPS // RANKS))[:LOOKUPS]
    start = time.perf_counter()
    result = replay(plan, [{"items": Lookups(ids, ranks)}], {"items": profile})
    seconds = time.perf_counter() - start
    print(f"{machine()}, one core")
    tiers = ", ".join(f"{tier.rows:,} of g = {tier.group_size}" for tier in plan.tables["items"].tiers)
    print(f"{LOOKUPS:,} lookups of {ROWS:,} rows on {RANKS:,} ranks ({tiers}): {seconds:.1f} s")
    for traffic in result.traffic:
        print(
            f"  {traffic.kind}@{traffic.group_size} {traffic.content}: {traffic.mean_bytes:,.0f} bytes per rank,"
            f" imbalance {traffic.imbalance:.3f}"
        )


if __name__ == "__main__":
    main()
