"""The sequences of a whole model as columns of its master problem: their best placements within so much memory, found
where they matter, and what plans take at least that have others.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexshard._internal import plain_sum
from flexshard.errors import BudgetError
from flexshard.planner.deciding import dense_seconds
from flexshard.planner.gaps import relative_gap
from flexshard.planner.problem import Problem
from flexshard.planner.solver.deadline import ended_at
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solver.instance import Instance
from flexshard.planner.solver.solution import Solution
from flexshard.planner.solver.step_search import solve_step
from flexshard.planner.whole_model.lagrangian import lagrangian_bound
from flexshard.planner.whole_model.master import Assignment
from flexshard.planner.whole_model.menus import Menus, Spread, undominated
from flexshard.planner.whole_model.pooled_menus import HBM
from flexshard.planner.whole_model.program import solve_menus_program

__all__ = ["MOST_WORK", "Bound", "Column", "Latest", "Sequences", "columns_of_choices", "first_columns"]

FloatArray = npt.NDArray[np.float64]

MOST_WORK = 500_000.0  # microseconds that may go into making one placement of the sequences exact
_FIRST, _ROUNDS, _LOOKS = 9, 4, 40  # limits at first; rounds of two more beside the best; intervals of the bound
_CHOICES = 1_000  # of the other tables, that are looked at one by one
_WORK_OF_CHOICE = 10 * MOST_WORK  # of few placements
_STEP = 0.1  # of an interval, that a placement leaves unused where its time falls by a step
_NARROW, _LITTLE = 0.5, 0.1  # of the gap that is asked for; of what an interval's bound may be too low by
_OF_GAP = 0.25  # that is asked of a plan: gap of a placement
_CLOSE, _SAFETY, _NODES = 1e-3, 1e-6, 100
_JUST_BELOW = 1 - 4e-12  # an amount of memory, less what sums of float64 bytes may differ by


@dataclass(frozen=True)
class Column:
    """Sequences within a limit: the memory they have then, what they take, and what they take at least; and the limit
    within which they were placed, which may be larger, with the work that went into it at most.
    """

    limit: float
    memory: float
    seconds: float
    lower_bound: float
    placed_within: float
    work: float


@dataclass
class Latest:
    """Weights under which steps were bounded best the last time; those of other tables or memory are much the same."""

    weights: FloatArray | None = None


class Sequences:
    """The sequences' best placements within any limit, each found once."""

    def __init__(self, problem: Problem, until: float, latest: Latest) -> None:
        self.problem, self.variants, self.until = problem, Variants(problem), until
        self._known: dict[float, Column] = {}
        self._best: list[Column] = []  # that were placed, but for those that did not have to be the best
        self._latest = latest

    def row_wise_bytes(self) -> float:
        """What they need row by row on all ranks."""
        plain = self.variants.plain
        return plain.memory_bytes(plain.uniform(self.problem.cluster.world_size))

    def least_bytes(self) -> float:
        """That they can do with."""
        try:
            return self.within(0.0).memory
        except BudgetError as error:
            return error.least_bytes

    def known(self) -> list[Column]:
        """Those that were found, in order of their limits."""
        return sorted(self._known.values(), key=lambda one: one.limit)

    def within(self, limit: float, enough: float = np.inf, work: float = MOST_WORK) -> Column:
        """The best placement; raises BudgetError where none fits. Any, of which the bound says so, where none takes
        less than ``enough``. ``work`` is what may go into making it exact, in microseconds.
        """
        if limit not in self._known:
            # With less memory it takes no less, and this one has no more.
            found = next((one for one in self._best if one.memory <= limit <= one.limit), None)
            if found is None:
                found = self._placed(limit, enough, work)
                if np.isinf(enough):
                    self._best.append(found)
            self._known[limit] = replace(found, limit=limit)
        return self._known[limit]

    def _placed(self, limit: float, enough: float, work: float) -> Column:
        # What takes longest is to prove the last millionth of one placement.
        with ended_at(self.until, work):
            instance, found = self._solved(limit, enough)
        memory = self.variants.of(instance.deduplicated).memory_bytes(found.allocation)
        return Column(limit, memory, found.seconds, found.lower_bound_seconds, limit, work)

    def _solved(self, limit: float, enough: float) -> tuple[Instance, Solution]:
        if self.problem.objective != "step":
            return self.variants.solve(limit, self.problem.tiers)
        close = self.problem.gap * _OF_GAP
        latest, tiers = self._latest.weights, self.problem.tiers
        found = solve_step(self.variants, limit, tiers, weights=latest, enough=enough, close=close)
        self._latest.weights = found.weights
        return found.instance, found.solution


