"""Settling the last row exactly where an instance is small.

A linear relaxation leaves a gap of at most one row's cost. Moving a row away from its cheapest tier at price λ adds
its *reduced cost*, so only rows whose reduced cost is below the gap can be elsewhere in a better plan (reduced-cost
fixing; Pisinger and Toth 1998, "Knapsack problems", section 4). Those few are enumerated count by count, keeping the
Pareto-best pairs of memory and time.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt

from flexshard._internal import plain_sum
from flexshard.planner.solver.deadline import is_enough
from flexshard.planner.solver.instance import Allocation, Instance

__all__ = ["polish"]

FloatArray = npt.NDArray[np.float64]

_MOST_COUNTS = 2_000
_MOST_OPTIONS = 1_000
_MOST_STATES = 5_000
_WORTHWHILE = 1e-9
_WORK_OF_COUNT, _WORK_OF_STATE = 100.0, 0.2  # microseconds


def polish(
    instance: Instance, levels: npt.NDArray[np.int64], start: Allocation, price: float, dual: float, limit_bytes: float
) -> tuple[Allocation, float]:
    """The best allocation within the limit and what none takes less than; or ``start`` and ``dual`` where the gap is
    nothing or the search would be long.

    Args:
        levels: the levels that are allowed.
        start: an allocation within the limit.
        price, dual: λ and the Lagrangian bound at it, without latencies.
    """
    value = instance.variable_seconds(start)
    gap = value - dual
    if gap <= _WORTHWHILE * abs(value) or instance.reads.size > _MOST_COUNTS:
        return start, dual
    searched = _search(instance, levels, price, gap, limit_bytes - instance.held_bytes)
    if searched is None:
        return start, dual
    if searched.size:
        reads = instance.tier_reads(searched)
        less = instance.variable_seconds(searched, reads)
        if less < value and instance.memory_bytes(searched, reads) <= limit_bytes:
            return searched, less
    return start, value


def _search(
    instance: Instance, levels: npt.NDArray[np.int64], price: float, gap: float, limit_bytes: float
) -> Allocation | None:
    """The best allocation above the Lagrangian bound by less than the gap; an empty array if there is none, None where
    looking through them would take long.
    """
    table, rows = instance.table_of_count, instance.rows_of_count
    memory, comm = _row_costs(instance, table, levels)
    priced = comm + price * memory
    home = priced.argmin(axis=1)
    reduced = priced - priced.min(axis=1, keepdims=True)
    every = np.arange(home.size)
    base_memory = float(rows @ memory[every, home])
    allocation = np.zeros((len(instance.tables), instance.group_sizes.size), np.int64)
    np.add.at(allocation, (table, levels[home]), rows)

    states_memory, states_comm = np.array([base_memory]), np.array([0.0])
    history: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], list[dict[int, int]], int]] = []
    core = np.flatnonzero((np.sort(reduced, axis=1)[:, 1] if levels.size > 1 else np.full(home.size, np.inf)) < gap)
    for count in core.tolist():
        options = _options(reduced[count], int(home[count]), int(rows[count]), gap)
        if options is None or len(options) * states_memory.size > 20 * _MOST_STATES:
            return None
        if is_enough(_WORK_OF_COUNT + _WORK_OF_STATE * len(options) * states_memory.size):
            return None
        extra = [
            (
                plain_sum(n * (memory[count, tier] - memory[count, home[count]]) for tier, n in option.items()),
                plain_sum(n * (comm[count, tier] - comm[count, home[count]]) for tier, n in option.items()),
            )
            for option in options
        ]
        more_memory, more_comm = np.array(extra).T
        all_memory = (states_memory[:, None] + more_memory).ravel()
        all_comm = (states_comm[:, None] + more_comm).ravel()
        spent = all_comm + price * (all_memory - base_memory)
        kept = _pareto(all_memory, all_comm, spent < gap)
        if kept.size > _MOST_STATES or kept.size == 0:
            return None
        history.append((kept // len(options), kept % len(options), options, count))
        states_memory, states_comm = all_memory[kept], all_comm[kept]
    feasible = np.flatnonzero(states_memory <= limit_bytes)
    if not feasible.size:
        return np.zeros(0, np.int64)
    state = int(feasible[states_comm[feasible].argmin()])
    for parents, chosen, options, count in reversed(history):
        for tier, moved in options[int(chosen[state])].items():
            allocation[table[count], levels[home[count]]] -= moved
            allocation[table[count], levels[tier]] += moved
        state = int(parents[state])
    return allocation


def _row_costs(
    instance: Instance, table: npt.NDArray[np.int64], levels: npt.NDArray[np.int64]
) -> tuple[FloatArray, FloatArray]:
    """Memory and time of one row of each count in each of the levels; shape (K, L) each."""
    size = instance.row_bytes[table][:, None]
    reads = instance.reads[:, None]
    memory = size * (instance.table_memory_fixed[table][:, levels] + instance.memory_per_read[levels] * reads)
    comm = size * (instance.table_comm_fixed[table][:, levels] + instance.table_comm_per_read[table][:, levels] * reads)
    if instance.most_reads is not None:
        comm = np.where(reads <= instance.most_reads[table][:, levels], comm, np.inf)
    return memory, comm


def _options(reduced: FloatArray, home: int, rows: int, gap: float) -> list[dict[int, int]] | None:
    """Ways to spread the rows of one count over other tiers at less than the gap: rows moved, by tier."""
    tiers = [tier for tier in range(reduced.size) if tier != home and reduced[tier] < gap]
    most = [rows if reduced[tier] <= 0 else min(rows, int(gap / reduced[tier])) for tier in tiers]
    if np.prod([float(n + 1) for n in most]) > _MOST_OPTIONS:
        return None
    choices = product(*(range(n + 1) for n in most))
    return [dict(zip(tiers, choice, strict=True)) for choice in choices if sum(choice) <= rows]


def _pareto(memory: FloatArray, comm: FloatArray, allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Indices of the states that no other beats in both memory and time."""
    index = np.flatnonzero(allowed)
    order = index[np.lexsort((comm[index], memory[index]))]
    least = np.minimum.accumulate(comm[order]) if order.size else comm[order]
    first = np.ones(order.size, np.bool_)
    first[1:] = comm[order][1:] < least[:-1]
    return np.asarray(order[first])
