"""Lookups and updates of dense tables, predicted by 'flexshard calibrate', at batches that it did not time.

    python -m benchmarks.lookups [--rounds 7]

Twelve tables (three sizes, two dimensions, two lengths), then tables of other data types and optimizers, are calibrated
at their own sizes and lengths, then timed at other batch sizes, lengths and skews, with pooling and without. "before":
timed at 20 ids a bag of a million rows. FBGEMM has no Adam on CPUs: executors update such rows in torch alone.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import numpy as np
import torch

from benchmarks.timing import machine
from flexshard._internal import as_text, new_grid
from flexshard.calibration import calibrate, least_seconds
from flexshard.calibration.dense_tables import DenseShape, dense_step, dense_table, split_seconds

TABLES = [DenseShape(*one) for one in itertools.product((10_000, 200_000, 4_000_000), (16, 128), (3.0, 30.0))]
KERNELS = [
    DenseShape(200_000, 64, 10.0, dtype, optimizer)
    for dtype, optimizer in (
        ("float16", "rowwise_adagrad"),
        ("float32", "sgd"),
        ("float32", "adagrad"),
        ("float16", "sgd"),
        ("float32", "adam"),
        ("float32", "partial_rowwise_adam"),
    )
]
BATCH = 2048
# Samples and ids of each, as shares of what was calibrated, and exponent of Zipf's law.
OTHERS = ((0.75, 1.0, 1.0), (0.35, 1.0, 1.15), (1.5, 0.67, 1.05))


def batches(rows: int, length: float) -> list[tuple[np.ndarray, int]]:
    random, found = np.random.default_rng(7), []
    p_of = {exponent: np.arange(1.0, rows + 1) ** -exponent for _, _, exponent in OTHERS}
    place = random.permutation(rows)
    for share, part, exponent in OTHERS:
        bags, each = round(share * BATCH), max(round(part * length), 1)
        cumulative = np.cumsum(p_of[exponent]) / p_of[exponent].sum()
        found.append((place[np.minimum(np.searchsorted(cumulative, random.random(bags * each)), rows - 1)], bags))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(machine())
    rates = calibrate([], tables=[*TABLES, *KERNELS], batch_size=BATCH, rounds=rounds)
    usual = calibrate([], tables=[(1_000_000, dim, 20.0) for dim in (16, 128)], batch_size=BATCH, rounds=rounds)
    grid = new_grid(
        "Milliseconds of batches that were not calibrated, means of three",
        ["rows", "dim", "length", "kernel"],
        [
            "pooled step",
            "predicted",
            "error",
            "before",
            "look up",
            "predicted",
            "error",
            "update",
            "predicted",
            "error",
        ],
    )
    errors: dict[str, dict[str, list[float]]] = {}
    for own in rates.tables:
        shape = DenseShape(own.rows, own.dim, own.length, own.dtype, own.optimizer)
        samples = batches(shape.rows, shape.length)
        pooled = dense_table(shape, pooled=True, device="cpu")
        step = least_seconds([dense_step(pooled, shape.dim, *one, "cpu") for one in samples], rounds)
        alone, dtype = dense_table(shape, pooled=False, device="cpu"), getattr(torch, shape.dtype)
        halves = split_seconds(alone, samples, rounds, "cpu", dtype)
        sizes = [ids.size for ids, _ in samples]
        said = {
            "pooled": [own.pooled[0] + n * own.pooled[1] for n in sizes],
            "before": [usual.dense_seconds(n, shape.dim) for n in sizes],
            "look up": [own.look_up[0] + n * own.look_up[1] for n in sizes],
            "update": [own.update[0] + n * own.update[1] for n in sizes],
        }
        seen = {"pooled": step, "before": step, "look up": halves[0], "update": halves[1]}
        cells = []
        group = errors.setdefault("twelve shapes" if shape in TABLES else "other kernels", {})
        for name in said:
            group.setdefault(name, []).extend(s / m - 1 for s, m in zip(said[name], seen[name], strict=True))
            mean, expected = statistics.mean(seen[name]), statistics.mean(said[name])
            shown = [f"{1e3 * mean:.2f}", f"{1e3 * expected:.2f}", f"{expected / mean - 1:+.0%}"]
            cells += shown if name != "before" else shown[2:]
        kernel = f"{shape.optimizer}, {shape.dtype}"
        grid.add_row(f"{shape.rows:,}", str(shape.dim), f"{shape.length:g}", kernel, *cells)
    print(as_text(grid, 180))
    for group_name, found_of in errors.items():
        for name, found in found_of.items():
            sizes_of = [abs(one) for one in found]
            median, worst = statistics.median(sizes_of), max(sizes_of)
            print(f"{group_name}, {name}: median error {median:.0%}, largest {worst:.0%}, of {len(found)} batches")


if __name__ == "__main__":
    main()
