"""The optimal placement within a memory budget (docs/model.md).

For a price λ of a byte every row takes its cheapest tier; one search over λ meets the budget. That solves the linear
relaxation, whose dual value bounds every plan from below. Rows that cost the same at λ then fill the budget to within
one row, and on small instances the last row is settled exactly (``polish``). Latencies are paid once per collective
that is used at all, so each subset of the levels is solved, unless its bound shows that it cannot win.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flexshard import units
from flexshard.errors import BudgetError
from flexshard.planner.solver.bisection import bisect_floats, bits_alike
from flexshard.planner.solver.exact_search import polish
from flexshard.planner.solver.gathered import least_of_tables, solve_gathered
from flexshard.planner.solver.hottest_rows import FEW_COUNTS, least_with_excess
from flexshard.planner.solver.instance import Allocation, Instance, memory_limit
from flexshard.planner.solver.rounding import fill
from flexshard.planner.solver.solution import Solution
from flexshard.planner.solver.thresholds import allocate

__all__ = [
    "bound_at_price",
    "cheapest_tables",
    "least_memory",
    "price_range",
    "solve_instance",
    "solve_levels",
    "subsets_of",
]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_MOST_TRIES_GATHERED = 4  # of how long hot rows may make all wait
# Shares of the price at which rows are still looked for, to spend what the last row left over.
_CHEAPER = (0.999, 0.99, 0.9, 0.7, 0.4, 0.1, 0.0)


def least_memory(instance: Instance, levels: IntArray | None = None) -> float:
    """Least memory per rank of any allocation to some levels (all by default), in bytes."""
    levels = np.arange(instance.group_sizes.size) if levels is None else levels
    return instance.memory_bytes(*allocate(instance, levels, np.inf))


def solve_instance(
    instance: Instance,
    budget_bytes: float,
    max_tiers: int,
    *,
    start_price: float | None = None,
    known_seconds: float = np.inf,
) -> Solution:
    """The best allocation within a budget that uses at most ``max_tiers`` group sizes.

    Args:
        start_price: what the price may be, if known: the search starts there.
        known_seconds: what a placement of another instance takes, which one of this would have to beat: where none can,
            any is given, with a bound that says so.

    Raises:
        BudgetError: none fits; says the least budget that would.
    """
    # The largest subsets first: their bounds rule most of the others out.
    subsets = sorted(subsets_of(instance, max_tiers), key=len, reverse=True)
    best: Solution | None = None
    bounds: list[float] = []
    for levels in subsets:
        latency = instance.latency_seconds(levels)
        if best is not None and latency + _bound(instance, levels, best.price, budget_bytes) >= best.seconds:
            continue
        known = known_seconds if best is None else min(known_seconds, best.seconds)
        candidate = solve_levels(instance, levels, budget_bytes, start_price, known)
        if candidate is None:
            continue
        bounds.append(candidate.lower_bound_seconds)
        if best is None or candidate.seconds < best.seconds:
            best = candidate
    if best is None:
        raise _infeasible(instance, budget_bytes, max_tiers, subsets)
    best = _of_used_levels(instance, best, budget_bytes)
    return replace(best, lower_bound_seconds=min(best.seconds, *bounds))


def subsets_of(instance: Instance, max_tiers: int) -> list[IntArray]:
    """Levels that rows may be at together."""
    gathering = instance.gathering
    return [one for one in instance.level_subsets(max_tiers) if gathering is None or gathering.is_at(one)]


def bound_at_price(instance: Instance, budget_bytes: float, max_tiers: int, price: float) -> float:
    """No placement within a budget takes less, whatever the price of memory at which this is said: seconds."""
    limit = memory_limit(budget_bytes)
    return min(
        instance.latency_seconds(levels) + _bound(instance, levels, price, limit)
        for levels in subsets_of(instance, max_tiers)
    )


def _of_used_levels(instance: Instance, best: Solution, budget_bytes: float) -> Solution:
    """The same solution with the price of memory among the levels that it uses.

    A level that was allowed and not used has set the price of rows that would only have gone there.
    """
    used = np.flatnonzero(best.allocation.any(axis=0))
    while used.size < best.levels.size:
        again = solve_levels(instance, used, budget_bytes, None)
        if again is None or again.seconds > best.seconds * (1 + 1e-12):
            return replace(best, levels=used)
        best, used = again, np.flatnonzero(again.allocation.any(axis=0))
    return best


def _infeasible(instance: Instance, budget_bytes: float, max_tiers: int, subsets: list[IntArray]) -> BudgetError:
    least = min(least_memory(instance, levels) for levels in subsets)
    return BudgetError(
        f"no placement in at most {max_tiers} tiers fits a budget of {units.format_bytes(budget_bytes)}"
        f" ({budget_bytes:,.0f} bytes) per rank; the least that is feasible is {units.format_bytes(least)}"
        f" ({np.ceil(least):,.0f} bytes): raise the budget, use more ranks, or a smaller batch",
        float(least),
    )


def _bound(instance: Instance, levels: IntArray, price: float, limit_bytes: float) -> float:
    """Lagrangian bound at a price, without latencies or excess: no allocation to these levels within the limit is
    faster.
    """
    if instance.gathering is not None:
        seconds, memory = least_of_tables(instance, levels, price)
        return float(seconds.sum()) + price * (float(memory.sum()) + instance.held_bytes - limit_bytes)
    allocated = allocate(instance, levels, price)
    over = instance.memory_bytes(*allocated) - limit_bytes
    return instance.variable_seconds(*allocated) + price * over


def cheapest_tables(instance: Instance, levels: IntArray, price: float) -> tuple[FloatArray, FloatArray]:
    """Seconds and memory of each table whose rows are where they cost least at a price; shape (T,) each."""
    if instance.gathering is not None:
        return least_of_tables(instance, levels, price)
    return instance.per_table(*allocate(instance, levels, price))


def solve_levels(
    instance: Instance,
    levels: IntArray,
    budget_bytes: float,
    start_price: float | None,
    known_seconds: float = np.inf,
) -> Solution | None:
    """The best placement that uses just these levels (indices); none where no such placement fits.

    A hot row makes its owner the busiest rank, which is not a sum over rows: branch and bound on how much longer the
    hottest row of a level may make its all-to-alls (:mod:`flexshard.planner.solver.hottest_rows`).
    """
    if instance.gathering is not None:
        limit, prices = memory_limit(budget_bytes), price_range(instance)
        return least_with_excess(
            instance,
            lambda limited: solve_gathered(limited, levels, limit, prices),
            _MOST_TRIES_GATHERED,
            known_seconds=known_seconds,
        )
    latest = start_price

    def solve(limited: Instance) -> Solution | None:
        nonlocal latest
        found = _solve_sums(limited, levels, budget_bytes, latest)
        latest = latest if found is None else found.price
        return found

    return least_with_excess(instance, solve, known_seconds=known_seconds)


def _solve_sums(
    instance: Instance, levels: IntArray, budget_bytes: float, start_price: float | None
) -> Solution | None:
    """As :func:`solve_levels`, with a bound that leaves out how much longer hot rows make it."""
    limit = memory_limit(budget_bytes)
    latency = instance.latency_seconds(levels)
    floor, ceiling = price_range(instance)

    def fits(price: float) -> bool:
        return instance.memory_bytes(*allocate(instance, levels, price)) <= limit

    if fits(floor):
        fastest = instance.variable_seconds(*allocate(instance, levels, 0.0))
        return _solution(instance, allocate(instance, levels, floor)[0], fastest + latency, 0.0, levels)
    if not fits(ceiling):
        return None
    low, high = bisect_floats(floor, ceiling, fits, bits=bits_alike(instance.reads.size), near=start_price)
    dual = max(_bound(instance, levels, price, limit) for price in (low, high))
    beyond, inside = (allocate(instance, levels, price)[0] for price in (low, high))
    filled = fill(instance, inside, beyond, limit)
    for share in _CHEAPER:
        # A row too large for what is left blocks the rows that cost the same; smaller ones elsewhere may still fit.
        if instance.variable_seconds(filled) - dual <= 1e-6 * abs(dual):
            break
        filled = fill(instance, filled, allocate(instance, levels, share * high)[0], limit)
    exact, bound = filled, dual
    if instance.most_reads is None or instance.reads.size <= FEW_COUNTS:
        exact, bound = polish(instance, levels, filled, high, dual, limit)
    return _solution(instance, exact, bound + latency, high, levels)


def _solution(instance: Instance, allocation: Allocation, bound: float, price: float, levels: IntArray) -> Solution:
    seconds = instance.exposed_seconds(allocation)
    return Solution(allocation, seconds, min(bound, seconds), price, levels)


def price_range(instance: Instance) -> tuple[float, float]:
    """Prices so low that memory only breaks ties, and so high that time only does."""
    comm = np.concatenate([instance.comm_fixed.ravel(), instance.comm_per_read.ravel()])
    memory = np.concatenate([instance.memory_fixed.ravel(), instance.memory_per_read])
    if not comm.any():
        return 1.0, 2.0  # nothing to communicate: any price above 0 will do
    return 1e-30 * comm.max() / memory.max(), 1e18 * comm.max() / memory[memory > 0].min()
