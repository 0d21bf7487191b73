"""A whole model under our costs and one memory limit: shards of TorchRec's tables and tiers of rows in one problem.

Every rank has the same of the sequences' tiers, so that all sequences together are one more table of the master
problem, whose options are their best placements within so many bytes. These are found where they matter: where the
sequences' time, and a bound of the pooled tables' in the memory that is left, add up to little.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from flexshard.costmodels import PooledCosts, PooledOption
from flexshard.errors import BudgetError, FlexShardError, JobError
from flexshard.planner.budget import Budget
from flexshard.planner.constraints import TIERS, TableConstraints
from flexshard.planner.deciding import Decision, checked_limit, decide
from flexshard.planner.problem import Problem
from flexshard.planner.solver.deadline import ended_at
from flexshard.planner.whole_model.columns import Bound, Column, Sequences, first_columns
from flexshard.planner.whole_model.lagrangian import lagrangian_bound
from flexshard.planner.whole_model.master import Assignment, assign, relative_gap
from flexshard.planner.whole_model.menus import Menus, Option, Spread, undominated
from flexshard.planner.whole_model.pooled_menus import HBM, Choice, PooledMenus, pooled_menus, table_options
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["WholeDecision", "decide_whole"]

_NAMED = 3  # of the tables in tiers, where nothing fits
_FOR_COLUMNS = 0.4  # of the time, for the first placements of the sequences
_SHARE = 0.5  # of what is left, for plans; the rest is for the bound, and for further placements
_ROUNDS = 4  # of further placements
_MOST_UNDECIDED = 6  # tables that may be in tiers or not, each choice of which is a problem of its own
_AT_LEAST = 5.0  # seconds for the placement that is taken, whatever is left


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
        menus: of the tables that are not in tiers of rows.
        pooled: an option and ranks for each of them, in the menus' order.
        sequences: of the other tables; None where there are none.
        row_wise: an option and ranks for each of the former where all are cut by rows, as "neutral" has it.
        lower_bound_seconds: no plan takes less than this, dense work included.
        prices: of a byte in each kind of memory of every rank, by name.
    """

    problem: Problem
    limit_bytes: float
    menus: PooledMenus
    pooled: tuple[Choice, ...]
    sequences: Decision | None
    row_wise: tuple[Choice, ...]
    lower_bound_seconds: float
    prices: dict[str, float]


def decide_whole(
    problem: Problem, trains: Mapping[str, Sequence[PooledOption]] | None = None, loss_limit: float | None = None
) -> WholeDecision:
    """Choose and place.

    Where tables without pooling may be in tiers of rows or be something else, each choice of those that are in tiers is
    a problem of its own; those whose bound is above the best plan so far are not looked at more closely.

    Args:
        problem: to solve.
        trains: tensor trains that tables may become, by name.
        loss_limit: of all options chosen together; None for any.

    Raises:
        JobError, BudgetError: as :func:`flexshard.solve`.
    """
    trains, until = trains or {}, time.monotonic() + problem.timeout_seconds
    cases = _Cases(problem, trains, loss_limit, until)
    best: tuple[float, _Case, Assignment, Menus, Column | None] | None = None
    lower, errors = np.inf, list[FlexShardError]()
    waiting = cases.all()
    for number, case in enumerate(waiting):
        bound = case.bound if number else 0.0  # of one alone there is nothing to rule out
        late = best is not None and time.monotonic() >= until
        if best is not None and (late or bound >= best[0] * (1 - problem.gap)):
            lower = min(lower, bound)
            continue
        now = time.monotonic()
        try:
            menus, found, least, column = _searched(
                problem, case.sequences, case.pooled, now + max(until - now, 0.0) / (len(waiting) - number)
            )
        except (BudgetError, JobError) as error:
            errors.append(error)
            continue
        lower = min(lower, least)
        if best is None or found.rating < best[0]:
            best = found.rating, case, found, menus, column
    if best is None:
        raise min(errors, key=lambda one: one.least_bytes if isinstance(one, BudgetError) else np.inf)
    rating, case, found, menus, column = best
    chosen = None
    if case.sequences is not None and column is not None:
        with ended_at(max(until, time.monotonic() + _AT_LEAST)):
            chosen = decide(replace(case.sequences.problem, budget=_Exactly(column.limit, problem.budget.name)))
    pooled = case.pooled
    count = len(pooled.menus.tables)
    real = undominated(menus)
    prices = dict(zip(real.kinds, lagrangian_bound(real).per_byte.tolist(), strict=True))
    if chosen is not None:  # whose price is exact, while the bound's takes tables for divisible
        prices[HBM] = max(prices.get(HBM, 0.0), chosen.placement.price)
    return WholeDecision(
        problem,
        cases.limit,
        pooled,
        tuple(pooled.chosen(found.choice[:count], found.ranks[:count])),
        chosen,
        tuple(_row_wise(cases.costs, pooled.tables)[0]),
        min(lower, rating),
        prices,
    )


