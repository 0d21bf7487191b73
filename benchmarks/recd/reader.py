"""Samples per second and core of a reader, baseline against RecD (the paper: 1.36 to 1.79 times), by phase.

Figure 10 and Table 3: rows in time order as KJTs, clustered rows as KJTs, clustered rows as IKJTs; the same transforms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.recd.data import logs, write
from benchmarks.timing import on_one_core
from flexshard import units
from flexshard._internal import as_text, new_grid
from flexshard.ingestion import (
    DedupedTransform,
    HashIds,
    ReaderPhases,
    SessionReader,
    SortIds,
    Truncate,
    cluster_sessions,
)

__all__ = ["main"]

BATCH, ROUNDS = 4096, 5
GROUPS = {"generated": [["history"]], "MIND": [["history"]], "Globo": [["user_id", "click_os", "click_region"]]}
FEATURES = {
    "generated": ["history", "candidate"],
    "MIND": ["history", "candidate"],
    "Globo": ["user_id", "click_os", "click_region", "item_id"],
}


def main(folder: Path) -> None:
    on_one_core()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    numbers = ["fill", "convert", "process", "sum", "samples/s", "", "read", "sent"]
    for log in logs(folder, sessions=8000):
        clustered = cluster_sessions(log.path, folder / f"{log.name}.by_session", session=log.session, time=log.time)
        in_time = folder / "time.parquet"
        write(pq.read_table(log.path), in_time)
        features, groups = FEATURES[log.name], GROUPS[log.name]
        cases: dict[str, tuple[Path, list[list[str]]]] = {
            "baseline": (in_time, []),
            "with cluster": (clustered.path, []),
            "with IKJT": (clustered.path, groups),
        }
        grid = new_grid(f"Reader: {log.name}, batches of {BATCH:,}, one core; µs per sample", [""], numbers)
        best: dict[str, ReaderPhases] = {}
        for _ in range(ROUNDS):
            for name, (path, own) in cases.items():
                found = read(path, features, own)
                if name not in best or found.seconds < best[name].seconds:
                    best[name] = found
        for name, found in best.items():
            each = (found.fill_seconds, found.convert_seconds, found.process_seconds, found.seconds)
            grid.add_row(
                name,
                *(f"{1e6 * seconds / found.samples:.2f}" for seconds in each),
                f"{found.samples / found.seconds:,.0f}",
                f"{best['baseline'].seconds / found.seconds:.2f}x",
                units.format_bytes(found.bytes_read),
                units.format_bytes(found.bytes_sent),
            )
        print(as_text(grid, 150), flush=True)


def read(path: Path, features: list[str], groups: list[list[str]]) -> ReaderPhases:
    """All batches."""
    transform: Any = DedupedTransform(HashIds(1 << 20), Truncate(100), SortIds())
    batches = SessionReader(path, batch_size=BATCH, features=features, groups=groups, transform=transform)
    return sum((batch.phases for batch in batches), ReaderPhases())
