"""Counting 10^8 ids over 10^7 rows of Parquet, beside DuckDB's and Polars' group-by-count, each in its own process.

python -m benchmarks.profiling [FOLDER FOR THE DATA]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.timing import Run, machine, run_process
from flexshard._internal import as_text, new_grid

IDS, ROWS, REPEATS = 100_000_000, 10_000_000, 5

SCRIPTS = {
    "flexshard": """
        from flexshard import AccessProfile
        profile = AccessProfile.from_parquet(PATH, column="id", num_rows=ROWS)
        print(profile.rows_read, profile.num_accesses)
    """,
    "flexshard, ranked": """
        from flexshard import AccessProfile
        profile = AccessProfile.from_parquet(PATH, column="id", num_rows=ROWS)
        profile.ranked_rows
        print(profile.rows_read, profile.num_accesses)
    """,
    "duckdb": """
        import duckdb
        duckdb.sql("set enable_progress_bar = false")
        table = duckdb.sql(f"select id, count(*) as n from '{PATH}' group by id").to_arrow_table()
        print(table.num_rows, table.column("n").to_numpy().sum())
    """,
    "polars": """
        import polars as pl
        table = pl.scan_parquet(PATH).group_by("id").len().collect(engine="streaming")
        print(table.height, table["len"].cast(pl.Int64).sum())
    """,
}


def write_ids(path: Path) -> None:
    """Ids of a power law of exponent 1 over all rows, scattered, in row groups of a million."""
    random = np.random.default_rng(0)
    with pq.ParquetWriter(path, pa.schema([("id", pa.int64())]), compression="zstd") as writer:
        for _ in range(IDS // 1_000_000):
            ranks = ((ROWS + 1.0) ** random.random(1_000_000) - 1).astype(np.int64)
            writer.write_table(pa.table({"id": ranks * 7919 % ROWS}))


def main(folder: str) -> None:
    path = Path(folder) / "ids.parquet"
    if not path.exists():
        write_ids(path)
    print(f"{IDS:,} ids over {ROWS:,} rows, {path.stat().st_size / 1e6:.0f} MB of Parquet; {machine()}")
    runs: dict[str, list[Run]] = {name: [] for name in SCRIPTS}
    for _ in range(REPEATS):  # in turn, so that a slow minute of the machine slows all alike
        for name, body in SCRIPTS.items():
            script = f"PATH, ROWS = {os.fspath(path)!r}, {ROWS}\n{textwrap.dedent(body)}"
            runs[name].append(run_process(["-c", script]))
    answers = {run.output.splitlines()[-1] for each in runs.values() for run in each}
    assert len(answers) == 1, f"all must count the same: {answers}"
    seconds = {name: statistics.median(run.seconds for run in each) for name, each in runs.items()}
    peaks = {name: statistics.median(run.peak_bytes for run in each) for name, each in runs.items()}
    peers = ("duckdb", "polars")
    fastest, smallest = min(seconds[peer] for peer in peers), min(peaks[peer] for peer in peers)
    columns = ["median s", "peak MB", "time / best peer's", "memory / best peer's"]
    grid = new_grid(f"Whole processes, medians of {REPEATS}", [""], columns)
    for name in SCRIPTS:
        ratios = (f"{seconds[name] / fastest:.2f}", f"{peaks[name] / smallest:.2f}")
        grid.add_row(name, f"{seconds[name]:.2f}", f"{peaks[name] / 1e6:.0f}", *ratios)
    print(as_text(grid))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
