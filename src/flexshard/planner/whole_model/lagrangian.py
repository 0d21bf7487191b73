"""A bound on every plan, in closed form but for two bisections: no plan's slowest rank is faster."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexshard.planner.whole_model.menus import Menus

__all__ = ["Prices", "Totals", "lagrangian_bound", "priced_options", "totals"]

FloatArray = npt.NDArray[np.float64]

_BISECTIONS = 30
_ROUNDS = 2  # over the kinds of memory, each priced while the others' prices stand


@dataclass(frozen=True)
class Totals:
    """Sums over the shards of each option, one row a table, padded with options of infinite cost.

    Attributes:
        perf: of all kinds of load, as ``Menus.added_up``; shape (tables, options).
        memory: shape (kinds, tables, options).
        largest: of each kind of load the dearest shard's cost, added up, and the charge; shape (tables, options).
    """

    perf: FloatArray
    memory: FloatArray
    largest: FloatArray


@dataclass(frozen=True)
class Prices:
    """A bound and the prices per byte that prove it.

    Attributes:
        bound: no plan within memory has a smaller rating; infinite if none fits.
        per_byte: price of each kind of memory; shape (kinds,).
    """

    bound: float
    per_byte: FloatArray


def totals(menus: Menus) -> Totals:
    """Sums of costs and bytes, and the largest shard, of every option."""
    tables, most = len(menus.options), max(map(len, menus.options), default=0)
    perf, largest = np.full((tables, most), np.inf), np.full((tables, most), np.inf)
    memory = np.zeros((len(menus.kinds), tables, most))
    for table, menu in enumerate(menus.options):
        for index, option in enumerate(menu):
            perf[table, index] = menus.added_up(table, option)
            largest[table, index] = menus.dearest(option)
            memory[:, table, index] = option.memory.sum(axis=1)
    return Totals(perf, memory, largest)


def priced_options(sums: Totals, rating: float, per_byte: FloatArray) -> FloatArray:
    """Cost of each option with its bytes paid for; infinite where the dearest shard exceeds the rating.

    A table all of whose options exceed it keeps them.
    """
    perf = np.where(sums.largest <= rating, sums.perf, np.inf)
    perf = np.where(np.isfinite(perf).any(axis=1, keepdims=True), perf, sums.perf)
    priced: FloatArray = perf + (per_byte[:, None, None] * sums.memory).sum(axis=0)
    return priced


def lagrangian_bound(menus: Menus, sums: Totals | None = None) -> Prices:
    """The least T that is not refuted by this: of options whose dearest shard costs at most T, the cheapest per table,
    each byte paid for at the best prices, cost T per rank on average.

    A plan of rating T uses such options only, and on average no rank costs more than the slowest. Charges count where
    they alone are beyond T; otherwise they are left out.
    """
    sums = totals(menus) if sums is None else sums
    if not sums.perf.size:
        return Prices(0.0, np.zeros(len(menus.kinds)))
    least = float(sums.largest.min(axis=1).max())
    if not np.isfinite(least):
        return Prices(np.inf, np.zeros(len(menus.kinds)))
    room = menus.capacity.sum(axis=1)

    def average(rating: float) -> tuple[float, FloatArray]:
        perf = np.where(sums.largest <= rating, sums.perf, np.inf)
        return _dual(perf, sums.memory, room, menus.ranks)

    finite = sums.largest[np.isfinite(sums.largest)]
    low, high = least, max(least, float(finite.max()), average(np.inf)[0])
    if not np.isfinite(high):
        return Prices(np.inf, np.zeros(len(menus.kinds)))
    value, prices = average(low)
    if value > low:
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if average(middle)[0] > middle:
                low = middle
            else:
                high = middle
        value, prices = average(low)
    return Prices(low, prices if np.isfinite(value) else average(high)[1])


def _dual(perf: FloatArray, memory: FloatArray, room: FloatArray, ranks: int) -> tuple[float, FloatArray]:
    """Average cost of a rank at the best prices found; any prices give a bound. Infinite if memory cannot suffice."""
    rows = np.arange(len(perf))
    prices = np.zeros(len(room))
    if (np.where(np.isfinite(perf), memory, np.inf).min(axis=2).sum(axis=1) > room).any():
        return np.inf, prices

    def at(prices: FloatArray) -> tuple[float, FloatArray]:
        priced = perf + (prices[:, None, None] * memory).sum(axis=0)
        best = priced.argmin(axis=1)
        excess = memory[:, rows, best].sum(axis=1) - room
        return float(priced[rows, best].sum() - prices @ room), excess

    value, excess = at(prices)
    if (excess <= 0).all():
        return value / ranks, prices
    scale = float(perf[np.isfinite(perf)].sum()) or 1.0
    for _ in range(_ROUNDS if len(room) > 1 else 1):
        for kind in range(len(room)):
            low, high = 0.0, scale / max(room[kind], 1.0)
            for _ in range(_BISECTIONS):
                # The dual is concave in each price, and its slope is what the choice takes beyond the room.
                trial = prices.copy()
                trial[kind] = (low + high) / 2
                if at(trial)[1][kind] > 0:
                    low = trial[kind]
                else:
                    high = trial[kind]
            ends = [np.where(np.arange(len(room)) == kind, end, prices) for end in (low, high)]
            prices = max(ends, key=lambda end: at(end)[0])
    return max(value, at(prices)[0]) / ranks, prices
