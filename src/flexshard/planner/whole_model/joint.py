"""A whole model under our costs and one memory limit: pooled tables' shards and sequences' tiers in one problem.

Every rank has the same of the sequences' tiers, so that all sequences together are one more table of the master
problem, whose options are their best placements within so many bytes. These are found where they matter: where the
sequences' time, and a bound of the pooled tables' in the memory that is left, add up to little.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexshard.costmodels import PooledCosts
from flexshard.errors import BudgetError, JobError
from flexshard.planner.budget import Budget
from flexshard.planner.deciding import Decision, checked_limit, decide
from flexshard.planner.problem import Problem
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solver.step_search import solve_step
from flexshard.planner.whole_model.lagrangian import lagrangian_bound
from flexshard.planner.whole_model.master import Assignment, assign, relative_gap
from flexshard.planner.whole_model.menus import Menus, Option, Spread, undominated
from flexshard.planner.whole_model.pooled_menus import HBM, Choice, PooledMenus, pooled_menus
from flexshard.planner.whole_model.program import solve_menus_program
from flexshard.topologies import Cluster

__all__ = ["WholeDecision", "decide_whole", "pooled_row_wise"]

SEQUENCES = "(tables without pooling)"
_FIRST, _ROUNDS, _LOOKS = 9, 4, 40  # limits at first; rounds of two more beside the best; intervals of the bound
_CLOSE, _SAFETY, _NODES = 1e-3, 1e-6, 100
_SHARE = 0.7  # of the time, for plans; the rest is for the bound where there are sequences


class _Exactly(Budget):
    """So many bytes, of which nothing is taken off."""

    def __init__(self, nbytes: float, name: str) -> None:
        self.nbytes, self.name = nbytes, name

    def limit_bytes(self, neutral_bytes: float, cluster: Cluster) -> float:
        """As it says."""
        del neutral_bytes, cluster
        return self.nbytes


@dataclass(frozen=True, eq=False)
class WholeDecision:
    """Where everything goes.

    Attributes:
        problem: what was asked for.
        limit_bytes: per rank, of everything.
        menus: of the pooled tables.
        pooled: an option and ranks for each pooled table, in the problem's order.
        sequences: of the other tables; None where there are none.
        seconds: of the objective.
        lower_bound_seconds: no plan takes less.
        prices: of a byte in each kind of memory of every rank, by name.
        finished: whether the search ended by itself, so that every machine finds this plan and bound.
    """

    problem: Problem
    limit_bytes: float
    menus: PooledMenus
    pooled: tuple[Choice, ...]
    sequences: Decision | None
    seconds: float
    lower_bound_seconds: float
    prices: dict[str, float]
    finished: bool


@dataclass(frozen=True)
class _Column:
    """Sequences within a limit: the memory they have then, what they take, and what they take at least."""

    limit: float
    memory: float
    seconds: float
    lower_bound: float


class _Sequences:
    """The sequences' best placements within any limit, each found once."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.variants = problem, Variants(problem)
        self._known: dict[float, _Column] = {}

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

    def within(self, limit: float) -> _Column:
        """The best placement; raises BudgetError where none fits."""
        if limit not in self._known:
            solve = self._step if self.problem.objective == "step" else self._communication
            self._known[limit] = _Column(limit, *solve(limit))
        return self._known[limit]

    def _communication(self, limit: float) -> tuple[float, float, float]:
        instance, found = self.variants.solve(limit, self.problem.tiers)
        return instance.memory_bytes(found.allocation), found.seconds, found.lower_bound_seconds

    def _step(self, limit: float) -> tuple[float, float, float]:
        instance, found, _ = solve_step(self.variants, limit, self.problem.tiers)
        memory = self.variants.of(instance.deduplicated).memory_bytes(found.allocation)
        return memory, found.seconds, found.lower_bound_seconds


