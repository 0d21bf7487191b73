"""Options of a few tables that just fit what others leave of a rank's memory and of its host's.

Prices ask for options on the convex hull of all. Where memory ends within a table, a mixture of two has what one whole
option has to be near to: as many copies as the host's memory leaves no room for, say. These lie above the hull.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
import numpy.typing as npt

from flexshard.planner.solver.cached_program import Mixture, Room, waits_of
from flexshard.planner.solver.cached_rows import Options, Side, options_of

__all__ = ["fitting", "least_that_fits"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_ZOOMS, _POINTS, _NEAR, _PARTS = 6, 24, 4, 8
_MOST_TABLES = 2  # that a mixture has in parts: it has two limits
_SOME = 1e-9


@dataclass(frozen=True, eq=False)
class _Left:
    """Bytes that are left of a rank's memory and of its host's."""

    hbm_bytes: float
    host_bytes: float

    def but(self, options: Options) -> _Left:
        """Without what options take."""
        hbm_bytes, host_bytes = float(options.hbm_bytes.sum()), float(options.host_bytes.sum())
        return _Left(self.hbm_bytes - hbm_bytes, self.host_bytes - host_bytes)

    def has_room_for(self, options: Options) -> npt.NDArray[np.bool_]:
        """Which of these fit by themselves; shape (N,)."""
        return np.asarray((options.hbm_bytes <= self.hbm_bytes) & (options.host_bytes <= self.host_bytes))


def fitting(
    sides: Sequence[Side], levels: IntArray, batches: Sequence[int], pool: Options, mixture: Mixture, room: Room
) -> Options:
    """Options of the tables that a mixture of a pool has in parts, which fit beside those that it has whole.

    Args:
        levels: where rows may be; ascending.
        batches: for which they may stay in a cache.
    """
    there = mixture.shares > _SOME
    mixed = np.unique(pool.table[there & (mixture.shares < 1 - _SOME)])
    if not 0 < mixed.size <= _MOST_TABLES:
        return _none(pool)
    whole = pool[there & ~np.isin(pool.table, mixed)]
    left = _Left(room.hbm_bytes, room.host_bytes).but(whole)
    grids = [_Grid.first(sides, levels, (0, *batches), table, left) for table in mixed.tolist()]
    found = []
    for start in _starts(grids, left):
        picks = list(start)
        for _ in range(_ZOOMS):
            for index, grid in enumerate(grids):
                others = Options.joined([_none(pool), *(pick for other, pick in enumerate(picks) if other != index)])
                closer = grid.around(picks[index], left.but(others))
                picks[index] = _best(Options.joined([picks[index], closer]), sides, left.but(others)) or picks[index]
        found += picks
    return Options.joined([_none(pool), *found])


def _none(options: Options) -> Options:
    return options[np.zeros(0, np.int64)]


def _starts(grids: Sequence[_Grid], left: _Left) -> Iterator[tuple[Options, ...]]:
    """Some choices of one option of each grid that fit together, the best ones."""
    if len(grids) == 1:
        best = _best(grids[0].options, grids[0].sides, left)
        if best is not None:
            yield (best,)
        return
    first, second = grids
    pairs = []
    for share in np.linspace(0.0, 1.0, _PARTS).tolist():
        for host_share in np.linspace(0.0, 1.0, _PARTS).tolist():
            one = _best(first.options, first.sides, _Left(share * left.hbm_bytes, host_share * left.host_bytes))
            other = None if one is None else _best(second.options, second.sides, left.but(one))
            if one is not None and other is not None:
                value = float(_value(one, first.sides)[0] + _value(other, second.sides)[0])
                pairs.append((value, one, other))
    pairs.sort(key=lambda pair: pair[0])
    yield from ((one, other) for _, one, other in pairs[:_NEAR])


def _value(options: Options, sides: Sequence[Side]) -> FloatArray:
    """Seconds, with every wait for an option's own hottest rows; shape (N,)."""
    return np.asarray(options.seconds + waits_of(sides, options).sum(axis=1))


def _best(options: Options, sides: Sequence[Side], left: _Left) -> Options | None:
    """The fastest option that fits, if one does."""
    of = np.flatnonzero(left.has_room_for(options))
    if not of.size:
        return None
    return options[of[[int(_value(options[of], sides).argmin())]]]


