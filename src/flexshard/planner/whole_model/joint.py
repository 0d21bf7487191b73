"""A whole model under our costs and one memory limit: shards of TorchRec's tables and tiers of rows in one problem.

Every rank has the same of the sequences' tiers, so that all sequences together are one more table of the master
problem, whose options are their best placements within so many bytes. These are found where they matter: where the
sequences' time, and a bound of the pooled tables' in the memory that is left, add up to little. Where a table may be in
tiers or be something else, branch and bound decides: each choice is such a problem, and most are ruled out unseen.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexshard.costmodels import PooledOption
from flexshard.errors import BudgetError, FlexShardError, JobError
from flexshard.planner.budget import Budget
from flexshard.planner.deciding import Decision, decide, dense_seconds
from flexshard.planner.gaps import relative_gap
from flexshard.planner.problem import Problem
from flexshard.planner.solver.deadline import ended_at
from flexshard.planner.whole_model.annealing import compile_loops
from flexshard.planner.whole_model.cases import Case, Cases, row_wise, with_dense, with_sequences
from flexshard.planner.whole_model.columns import Bound, Column, Sequences, columns_of_choices, first_columns
from flexshard.planner.whole_model.lagrangian import lagrangian_bound
from flexshard.planner.whole_model.master import Assignment, assign
from flexshard.planner.whole_model.menus import Menus, undominated
from flexshard.planner.whole_model.pooled_menus import HBM, Choice, PooledMenus
from flexshard.topologies import Cluster

__all__ = ["WholeDecision", "decide_whole"]

_FOR_COLUMNS = 0.4  # of the time, for the first placements of the sequences
_SHARE = 0.5  # of what is left, for plans; the rest is for the bound, and for further placements
_ROUNDS = 8  # of further placements
_OF_TIME = 0.3  # that is left, for one choice of the tables in tiers
_WITHOUT_PLAN = 100  # choices, decided in part or whole, that are looked at whatever the time while no plan is known
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

    Args:
        problem: to solve.
        trains: tensor trains that tables may become, by name.
        loss_limit: of all options chosen together; None for any.

    Raises:
        JobError, BudgetError: as :func:`flexshard.solve`.
    """
    compile_loops()
    until = time.monotonic() + problem.timeout_seconds
    cases = Cases(problem, trains or {}, loss_limit, until)
    best, lower = _Search(problem, cases, until).best()
    case, found, column = best.case, best.found, best.column
    chosen = None
    if case.sequences is not None and column is not None:
        with ended_at(max(until, time.monotonic() + _AT_LEAST), column.work):  # as it was found
            chosen = decide(replace(case.sequences.problem, budget=_Exactly(column.placed_within, problem.budget.name)))
    pooled = case.pooled
    count = len(pooled.menus.tables)
    real = undominated(best.menus)
    prices = dict(zip(real.kinds, lagrangian_bound(real).per_byte.tolist(), strict=True))
    if chosen is not None:  # whose price is exact, while the bound's takes tables for divisible
        prices[HBM] = max(prices.get(HBM, 0.0), chosen.placement.price)
    return WholeDecision(
        problem,
        cases.limit,
        pooled,
        tuple(pooled.chosen(found.choice[:count], found.ranks[:count])),
        chosen,
        tuple(row_wise(cases.costs, pooled.tables)[0]),
        min(lower, found.rating),
        prices,
    )


@dataclass(frozen=True, eq=False)
class _Solved:
    """The best plan of one choice of the tables in tiers."""

    case: Case
    menus: Menus
    found: Assignment
    column: Column | None


@dataclass(frozen=True, order=True)
class _Open:
    """Plans with some of the undecided tables in tiers and some not; the least bound first, then the first met."""

    bound: float
    number: int
    inside: frozenset[str]
    outside: frozenset[str]