def decide_whole(problem: Problem) -> WholeDecision:
    """Choose and place; raises as :func:`flexshard.solve`."""
    started = time.monotonic()
    sequences = _Sequences(problem.without_pooled_tables()) if problem.sequence_tables else None
    costs = PooledCosts(problem.cluster, problem.batch_size, problem.hidden, problem.rates)
    neutral = pooled_row_wise(problem, costs)[1] + (0.0 if sequences is None else sequences.row_wise_bytes())
    limit = checked_limit(problem, neutral)
    tables = problem.pooled_tables
    pooled = pooled_menus(tables, costs, problem.constraints, hbm_bytes=limit, host_bytes=problem.host_memory)
    columns = [] if sequences is None else _columns(sequences, pooled.menus)
    menus = pooled.menus if sequences is None else _with_sequences(pooled.menus, columns)
    menus = _with_dense(menus, problem)
    left = started + problem.timeout_seconds - time.monotonic()
    try:
        found = assign(menus, seconds=max(left * (1 if sequences is None else _SHARE), 0.0), gap=problem.gap)
    except BudgetError as error:
        raise _no_plan(problem, pooled, error) from error
    lower = found.lower_bound
    chosen = None
    if sequences is not None:
        until = started + problem.timeout_seconds
        lower = _Bound(sequences, pooled.menus, columns, found, problem, until).value()
        budget = _Exactly(columns[found.choice[len(pooled.menus.tables)]].limit, problem.budget.name)
        chosen = decide(replace(sequences.problem, budget=budget))
    count = len(pooled.menus.tables)
    real = undominated(menus)
    prices = dict(zip(real.kinds, lagrangian_bound(real).per_byte.tolist(), strict=True))
    if chosen is not None:  # whose price is exact, while the bound's takes tables for divisible
        prices[HBM] = max(prices.get(HBM, 0.0), chosen.placement.price)
    return WholeDecision(
        problem,
        limit,
        pooled,
        tuple(pooled.chosen(found.choice[:count], found.ranks[:count])),
        chosen,
        found.rating,
        min(lower, found.rating),
        prices,
        found.finished,
    )


def pooled_row_wise(problem: Problem, costs: PooledCosts) -> tuple[list[Choice], float]:
    """Every pooled table row-wise over all ranks, and the memory of the fullest of them."""
    ranks = tuple(range(problem.cluster.world_size))
    kind = "row_wise" if len(ranks) > 1 else "table_wise"
    choices = [(costs.options(table, sharding_types=[kind])[0], ranks) for table in problem.pooled_tables]
    held = sum((one.static_bytes + one.dynamic_bytes for one, _ in choices), np.zeros(len(ranks)))
    received = sum(costs.received_bytes(table) for table in problem.pooled_tables)
    return choices, float(held.max()) + received


def _within(menus: Menus, less: float) -> Menus:
    """The menus where every rank has so many bytes less."""
    capacity = menus.capacity.copy()
    capacity[menus.kinds.index(HBM)] -= less
    return replace(menus, capacity=np.maximum(capacity, 0.0))


def _pooled_bound(menus: Menus, less: float) -> float:
    """What pooled tables take at least where sequences have so many bytes."""
    left = undominated(_within(menus, less))
    return lagrangian_bound(left).bound if all(left.options) else np.inf


def _columns(sequences: _Sequences, menus: Menus) -> list[_Column]:
    """Placements of the sequences to choose from, in order of memory.

    Raises:
        BudgetError: nothing fits.
    """
    least = sequences.least_bytes()
    hbm = menus.kinds.index(HBM)
    needed = sum(min((float(o.memory[hbm].sum()) for o in menu), default=0.0) for menu in menus.options) / menus.ranks
    room = float(menus.capacity[hbm].max())
    most = room - needed
    if least > most:
        return [sequences.within(least)]
    limits = sorted({least + (most - least) * (step / (_FIRST - 1)) ** 2 for step in range(_FIRST)})
    found = [sequences.within(limit) for limit in limits]
    bounds = {one.limit: _pooled_bound(menus, one.memory) for one in found}
    for _ in range(_ROUNDS):
        value = [one.seconds + bounds[one.limit] for one in found]
        best = int(np.argmin(value))
        if not np.isfinite(value[best]):
            best = 0  # the less they take, the more is left
        for other in (best - 1, best + 1):
            if 0 <= other < len(limits):
                one = sequences.within((limits[best] + limits[other]) / 2)
                bounds[one.limit] = _pooled_bound(menus, one.memory)
                found.append(one)
        found.sort(key=lambda one: one.limit)
        limits = [one.limit for one in found]
    return found


