"""From two neighbouring allocations, one within the budget and one beyond, to one that fills it to within a row."""

from __future__ import annotations

from dataclasses import dataclass

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
    steps = _steps(instance, inside, beyond)
    if not steps.rows.size:
        return inside
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


def _steps(instance: Instance, inside: Allocation, beyond: Allocation) -> _Steps:
    """Of all tables, by table and then from the hottest rows on."""
    differ = np.flatnonzero((inside != beyond).any(axis=1))
    ends_inside, ends_beyond = np.cumsum(inside[differ], axis=1), np.cumsum(beyond[differ], axis=1)
    none = np.zeros((differ.size, 1), np.int64)
    points = np.sort(np.concatenate([none, ends_inside, ends_beyond], axis=1), axis=1)
    first, last = points[:, :-1], points[:, 1:]
    source, target = ((ends[:, None] <= first[:, :, None]).sum(axis=2) for ends in (ends_inside, ends_beyond))
    moves = (first < last) & (source != target)
    table = np.broadcast_to(differ[:, None], moves.shape)[moves]
    return _by_count(instance, table, *(values[moves] for values in (first, last, source, target)))


def _by_count(
    instance: Instance, table: IntArray, first: IntArray, last: IntArray, source: IntArray, target: IntArray
) -> _Steps:
    """Ranges of rows of a table, shape (n,) each, a count at a time."""
    from_count, number = np.zeros(table.size, np.int64), np.zeros(table.size, np.int64)
    for index, (start, end) in enumerate(zip(instance.starts[table], instance.starts[table + 1], strict=True)):
        cum_rows = instance.cum_rows[start:end]
        group = np.searchsorted(cum_rows, first[index], side="right")
        from_count[index] = start + group
        number[index] = np.searchsorted(cum_rows, last[index], side="left") + 1 - group
    which = np.repeat(np.arange(table.size), number)
    count = np.arange(which.size) + (from_count - np.cumsum(number) + number)[which]
    table, source, target = table[which], source[which], target[which]
    before = np.where(count > instance.starts[table], instance.cum_rows[count - 1], 0)
    rows = np.minimum(instance.cum_rows[count], last[which]) - np.maximum(before, first[which])
    fixed = instance.table_memory_fixed
    extra_fixed = fixed[table, target] - fixed[table, source]
    extra_read = instance.memory_per_read[target] - instance.memory_per_read[source]
    per_row = instance.row_bytes[table] * (extra_fixed + extra_read * instance.reads[count])
    return _Steps(table, rows, source, target, per_row)
