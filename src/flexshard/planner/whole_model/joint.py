"""A whole model under our costs and one memory limit: pooled tables' shards and sequences' tiers in one problem.

Every rank has the same of the sequences' tiers, so that all sequences together are one more table of the master
problem, whose options are their best placements within so many bytes. These are found where they matter: where the
sequences' time, and a bound of the pooled tables' in the memory that is left, add up to little.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexshard.costmodels import PooledCosts, PooledOption
from flexshard.errors import BudgetError, JobError
from flexshard.planner.budget import Budget
from flexshard.planner.deciding import Decision, checked_limit, decide
from flexshard.planner.problem import Problem
from flexshard.planner.solver.deadline import ended_at
from flexshard.planner.whole_model.columns import Bound, Column, Sequences, first_columns
from flexshard.planner.whole_model.lagrangian import lagrangian_bound
from flexshard.planner.whole_model.master import Assignment, assign, relative_gap
from flexshard.planner.whole_model.menus import Menus, Option, Spread, undominated
from flexshard.planner.whole_model.pooled_menus import HBM, Choice, PooledMenus, pooled_menus
from flexshard.topologies import Cluster

__all__ = ["WholeDecision", "decide_whole"]

SEQUENCES = "(tables without pooling)"
_FOR_COLUMNS = 0.4  # of the time, for the first placements of the sequences
_SHARE = 0.5  # of what is left, for plans; the rest is for the bound, and for further placements
_ROUNDS = 4  # of further placements
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
        menus: of the pooled tables.
        pooled: an option and ranks for each pooled table, in the problem's order.
        sequences: of the other tables; None where there are none.
        row_wise: an option and ranks for each pooled table where all are cut by rows, as "neutral" has it.
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
    problem: Problem, others: Mapping[str, Sequence[PooledOption]] | None = None, loss_limit: float | None = None
) -> WholeDecision:
    """Choose and place; raises as :func:`flexshard.solve`. ``others`` and ``loss_limit`` as of :func:`pooled_menus`."""
    until = time.monotonic() + problem.timeout_seconds
    sequences = Sequences(problem.without_pooled_tables(), until) if problem.sequence_tables else None
    costs = PooledCosts(problem.cluster, problem.batch_size, problem.hidden, problem.rates)
    row_wise, needed = _row_wise(problem, costs)
    limit = checked_limit(problem, needed + (0.0 if sequences is None else sequences.row_wise_bytes()))
    tables = problem.pooled_tables
    pooled = pooled_menus(
        tables,
        costs,
        problem.constraints,
        hbm_bytes=limit,
        host_bytes=problem.host_memory,
        others=others,
        loss_limit=loss_limit,
    )
    menus, found, lower, column = _searched(problem, sequences, pooled, until)
    chosen = None
    if sequences is not None and column is not None:
        with ended_at(max(until, time.monotonic() + _AT_LEAST)):
            chosen = decide(replace(sequences.problem, budget=_Exactly(column.limit, problem.budget.name)))
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
        tuple(row_wise),
        min(lower, found.rating),
        prices,
    )


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
        menus = _with_dense(_with_sequences(pooled.menus, columns), problem)
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


def _row_wise(problem: Problem, costs: PooledCosts) -> tuple[list[Choice], float]:
    """Every pooled table row-wise over all ranks, and the memory of the fullest of them; tables of means, which are not
    cut by rows, whole on the ranks that hold least.
    """
    everywhere = tuple(range(problem.cluster.world_size))
    found: dict[str, Choice] = {}
    held = np.zeros(len(everywhere))
    for cut in (True, False):
        kind = "row_wise" if cut and len(everywhere) > 1 else "table_wise"
        for table in problem.pooled_tables:
            if (table.pooling == "sum") is cut:
                (option,) = costs.options(table, sharding_types=[kind])
                ranks = everywhere if option.shards > 1 else (int(held.argmin()),)
                held[list(ranks)] += option.static_bytes + option.dynamic_bytes
                found[table.name] = option, ranks
    received = sum(costs.received_bytes(table) for table in problem.pooled_tables)
    return [found[table.name] for table in problem.pooled_tables], float(held.max()) + received


def _alike(menus: Menus, name: str, seconds: float, nbytes: float = 0.0, source: int = 0) -> Option:
    """An option of which every rank has the same; which kind of load it is does not matter then."""
    perf, memory = np.zeros((len(menus.loads), menus.ranks)), np.zeros((len(menus.kinds), menus.ranks))
    perf[0], memory[menus.kinds.index(HBM)] = seconds, nbytes
    return Option(name, Spread.EVERY_RANK, perf, memory, source)


def _with_table(menus: Menus, name: str, options: Sequence[Option]) -> Menus:
    return replace(menus, tables=(*menus.tables, name), options=(*menus.options, tuple(options)))


def _with_sequences(menus: Menus, columns: Sequence[Column]) -> Menus:
    """The menus with all sequences as one more table."""
    tiers = [_alike(menus, "tiers", one.seconds, one.memory, source) for source, one in enumerate(columns)]
    return _with_table(menus, SEQUENCES, tiers)


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
