"""Distinct rows of a batch, predicted from a profile and counted: shuffled samples, and samples in the files' order.

    python -m benchmarks.distinct_rows [--data ../shared/data]

Streams: clicks of Globo.com by session and by user (items, users, regions), lookups of a recommendation cache and of an
e-commerce application's tables (one a sample), and three that are generated: Zipf 1.1 lists, lists that repeat a few
favourites, geometric lengths. Predictions take samples as independent, as they are where they are shuffled; what the
order of the files adds is measured, not predicted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flexshard import AccessProfile, Table
from flexshard._internal import as_text, new_grid
from flexshard.profiling import read_samples

BATCHES = (64, 512, 4096)
BY_KEY = [("item_id", "session_id"), ("item_id", "user_id"), ("user_id", "session_id"), ("click_region", "user_id")]
Stream = tuple[str, np.ndarray, np.ndarray]


def recorded(data: Path) -> Iterator[Stream]:
    for column, key in BY_KEY:
        yield f"globo {column} by {key}", *read_samples(data / "globo_clicks.parquet", column, sample_key=key)
    scarab = read_samples(data / "scarab_recs.parquet", "key", hash="splitmix64", num_rows=1 << 24)
    yield "scarab keys", *scarab
    yield "e-commerce rows", *read_samples(data / "ecommerce_orm_busy.parquet", "entity_id")


def generated(samples: int = 60_000) -> Iterator[Stream]:
    random = np.random.default_rng(0)
    lengths = np.full(samples, 20)
    yield "Zipf 1.1, 20 ids", random.zipf(1.1, samples * 20) % 1_000_000, lengths
    favourites = random.zipf(1.2, (samples, 4)) % 1_000_000
    chosen = np.take_along_axis(favourites, random.integers(0, 4, (samples, 20)), axis=1)
    yield "4 favourites, 20 ids", chosen.ravel(), lengths
    lengths = random.geometric(0.05, samples) - 1
    yield "Zipf 1.3, geometric", random.zipf(1.3, int(lengths.sum())) % 1_000_000, lengths


def counted(ids: np.ndarray, lengths: np.ndarray, order: np.ndarray, batch: int, most: int = 200) -> float:
    """Mean number of distinct ids in batches of samples in an order."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.linspace(0, order.size - batch, min(most, order.size // batch)).astype(np.int64)
    found = []
    for first in starts.tolist():
        part = order[first : first + batch]
        own = np.concatenate([ids[ends[sample] : ends[sample + 1]] for sample in part.tolist()])
        found.append(np.unique(own).size)
    return float(np.mean(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    data = parser.parse_args().data
    grid = new_grid(
        "Distinct ids of a batch",
        ["stream"],
        ["B", "ids", "predicted", "shuffled", "error", "repeats independent", "in files' order", "less by"],
    )
    errors, before = [], []
    for name, raw, lengths in [*(recorded(data) if data.exists() else ()), *generated()]:
        kept, ids = np.unique(raw, return_inverse=True)
        profile = AccessProfile.from_ids(ids, lengths=lengths, num_rows=kept.size)
        table, shuffled = Table("t", kept.size, 4, profile), np.random.default_rng(1).permutation(lengths.size)
        p = np.minimum(profile.counts / profile.num_samples, 1 - 2**-53)
        for batch in BATCHES:
            predicted = float(table.reads(batch, index_dedup=True) @ profile.rows)
            independent = float(-np.expm1(batch * np.log1p(-p)) @ profile.rows)
            seen = counted(ids, lengths, shuffled, batch)
            in_order = counted(ids, lengths, np.arange(lengths.size), batch)
            errors.append(predicted / seen - 1)
            before.append(independent / seen - 1)
            cells = [f"{batch:,}", f"{batch * profile.avg_length:,.0f}", f"{predicted:,.0f}", f"{seen:,.0f}"]
            cells += [f"{errors[-1]:+.1%}", f"{before[-1]:+.1%}", f"{in_order:,.0f}", f"{1 - in_order / seen:.0%}"]
            grid.add_row(name, *cells)
    print(as_text(grid))
    print(f"errors on shuffled samples: {min(errors):+.1%} to {max(errors):+.1%}, repeats within a sample counted;")
    print(f"taken as independent, as before: {min(before):+.1%} to {max(before):+.1%}")


if __name__ == "__main__":
    main()
