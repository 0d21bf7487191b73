"""Simulated annealing over options and ranks at once, towards a rating that is asked for.

A state has an option for every table and a rank for every shard; it is as bad as ranks cost more than the rating asked
for, and hold more than their memory. Whenever nothing is too much, the plan is kept and a lower rating is asked for.
Where several kinds of load make the rating, each has a share of what is asked for, as in the best plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexshard.planner.whole_model.annealing_kernels import anneal_moves
from flexshard.planner.whole_model.laying_kernels import lay, new_account
from flexshard.planner.whole_model.menus import Menus

__all__ = ["Annealing", "Flat", "State", "compile_loops", "flat", "place", "rating"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_LEAST_LOAD = 0.05  # of a rating asked for, whatever charges take of it
_MEMORY = 2.0  # weight of a rank's memory beyond capacity beside cost beyond the rating, both relative


@dataclass(frozen=True)
class Flat:
    """Menus as arrays. What shards weigh and ranks hold has each kind of load first, then each kind of memory.

    Attributes:
        spread, first, shards: of each option: its :class:`Spread`, its first shard, and how many it has.
        weights: of each shard of each option; shape (shards, loads + kinds). Of loads that ranks share, what each of
            them has of it.
        sharing: how many consecutive ranks share each; all count at the first of ``ranks / sharing`` places.
        begin: first option of each table; shape (tables + 1,).
        slot: first place of each table in ``State.ranks``; shape (tables + 1,).
        group: number of the group of tables on one host that a table is in, or -1.
        capacity: shape (kinds, ranks).
        per_host: ranks of a host.
        charge: of each option: which one it pays, or the last, which is nothing.
        charges: shape (charges + 1,).
    """

    spread: IntArray
    first: IntArray
    shards: IntArray
    weights: FloatArray
    begin: IntArray
    slot: IntArray
    group: IntArray
    capacity: FloatArray
    per_host: int
    charge: IntArray
    charges: FloatArray
    sharing: IntArray

    @property
    def loads(self) -> int:
        """Kinds of load."""
        return int(self.weights.shape[1]) - len(self.capacity)


class State(NamedTuple):
    """Options chosen (positions in all options), ranks of shards, and hosts of groups."""

    choice: IntArray
    ranks: IntArray
    host: IntArray


def flat(menus: Menus) -> Flat:
    """Arrays of menus."""
    options = [option for _, option in menus.pairs()]
    shards = np.array([option.shards for option in options], np.int64)
    sizes = np.array([len(menu) for menu in menus.options], np.int64)
    most = np.array([max(option.shards for option in menu) for menu in menus.options], np.int64)
    group = np.full(len(menus.options), -1, np.int64)
    for number, tables in enumerate(menus.together):
        group[list(tables)] = number
    sharing = np.array([*menus.sharing, *[1] * len(menus.kinds)], np.int64)
    weights = np.concatenate([np.concatenate([option.perf, option.memory]).T for option in options])
    return Flat(
        spread=np.array([option.spread for option in options], np.int64),
        first=_starts(shards)[:-1],
        shards=shards,
        weights=np.ascontiguousarray(weights / sharing),  # a shard's side by side
        begin=_starts(sizes),
        slot=_starts(most),
        group=group,
        capacity=menus.capacity,
        per_host=menus.ranks_per_host,
        charge=np.array([option.charge % (len(menus.charges) + 1) for option in options], np.int64),
        charges=np.array([*menus.charges, 0.0]),
        sharing=sharing,
    )


def _starts(sizes: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def held(problem: Flat, state: State) -> FloatArray:
    """Cost and bytes of each rank, added up anew; shape (loads + kinds, ranks)."""
    counts = problem.shards[state.choice]
    shards = np.concatenate([np.arange(f, f + c) for f, c in zip(problem.first[state.choice], counts, strict=True)])
    where = np.concatenate([state.ranks[s : s + c] for s, c in zip(problem.slot, counts, strict=False)])
    world = problem.capacity.shape[1]
    places = [where // together for together in problem.sharing]
    return np.array([np.bincount(at, row, world) for at, row in zip(places, problem.weights[shards].T, strict=True)])


def rating(problem: Flat, state: State) -> float:
    """Cost of the slowest rank, kind by kind of load, and charges; infinite where a rank holds more than it may."""
    fill, loads = held(problem, state), problem.loads
    cost = float(fill[:loads].max(axis=1, initial=0.0).sum()) + paid(problem, state)
    return cost if (fill[loads:] <= problem.capacity).all() else np.inf


def paid(problem: Flat, state: State) -> float:
    """Charges of a state."""
    return float(problem.charges[np.unique(problem.charge[state.choice])].sum())


def _limits(problem: Flat, aim: float, shares: FloatArray, charged: float = 0.0) -> tuple[FloatArray, FloatArray]:
    """What ranks may hold, and what a unit beyond that counts; ``shares`` of the kinds of load in what charges leave of
    ``aim``.
    """
    loads, ranks = problem.loads, problem.capacity.shape[1]
    left = max(aim - charged, aim * _LEAST_LOAD)
    each = left * shares / shares.sum() if loads > 1 and shares.sum() > 0 else np.full(loads, left / loads)
    limit = np.concatenate([np.repeat(each[:, None], ranks, axis=1), problem.capacity])
    per_unit = np.concatenate([[1.0 / aim] * loads, _MEMORY / np.maximum(problem.capacity.mean(axis=1), 1.0)])
    return limit, per_unit


def place(problem: Flat, choice: IntArray, aim: float) -> State:
    """Lay chosen options on ranks: what stands on every rank first, then those with the largest shards first."""
    groups = int(problem.group.max(initial=-1)) + 1
    state = State(choice.astype(np.int64), np.zeros(int(problem.slot[-1]), np.int64), np.full(groups, -1, np.int64))
    shards = np.concatenate([np.arange(problem.first[o], problem.first[o] + problem.shards[o]) for o in choice])
    whole = problem.weights[shards] * problem.sharing
    limit, per_unit = _limits(problem, aim, whole[:, : problem.loads].sum(axis=0))
    size = (problem.weights * per_unit).max(axis=1)
    largest = [size[problem.first[o] : problem.first[o] + problem.shards[o]].max() for o in choice]
    order = np.lexsort((np.arange(len(choice)), -np.array(largest), problem.spread[choice]))
    fill, random = np.zeros(limit.shape), np.ones(1, np.int64)
    account = new_account(problem.loads, int(problem.shards[choice].max(initial=0)) * len(fill))
    for table in order:
        option = choice[table]
        of_option = (problem.spread[option], problem.first[option], problem.shards[option])
        of_table = (problem.slot[table], problem.group[table], state.ranks, state.host)
        weights = (problem.weights, problem.sharing)
        arguments = (*of_option, *weights, *of_table, fill, limit, per_unit, problem.per_host, 0.0, random)
        account[-1][0] = 0
        lay(*arguments, account)
    return state


class Annealing:
    """An annealing under way, which may be run in parts.

    Args:
        problem: menus.
        state: to begin with; it is not changed.
        aim: rating to ask for at first.
        floor: rating at which nothing is left to gain.
        moves: how many changes are tried in all.
        seed: of random numbers; the same seed gives the same plan on every machine, however it is run in parts.
        heat: temperature at the beginning and at the end.
        step: by how much, relatively, the rating asked for is below the best plan's.
    """

    def __init__(
        self,
        problem: Flat,
        state: State,
        *,
        aim: float,
        floor: float,
        moves: int,
        seed: int,
        heat: tuple[float, float],
        step: float,
    ) -> None:
        self._problem, self._floor, self._moves = problem, floor, moves
        self._heat, self._step = heat, step
        self._work = State(*(array.copy() for array in state))
        self._best = State(*(array.copy() for array in state))
        self._random = np.array([(seed * 2_654_435_761 + 1) % 2_147_483_646 + 1], np.int64)
        self._fill = held(problem, state)
        allowed = paid(problem, state)
        self._asked = np.array([aim, allowed])
        used = np.bincount(problem.charge[state.choice], minlength=len(problem.charges))
        self._used = used.astype(np.int64)
        shares = self._fill[: problem.loads].max(axis=1, initial=0.0)
        self._limit, self._per_unit = _limits(problem, aim, shares, allowed)
        # A move takes one option away and lays another, or shards of two tables, or all of a group's.
        by_table = np.diff(problem.slot)
        groups = np.bincount(problem.group + 1, by_table, len(state.host) + 1)[1:]
        most = 2 * max(2, int(by_table.max(initial=0)), int(groups.max(initial=0)))
        self._account = new_account(problem.loads, most * len(self._fill))
        self._done, self._found = 0, np.inf

    def run(self, moves: int) -> bool:
        """Try so many more changes; whether any are left to try."""
        part = min(moves, self._moves - self._done)
        problem = self._problem
        menus = (problem.spread, problem.first, problem.shards, problem.weights, problem.sharing)
        tables = (problem.begin, problem.slot, problem.group, problem.per_host)
        ranks = (self._fill, self._limit, self._per_unit)
        charges = (problem.loads, problem.charge, problem.charges, self._used, self._asked)
        course = (self._floor, self._found, self._done, part, self._moves, *self._heat, self._step)
        arguments = (*menus, *tables, *self._work, *self._best, *ranks, *charges, *course, self._random, self._account)
        self._found = anneal_moves(*arguments)
        self._done += part
        return self._done < self._moves and self._found > self._floor

    @property
    def plan(self) -> State | None:
        """The best plan within memory and the rating asked for, if there was one."""
        return self._best if np.isfinite(self._found) else None


@cache
def compile_loops() -> None:
    """Compile what anneals, or read it from disk: seconds that are not to be taken from a search's."""
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    problem = Flat(
        spread=3 * one,
        first=zero,
        shards=one,
        weights=np.ones((1, 2)),
        begin=np.arange(2),
        slot=np.arange(2),
        group=-one,
        capacity=np.ones((1, 1)),
        per_host=1,
        charge=zero,
        charges=np.zeros(1),
        sharing=np.ones(2, np.int64),
    )
    start = place(problem, zero, 1.0)
    Annealing(problem, start, aim=1.0, floor=0.0, moves=1, seed=0, heat=(1.0, 0.1), step=0.1).run(1)
