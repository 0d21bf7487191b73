"""From access data to a proven placement plan, with the commands that a user would type.

make demo                              on power-law sequences that it generates
make demo DATA=clicks.parquet COLUMN=item_id
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq

OUTPUT = Path("demo")
SHAPE = ("--rows", 2_000_000, "--samples", 60_000, "--length", 400, "--exponent", 0.8)
FLEXSHARD = [sys.executable, "-m", "flexshard.cli"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a Parquet file of yours")
    parser.add_argument("--column", help="its column of ids, or of lists of ids")
    given = parser.parse_args()
    if (given.data is None) != (given.column is None):
        parser.error("give both: make demo DATA=path COLUMN=name")
    start = time.perf_counter()
    OUTPUT.mkdir(exist_ok=True)
    data, column = given.data, given.column
    if data is None:
        print("Generating 60,000 samples of about 400 ids each; popularity follows a power law over two million rows.")
        data, column = f"{OUTPUT}/clicks.parquet", "items"
        flexshard("generate", "-o", data, *SHAPE)
    profile, job, plan = (f"{OUTPUT}/{name}" for name in ("items.profile.parquet", "job.yaml", "plan.json"))
    count(data, column, profile)
    options = ("--cluster", "a100-4x8-roce", "--batch-size", 4096, "--dim", 256)
    flexshard("job", profile, *options, "-o", job)
    flexshard("plan", job, "-o", plan)
    flexshard("explain", plan)
    flexshard("pareto", job, "-o", f"{OUTPUT}/pareto.png")
    print(
        f"\nDone in {time.perf_counter() - start:.0f} s. Now look at {OUTPUT}/pareto.png, or edit {job} and plan again."
    )


def count(data: str, column: str, profile: str) -> None:
    """Profile the column as it is; fold its ids where they are raw 64-bit ones."""
    command = ("profile", data, "--column", column, "--holdout", 0.1, "-o", profile)
    problem = flexshard(*command, may_fail=True)
    if "--hash" not in problem:
        if problem:
            sys.exit(2)
        return
    folded = 1 << max(16, (2 * pq.ParquetFile(data).metadata.num_rows - 1).bit_length())
    print(f"The ids are raw; folding them into {folded:,} rows.")
    flexshard(*command, "--hash", "splitmix64", "--rows", folded)


def flexshard(*arguments: object, may_fail: bool = False) -> str:
    """Show a command, run it, and return what it said on standard error if it failed."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ flexshard {shlex.join(words)}", flush=True)
    result = subprocess.run([*FLEXSHARD, *words], stderr=subprocess.PIPE if may_fail else None, text=True, check=False)
    if result.returncode == 0:
        return ""
    if not may_fail:
        sys.exit(result.returncode)
    print(result.stderr, end="", flush=True)
    return result.stderr


if __name__ == "__main__":
    main()
