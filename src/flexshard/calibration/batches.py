"""Batches of ids to time, and how they are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

__all__ = ["least_seconds", "sample_batches"]

# Shares of the batch and of the ids per bag, exponent of Zipf's law, and whether ids are in order of frequency.
_BATCHES = (
    (1.0, 1.0, 1.05, False),
    (1.0, 1.0, 1.05, True),
    (0.25, 1.0, 1.05, False),
    (1.0, 0.25, 0.9, True),
    (0.5, 0.5, 1.2, True),
)

Step = Callable[[], object]


def sample_batches(rows: int, batch_size: int, seed: int, length: float = 20.0) -> Iterator[tuple[np.ndarray, int]]:
    """Ids of the batches that are timed, and how many bags of equal length they are in."""
    generator = np.random.default_rng(seed)
    for share, part, exponent, ordered in _BATCHES:
        bags, length_of = max(round(share * batch_size), 1), max(round(part * length), 1)
        # Zipf's law by its inverse, so that a table of any size needs no array of its rows.
        uniform = generator.random(bags * length_of)
        if exponent == 1.0:
            rank = rows**uniform
        else:
            rank = (1.0 + uniform * (rows ** (1.0 - exponent) - 1.0)) ** (1.0 / (1.0 - exponent))
        ids = np.minimum(rank.astype(np.int64) - 1, rows - 1)
        if not ordered:
            # Multiplying by a number without a common factor sends every row to another one.
            factor = next(f for f in range(int(0.618 * rows) | 1, 2 * rows + 3) if np.gcd(f, rows) == 1)
            ids = (ids.astype(object) * factor % rows).astype(np.int64) if rows > 1 << 31 else ids * factor % rows
        yield ids, bags


def least_seconds(steps: Sequence[Step], rounds: int, device: torch.device | str = "cpu") -> list[float]:
    """Least time of each step, all of them in turn, so that a slow spell of the machine meets them all alike."""
    times = np.full((rounds + 1, len(steps)), np.inf)
    for number in range(rounds + 1):
        for position, step in enumerate(steps):
            start = time.perf_counter()
            step()
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize(device)
            times[number, position] = time.perf_counter() - start
    least: list[float] = times[1:].min(axis=0).tolist()  # the first round warms up
    return least
