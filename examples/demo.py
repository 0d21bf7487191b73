"""From access data to a proven plan, and from a plan to a model that trains under it, with the commands that a user
would type.

make demo                              on power-law sequences that it generates
make demo DATA=clicks.parquet COLUMN=item_id
"""

from __future__ import annotations

import argparse
import glob
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

from clicks import read_log
from one_line import run_example

OUTPUT = Path("demo")
SHAPE = ("--rows", 2_000_000, "--samples", 60_000, "--length", 400, "--exponent", 0.8)
FLEXSHARD = [sys.executable, "-m", "flexshard.cli"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a Parquet file of yours")
    parser.add_argument("--column", help="its column of ids, or of lists of ids")
    parser.add_argument("--sample-key", help="column whose distinct values are the samples, such as a session")
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
    count(data, column, given.sample_key, profile)
    options = ("--cluster", "a100-4x8-roce", "--batch-size", 4096, "--dim", 256)
    flexshard("job", profile, *options, "-o", job)
    flexshard("plan", job, "-o", plan)
    flexshard("explain", plan)
    flexshard("pareto", job, "-o", f"{OUTPUT}/pareto.png")
    pictures = f"{OUTPUT}/pareto.png"
    if given.data is None:
        train()
        pictures += f" and {OUTPUT}/reduction.png"
    print(f"\nDone in {time.perf_counter() - start:.0f} s. Now look at {pictures}, or edit {job} and plan again.")


def train() -> None:
    """Profile the lookups of a sequence model, plan them, and train it on four processes with and without the plan."""
    print("\nNow a model: the next click of a session, on four processes that stand for two nodes with two GPUs each.")
    log, lookups, profile, job, plan, observed, row_wise = (
        f"{OUTPUT}/{name}"
        for name in (
            "log.parquet",
            "lookups.parquet",
            "articles.profile.parquet",
            "model.job.yaml",
            "model.plan.json",
            "observed.json",
            "observed_row_wise.json",
        )
    )
    show([sys.executable, "examples/clicks.py", log, "--items", "20000", "--sessions", "24000"])
    model = ["examples/next_click.py", log, "--sessions", "16000"]
    show([sys.executable, *model, "--lookups", lookups])
    articles = read_log(Path(log), 1).num_items
    flexshard("profile", lookups, "--column", "articles", "--rows", articles, "-o", profile)
    flexshard("job", profile, "--cluster", "examples/cluster_2x2.yaml", "--batch-size", 64, "--dim", 64, "-o", job)
    flexshard("plan", job, "-o", plan)
    on_two_nodes([*model, "--observed", row_wise])
    on_two_nodes([*model, "--plan", plan, "--observed", observed])
    print(
        "\nWhat was predicted, and what went over the wire (one machine has no network, so bytes count here, not time):"
    )
    flexshard("compare", plan, observed, "--row-wise", row_wise, "-o", f"{OUTPUT}/reduction.png")


def on_two_nodes(arguments: list[str]) -> None:
    """Run a script or module with torchrun, once for each of two nodes of two processes on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shape = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    print(f"\n$ torchrun --nnodes 2 --nproc-per-node 2 {shlex.join(arguments)}", flush=True)
    with tempfile.TemporaryFile("w+") as said:
        nodes = [
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *shape, "--node-rank", str(node), *arguments],
                env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
                stderr=said,
            )
            for node in range(2)
        ]
        codes = [node.wait() for node in nodes]
        if any(codes):
            said.seek(0)
            sys.exit(said.read())


def show(command: list[str]) -> None:
    """Show a command and run it; stop where it fails."""
    print(f"\n$ {shlex.join(['python', *command[1:]])}", flush=True)
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(1)


def count(data: str, column: str, sample_key: str | None, profile: str) -> None:
    """Profile the column as it is; fold its ids where they are raw 64-bit ones."""
    options: list[object] = ["--column", column, "--holdout", 0.1, "-o", profile]
    if sample_key is not None:
        options += ["--sample-key", sample_key]
    largest, number = id_range(data, column)
    if largest >= 1 << 28:
        rows = 1 << max(16, (2 * number - 1).bit_length())
        print(f"Ids of up to {largest:,} are raw, not rows of a table: they are folded into {rows:,} rows.")
        options += ["--hash", "splitmix64", "--rows", rows]
    flexshard("profile", data, *options)


def id_range(data: str, column: str) -> tuple[int, int]:
    """Largest absolute id and number of ids, from the files' statistics; 0 where they say nothing."""
    largest = number = 0
    files = sorted(Path(data).rglob("*.parquet")) if Path(data).is_dir() else glob.glob(data, recursive=True)
    for file in files:
        metadata = pq.ParquetFile(file).metadata
        for group in range(metadata.num_row_groups):
            for index in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(index)
                if chunk.path_in_schema.split(".")[0] != column:
                    continue
                number += chunk.num_values
                bounds = chunk.statistics
                if bounds is not None and bounds.has_min_max and isinstance(bounds.max, int):
                    # One padding value below zero is not a raw id; the command will say what is wrong with it.
                    largest = max(largest, bounds.max, -bounds.min)
    return largest, number


def flexshard(*arguments: object) -> None:
    """Show a command and run it; stop where it fails."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ flexshard {shlex.join(words)}", flush=True)
    result = subprocess.run([*FLEXSHARD, *words], check=False)
    if result.returncode != 0:
        sys.exit(result.returncode)


if __name__ == "__main__":
    run_example(main)
