"""How many workers a trainer needs: from demand and rates, and from how long clients wait (DPP paper, section 3.2)."""

from __future__ import annotations

import math

from flexshard.errors import DataError

__all__ = ["adjusted_workers", "workers_needed"]


def workers_needed(demand: float, worker_rate: float) -> float:
    """Workers that serve a demand, as Table 4 counts the nodes a trainer needs; round it up to run them.

    Args:
        demand: of the trainers, in samples or bytes per second (Table 3).
        worker_rate: of one worker at saturation, in the same unit (Table 4, "Transform TX").

    Raises:
        DataError: a demand below 0, or a rate that is not above 0.
    """
    if not demand >= 0 or not worker_rate > 0:
        raise DataError(f"workers follow from a demand and a rate above 0, found {demand} and {worker_rate}")
    return demand / worker_rate


def adjusted_workers(
    workers: int, stalled: float, buffered: float, *, least: int = 1, most: int = 64, target: float = 0.05
) -> int:
    """How many workers to run next, from what clients saw with ``workers`` of them.

    A client that waits for a share ``stalled`` of its time trains at ``1 - stalled`` of its rate, which so many
    workers serve; without waiting it would take ``workers / (1 - stalled)``. One that never waits, and has its buffers
    full, is served by one worker less.

    Args:
        workers: now.
        stalled: share of the time that clients waited, 0 to 1.
        buffered: share of what clients may hold that waits there, 0 to 1.
        least, most: bounds of the answer.
        target: share of waiting that is let be.
    """
    if stalled > target:
        wanted = math.ceil(workers / max(1 - stalled, 0.25))  # at most four times as many at once
    elif stalled <= target / 5 and buffered >= 0.8:
        wanted = workers - 1
    else:
        wanted = workers
    return max(least, min(most, wanted))
