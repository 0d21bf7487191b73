"""Memory of the fullest rank: how often steps exceed what plans say they do in one of a thousand.

    python -m benchmarks.memory [--data ../shared/data] [--steps 2000] [--ranks 8 32 128] [--streams Zipf globo]

Streams: clicks, lookups of a recommendation cache and of an application as recorded, and three that are generated.
Each is planned row-wise and with tiers in the same memory, for 8, 32 and 128 ranks, and replayed: shuffled again and
again, and in the order of its files. Bytes are those of rows, copies and gradients that the replay counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flexshard import AccessProfile, Cluster, Plan, Table, solve
from flexshard._internal import as_text, new_grid
from flexshard.executors import replay, split_by_rank
from flexshard.profiling import read_samples

BATCH, DIM = 64, 64
RANKS = (8, 32, 128)
Stream = tuple[str, np.ndarray, np.ndarray]


def recorded(data: Path) -> Iterator[Stream]:
    yield "globo_clicks item_id", *read_samples(data / "globo_clicks.parquet", "item_id", limit=1_500_000)
    yield "globo_clicks by session", *read_samples(data / "globo_clicks.parquet", "item_id", sample_key="session_id")
    yield (
        "scarab_recs key",
        *read_samples(data / "scarab_recs.parquet", "key", hash="splitmix64", num_rows=1 << 24),
    )
    yield "ecommerce_orm_busy entity_id", *read_samples(data / "ecommerce_orm_busy.parquet", "entity_id")


def generated(samples: int = 300_000) -> Iterator[Stream]:
    random = np.random.default_rng(0)
    lengths = np.full(samples, 10)
    yield "uniform, 10 ids", random.integers(0, 1_000_000, samples * 10), lengths
    yield "Zipf 1.2, 10 ids", random.zipf(1.2, samples * 10) % 1_000_000, lengths
    lengths = np.minimum(random.lognormal(1.5, 1.2, samples).astype(np.int64), 2_000)
    yield "Zipf 1.5, lognormal lengths", random.zipf(1.5, int(lengths.sum())) % 1_000_000, lengths


def fullest(plan: Plan, profile: AccessProfile, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Dynamic memory of the fullest rank of each step, and without copies and gradients; shape (2, steps)."""
    steps = split_by_rank({"t": (ids, lengths)}, world_size=plan.cluster.world_size, batch_size=BATCH)
    found = replay(plan, steps, {"t": profile})
    return np.stack([found.fullest_memory_bytes.max(axis=1), found.dynamic_memory_bytes.max(axis=1)])


def shuffled(
    ids: np.ndarray, lengths: np.ndarray, steps: int, per_step: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Whole passes in new orders, until there are so many steps."""
    random, starts = np.random.default_rng(1), np.cumsum(lengths) - lengths
    while steps > 0:
        order = random.permutation(lengths.size)[: steps * per_step]
        each = lengths[order]
        at = np.repeat(starts[order] - (np.cumsum(each) - each), each) + np.arange(each.sum())
        yield ids[at], each
        steps -= order.size // per_step


def above(bound: float, seen: int, steps: int) -> float:
    """Upper end of a one-sided 95 % binomial interval, in steps of a thousand."""
    from scipy.stats import beta

    return 1000 * float(beta.ppf(0.95, seen + 1, steps - seen)) if seen < steps else 1000.0 * bool(bound)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--steps", type=int, default=2_000, help="shuffled ones")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="multiples of 8")
    parser.add_argument("--streams", nargs="+", default=[""], help="how the names of those to take begin")
    options = parser.parse_args()
    grid = new_grid(
        f"Dynamic memory of the fullest rank, B = {BATCH}, D = {DIM}",
        ["stream", "plan"],
        [
            "ranks",
            "p99.9, shuffled",
            "over obs.",
            "exceeded",
            "at most (95 %)",
            "p99.9, in order",
            "exceeded",
            "worst",
            "before: exceeded",
        ],
    )
    ratios, rates, in_order_rates = [], [], []
    for name, raw, lengths in [*(recorded(options.data) if options.data.exists() else ()), *generated()]:
        if not name.startswith(tuple(options.streams)):
            continue
        kept, ids = np.unique(raw, return_inverse=True)
        profile = AccessProfile.from_ids(ids, lengths=lengths, num_rows=kept.size)
        for ranks in options.ranks:
            cluster = Cluster.preset("dgx-h100", nodes=ranks // 8)
            for kind, tiers in (("row-wise", 1), ("tiers", 3)):
                start = time.perf_counter()
                how = {"batch_size": BATCH, "tiers": tiers, "index_dedup": False}
                table = Table("t", kept.size, DIM, profile)
                plans = {order: solve([table], cluster, **how, sample_order=order) for order in ("shuffled", "file")}
                said = {order: plan.predicted.fullest_dynamic_bytes for order, plan in plans.items()}
                sigma = plans["file"].predicted.dynamic_memory_sigma_bytes
                lengths_alone = plans["file"].predicted.dynamic_memory_bytes + 3.09 * sigma
                seen = np.concatenate(
                    [
                        fullest(plans["file"], profile, *part)
                        for part in shuffled(ids, lengths, options.steps, ranks * BATCH)
                    ],
                    axis=1,
                )
                ordered = fullest(plans["file"], profile, ids, lengths)
                former = float((np.concatenate([seen[1], ordered[1]]) > lengths_alone).mean())
                seen, ordered = seen[0], ordered[0]
                exceeded, over = int((seen > said["shuffled"]).sum()), said["shuffled"] / np.quantile(seen, 0.999)
                late = int((ordered > said["file"]).sum())
                grid.add_row(
                    name,
                    kind,
                    str(ranks),
                    f"{said['shuffled'] / 2**20:.2f} MiB",
                    f"{over:.3f}",
                    f"{exceeded} of {seen.size:,}",
                    f"{above(1, exceeded, seen.size):.2f} per 1,000",
                    f"{said['file'] / 2**20:.2f} MiB",
                    f"{late} of {ordered.size:,}",
                    f"{ordered.max() / said['file']:.3f}",
                    f"{former:.0%}",
                )
                ratios.append(over)
                rates.append(exceeded / seen.size)
                in_order_rates.append(late / ordered.size)
                print(f"{name}, {kind}, {ranks} ranks: {time.perf_counter() - start:.1f} s", flush=True)
    print(as_text(grid, 170))
    print(f"shuffled: p99.9 over the observed one {min(ratios):.3f} to {max(ratios):.3f}")
    print(f"shuffled: exceeded in {1000 * min(rates):.2f} to {1000 * max(rates):.2f} of 1,000 steps")
    print(f"in order: exceeded in {100 * min(in_order_rates):.2f} to {100 * max(in_order_rates):.2f} of 100 steps")


if __name__ == "__main__":
    main()