class _Search:
    """Branch and bound over which of the undecided tables are in tiers."""

    def __init__(self, problem: Problem, cases: Cases, until: float) -> None:
        self._problem, self._cases, self._until = problem, cases, until
        self._solved: dict[frozenset[str], float] = {}  # by the tables not in tiers, the bound
        self._errors: list[FlexShardError] = []
        self._best: _Solved | None = None
        self._lower = np.inf  # of all that was looked at or left out

    def best(self) -> tuple[_Solved, float]:
        """The best plan, and a bound of all."""
        if self._cases.undecided:
            self._branch()
        else:
            self._lower = self._solve(frozenset())
        if self._best is None and not self._errors:  # nothing fits, which one of these says best
            for names in ((), self._cases.undecided):
                self._solve(frozenset(names))
        if self._best is None:
            raise min(self._errors, key=lambda one: one.least_bytes if isinstance(one, BudgetError) else np.inf)
        return self._best, self._lower

    @property
    def _enough(self) -> float:
        """Plans that do not take less need not be found."""
        return np.inf if self._best is None else self._best.found.rating * (1 - self._problem.gap)

    def _branch(self) -> None:
        relaxation = self._cases.relaxation()
        number, waiting = 0, [_Open(0.0, 0, frozenset(), frozenset())]
        while waiting:
            one = heapq.heappop(waiting)
            if one.bound >= self._enough or self._is_late(number):
                self._lower = min(self._lower, one.bound)  # the others' are no less
                return
            enough = self._enough
            relaxed = relaxation.at(one.inside, one.outside, enough)
            bound = max(one.bound, relaxed.bound)
            if bound >= enough:
                self._lower = min(self._lower, bound)
                continue
            if (relaxed.inside, relaxed.outside) != (one.inside, one.outside):
                self._lower = min(self._lower, enough)
            outside = relaxed.outside | relaxed.better_outside
            if self._best is None:  # not what memory, or losses, leave on average alone
                likely = relaxation.choice(relaxed, self._seconds() * _OF_TIME)
                if likely is None and not relaxation.fits(relaxed, self._seconds()):
                    continue
                outside = outside if likely is None else likely
            known = self._best
            least = self._solve(outside)
            if self._best is not known:  # whose steps are bounded best under other weights
                relaxation = self._cases.relaxation()
            if relaxed.most_decided is None:
                self._lower = min(self._lower, max(bound, least))
                continue
            table = {relaxed.most_decided}
            for inside, outside in (
                (relaxed.inside | table, relaxed.outside),
                (relaxed.inside, relaxed.outside | table),
            ):
                number += 1
                heapq.heappush(waiting, _Open(bound, number, inside, outside))

    def _seconds(self) -> float:
        """That are left."""
        return max(self._until - time.monotonic(), 0.0)

    def _is_late(self, number: int) -> bool:
        return not self._seconds() and (self._best is not None or number >= _WITHOUT_PLAN)

    def _solve(self, outside: frozenset[str]) -> float:
        """Look for the best plan where just these of the undecided tables are not in tiers; a bound of such plans,
        infinite where it is known that none fits.
        """
        if outside not in self._solved:
            case, seconds = self._cases.of(outside), self._seconds() * (_OF_TIME if self._cases.undecided else 1.0)
            try:
                found, least = _searched(
                    self._problem, case.sequences, case.pooled, time.monotonic() + seconds, self._enough
                )
            except (BudgetError, JobError) as error:
                self._errors.append(error)
                # What fits all ranks together may fit them one by one, though no plan was found.
                least = 0.0 if isinstance(error, BudgetError) and not error.by_sums else np.inf
            else:
                if found is not None and (self._best is None or found[1].rating < self._best.found.rating):
                    self._best = _Solved(case, *found)
            self._solved[outside] = least
        return self._solved[outside]


def _searched(
    problem: Problem, sequences: Sequences | None, pooled: PooledMenus, until: float, enough: float
) -> tuple[tuple[Menus, Assignment, Column | None] | None, float]:
    """The menus, the best assignment and the sequences' placement, with more placements of the sequences as long as the
    bound asks for them; and a bound. None where it is known early that nothing takes less than ``enough``.
    """

    def best_of(menus: Menus, share: float) -> Assignment:
        seconds = max((until - time.monotonic()) * share, 0.0)
        try:
            return assign(menus, seconds=seconds, gap=problem.gap)
        except BudgetError as error:
            raise _no_plan(problem, pooled, error) from error

    if sequences is None:
        menus = with_dense(pooled.menus, problem)
        found = best_of(menus, 1.0)
        return (menus, found, None), found.lower_bound
    place = len(pooled.menus.tables)
    dense = dense_seconds(problem)
    of_choices = columns_of_choices(sequences, pooled.menus, enough - dense, problem.gap)
    if of_choices is not None:
        columns, lower = of_choices
        if not columns:
            return None, lower + dense
        menus = with_dense(with_sequences(pooled.menus, columns, sequences.problem.tables), problem)
        found = best_of(menus, 1.0)
        return (menus, found, columns[found.choice[place]]), lower + dense
    started = time.monotonic()
    columns = first_columns(sequences, pooled.menus, started + (until - started) * _FOR_COLUMNS)
    lower = 0.0
    best: tuple[Menus, Assignment, Column] | None = None
    for _ in range(_ROUNDS):
        menus = with_dense(with_sequences(pooled.menus, columns, sequences.problem.tables), problem)
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
    return best, lower


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