@dataclass(frozen=True, eq=False)
class _Grid:
    """Options of a table whose tiers end at some rows.

    Attributes:
        sides, levels: as of :func:`fitting`; ``stays`` as its batches, with 0 for no cache.
        table: whose.
        options: of the first, widest grid.
    """

    sides: Sequence[Side]
    levels: IntArray
    stays: tuple[int, ...]
    table: int
    options: Options

    @classmethod
    def first(cls, sides: Sequence[Side], levels: IntArray, stays: tuple[int, ...], table: int, left: _Left) -> _Grid:
        """Over all rows of a table, and where what is behind a cache just fits the host's memory."""
        rows = int(sides[0].instance.num_rows[table])
        points = {0, rows, *np.geomspace(1, rows, _POINTS).astype(np.int64).tolist()}
        points |= {*np.linspace(0, rows, _POINTS).astype(np.int64).tolist(), _ahead(sides, table, left)}
        ends = _ends(np.array(sorted(points)), levels.size - 1)
        return cls(sides, levels, stays, table, _options(sides, levels, stays, table, ends))

    def around(self, option: Options, left: _Left) -> Options:
        """Options near one: ends of tiers not so far from its own as those of the grid are from each other."""
        rows = int(self.sides[0].instance.num_rows[self.table])
        own = np.cumsum(option.allocation[0, self.levels])[:-1]
        if not own.size:
            return _none(option)
        shares = np.geomspace(1e-3, 1.0, _POINTS // 3)  # of a width, to both sides
        shares = np.concatenate([-shares, [0.0], shares])
        steps = [
            np.unique(np.clip(end + (max(end // _POINTS, 1) * shares).astype(np.int64), 0, rows))
            for end in own.tolist()
        ]
        steps[-1] = np.unique(np.append(steps[-1], _ahead(self.sides, self.table, left)))
        ends = np.stack(np.meshgrid(*steps, indexing="ij"), axis=-1).reshape(-1, own.size)
        ends = ends[(np.diff(ends, axis=1) >= 0).all(axis=1)]
        stays = np.unique(np.array(self.stays))
        at = int(np.searchsorted(stays, int(option.batches[0])))
        near = tuple(stays[max(at - 1, 0) : at + 2].tolist())
        return _options(self.sides, self.levels, near, self.table, ends)


def _ahead(sides: Sequence[Side], table: int, left: _Left) -> int:
    """Rows of a table that cannot be behind a cache, for want of the host's memory."""
    rows, each = int(sides[0].instance.num_rows[table]), float(sides[0].caches.row_host_bytes[table])
    return int(np.clip(rows - np.floor(max(left.host_bytes, 0.0) / max(each, 1e-300)), 0, rows))


def _ends(points: IntArray, number: int) -> IntArray:
    """Rows at which so many tiers end, ascending, of these; shape (N, number)."""
    ends = np.array([*combinations_with_replacement(points.tolist(), number)], np.int64)
    return ends.reshape(-1, number) if number else np.zeros((1, 0), np.int64)


def _options(sides: Sequence[Side], levels: IntArray, stays: Sequence[int], table: int, ends: IntArray) -> Options:
    """Of a table whose tiers end at these rows, shape (N, L - 1), looked up in every way."""
    instance = sides[0].instance
    edges = np.column_stack([ends, np.full(len(ends), instance.num_rows[table])])
    allocation = np.zeros((len(edges), instance.group_sizes.size), np.int64)
    allocation[:, levels] = np.diff(edges, axis=1, prepend=0)
    of = np.full(len(edges), table)
    return Options.joined(
        [options_of(side, of, allocation, np.full(len(edges), number)) for side in sides for number in stays]
    )


def least_that_fits(
    sides: Sequence[Side], levels: IntArray, batches: Sequence[int], table: int, host_bytes: float
) -> float:
    """About the least memory per rank of a table of which so many bytes fit the host's memory."""
    left = _Left(np.inf, host_bytes)
    options = _Grid.first(sides, levels, (0, *batches), table, left).options
    return float(options.hbm_bytes[left.has_room_for(options)].min())
