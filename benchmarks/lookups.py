"""Lookups and updates of dense tables, predicted by 'flexshard calibrate', at batches that it did not time.

    python -m benchmarks.lookups [--rounds 7]

Twelve tables (three sizes, two dimensions, two lengths) are calibrated at their own sizes and lengths, then timed at
other batch sizes, lengths and skews, with pooling and without. "before": timed at 20 ids a bag of a million rows.
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
from flexshard.calibration.dense_tables import dense_step, dense_table, split_seconds

TABLES = list(itertools.product((10_000, 200_000, 4_000_000), (16, 128), (3.0, 30.0)))
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
    rates = calibrate([], tables=TABLES, batch_size=BATCH, rounds=rounds)
    usual = calibrate([], tables=[(1_000_000, dim, 20.0) for dim in (16, 128)], batch_size=BATCH, rounds=rounds)
    grid = new_grid(
        "Milliseconds of batches that were not calibrated, means of three",
        ["rows", "dim", "length"],
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
    errors: dict[str, list[float]] = {"pooled": [], "before": [], "look up": [], "update": []}
    for rows, dim, length in TABLES:
        samples = batches(rows, length)
        pooled = dense_table(rows, dim, pooled=True, device="cpu")
        step = least_seconds([dense_step(pooled, dim, *one, "cpu") for one in samples], rounds)
        halves = split_seconds(dense_table(rows, dim, pooled=False, device="cpu"), samples, rounds, "cpu")
        sizes = [ids.size for ids, _ in samples]
        look_up, update = rates.local.of(rows, dim)
        said = {
            "pooled": [rates.dense_seconds(n, dim, rows) for n in sizes],
            "before": [usual.dense_seconds(n, dim) for n in sizes],
            "look up": [look_up[0] + n * look_up[1] for n in sizes],
            "update": [update[0] + n * update[1] for n in sizes],
        }
        seen = {"pooled": step, "before": step, "look up": halves[0], "update": halves[1]}
        cells = []
        for name in said:
            errors[name] += [s / m - 1 for s, m in zip(said[name], seen[name], strict=True)]
            mean, expected = statistics.mean(seen[name]), statistics.mean(said[name])
            shown = [f"{1e3 * mean:.2f}", f"{1e3 * expected:.2f}", f"{expected / mean - 1:+.0%}"]
            cells += shown if name != "before" else shown[2:]
        grid.add_row(f"{rows:,}", str(dim), f"{length:g}", *cells)
    print(as_text(grid, 150))
    for name, found in errors.items():
        sizes = [abs(one) for one in found]
        print(f"{name}: median error {statistics.median(sizes):.0%}, largest {max(sizes):.0%}, of {len(found)} batches")


if __name__ == "__main__":
    main()
