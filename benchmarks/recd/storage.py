"""Bytes of zstd Parquet clustered by session, against time order (the paper: 2.06 to 3.71 times)."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.recd.data import logs, shuffled, write
from flexshard import units
from flexshard._internal import as_text, new_grid
from flexshard.ingestion import cluster_sessions

__all__ = ["main"]


def main(folder: Path) -> None:
    numbers = [
        "time order",
        "same, lists unpacked",
        "random order",
        "by session",
        "of time order",
        "of unpacked",
        "of random",
    ]
    grid = new_grid("Storage: zstd Parquet, row groups of 65,536", ["log", "rows", "S"], numbers)
    for log in logs(folder, sessions=20_000):
        table = pq.read_table(log.path)
        packed = write(table, folder / "packed.parquet")
        plain = write(table, folder / "plain.parquet", packed=False)
        mixed = write(shuffled(table), folder / "mixed.parquet")
        found = cluster_sessions(log.path, folder / f"{log.name}.by_session", session=log.session, time=log.time)
        sizes = (packed, plain, mixed, found.bytes_after)
        ratios = (size / found.bytes_after for size in sizes[:3])
        grid.add_row(
            log.name,
            f"{found.rows:,}",
            f"{found.samples_per_session:.1f}",
            *(units.format_bytes(size) for size in sizes),
            *(f"{ratio:.2f}x" for ratio in ratios),
        )
    print(as_text(grid, 170), flush=True)
