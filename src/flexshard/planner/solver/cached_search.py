"""The best choice of caches and tiers within a rank's memory and its host's: prices, options, one of each table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from math import comb

import numpy as np
import numpy.typing as npt

from flexshard.planner.solver.cached_cuts import Between, cheapest
from flexshard.planner.solver.cached_fits import fitting, least_that_fits
from flexshard.planner.solver.cached_program import Chosen, Mixture, Room, best_mixture, best_of_each
from flexshard.planner.solver.cached_rows import Options, Side, options_of
from flexshard.planner.solver.cached_sums import Prices
from flexshard.planner.solver.instance import Instance

__all__ = ["CachedChoice", "Limits", "are_few", "choose_cached", "least_hbm_bytes", "takes_longer"]

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_ROUNDS, _NEAR, _CLOSE = 40, 1e-4, 1e-5
_HALVINGS, _WIDER = 10, 30.0
_ALL_OPTIONS = 40_000  # up to so many, every option there is is tried
_FEW_TABLES, _STEPS = 60, 7
_SOME = 1e-9
_RISES = 0.05  # part of a gap, by which two cases of a table have to raise its bound
_GOOD, _MOST_NODES, _TABLES_IN_PART = 1e-3, 8, 3  # the first of a bound
_EXTREMES = ((0.0, 1.0, 0.0), (0.0, 1.0, 1e6))  # with as much of the host's memory as helps, and without


@dataclass(frozen=True)
class Limits:
    """Bytes of a rank's memory and of its host's, and seconds after which a program ends with what it has."""

    hbm_bytes: float
    host_bytes: float
    timeout_seconds: float = 60.0

    def room(self, instance: Instance) -> Room:
        """What placements may take."""
        return Room(self.hbm_bytes - instance.held_bytes, self.host_bytes, len(instance.tables))


@dataclass(frozen=True, eq=False)
class CachedChoice:
    """One option of every table, if one was found.

    Attributes:
        chosen: with waits for the hottest rows and without latencies; and a bound of every choice of these levels.
        prices: seconds that one more byte of a rank's memory saves, and one of its host's.
    """

    chosen: Chosen
    prices: tuple[float, float]


def choose_cached(sides: Sequence[Side], levels: IntArray, limits: Limits) -> CachedChoice:
    """The best that was found of the options of each table at some levels."""
    room = limits.room(sides[0].instance)
    every = _every_option(sides, levels)
    if every is not None:
        chosen = best_of_each(sides, every, room, gap=0.0, seconds=limits.timeout_seconds, proves=True)
        return CachedChoice(chosen, best_mixture(every, room).prices)
    root = _generated(sides, levels, limits, np.zeros((room.tables, 2), np.bool_))
    nodes, pool, fitted, enough = [root], root.options, False, -np.inf
    while True:
        chosen = best_of_each(sides, pool, room, gap=_CLOSE, seconds=limits.timeout_seconds, proves=False)
        lowest = min(nodes, key=lambda node: node.bound)
        if lowest.bound >= chosen.seconds * (1 - _GOOD) or not root.mixture.fits:
            break
        if not fitted:
            fitted = True
            pool = Options.joined([pool, root.fitting(sides, levels, room)]).distinct()
            continue
        undecided = np.flatnonzero(lowest.mixed & ~lowest.barred.any(axis=1))
        if not undecided.size or len(nodes) >= _MOST_NODES:
            break
        if lowest.bound < enough:
            break  # the last two cases said little
        if chosen.options is not None:
            enough = lowest.bound + _RISES * (chosen.seconds - lowest.bound)
        nodes.remove(lowest)
        for way in (0, 1):
            barred = lowest.barred.copy()
            barred[undecided[0], way] = True
            node = _generated(sides, levels, limits, barred)
            nodes.append(replace(node, bound=max(node.bound, lowest.bound)))
            pool = Options.joined([pool, node.options, node.fitting(sides, levels, room)]).distinct()
    # Options that were not met are under the bound alone.
    bound = min(*(node.bound for node in nodes), chosen.seconds)
    return CachedChoice(replace(chosen, lower_bound_seconds=bound), root.mixture.prices)


def takes_longer(
    sides: Sequence[Side], levels: IntArray, limits: Limits, prices: tuple[float, float], seconds: float
) -> bool:
    """Whether these prices show that every choice of these levels takes so long at least, without latencies."""
    batches = _batches(sides, levels)
    looks: tuple[Between, ...] = ("bounded", "looked at")  # the first takes less time, and is mostly enough
    return any(
        _cheapest_of_all(sides, levels, limits, (1.0, *prices), batches, between=between)[1] >= seconds
        for between in looks
    )


def _batches(sides: Sequence[Side], levels: IntArray) -> tuple[int, ...]:
    """For which rows may stay in caches, where there are rows without copies."""
    return sides[0].caches.batches if levels[-1] == sides[0].instance.group_sizes.size - 1 else ()


def _cheapest_of_all(
    sides: Sequence[Side],
    levels: IntArray,
    limits: Limits,
    prices: Prices,
    batches: Sequence[int],
    *,
    between: Between,
    barred: BoolArray | None = None,
) -> tuple[Options, float]:
    """The best option of every table at some prices, and their Lagrangian bound; ``barred`` as of :class:`_Node`."""
    instance = sides[0].instance
    host_bytes = limits.host_bytes
    both, values, least = cheapest(sides, levels, prices, batches, between=between, host_bytes=host_bytes)
    if barred is not None:
        behind = (np.arange(both.table.size) >= len(sides) * len(instance.tables)).astype(np.int64)
        values, least = (np.where(barred[both.table, behind], np.inf, each) for each in (values, least))
    order = np.lexsort((values, both.table))
    first = order[np.searchsorted(both.table[order], np.arange(len(instance.tables)))]
    room, bound = limits.room(instance), np.full(len(instance.tables), np.inf)
    np.minimum.at(bound, both.table, least)
    return both[first], float(bound.sum()) - prices[1] * room.hbm_bytes - prices[2] * room.host_bytes


def least_hbm_bytes(sides: Sequence[Side], levels: IntArray, host_bytes: float) -> float:
    """Least memory per rank of what fits its host's memory; where that is short, tables that save most per byte of it
    are kept there.
    """
    both, _, _ = cheapest(sides, levels, (0.0, 1.0, 0.0), _batches(sides, levels)[:1], between="looked at")
    count = len(sides[0].instance.tables)
    without, behind = np.full(count, np.inf), np.full(count, np.inf)
    needed = np.zeros(count)
    for mask, least in ((both.batches == 0, without), (both.batches > 0, behind)):
        np.minimum.at(least, both.table[mask], both.hbm_bytes[mask])
    np.maximum.at(needed, both.table, both.host_bytes)
    saved = np.maximum(without - behind, 0.0)
    total, left, others = float(without.sum()), host_bytes, []
    for table in np.argsort(-saved / np.maximum(needed, 1.0), kind="stable").tolist():
        if needed[table] <= left:
            total, left = total - float(saved[table]), left - float(needed[table])
        else:
            others.append(table)
    # Of one of the others a part fits, beside those, or alone.
    places = [(total, left), (float(without.sum()), host_bytes)]
    in_part = [
        rest - float(without[table]) + least_that_fits(sides, levels, _batches(sides, levels), table, free)
        for table in others[:_TABLES_IN_PART]
        for rest, free in places
    ]
    return float(min([total, *in_part])) + sides[0].instance.held_bytes


# -- options


def are_few(sides: Sequence[Side], levels: IntArray) -> bool:
    """Whether every option that there is, row by row, is tried."""
    tiers, numbers = int(levels.size), sides[0].instance.num_rows.tolist()
    if len(numbers) > _FEW_TABLES:
        return False  # of many, options of one tier alone would be few, too
    placements = sum(comb(rows + tiers - 1, tiers - 1) for rows in numbers)
    return placements * (len(_batches(sides, levels)) + 1) * len(sides) <= _ALL_OPTIONS


def _every_option(sides: Sequence[Side], levels: IntArray) -> Options | None:
    """All of all tables, row by row; None where they are too many."""
    instance, tiers = sides[0].instance, int(levels.size)
    if not are_few(sides, levels):
        return None
    stays, parts = (0, *_batches(sides, levels)), []
    for side in sides:
        for table, rows in enumerate(instance.num_rows.tolist()):
            # Of one tier there is one placement, however many rows it has.
            cuts = [*combinations_with_replacement(range(rows + 1 if tiers > 1 else 0), tiers - 1)]
            edges = np.array([(*cut, rows) for cut in cuts], np.int64)
            allocation = np.zeros((len(edges), instance.group_sizes.size), np.int64)
            allocation[:, levels] = np.diff(edges, axis=1, prepend=0)
            for batches in stays:
                of = np.full(len(edges), table), allocation, np.full(len(edges), batches)
                parts.append(options_of(side, *of))
    return Options.joined(parts).distinct()


@dataclass(frozen=True, eq=False)
class _Node:
    """Some of all choices, where a few tables are behind a cache for sure, or are not.

    Attributes:
        barred: tables without a cache, and with one, that are no part of it; shape (T, 2).
        options: that an integer program is to choose from.
        priced: those that prices asked for.
        mixture: of these.
        mixed: tables that it has in parts; shape (T,).
        bound: no choice of them takes less.
    """

    barred: BoolArray
    options: Options
    priced: Options
    mixture: Mixture
    mixed: BoolArray
    bound: float

    def fitting(self, sides: Sequence[Side], levels: IntArray, room: Room) -> Options:
        """See :func:`flexshard.planner.solver.cached_fits.fitting`."""
        return fitting(sides, levels, _batches(sides, levels), self.priced, self.mixture, room)


def _generated(sides: Sequence[Side], levels: IntArray, limits: Limits, barred: BoolArray) -> _Node:
    """Options that some prices ask for, those beside them, and the highest bound of these prices."""
    pool, mixture, bound = _priced(sides, levels, limits, barred)
    shares, tables, priced = mixture.shares, barred.shape[0], pool
    parts = (shares > _SOME) & (shares < 1 - _SOME)
    # Of many tables those are settled that a mixture has whole; of the others, what is between is tried, too.
    mixed = np.isin(pool.table, pool.table[parts])
    near = _between(sides, levels, pool[mixed & (shares > _SOME)]) if mixed.any() else pool[mixed]
    of_tables = np.isin(np.arange(tables), pool.table[parts])
    if tables > _FEW_TABLES:
        pool = pool[mixed | (shares >= 1 - _SOME)]
    return _Node(barred, Options.joined([pool, near]).distinct(), priced, mixture, of_tables, bound)


def _priced(
    sides: Sequence[Side], levels: IntArray, limits: Limits, barred: BoolArray
) -> tuple[Options, Mixture, float]:
    """Options that some prices ask for, the best mixture of them, and the highest bound of these prices."""
    every, room = _batches(sides, levels), limits.room(sides[0].instance)

    def at(prices: Prices, batches: Sequence[int] = every, *, between: Between) -> tuple[Options, float]:
        return _cheapest_of_all(sides, levels, limits, prices, batches, between=between, barred=barred)

    parts = [at(prices, every[:1], between="looked at")[0] for prices in _EXTREMES]
    # Without a price of the host's memory first: one that the budget is just met at, among some of the options.
    price = float(parts[0].seconds.sum()) / max(limits.hbm_bytes, 1.0)
    low, high = 0.0, np.inf
    ends: dict[bool, Options] = {}
    for _ in range(_HALVINGS):
        options, _ = at((1.0, price, 0.0), between="left out")
        fits = float(options.hbm_bytes.sum()) <= room.hbm_bytes
        ends[fits] = options
        low, high = (low, price) if fits else (price, high)
        price = price * _WIDER if np.isinf(high) else high / _WIDER if low == 0.0 else float(np.sqrt(low * high))
    pool, best = Options.joined([*parts, *ends.values()]).distinct(), -np.inf
    mixture = best_mixture(pool, room)
    for _ in range(_ROUNDS):
        value, prices = mixture.seconds, (1.0, *mixture.prices)
        if best >= value - _CLOSE * abs(value):
            break
        # Most rounds look at some cuts; what bounds all plans looks at all.
        options, near_bound = at(prices, between="left out")
        size, ended = pool.table.size, False
        pool = Options.joined([pool, options]).distinct()
        if pool.table.size == size or near_bound >= value - _NEAR * abs(value):
            options, bound = at(prices, between="looked at")
            best, size = max(best, bound), pool.table.size
            pool = Options.joined([pool, options]).distinct()
            ended = pool.table.size == size
        mixture = best_mixture(pool, room)
        if ended:
            break
    else:
        best = max(best, at((1.0, *mixture.prices), between="looked at")[1])
    return pool, mixture, best


def _between(sides: Sequence[Side], levels: IntArray, options: Options) -> Options:
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
            moved[:, levels[-1]] += near.allocation[0].sum() - moved.sum(axis=1)
            moved = moved[(moved >= 0).all(axis=1)]
            stays = near.batches[near.batches > 0]
            numbers = [n for n in side.caches.batches if stays.size and stays.min() <= n <= stays.max()]
            for number in [*numbers, *([0] if np.any(near.batches == 0) else [])]:
                of = np.full(len(moved), table), moved, np.full(len(moved), number)
                parts.append(options_of(side, *of))
    return Options.joined(parts).distinct()