@dataclass(frozen=True)
class _Interval:
    """Plans whose sequences have between two amounts of memory.

    Attributes:
        bound: of their seconds.
        known: the largest placement of no more memory that the master problem knew.
        low, high: its ends.
        closer: whether the bound is a program's.
    """

    bound: float
    known: Column
    low: Column
    high: Column
    closer: bool


def _within(menus: Menus, less: float) -> Menus:
    """The menus where every rank has so many bytes less."""
    capacity = menus.capacity.copy()
    capacity[menus.kinds.index(HBM)] -= less
    return replace(menus, capacity=np.maximum(capacity, 0.0))


def _pooled_bound(menus: Menus, less: float) -> float:
    """What pooled tables take at least where sequences have so many bytes."""
    left = undominated(_within(menus, less))
    return lagrangian_bound(left).bound if all(left.options) else np.inf


def columns_of_choices(
    sequences: Sequences, menus: Menus, enough: float, gap: float
) -> tuple[list[Column], float] | None:
    """The sequences' placements within what choices of the other tables' options leave, where every rank has the same
    of each and there are few choices; None elsewhere. The choice that takes least by what is known so far is looked at
    next, until none is left that takes less than what was found, or than ``enough``, by more than the gap.

    Returns:
        the placements, and a bound of all plans. One placement, the least that the sequences can do with, where no
        choice leaves enough memory; none where no choice takes less than ``enough``.
    """
    options = [option for _, option in menus.pairs()]
    if math.prod(map(len, menus.options)) > _CHOICES or any(
        one.spread is not Spread.EVERY_RANK or any(np.ptp(each, axis=1).any() for each in (one.perf, one.memory))
        for one in options
    ):
        return None
    hbm, room = menus.kinds.index(HBM), menus.capacity.min(axis=1)
    waiting: list[tuple[float, float, float]] = []  # bound, limit, seconds of the other tables
    for choice in itertools.product(*menus.options):
        left = room - np.sum([one.memory[:, 0] for one in choice], axis=0)
        if (left >= 0).all():
            charged = {one.charge for one in choice if one.charge >= 0}
            seconds = plain_sum(float(one.perf[:, 0].sum()) for one in choice) + plain_sum(
                menus.charges[one] for one in charged
            )
            waiting.append((seconds, float(left[hbm]), seconds))
    found: dict[float, Column] = {}
    too_little, best, lower = -np.inf, np.inf, np.inf
    heapq.heapify(waiting)
    while waiting:
        bound, limit, seconds = heapq.heappop(waiting)
        # Those with less memory take no less than those with more.
        more = [one.lower_bound for one in found.values() if one.limit >= limit]
        closer = seconds + max(more, default=0.0)
        if closer > bound:
            heapq.heappush(waiting, (closer, limit, seconds))
            continue
        if bound >= min(best * (1 - gap), enough) or (found and time.monotonic() >= sequences.until):
            lower = min(lower, bound)
            break
        if limit in found or limit <= too_little:
            continue
        try:
            one = found[limit] = sequences.within(limit, min(best, enough) - seconds, _WORK_OF_CHOICE)
            best, lower = min(best, seconds + one.seconds), min(lower, seconds + one.lower_bound)
        except BudgetError:
            too_little = limit
    if not found and not np.isfinite(lower):
        return [sequences.within(sequences.least_bytes())], lower
    return sorted(found.values(), key=lambda one: one.limit), lower


def first_columns(sequences: Sequences, menus: Menus, until: float) -> list[Column]:
    """Placements of the sequences to choose from, in order of memory; few of them where time is up.

    Raises:
        BudgetError: nothing fits.
    """
    least = sequences.least_bytes()
    hbm = menus.kinds.index(HBM)
    needed = (
        plain_sum(min((float(o.memory[hbm].sum()) for o in menu), default=0.0) for menu in menus.options) / menus.ranks
    )
    room = float(menus.capacity[hbm].max())
    most = room - needed
    if least > most:
        return [sequences.within(least)]
    found = [sequences.within(limit) for limit in (least, most)]
    used = found[-1].memory  # with more, nothing is gained
    between = (least + (used - least) * (step / (_FIRST - 1)) ** 2 for step in range(1, _FIRST - 1))
    found += [sequences.within(limit) for limit in between if time.monotonic() < until]
    found.sort(key=lambda one: one.limit)
    limits = [one.limit for one in found]
    bounds = {one.limit: _pooled_bound(menus, one.memory) for one in found}
    for _ in range(_ROUNDS):
        if time.monotonic() >= until:
            break
        value = [one.seconds + bounds[one.limit] for one in found]
        best = int(np.argmin(value))
        if not np.isfinite(value[best]):
            best = 0  # the less they take, the more is left
        for other in (best - 1, best + 1):
            if 0 <= other < len(limits) and found[best].memory != found[other].memory:
                one = sequences.within((limits[best] + limits[other]) / 2)
                bounds[one.limit] = _pooled_bound(menus, one.memory)
                found.append(one)
        found.sort(key=lambda one: one.limit)
        limits = [one.limit for one in found]
    return found


