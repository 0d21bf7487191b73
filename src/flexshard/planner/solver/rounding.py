"""From two neighbouring allocations, one within the budget and one beyond, to one that fills it to within a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flexshard.planner.solver.instance import Allocation, Instance

__all__ = ["fill"]


# The running slack is a sum of differences; where rounding overdraws it, this share of the limit is left unspent.
_SPARED = (0.0, 1e-13, 1e-12, 1e-11)


@dataclass(frozen=True)
class _Step:
    """Rows of one count of a table whose tier differs, and what moving one of them takes."""

    table: int
    rows: int
    source: int
    target: int
    row_memory_bytes: float


def fill(instance: Instance, inside: Allocation, beyond: Allocation, limit_bytes: float) -> Allocation:
    """Move rows from their tier in ``inside`` to that in ``beyond`` while the memory limit lasts.

    Both allocations minimise the same priced cost, so every mixture does, and the fullest is the fastest.
    """
    steps = list(_steps(instance, inside, beyond))
    for spared in _SPARED:
        filled = _filled(instance, inside, steps, limit_bytes * (1 - spared))
        if instance.memory_bytes(filled) <= limit_bytes * (1 + 1e-13):
            return filled
    return inside


def _filled(instance: Instance, inside: Allocation, steps: Sequence[_Step], limit_bytes: float) -> Allocation:
    result = inside.copy()
    slack = limit_bytes - instance.memory_bytes(inside)
    for step in steps:
        if step.row_memory_bytes <= 0:
            continue
        moved = min(step.rows, int(max(slack, 0.0) / step.row_memory_bytes))
        result[step.table, step.source] -= moved
        result[step.table, step.target] += moved
        slack -= moved * step.row_memory_bytes
    return result


def _steps(instance: Instance, inside: Allocation, beyond: Allocation) -> Iterator[_Step]:
    for table in np.flatnonzero((inside != beyond).any(axis=1)).tolist():
        ends_inside, ends_beyond = np.cumsum(inside[table]), np.cumsum(beyond[table])
        points = np.unique(np.concatenate([[0], ends_inside, ends_beyond]))
        for first, last in zip(points[:-1].tolist(), points[1:].tolist(), strict=True):
            source = int(np.searchsorted(ends_inside, first, side="right"))
            target = int(np.searchsorted(ends_beyond, first, side="right"))
            if source != target:
                yield from _by_count(instance, table, first, last, source, target)


def _by_count(instance: Instance, table: int, first: int, last: int, source: int, target: int) -> Iterator[_Step]:
    start, end = int(instance.starts[table]), int(instance.starts[table + 1])
    cum_rows = instance.cum_rows[start:end]
    groups = np.arange(np.searchsorted(cum_rows, first, side="right"), np.searchsorted(cum_rows, last, side="left") + 1)
    lower = np.maximum(np.where(groups > 0, cum_rows[groups - 1], 0), first)
    upper = np.minimum(cum_rows[groups], last)
    fixed = instance.table_memory_fixed[table]
    extra_fixed = fixed[target] - fixed[source]
    extra_read = instance.memory_per_read[target] - instance.memory_per_read[source]
    per_row = instance.row_bytes[table] * (extra_fixed + extra_read * instance.reads[start + groups])
    for rows, nbytes in zip((upper - lower).tolist(), per_row.tolist(), strict=True):
        yield _Step(table, rows, source, target, nbytes)
