"""The best choice of caches and tiers within a rank's memory and its host's: prices, options, one of each table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import comb
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard.planner.solver.cached_cuts import cheapest
from flexshard.planner.solver.cached_rows import Cuts, Options, Side, hottest, options_of

__all__ = ["CachedChoice", "Limits", "bound_at", "choose_cached", "least_hbm_bytes"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_ROUNDS, _NEAR, _CLOSE = 40, 1e-4, 1e-5
_ALL_OPTIONS = 40_000  # up to so many, every option there is is tried
_FEW_TABLES, _STEPS = 60, 7
_SECONDS = 10.0
_SOME = 1e-9
_EXTREMES = ((0.0, 1.0, 0.0), (0.0, 1.0, 1e6))  # with as much of the host's memory as helps, and without
_HALVINGS, _WIDER = 14, 30.0
_ALL_OPTIONS = 40_000  # up to so many, every option there is is tried
_FEW_TABLES, _STEPS = 60, 7
_SECONDS = 10.0
_SOME = 1e-9
_EXTREMES = ((0.0, 1.0, 0.0), (0.0, 1.0, 1e6))  # with as much of the host's memory as helps, and without
_START = (0.0, 0.1, 1.0)
_COARSE, _LATEST = 4, 2_000


@dataclass(frozen=True)
class Limits:
    """Bytes of a rank's memory and of its host's."""

    hbm_bytes: float
    host_bytes: float


@dataclass(frozen=True, eq=False)
class CachedChoice:
    """One option of every table.

    Attributes:
        options: in the tables' order; shape (T,).
        seconds: with waits for the hottest rows, without latencies.
        lower_bound_seconds: of every choice of these levels, without latencies.
        prices: seconds that one more byte of a rank's memory saves, and one of its host's.
    """

    options: Options
    seconds: float
    lower_bound_seconds: float
    prices: tuple[float, float]


def choose_cached(sides: Sequence[Side], levels: IntArray, limits: Limits) -> CachedChoice | None:
    """The best that was found of the options of each table at some levels; None if nothing fits."""
    every = _every_option(sides, levels)
    if every is not None:
        return _chosen(sides, every, limits, None)
    return _chosen(sides, *_generated(sides, levels, limits))


def bound_at(sides: Sequence[Side], levels: IntArray, limits: Limits, prices: tuple[float, float]) -> float:
    """No choice of these levels takes less, whatever the prices, without latencies."""
    return _cheapest_of_all(sides, levels, limits, (1.0, *prices), _batches(sides, levels), sides[0].caches.every_cut)[
        1
    ]


def _batches(sides: Sequence[Side], levels: IntArray) -> tuple[int, ...]:
    """For which rows may stay in caches, where there are rows without copies."""
    return sides[0].caches.batches if levels[-1] == sides[0].instance.group_sizes.size - 1 else ()


def _cheapest_of_all(
    sides: Sequence[Side],
    levels: IntArray,
    limits: Limits,
    prices: tuple[float, float, float],
    batches: Sequence[int],
    cuts: Cuts,
) -> tuple[Options, float]:
    """The best option of every table at some prices, and their Lagrangian bound."""
    instance = sides[0].instance
    both, values = cheapest(sides, levels, prices, batches, cuts)
    order = np.lexsort((values, both.table))
    first = order[np.searchsorted(both.table[order], np.arange(len(instance.tables)))]
    room = limits.hbm_bytes - instance.held_bytes
    return both[first], float(values[first].sum()) - prices[1] * room - prices[2] * limits.host_bytes


def least_hbm_bytes(sides: Sequence[Side], levels: IntArray, host_bytes: float) -> float:
    """Least memory per rank of what fits its host's memory; where that is short, tables that save most per byte of it
    are kept there.
    """
    cuts = sides[0].caches.every_cut
    both, _ = cheapest(sides, levels, (0.0, 1.0, 0.0), _batches(sides, levels)[:1], cuts)
    count = len(sides[0].instance.tables)
    without, behind = np.full(count, np.inf), np.full(count, np.inf)
    needed = np.zeros(count)
    for mask, least in ((both.batches == 0, without), (both.batches > 0, behind)):
        np.minimum.at(least, both.table[mask], both.hbm_bytes[mask])
    np.maximum.at(needed, both.table, both.host_bytes)
    saved = np.maximum(without - behind, 0.0)
    order = np.argsort(-saved / np.maximum(needed, 1.0), kind="stable")
    kept = order[np.cumsum(needed[order]) <= host_bytes]
    return float(without.sum() - saved[kept].sum()) + sides[0].instance.held_bytes


# -- options


def _every_option(sides: Sequence[Side], levels: IntArray) -> Options | None:
    """All of all tables, row by row; None where they are too many."""
    instance, tiers = sides[0].instance, int(levels.size)
    placements = sum(comb(rows + tiers - 1, tiers - 1) for rows in instance.num_rows.tolist())
    stays = (0, *_batches(sides, levels))
    if placements * len(stays) * len(sides) > _ALL_OPTIONS:
        return None
    parts = []
    for side in sides:
        for table, rows in enumerate(instance.num_rows.tolist()):
            cuts = [*combinations_with_replacement(range(rows + 1), tiers - 1)]
            edges = np.array([(*cut, rows) for cut in cuts], np.int64)
            allocation = np.zeros((len(edges), instance.group_sizes.size), np.int64)
            allocation[:, levels] = np.diff(edges, axis=1, prepend=0)
            for batches in stays:
                of = np.full(len(edges), table), allocation, np.full(len(edges), batches)
                parts.append(options_of(side, *of))
    return Options.joined(parts).distinct()


def _generated(sides: Sequence[Side], levels: IntArray, limits: Limits) -> tuple[Options, Limits, float]:
    """Options that some prices ask for, and the highest bound of these prices."""
    instance, every, caches = sides[0].instance, _batches(sides, levels), sides[0].caches
    tables, room = len(instance.tables), limits.hbm_bytes - instance.held_bytes

    def at(prices: tuple[float, float, float], batches: Sequence[int], cuts: Cuts) -> tuple[Options, float]:
        return _cheapest_of_all(sides, levels, limits, prices, batches, cuts)

    parts = [at(prices, every[:1], caches.every_cut)[0] for prices in _EXTREMES]
    # Without a price of the host's memory first: one that the budget is just met at, among some of the options.
    price = float(parts[0].seconds.sum()) / max(limits.hbm_bytes, 1.0)
    low, high = 0.0, np.inf
    ends: dict[bool, Options] = {}
    for _ in range(_HALVINGS):
        options, _ = at((1.0, price, 0.0), every, caches.some_cuts)
        fits = float(options.hbm_bytes.sum()) <= room
        ends[fits] = options
        low, high = (low, price) if fits else (price, high)
        price = price * _WIDER if np.isinf(high) else high / _WIDER if low == 0.0 else float(np.sqrt(low * high))
    pool, best = Options.joined([*parts, *ends.values()]).distinct(), -np.inf
    for _ in range(_ROUNDS):
        _, value, price, host_price = _mixture(pool, room, limits.host_bytes, tables)
        prices = (1.0, price, host_price)
        # Most rounds look at some cuts; what bounds all plans looks at all.
        options, near_bound = at(prices, every, caches.some_cuts)
        size = pool.table.size
        pool = Options.joined([pool, options]).distinct()
        if pool.table.size > size and near_bound < value - _NEAR * abs(value):
            continue
        options, bound = at(prices, every, caches.every_cut)
        best, size = max(best, bound), pool.table.size
        pool = Options.joined([pool, options]).distinct()
        if best >= value - _CLOSE * abs(value) or pool.table.size == size:
            break
    return pool, limits, best


def _between(sides: Sequence[Side], options: Options) -> Options:
    """Options between those of each table: tiers of some rows more, rows that stay longer."""
    parts = [options]
    for table in np.unique(options.table).tolist():
        mine = options[options.table == table]
        for side in sides:
            near = mine[mine.once == side.once]
            if near.table.size < 2:
                continue
            low, high = near.allocation.min(axis=0), near.allocation.max(axis=0)
            shares = np.linspace(0.0, 1.0, _STEPS)
            moved = np.rint(low + shares[:, None] * (high - low)).astype(np.int64)
            moved[:, -1] = moved[:, -1] + near.allocation[0].sum() - moved.sum(axis=1)
            moved = moved[(moved >= 0).all(axis=1)]
            stays = near.batches[near.batches > 0]
            numbers = [n for n in side.caches.batches if stays.size and stays.min() <= n <= stays.max()]
            for number in [*numbers, *([0] if np.any(near.batches == 0) else [])]:
                of = np.full(len(moved), table), moved, np.full(len(moved), number)
                parts.append(options_of(side, *of))
    return Options.joined(parts).distinct()


# -- programs


def _rows(options: Options, tables: int) -> Any:
    """Which table each option is of, as a sparse matrix (T, N)."""
    from scipy import sparse

    count = options.table.size
    return sparse.csr_array((np.ones(count), (options.table, np.arange(count))), shape=(tables, count))


def _mixture(pool: Options, room: float, host_bytes: float, tables: int) -> tuple[FloatArray, float, float, float]:
    """Shares of options that together take least, shape (N,); their seconds; and the prices of a byte of both memories
    there.
    """
    from scipy import sparse
    from scipy.optimize import linprog

    second = max(float(pool.seconds.max()), 1e-300)
    units = max(abs(room), 1.0), max(host_bytes, 1.0)
    count = pool.table.size
    used = np.stack([pool.hbm_bytes / units[0], pool.host_bytes / units[1]])
    short = 1e6 * tables  # what a byte too much costs: more than any option saves
    program: Any = linprog
    result = program(
        np.concatenate([pool.seconds / second, [short, short]]),
        A_ub=sparse.csr_array(np.hstack([used, -np.eye(2)])),
        b_ub=[room / units[0], host_bytes / units[1]],
        A_eq=sparse.hstack([_rows(pool, tables), sparse.csr_array((tables, 2))]).tocsr(),
        b_eq=np.ones(tables),
        bounds=(0.0, None),
        method="highs",
    )
    assert result.x is not None  # it is feasible, and no option takes less than no time
    duals = -result.ineqlin.marginals * second
    return (
        result.x[:count],
        float(result.fun) * second,
        max(float(duals[0]) / units[0], 0.0),
        max(float(duals[1]) / units[1], 0.0),
    )


def _chosen(sides: Sequence[Side], pool: Options, limits: Limits, bound: float | None) -> CachedChoice | None:
    """One option per table; of many tables those are settled first that a mixture has whole. ``bound``: of all options
    that there are, None where these are all.
    """
    instance = sides[0].instance
    tables, room = len(instance.tables), limits.hbm_bytes - instance.held_bytes
    shares, _, price, host_price = _mixture(pool, room, limits.host_bytes, tables)
    if bound is not None:
        mixed = np.isin(pool.table, pool.table[(shares > _SOME) & (shares < 1 - _SOME)])
        near = _between(sides, pool[mixed & (shares > _SOME)]) if mixed.any() else pool[mixed]
        if tables > _FEW_TABLES:
            pool = pool[mixed | (shares >= 1 - _SOME)]
        pool = Options.joined([pool, near]).distinct()
    found = _program(sides, pool, room, limits.host_bytes, tables, exact=bound is None)
    if found is None:
        return None
    options, seconds, dual = found
    return CachedChoice(options, seconds, min(dual if bound is None else bound, seconds), (price, host_price))


def _program(
    sides: Sequence[Side], pool: Options, room: float, host_bytes: float, tables: int, *, exact: bool
) -> tuple[Options, float, float] | None:
    """The choice of options that takes least, with the waits of every level for its hottest row; and a bound of it."""
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    instance = sides[0].instance
    waits = np.zeros((pool.table.size, instance.group_sizes.size))
    for side in sides:
        of = np.flatnonzero(pool.once == side.once)
        waits[of] = instance.hot_seconds_per_read[pool.table[of]] * hottest(side.instance, pool[of])
    count, levels = waits.shape
    second = max(float(pool.seconds.max()), float(waits.max()), 1e-300)
    of_table = _rows(pool, tables)
    constraints = [
        LinearConstraint(
            sparse.hstack([of_table, sparse.csr_array((tables, levels))]), np.ones(tables), np.ones(tables)
        ),
    ]
    for used, most in ((pool.hbm_bytes, room), (pool.host_bytes, host_bytes)):
        unit = max(most, 1.0)
        row = np.concatenate([used / unit, np.zeros(levels)])
        constraints.append(LinearConstraint(row[None], -np.inf, most / unit * (1 + 1e-12)))
    for level in np.flatnonzero(waits.any(axis=0)).tolist():
        ends = np.zeros((tables, levels))
        ends[:, level] = -1.0
        waiting = of_table.multiply(waits[:, level][None] / second).tocsr()
        constraints.append(LinearConstraint(sparse.hstack([waiting, sparse.csr_array(ends)]), -np.inf, 0.0))
    result = milp(
        np.concatenate([pool.seconds / second, np.ones(levels)]),
        integrality=np.concatenate([np.ones(count), np.zeros(levels)]),
        bounds=Bounds(0.0, np.concatenate([np.ones(count), np.full(levels, np.inf)])),
        constraints=constraints,
        options={"time_limit": _SECONDS, "mip_rel_gap": 0.0 if exact else 1e-5},
    )
    if result.x is None:
        return None
    taken = np.flatnonzero(np.rint(result.x[:count]) > 0)
    options = pool[taken[np.argsort(pool.table[taken], kind="stable")]]
    if options.table.size != tables:
        return None
    seconds = float(options.seconds.sum()) + float(waits[taken].max(axis=0).sum())
    dual = result.mip_dual_bound if result.mip_dual_bound is not None else -np.inf
    return options, seconds, float(dual) * second
