"""The module's kernels on a GPU by themselves, against what its memory could do: 10^6 ids of 10^7 rows.

    python -m benchmarks.gpu [--device cpu]

Bucketising reads and writes each id a few times, a lookup reads and writes each row once, an update of copies reads
weight, gradient and state of each row and writes two of them. Printed is the share of the memory's bandwidth that this
takes, as a copy of the same size measures it. With ``--device cpu`` it shows that it runs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial

import torch

from flexshard._internal import moment, seconds_between
from flexshard.executors.comm.bucketized_ids import Buckets, bucketize
from flexshard.executors.stores.fused import FusedStore
from flexshard.executors.stores.touched_rows import sum_by_slot
from flexshard.executors.stores.updates import OptimizerSpec

ROWS, IDS, DIM, COPIED, RANKS, ROUNDS = 10_000_000, 1_000_000, 64, 1_000_000, 64, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=float, default=ROWS)
    args = parser.parse_args()
    device, rows = torch.device(args.device), int(args.rows)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --device cpu shows that this runs")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    version = commit.stdout.strip() or "unknown"
    print(f"{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, commit {version}")
    bandwidth = copy_bandwidth(device)
    print(f"a copy moves {bandwidth / 1e9:.0f} GB/s")

    generator = torch.Generator(device=device).manual_seed(0)
    slots = rows // RANKS
    locations = torch.randint(0, RANKS * slots, (IDS,), generator=generator, device=device, dtype=torch.int32)
    buckets = Buckets(RANKS, (0,), slots, torch.int32, device)
    for dedup in (False, True):
        seconds = timed(partial(bucketize, locations, [IDS], buckets, index_dedup=dedup), device)
        what = "bucketise distinct ids" if dedup else "bucketise"
        report(what, seconds, IDS * (4 + 4 + 8), bandwidth)

    spec = OptimizerSpec.of({"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.1}, "t", device)
    store = FusedStore(spec, rows, DIM, torch.float32, device)
    at = torch.randint(0, rows, (IDS,), generator=generator, device=device)
    gradient = torch.ones(IDS, DIM, device=device)
    report("look up", timed(lambda: store.look_up(at), device), 2 * IDS * DIM * 4, bandwidth)

    def train() -> None:
        store.look_up(at).update(gradient)

    report("look up and update", timed(train, device), 6 * IDS * DIM * 4, bandwidth)
    copied = min(COPIED, rows)
    dense = torch.ones(copied, DIM, device=device)
    seconds = timed(lambda: store.update_copies(slice(0, copied), dense), device)
    report("update rows with copies", seconds, 3 * copied * DIM * 4, bandwidth)
    report("sum gradients by slot", timed(lambda: sum_by_slot(at, gradient), device), 3 * IDS * DIM * 4, bandwidth)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second."""
    source = torch.empty(1 << 27, dtype=torch.float32, device=device)
    copied = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: copied.copy_(source), device)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of one call, after some that warm up."""
    for _ in range(3):
        work()
    times = []
    for _ in range(ROUNDS):
        start = moment(device)
        work()
        times.append(seconds_between(start, moment(device)))
    return statistics.median(times)


def report(what: str, seconds: float, nbytes: int, bandwidth: float) -> None:
    print(f"{what}: {seconds * 1e3:.3f} ms, {nbytes / seconds / bandwidth:.0%} of the bandwidth")


if __name__ == "__main__":
    main()