def _with_sequences(menus: Menus, columns: Sequence[_Column]) -> Menus:
    """The menus with all sequences as one more table."""
    ranks, hbm = menus.ranks, menus.kinds.index(HBM)
    options = []
    for source, column in enumerate(columns):
        perf, memory = np.zeros((len(menus.loads), ranks)), np.zeros((len(menus.kinds), ranks))
        perf[0], memory[hbm] = column.seconds, column.memory
        options.append(Option("tiers", Spread.EVERY_RANK, perf, memory, source))
    return replace(menus, tables=(*menus.tables, SEQUENCES), options=(*menus.options, tuple(options)))


def _with_dense(menus: Menus, problem: Problem) -> Menus:
    """The menus, and the rest of a step as a table that has no choice: gaps are of whole steps."""
    if problem.step is None or not problem.step.dense_seconds:
        return menus
    perf, memory = np.zeros((len(menus.loads), menus.ranks)), np.zeros((len(menus.kinds), menus.ranks))
    perf[0] = problem.step.dense_seconds
    dense = Option("dense work", Spread.EVERY_RANK, perf, memory)
    return replace(menus, tables=(*menus.tables, "(dense work)"), options=(*menus.options, (dense,)))


class _Bound:
    """A bound on all plans, those too whose sequences have none of the limits tried.

    Between two limits, sequences take at least what they do within the larger one, and the pooled tables what they do
    with the smaller one taken off. And as a plan's sequences could have the placement of the smaller one, the bound of
    plans with those that were tried is too high by what these two differ at most.
    """

    def __init__(
        self,
        sequences: _Sequences,
        menus: Menus,
        columns: Sequence[_Column],
        found: Assignment,
        problem: Problem,
        until: float,
    ) -> None:
        self._sequences, self._menus, self._found, self._until = sequences, menus, found, until
        self._columns, self._gap = columns, problem.gap
        self._dense = 0.0 if problem.step is None else problem.step.dense_seconds

    def value(self) -> float:
        """The bound; as close as gap or time ask for."""
        pairs = zip(self._columns, [*self._columns[1:], self._columns[-1]], strict=True)
        intervals = [self._interval(low, low, high, closer=False) for low, high in pairs]
        for _ in range(_LOOKS):
            intervals.sort(key=lambda one: (one.bound, one.low.limit))
            least = intervals[0]
            middle = (least.low.limit + least.high.limit) / 2
            done = relative_gap(self._found.rating, least.bound) <= self._gap or time.monotonic() >= self._until
            if done or (least.closer and not least.low.limit < middle < least.high.limit):
                break
            if not least.closer:
                intervals[0] = self._interval(least.known, least.low, least.high, closer=True)
                continue
            between = self._sequences.within(middle)
            intervals[:1] = [
                self._interval(least.known, low, high, closer=True)
                for low, high in ((least.low, between), (between, least.high))
            ]
        return min(one.bound for one in intervals)

    def _interval(self, known: _Column, low: _Column, high: _Column, *, closer: bool) -> _Interval:
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
    known: _Column
    low: _Column
    high: _Column
    closer: bool


def _no_plan(problem: Problem, pooled: PooledMenus, error: BudgetError) -> Exception:
    """Why nothing fits: memory, or tables that are to be apart."""
    real = [kind for kind, name in enumerate(pooled.menus.kinds) if " apart from " not in name]
    if len(real) < len(pooled.menus.kinds) and not problem.sequence_tables:
        options = tuple(
            tuple(replace(option, memory=option.memory[real]) for option in menu) for menu in pooled.menus.options
        )
        kinds = tuple(pooled.menus.kinds[kind] for kind in real)
        menus = replace(pooled.menus, options=options, capacity=pooled.menus.capacity[real], kinds=kinds)
        try:
            assign(menus, seconds=1.0, gap=problem.gap)
        except BudgetError:
            return error
        pairs = ", ".join(name for name in pooled.menus.kinds if " apart from " in name)
        return JobError(f"constraints leave no plan: {pairs}; there would be one without apart")
    return error
