"""How far any choice of tensor trains and tiers could be below: a Lagrangian bound, and the price of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from flexshard.planner.compression.menu import ChoiceProblem
from flexshard.planner.compression.program import PRICES
from flexshard.planner.plan import Plan
from flexshard.planner.solver.thresholds import crossing_prices

__all__ = ["dual_bound", "price_of"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def dual_bound(problem: ChoiceProblem, levels: IntArray | None) -> tuple[float, float]:
    """No choice with tiers of these levels takes less than this; the price of memory at which that shows."""
    prices = _all_prices(problem, levels)
    values = [_dual(problem, levels, price) for price in prices]
    best = int(np.argmax(values))
    low, high = prices[max(best - 1, 0)], prices[min(best + 1, len(prices) - 1)]
    price, value = _ternary(lambda p: _dual(problem, levels, p), low, high)
    if values[best] >= value:
        price, value = prices[best], values[best]
    latency = problem.latency if levels is None else problem.instance.latency_seconds(levels)
    return value + latency, price


def price_of(
    problem: ChoiceProblem, subsets: Sequence[IntArray | None], bounds: Sequence[tuple[float, float]], plan: Plan | None
) -> tuple[float, IntArray]:
    """The price of memory among the levels that a plan uses, and these levels (all of them if there is no plan)."""
    sizes = problem.instance.group_sizes
    every = np.arange(sizes.size)
    if plan is None:
        known = [price for subset, (_, price) in zip(subsets, bounds, strict=True) if subset is None]
        return known[0], every
    used = {tier.group_size for table in plan.tables.values() for tier in table.tiers}
    levels = np.flatnonzero([size in used for size in sizes.tolist()])
    known = [
        price
        for subset, (_, price) in zip(subsets, bounds, strict=True)
        if subset is not None and np.array_equal(subset, levels)
    ]
    return known[0] if known else dual_bound(problem, levels)[1], levels


def _all_prices(problem: ChoiceProblem, levels: IntArray | None) -> list[float]:
    """Prices at which some table may change its mind, from none to where memory alone counts; ascending."""
    prices = set()
    if levels is not None:
        prices = {p for p in crossing_prices(problem.instance, levels, PRICES) if np.isfinite(p)}
    span = problem.options.seconds.max(initial=0.0) / max(problem.options.memory.min(initial=np.inf), 1.0)
    return [0.0, *sorted({*prices, *(span * 10.0 ** np.arange(-12.0, 4.0)).tolist()} - {0.0})]


def _dual(problem: ChoiceProblem, levels: IntArray | None, price: float) -> float:
    """Least time of all tables plus priced memory beyond the limit: below every choice that fits."""
    least = np.full(len(problem.instance.tables), np.inf)
    if levels is not None:
        seconds, memory = problem.tiers(levels, price)
        least = seconds + price * memory
    np.minimum.at(least, problem.options.table, problem.options.seconds + price * problem.options.memory)
    return float(least.sum() - price * problem.limit)


def _ternary(value: Callable[[float], float], low: float, high: float, steps: int = 60) -> tuple[float, float]:
    """Where a concave function is greatest, and how great."""
    for _ in range(steps):
        third = (high - low) / 3
        if value(low + third) < value(high - third):
            low += third
        else:
            high -= third
    middle = (low + high) / 2
    return middle, value(middle)