@dataclass(frozen=True, eq=False)
class _Case:
    """Which tables are in tiers, and which are not.

    Attributes:
        problem: of all.
        pooled: menus of those that TorchRec shards, or that become tensor trains.
        sequences: the others; None where there are none.
    """

    problem: Problem
    pooled: PooledMenus
    sequences: Sequences | None

    @cached_property
    def bound(self) -> float:
        """No plan takes less; infinite where nothing fits, 0 where there is no time to know."""
        menus = _with_dense(self.pooled.menus, self.problem)
        real = undominated(menus)
        if not all(real.options):
            return np.inf
        bound = lagrangian_bound(real).bound
        if self.sequences is None:
            return bound
        if time.monotonic() >= self.sequences.until:
            return 0.0
        try:
            return bound + self.sequences.within(float(menus.capacity[menus.kinds.index(HBM)].max())).lower_bound
        except BudgetError:
            return np.inf


class _Cases:
    """What the tables may be, and the limit of their memory."""

    def __init__(
        self, problem: Problem, trains: Mapping[str, Sequence[PooledOption]], loss_limit: float | None, until: float
    ) -> None:
        self._problem, self._loss_limit, self._until = problem, loss_limit, until
        self.costs = PooledCosts(problem.cluster, problem.batch_size, problem.hidden, problem.rates)
        self._sharded = {table.name for table in problem.sharded_tables}
        choose = {table.name for table in problem.undecided_tables} | {name for name in trains if trains[name]}
        host = problem.host_memory is not None
        asked = {table.name: problem.constraints.get(table.name, TableConstraints()) for table in problem.tables}
        self._offered = {}
        for table in problem.tables:
            options: list[PooledOption] = []
            if table.name in self._sharded or asked[table.name].torchrec_types:
                try:
                    options = table_options(table, self.costs, asked[table.name], host=host)
                except JobError as error:
                    if table.name in self._sharded:
                        raise
                    warnings.warn(f"{error}; its rows are in tiers ({TIERS!r})", UserWarning, stacklevel=2)
            self._offered[table.name] = [*options, *trains.get(table.name, ())]
        undecided = [table.name for table in problem.tables if table.name in choose - self._sharded]
        self._undecided = [name for name in undecided if self._offered[name]]
        if len(self._undecided) > _MOST_UNDECIDED:
            raise JobError(
                f"{len(self._undecided)} tables without pooling may be in tiers of rows or not, such as"
                f" {self._undecided[0]!r}; at most {_MOST_UNDECIDED} can be decided on at once: decide on others by"
                " constraints, or offer fewer tensor trains"
            )
        _, needed = _row_wise(self.costs, problem.sharded_tables)
        self._first = self._sequences(())
        self.limit = checked_limit(problem, needed + (0.0 if self._first is None else self._first.row_wise_bytes()))

    def all(self) -> list[_Case]:
        """Every choice of the tables that are not in tiers, few of them first."""
        return [
            self._case(names)
            for number in range(len(self._undecided) + 1)
            for names in itertools.combinations(self._undecided, number)
        ]

    def _sequences(self, names: Sequence[str]) -> Sequences | None:
        """Those in tiers where some of the undecided ones are not."""
        rows = [table for table in self._problem.tables if table.name not in {*self._sharded, *names}]
        return Sequences(self._problem.of_rows(rows), self._until) if rows else None

    def _case(self, names: Sequence[str]) -> _Case:
        problem = self._problem
        menus = pooled_menus(
            [table for table in problem.tables if table.name in {*self._sharded, *names}],
            self.costs,
            problem.constraints,
            self._offered,
            hbm_bytes=self.limit,
            host_bytes=problem.host_memory,
            loss_limit=self._loss_limit,
        )
        return _Case(problem, menus, self._sequences(names) if names else self._first)


