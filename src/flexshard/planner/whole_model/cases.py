"""Which tables of a whole model are in tiers of rows: each choice a problem of its own, and what all have in common."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexshard._internal import plain_sum
from flexshard.costmodels import PooledCosts, PooledOption
from flexshard.errors import JobError
from flexshard.planner.constraints import TIERS, TableConstraints
from flexshard.planner.deciding import checked_limit
from flexshard.planner.problem import Problem
from flexshard.planner.solver.deadline import ended_at
from flexshard.planner.solver.instance import memory_limit
from flexshard.planner.whole_model.columns import MOST_WORK, Column, Latest, Sequences
from flexshard.planner.whole_model.menus import Menus, Option
from flexshard.planner.whole_model.pooled_menus import HBM, Choice, PooledMenus, pooled_menus, table_options
from flexshard.planner.whole_model.relaxation import Relaxation
from flexshard.tables import Table

__all__ = ["Case", "Cases", "row_wise", "with_dense", "with_sequences"]

FloatArray = npt.NDArray[np.float64]

_NAMED = 3  # of the tables in tiers, where nothing fits


@dataclass(frozen=True, eq=False)
class Case:
    """Which tables are in tiers, and which are not.

    Attributes:
        pooled: menus of those that TorchRec shards, or that become tensor trains.
        sequences: the others; None where there are none.
    """

    pooled: PooledMenus
    sequences: Sequences | None


class Cases:
    """What the tables may be, and the limit of their memory.

    Attributes:
        costs: of the cluster.
        limit: bytes per rank, of everything.
        undecided: tables that may be in tiers of rows or be something else.
    """

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
        self.undecided = tuple(name for name in undecided if self._offered[name])
        _, needed = row_wise(self.costs, problem.sharded_tables)
        self._latest = Latest()
        self._relaxed: tuple[FloatArray | None, Relaxation] | None = None
        self._first = self._sequences(())
        self.limit = checked_limit(problem, needed + (0.0 if self._first is None else self._first.row_wise_bytes()))

    def of(self, names: Collection[str]) -> Case:
        """Where these of the undecided tables are not in tiers."""
        return Case(self._menus(names), self._sequences(names) if names else self._first)

    def relaxation(self) -> Relaxation:
        """Bounds of all of them, under the weights of the latest steps; there are undecided tables."""
        if self._relaxed is None or self._relaxed[0] is not self._latest.weights:
            self._relaxed = self._latest.weights, self._relaxation()
        return self._relaxed[1]

    def _relaxation(self) -> Relaxation:
        assert self._first is not None
        menus = with_dense(self._menus(self.undecided).menus, self._problem)
        received = {table.name: self.costs.received_bytes(table) for table in self._problem.tables}
        capacity = menus.capacity.copy()
        left = memory_limit(self.limit) - plain_sum(received[name] for name in self._sharded)
        capacity[menus.kinds.index(HBM)] = max(left, 0.0)  # of what is not sharded in any case, nothing is taken off
        menus = replace(menus, capacity=capacity)
        with ended_at(self._until, MOST_WORK):
            return Relaxation(
                menus, received, self._first.variants, self.limit, self._problem.tiers, self._latest.weights
            )

    def _sequences(self, names: Collection[str]) -> Sequences | None:
        """Those in tiers where some of the undecided ones are not."""
        rows = [table for table in self._problem.tables if table.name not in {*self._sharded, *names}]
        return Sequences(self._problem.of_rows(rows), self._until, self._latest) if rows else None

    def _menus(self, names: Collection[str]) -> PooledMenus:
        problem = self._problem
        return pooled_menus(
            [table for table in problem.tables if table.name in {*self._sharded, *names}],
            self.costs,
            problem.constraints,
            self._offered,
            hbm_bytes=self.limit,
            host_bytes=problem.host_memory,
            loss_limit=self._loss_limit,
        )


def row_wise(costs: PooledCosts, tables: Sequence[Table]) -> tuple[list[Choice], float]:
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
    received = plain_sum(costs.received_bytes(table) for table in tables)
    return [found[table.name] for table in tables], float(held.max()) + received


def _with_table(menus: Menus, name: str, options: Sequence[Option]) -> Menus:
    return replace(menus, tables=(*menus.tables, name), options=(*menus.options, tuple(options)))


def with_sequences(menus: Menus, columns: Sequence[Column], tables: Sequence[Table]) -> Menus:
    """The menus with all sequences as one more table, named by the first of them."""
    names = [table.name for table in tables]
    named = [*names[:_NAMED], *([f"{len(names) - _NAMED} more"] if len(names) > _NAMED else [])]
    hbm = menus.kinds.index(HBM)
    tiers = [menus.alike("tiers", hbm, one.seconds, one.memory, source) for source, one in enumerate(columns)]
    return _with_table(menus, f"{' + '.join(named)} (in tiers of rows)", tiers)


def with_dense(menus: Menus, problem: Problem) -> Menus:
    """The menus, and the rest of a step as a table that has no choice: gaps are of whole steps."""
    if problem.step is None or not problem.step.dense_seconds:
        return menus
    return _with_table(menus, "(dense work)", [menus.alike("dense work", 0, problem.step.dense_seconds)])
