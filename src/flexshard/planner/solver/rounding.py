"""From two neighbouring allocations, one within the budget and one beyond, to one that fills it to within a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard.planner.solver.instance import Allocation, Instance

__all__ = ["fill"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# The running slack is a sum of differences; where rounding overdraws it, this share of the limit is left unspent.
_SPARED = (0.0, 1e-13, 1e-12, 1e-11)


@dataclass(frozen=True, eq=False)
class _Steps:
    """Rows of one count of a table whose tier differs, and what moving one of them takes; shape (n,) each."""

    table: IntArray
    rows: IntArray
    source: IntArray
    target: IntArray
    row_memory_bytes: FloatArray


def fill(instance: Instance, inside: Allocation, beyond: Allocation, limit_bytes: float) -> Allocation:
    """Move rows from their tier in ``inside`` to that in ``beyond`` while the memory limit lasts.

    Both allocations minimise the same priced cost, so every mixture does, and the fullest is the fastest.
    """
    parts = list(_steps(instance, inside, beyond))
    if not parts:
        return inside
    steps = _Steps(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    for spared in _SPARED:
        filled = _filled(instance, inside, steps, limit_bytes * (1 - spared))
        if instance.memory_bytes(filled) <= limit_bytes * (1 + 1e-13):
            return filled
    return inside


def _filled(instance: Instance, inside: Allocation, steps: _Steps, limit_bytes: float) -> Allocation:
    result = inside.copy()
    slack = max(limit_bytes - instance.memory_bytes(inside), 0.0)
    moved = np.zeros(steps.rows.size, np.int64)
    left = np.flatnonzero(steps.row_memory_bytes > 0)
    while True:
        # One row too large for what is left does not keep smaller ones behind it from moving.
        left = left[steps.row_memory_bytes[left] <= slack]
        if not left.size:
            break
        spent = np.cumsum(steps.rows[left] * steps.row_memory_bytes[left])
        whole = int(np.searchsorted(spent, slack, side="right"))
        moved[left[:whole]] = steps.rows[left[:whole]]
        slack -= float(spent[whole - 1]) if whole else 0.0
        if whole == left.size:
            break
        part = left[whole]
        moved[part] = int(slack / steps.row_memory_bytes[part])
        slack -= float(moved[part] * steps.row_memory_bytes[part])
        left = left[whole + 1 :]
    np.subtract.at(result, (steps.table, steps.source), moved)
    np.add.at(result, (steps.table, steps.target), moved)
    return result


def _steps(instance: Instance, inside: Allocation, beyond: Allocation) -> Iterator[tuple[npt.NDArray[Any], ...]]:
    """Columns of :class:`_Steps`, of a range of one table's rows at a time."""
    for table in np.flatnonzero((inside != beyond).any(axis=1)).tolist():
        ends_inside, ends_beyond = np.cumsum(inside[table]), np.cumsum(beyond[table])
        points = np.unique(np.concatenate([[0], ends_inside, ends_beyond]))
        for first, last in zip(points[:-1].tolist(), points[1:].tolist(), strict=True):
            source = int(np.searchsorted(ends_inside, first, side="right"))
            target = int(np.searchsorted(ends_beyond, first, side="right"))
            if source != target:
                yield _by_count(instance, table, first, last, source, target)


def _by_count(
    instance: Instance, table: int, first: int, last: int, source: int, target: int
) -> tuple[npt.NDArray[Any], ...]:
    start, end = int(instance.starts[table]), int(instance.starts[table + 1])
    cum_rows = instance.cum_rows[start:end]
    groups = np.arange(np.searchsorted(cum_rows, first, side="right"), np.searchsorted(cum_rows, last, side="left") + 1)
    lower = np.maximum(np.where(groups > 0, cum_rows[groups - 1], 0), first)
    rows = np.minimum(cum_rows[groups], last) - lower
    fixed = instance.table_memory_fixed[table]
    extra_fixed = fixed[target] - fixed[source]
    extra_read = instance.memory_per_read[target] - instance.memory_per_read[source]
    per_row = instance.row_bytes[table] * (extra_fixed + extra_read * instance.reads[start + groups])
    of_table, of_source, of_target = (np.full(rows.size, value) for value in (table, source, target))
    return of_table, rows, of_source, of_target, per_row
