"""Encoding 10^8 rows of raw 64-bit ids, beside the same join written by hand in DuckDB, each in its own process.

By hand: count values, number them by how often they occur, save that, join it to the data, write Parquet. Once with the
rows as the join leaves them, and once sorted back into the order that they had, as ``flexshard encode`` keeps it.

    python -m benchmarks.encoding [FOLDER FOR THE DATA] [--rows 100000000]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.timing import Run, machine, run_process
from flexshard._internal import as_text, new_grid

VALUES, REPEATS = 1_000_000, 3

NUMBERED = """
        import duckdb
        duckdb.sql("set enable_progress_bar = false")
        duckdb.sql(f'''create table mapping as select item as value, count(*) as n,
                      row_number() over (order by count(*) desc, item) - 1 as row from '{PATH}' group by item''')
        duckdb.sql(f"copy mapping to '{OUT}.mapping' (format parquet, compression zstd)")
"""
SCRIPTS = {
    "flexshard encode": """
        from flexshard.profiling import encode
        encode(PATH, OUT, columns=["item"])
    """,
    "duckdb": NUMBERED
    + """
        duckdb.sql(f'''copy (select m.row as item, day from '{PATH}' join mapping m on item = m.value)
                   to '{OUT}' (format parquet, compression zstd)''')
    """,
    "duckdb, in order": NUMBERED
    + """
        duckdb.sql(f'''copy (select m.row as item, day from read_parquet('{PATH}', file_row_number = true)
                   join mapping m on item = m.value order by file_row_number)
                   to '{OUT}' (format parquet, compression zstd)''')
    """,
}


def write_ids(path: Path, rows: int) -> None:
    """Hashes of a power law of exponent 1 over a million values, and a second column."""
    random = np.random.default_rng(0)
    schema = pa.schema([("item", pa.int64()), ("day", pa.int32())])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for part in range(-(-rows // 1_000_000)):
            ranks = ((VALUES + 1.0) ** random.random(min(1_000_000, rows - part * 1_000_000)) - 1).astype(np.int64)
            hashes = (ranks + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(1)
            days = np.full(ranks.size, part, np.int32)
            writer.write_table(pa.table({"item": hashes.astype(np.int64), "day": days}))


def main(folder: str, rows: int) -> None:
    data, out = Path(folder) / "ids.parquet", Path(folder) / "encoded.parquet"
    if not data.exists() or pq.ParquetFile(data).metadata.num_rows != rows:
        write_ids(data, rows)
    runs: dict[str, list[Run]] = {name: [] for name in SCRIPTS}
    for _ in range(REPEATS):
        for name, script in SCRIPTS.items():
            out.unlink(missing_ok=True)
            code = f"PATH, OUT = {str(data)!r}, {str(out)!r}\n" + textwrap.dedent(script)
            runs[name].append(run_process(["-c", code]))
            assert pq.ParquetFile(out).metadata.num_rows == rows
    print(machine())
    grid = new_grid(f"{rows:,} rows, {VALUES:,} values", [""], ["seconds", "of DuckDB's", "peak memory, GB"])
    usual = statistics.median(run.seconds for run in runs["duckdb"])
    for name, found in runs.items():
        seconds = statistics.median(run.seconds for run in found)
        peak = statistics.median(run.peak_bytes for run in found)
        grid.add_row(name, f"{seconds:.1f}", f"{seconds / usual:.2f}", f"{peak / 1e9:.1f}")
    print(as_text(grid))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--rows", type=int, default=100_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(given.folder or temporary, given.rows)