def _searched(
    problem: Problem, sequences: Sequences | None, pooled: PooledMenus, until: float
) -> tuple[Menus, Assignment, float, Column | None]:
    """The menus, the best assignment, a bound, and the sequences' placement; with more placements of the sequences as
    long as the bound asks for them.
    """

    def best_of(menus: Menus, share: float) -> Assignment:
        seconds = max((until - time.monotonic()) * share, 0.0)
        try:
            return assign(menus, seconds=seconds, gap=problem.gap)
        except BudgetError as error:
            raise _no_plan(problem, pooled, error) from error

    if sequences is None:
        menus = _with_dense(pooled.menus, problem)
        found = best_of(menus, 1.0)
        return menus, found, found.lower_bound, None
    started = time.monotonic()
    columns = first_columns(sequences, pooled.menus, started + (until - started) * _FOR_COLUMNS)
    place, lower = len(pooled.menus.tables), 0.0
    best: tuple[Menus, Assignment, Column] | None = None
    for _ in range(_ROUNDS):
        menus = _with_dense(_with_sequences(pooled.menus, columns, sequences.problem.tables), problem)
        found = best_of(menus, _SHARE)
        if best is None or found.rating < best[1].rating:
            best = menus, found, columns[found.choice[place]]
        lower = max(lower, Bound(sequences, pooled.menus, columns, found, problem, until).value())
        more = [one for one in sequences.known() if columns[0].limit <= one.limit <= columns[-1].limit]
        near = relative_gap(best[1].rating, lower) <= problem.gap
        if near or len(more) == len(columns) or time.monotonic() >= until:
            break
        columns = more
    assert best is not None
    menus, found, column = best
    return menus, found, lower, column


def _row_wise(costs: PooledCosts, tables: Sequence[Table]) -> tuple[list[Choice], float]:
    """Every table row-wise over all ranks, and the memory of the fullest of them; tables of means, which are not
    cut by rows, whole on the ranks that hold least.
    """
    everywhere = tuple(range(costs.cluster.world_size))
    found: dict[str, Choice] = {}
    held = np.zeros(len(everywhere))
    for cut in (True, False):
        kind = "row_wise" if cut and len(everywhere) > 1 else "table_wise"
        for table in tables:
            if (table.pooling != "mean") is cut:
                (option,) = costs.options(table, sharding_types=[kind])
                ranks = everywhere if option.shards > 1 else (int(held.argmin()),)
                held[list(ranks)] += option.static_bytes + option.dynamic_bytes
                found[table.name] = option, ranks
    received = sum(costs.received_bytes(table) for table in tables)
    return [found[table.name] for table in tables], float(held.max()) + received


def _alike(menus: Menus, name: str, seconds: float, nbytes: float = 0.0, source: int = 0) -> Option:
    """An option of which every rank has the same; which kind of load it is does not matter then."""
    perf, memory = np.zeros((len(menus.loads), menus.ranks)), np.zeros((len(menus.kinds), menus.ranks))
    perf[0], memory[menus.kinds.index(HBM)] = seconds, nbytes
    return Option(name, Spread.EVERY_RANK, perf, memory, source)


def _with_table(menus: Menus, name: str, options: Sequence[Option]) -> Menus:
    return replace(menus, tables=(*menus.tables, name), options=(*menus.options, tuple(options)))


def _with_sequences(menus: Menus, columns: Sequence[Column], tables: Sequence[Table]) -> Menus:
    """The menus with all sequences as one more table, named by the first of them."""
    names = [table.name for table in tables]
    named = [*names[:_NAMED], *([f"{len(names) - _NAMED} more"] if len(names) > _NAMED else [])]
    tiers = [_alike(menus, "tiers", one.seconds, one.memory, source) for source, one in enumerate(columns)]
    return _with_table(menus, f"{' + '.join(named)} (in tiers of rows)", tiers)


def _with_dense(menus: Menus, problem: Problem) -> Menus:
    """The menus, and the rest of a step as a table that has no choice: gaps are of whole steps."""
    if problem.step is None or not problem.step.dense_seconds:
        return menus
    return _with_table(menus, "(dense work)", [_alike(menus, "dense work", problem.step.dense_seconds)])


def _no_plan(problem: Problem, pooled: PooledMenus, error: BudgetError) -> Exception:
    """Why nothing fits: memory, or tables that are to be apart, which no memory makes possible."""
    marks = [kind for kind, name in enumerate(pooled.menus.kinds) if " apart from " in name]
    if not marks:
        return error
    try:
        assign(pooled.menus.with_kinds(marks), seconds=1.0, gap=problem.gap)
    except BudgetError:
        pairs = ", ".join(pooled.menus.kinds[kind] for kind in marks)
        return JobError(f"constraints leave no plan, whatever the memory: {pairs}; there would be one without apart")
    return error
