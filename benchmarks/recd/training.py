"""Training with attention over histories on four processes: losses, throughput, activations, bytes; Figure 9's steps.

The model is that of ``examples/recd_mind.py``. Every configuration that says "by session" trains on the same batches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.recd.data import Log, logs, shuffled, write
from flexshard import units
from flexshard._internal import as_text, new_grid
from flexshard.ingestion import cluster_sessions

__all__ = ["main"]

RANKS = 4


def main(folder: Path) -> None:
    for log in logs(folder, sessions=6000):
        if log.name != "Globo":  # clicks have no lists to attend to
            print_training(log, train(log, folder))


def train(log: Log, folder: Path) -> dict[str, Any]:
    by_session = cluster_sessions(
        log.path, folder / f"{log.name}.by_session", session="session", time="time", row_group_rows=4096
    )
    table = pq.read_table(log.path)
    for name, rows in (("time", table), ("random", shuffled(table))):
        write(rows, folder / f"{log.name}.{name}.parquet", row_group_size=4096)
    result = folder / f"{log.name}.json"
    job = {
        "paths": {
            "by session": str(by_session.path),
            "in time": str(folder / f"{log.name}.time.parquet"),
            "shuffled": str(folder / f"{log.name}.random.parquet"),
        },
        "items": log.items,
        "impressions": log.name == "MIND",  # whose sessions are: one history and what was shown
        "result": str(result),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", "benchmarks.recd.rank", json.dumps(job)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    subprocess.run(command, check=True, env=environment)
    return dict(json.loads(result.read_text()))


def print_training(log: Log, found: dict[str, Any]) -> None:
    numbers = [
        "batch",
        "DedupFactor",
        "step s",
        "samples/s",
        "faster",
        "predicted",
        "error",
        "activations",
        "loss differs by",
    ]
    grid = new_grid(f"Training: {log.name}, {RANKS} gloo ranks, medians of rounds in turn", ["configuration"], numbers)
    base = found["configurations"]["by session, plain (CT)"]
    for name, one in found["configurations"].items():
        predicted = one.get("predicted_speedup")
        faster = one["samples_per_s"] / base["samples_per_s"]
        grid.add_row(
            name,
            f"{one['batch_size']:,}",
            f"{one['dedup_factor']:.2f}",
            f"{one['step_seconds']:.3f}",
            f"{one['samples_per_s']:,.0f}",
            f"{faster:.2f}x",
            "" if predicted is None else f"{predicted:.2f}x",
            "" if predicted is None else f"{faster / predicted - 1:+.0%}",
            units.format_bytes(one["activation_bytes"]),
            "" if one["loss_difference"] is None else f"{one['loss_difference']:.1e}",
        )
    print(as_text(grid, 170))
    configurations = found["configurations"]
    plain, deduped = configurations["shuffled, plain"], configurations["shuffled, deduplicated"]
    cost = deduped["step_seconds"] / plain["step_seconds"] - 1
    print(f"on shuffled data deduplication costs {cost:+.1%} of a step (median of ratios {deduped['ratio'] - 1:+.1%})")
    grid = new_grid("Bytes per rank and step", ["collective"], ["plain (CT)", "deduplicated compute (CT+DE+DC)", ""])
    whole, once = base["bytes"], configurations["by session, deduplicated compute (CT+DE+DC)"]["bytes"]
    for name in whole:
        ratio = f"{whole[name] / once[name]:.2f}x" if once.get(name) else ""
        grid.add_row(name, units.format_bytes(whole[name]), units.format_bytes(once.get(name, 0)), ratio)
    print(as_text(grid, 110), flush=True)