class Bound:
    """A bound on all plans, those too whose sequences have none of the limits tried.

    Between two limits, sequences take at least what they do within the larger one, and the pooled tables what they do
    with the smaller one taken off. And as a plan's sequences could have the placement of the smaller one, the bound of
    plans with those that were tried is too high by what these two differ at most.
    """

    def __init__(
        self,
        sequences: Sequences,
        menus: Menus,
        columns: Sequence[Column],
        found: Assignment,
        problem: Problem,
        until: float,
    ) -> None:
        self._sequences, self._menus, self._found, self._until = sequences, menus, found, until
        self._columns, self._gap = columns, problem.gap
        self._dense = dense_seconds(problem)

    def value(self) -> float:
        """The bound; as close as gap or time ask for."""
        pairs = zip(self._columns, [*self._columns[1:], self._columns[-1]], strict=True)
        intervals = [
            self._interval(high if high.memory * _JUST_BELOW <= low.limit else low, low, high, closer=False)
            for low, high in pairs
        ]
        narrow: list[_Interval] = []  # of which a bound by columns is close once the master problem has their ends
        for _ in range(_LOOKS):
            intervals.sort(key=lambda one: (one.bound, one.low.limit))
            if relative_gap(self._found.rating, intervals[0].bound) <= self._gap or time.monotonic() >= self._until:
                break
            closer = self._closer(intervals[0])
            if not closer:
                if intervals[0].known.seconds <= intervals[0].low.seconds:
                    break  # which no placement between brings nearer, in this round or the next
                narrow.append(intervals.pop(0))
                if not intervals:
                    break
            intervals[:1] = closer or intervals[:1]
        return min(one.bound for one in (*intervals, *narrow))

    def _closer(self, one: _Interval) -> list[_Interval]:
        """The same plans, looked at more closely: by a program; on both sides of the memory that the larger placement
        has, where sequences' time may fall by a step; in halves. None where they are too narrow.
        """
        low, high = one.low, one.high
        if not one.closer:
            return [self._interval(one.known, low, high, closer=True)]
        below, unused = high.memory * _JUST_BELOW, high.limit - high.memory
        if low.limit < below and unused > _STEP * (high.limit - low.limit):
            known = high if high in self._columns else one.known
            return [
                self._interval(one.known, low, self._sequences.within(below), closer=True),
                self._interval(known, replace(high, limit=high.memory), high, closer=True),
            ]
        middle = (low.limit + high.limit) / 2
        # The smaller placement takes little longer: with it, the master problem bounds these plans closely, or as
        # closely as their placements are bounded.
        most = low.seconds - high.lower_bound
        narrow = most <= _NARROW * self._gap * self._found.rating or low.seconds - high.seconds <= _LITTLE * most
        if narrow or not low.limit < middle < high.limit:
            return []
        between = self._sequences.within(middle)
        return [self._interval(one.known, *ends, closer=True) for ends in ((low, between), (between, high))]

    def _interval(self, known: Column, low: Column, high: Column, *, closer: bool) -> _Interval:
        bound = self._program_bound(low.limit) if closer else _pooled_bound(self._menus, low.limit)
        by_parts = high.lower_bound + bound + self._dense
        by_columns = self._found.lower_bound - max(0.0, known.seconds - high.lower_bound)
        return _Interval(float(max(by_parts, by_columns)), known, low, high, closer)

    def _program_bound(self, less: float) -> float:
        """What pooled tables take at least where sequences have so many bytes, charges included."""
        left = undominated(_within(self._menus, less))
        if not all(left.options):
            return np.inf
        seconds = self._until - time.monotonic()
        answer = solve_menus_program(left, "cluster", gap=_CLOSE, seconds=seconds, nodes=_NODES)
        return max(lagrangian_bound(left).bound, answer.bound * (1 - _SAFETY))
