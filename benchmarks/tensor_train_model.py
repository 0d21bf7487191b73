"""Predicted and measured steps of tensor-train tables: rates from a short calibration, batches that it has not seen.

    python -m benchmarks.tensor_train_model

Predictions are made twice: from the ids of the batch, and from the access profile alone, as the planner makes them.
Both calibration and measurement take the least of their rounds, and the least of two passes over all shapes, since a
shared machine has slow spells; one thread.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np
import torch

from benchmarks.timing import machine
from flexshard import AccessProfile, Table
from flexshard._internal import as_text, new_grid
from flexshard.calibration import calibrate, least_seconds, train_step
from flexshard.costmodels import TTReads
from flexshard.embeddings import TTShape

ROWS = 2_000_000
# Bags, ids per bag, exponent of Zipf's law, whether ids are hashed: none of them is calibrated with.
BATCHES = ((4096, 12, 1.0, True), (4096, 12, 1.0, False), (2048, 40, 1.15, True), (1500, 8, 0.8, False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    shapes = [
        TTShape.choose(ROWS, dim, rank, cores=cores)
        for dim, rank, cores in ((64, 16, 3), (64, 32, 3), (64, 64, 3), (64, 64, 2), (128, 32, 3), (32, 16, 4))
    ]
    numbers = ["batch", "measured", "from its ids", "", "from the profile", ""]
    grid = new_grid("Step of a batch, milliseconds", ["tensor train"], numbers)
    start = time.perf_counter()
    passes = np.array([[once(shape, args.rounds) for shape in shapes] for _ in range(2)])
    print(f"{(time.perf_counter() - start) / 2 / len(shapes):.1f} s to calibrate a shape and measure its batches")
    of_ids, of_profile = [], []
    for shape, found in zip(shapes, passes.min(axis=0), strict=True):
        name = f"D={shape.embedding_dim} {shape.cores} cores, ranks {shape.tt_ranks}"
        for (bags, length, exponent, hashed), (seconds, counted, expected) in zip(BATCHES, found, strict=True):
            of_ids.append(counted / seconds - 1)
            of_profile.append(expected / seconds - 1)
            cells = (f"{1e3 * counted:.1f}", f"{of_ids[-1]:+.0%}", f"{1e3 * expected:.1f}", f"{of_profile[-1]:+.0%}")
            batch = f"{bags} x {length}, Zipf {exponent}, {'hashed' if hashed else 'ordered'}"
            grid.add_row(name, batch, f"{1e3 * seconds:.1f}", *cells)
    for name, found in (("ids", of_ids), ("profile", of_profile)):
        errors = np.abs(found)
        print(f"from the {name}: {(errors <= 0.2).sum()} of {len(errors)} within 20 %, median {median(errors):.0%}")
    print(as_text(grid, 130))


def once(shape: TTShape, rounds: int) -> list[tuple[float, float, float]]:
    """Seconds of each batch: measured, predicted from its ids, and from the profile."""
    rates = calibrate([shape], rounds=rounds)
    own = [drawn(shape.embedding_dim, *batch, seed=seed) for seed, batch in enumerate(BATCHES)]
    steps = [train_step(shape, ids, bags) for (_, ids), (bags, _, _, _) in zip(own, BATCHES, strict=True)]
    return [
        (
            seconds,
            rates.step_seconds(shape, TTReads.of(ids, bags, shape)),
            rates.step_seconds(shape, TTReads.expected(table, bags, shape, hashed=hashed)),
        )
        for (table, ids), (bags, _, _, hashed), seconds in zip(own, BATCHES, least_seconds(steps, rounds), strict=True)
    ]


def drawn(dim: int, bags: int, length: int, exponent: float, hashed: bool, seed: int) -> tuple[Table, np.ndarray]:
    """A table with its profile, and a batch of it."""
    generator = np.random.default_rng(100 + seed)
    weights = 1.0 / np.arange(1, ROWS + 1) ** exponent
    cumulative = np.cumsum(weights)
    ids = np.searchsorted(cumulative, generator.random(bags * length) * cumulative[-1])
    samples = 10**7
    counts = np.round(samples * length * weights / cumulative[-1]).astype(np.int64)
    profile = AccessProfile.from_counts(counts, num_samples=round(counts.sum() / length))
    return Table("t", ROWS, dim, profile), generator.permutation(ROWS)[ids] if hashed else ids


if __name__ == "__main__":
    main()
