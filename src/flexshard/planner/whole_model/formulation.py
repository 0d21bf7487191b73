"""The mixed-integer program of a whole-model plan as rows and columns of HiGHS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from flexshard.errors import SolverError
from flexshard.planner.whole_model.menus import Menus, Option, Spread

__all__ = ["Bins", "Formulation", "LoadDuals", "ProgramAnswer"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Bins = Literal["cluster", "hosts", "ranks"]


@dataclass(frozen=True)
class ProgramAnswer:
    """What the program's solver returned.

    Attributes:
        bound: no plan has a smaller rating; infinite if there is no plan of at most the rating asked for.
        choice: option of each table in the best solution; None where none was found.
        ranks: by table, the rank of each shard, where bins are ranks.
        proven: whether the solver came to its end.
        rating: of the best solution in this program.
        out_of_time: whether time ended a search: another machine may get another answer.
    """

    bound: float
    choice: tuple[int, ...] | None
    ranks: dict[int, list[int]] = field(default_factory=dict)
    proven: bool = False
    rating: float = np.inf
    out_of_time: bool = False


@dataclass(frozen=True)
class LoadDuals:
    """What bounds each kind of load, which adds up to 1.

    Attributes:
        bins: the average of each bin; shape (loads, bins).
        watched: averages that are watched; shape (n,).
        tables: the heaviest shard of each table; shape (loads, tables).
        paid: by tables, of each charge, at most 1; shape (charges, tables).
    """

    bins: FloatArray
    watched: FloatArray
    tables: FloatArray
    paid: FloatArray


class Formulation:
    """Rows and columns as they are added. First columns are those that the rating adds up: of each kind of load, that
    of the rank that has most, and whether each charge is paid.
    """

    def __init__(self, menus: Menus, bins: Bins, at_most: float, unit: float) -> None:
        self._menus, self._bins, self._unit = menus, bins, unit
        self._width = {"cluster": menus.ranks, "hosts": menus.ranks_per_host, "ranks": 1}[bins]
        if bins == "hosts" and (menus.hosts == 0 or menus.ranks % menus.ranks_per_host):
            self._width = menus.ranks
            self._bins = "cluster"
        self._count = menus.ranks // self._width
        self._parts: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        loads, limit = len(menus.loads), at_most / unit if np.isfinite(at_most) else np.inf
        self.upper: list[float] = [limit] * loads + [1.0] * len(menus.charges)
        self.low: list[float] = []
        self.high: list[float] = []
        self._rated = np.array([1.0] * loads + [charge / unit for charge in menus.charges])
        self._choices: dict[int, tuple[int, int]] = {}  # column: table, option
        self._blocks: dict[int, tuple[int, int]] = {}  # column: table, host
        self._shards: dict[int, tuple[int, int, int]] = {}  # column: table, class of shards, bin
        self._classes: dict[tuple[int, int], list[IntArray]] = {}
        tables = len(menus.options)
        self._pick = self._add_rows(tables, 1.0, 1.0)
        self._load = self._add_rows(self._count * loads, -np.inf, 0.0)
        self._room = []
        self._scale = np.maximum(menus.capacity.max(axis=1), 1.0)
        for kind in range(len(menus.kinds)):
            room = menus.capacity[kind].reshape(self._count, self._width).sum(axis=1) / self._scale[kind]
            self._room.append(self.rows)
            for value in room:
                self._add_rows(1, -np.inf, float(value))
        self._dearest = self._add_rows(tables * loads, -np.inf, 0.0)
        for load in range(loads):
            self._put(self._load + load * self._count + np.arange(self._count), load, -float(self._width))
            self._put(self._dearest + load * tables + np.arange(tables), load, -1.0)
        self._watched, self._averages = self.rows, None if bins == "ranks" else menus.watched
        if self._averages is not None:
            self._add_rows(len(self._averages.loads), -np.inf, 0.0)
            for row, load in enumerate(self._averages.loads.tolist(), start=self._watched):
                self._put(row, load, -1.0)
        self._charged = self._add_rows(tables * len(menus.charges), -np.inf, 0.0)
        for charge in range(len(menus.charges)):
            self._put(self._charged + charge * tables + np.arange(tables), loads + charge, -1.0)
        if len(self._rated) > 1 and np.isfinite(limit):
            row = self._add_rows(1, -np.inf, limit)
            for column, value in enumerate(self._rated):
                self._put(row, column, value)
        self._group_hosts: dict[int, list[int]] = {}
        for group in menus.together:
            self._add_group(group)
        for table, menu in enumerate(menus.options):
            for index, option in enumerate(menu):
                if menus.dearest(option) <= at_most:
                    self._add_option(table, index, option)

    @property
    def rows(self) -> int:
        """Rows so far."""
        return len(self.low)

    @property
    def columns(self) -> int:
        """Columns so far."""
        return len(self.upper)

    def load_duals(self) -> LoadDuals | None:
        """Where options may be taken in part; None where the solver finds none."""
        solver, loads = self.loaded(relaxed=True), len(self._menus.loads)
        solver.setOptionValue("threads", 1)
        solver.run()
        if solver.modelStatusToString(solver.getModelStatus()) != "Optimal":
            return None
        duals = np.abs(np.array(solver.getSolution().row_dual))
        watched = 0 if self._averages is None else len(self._averages.loads)
        tables, charges = len(self._menus.tables), len(self._menus.charges)
        paid = duals[self._charged : self._charged + charges * tables].reshape(charges, tables)
        return LoadDuals(
            duals[self._load : self._load + loads * self._count].reshape(loads, self._count) * self._width,
            duals[self._watched : self._watched + watched],
            duals[self._dearest : self._dearest + loads * tables].reshape(loads, tables),
            paid / np.where(self._rated > 0, self._rated, np.inf)[loads:, None],
        )

    def loaded(self, *, relaxed: bool = False) -> Any:
        """HiGHS with the program."""
        import highspy  # takes as long to import as a small model to plan

        rows, columns, values = (np.concatenate(parts) for parts in self._parts)
        order = np.lexsort((rows, columns))
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = self.columns, self.rows
        program.col_cost_ = np.pad(self._rated, (0, self.columns - len(self._rated)))
        program.col_lower_, program.col_upper_ = np.zeros(self.columns), np.array(self.upper)
        program.row_lower_, program.row_upper_ = np.array(self.low), np.array(self.high)
        program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        program.a_matrix_.start_ = np.searchsorted(columns[order], np.arange(self.columns + 1)).astype(np.int32)
        program.a_matrix_.index_ = rows[order].astype(np.int32)
        program.a_matrix_.value_ = values[order]
        kinds = [highspy.HighsVarType.kContinuous if relaxed else highspy.HighsVarType.kInteger] * self.columns
        kinds[: len(self._menus.loads)] = [highspy.HighsVarType.kContinuous] * len(self._menus.loads)
        program.integrality_ = kinds
        solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        solver.setOptionValue("output_flag", False)
        # A process that used HiGHS with another number of threads could not use it again.
        solver.resetGlobalScheduler(True)
        if solver.passModel(program) == highspy.HighsStatus.kError:
            raise SolverError("HiGHS refuses the program of the whole model; please report this with the model")
        return solver

    def answer(self, values: IntArray, bound: float, proven: bool) -> ProgramAnswer:
        """Read a solution, the values of all columns."""
        choice = [0] * len(self._menus.options)
        for column, (table, index) in self._choices.items():
            if values[column]:
                choice[table] = index
        ranks = self._ranks(values, choice) if self._bins == "ranks" else {}
        return ProgramAnswer(bound, tuple(choice), ranks, proven)

    # -- rows and columns

    def _add_rows(self, count: int, low: float, high: float) -> int:
        first = self.rows
        self.low += [low] * count
        self.high += [high] * count
        return first

    def _add_column(self, upper: float) -> int:
        self.upper.append(upper)
        return self.columns - 1

    def _put(self, rows: Any, column: int, values: Any) -> None:
        rows = np.atleast_1d(rows)
        self._parts[0].append(rows)
        self._parts[1].append(np.full(len(rows), column))
        self._parts[2].append(np.broadcast_to(np.asarray(values, np.float64), rows.shape))

    def _put_loads(self, column: int, bins: Any, perf: FloatArray, memory: FloatArray) -> None:
        """What one unit of a column adds to bins; ``perf`` (loads, bins), ``memory`` (kinds, bins)."""
        bins = np.atleast_1d(bins)
        for load, values in enumerate(perf):
            # Ranks one by one may share a load, which then counts where the first of them is.
            together = self._menus.sharing[load] if self._width == 1 else 1
            if together == 1:
                if values.any():
                    self._put(self._load + load * self._count + bins, column, values / self._unit)
                continue
            places, which = np.unique(bins // together, return_inverse=True)
            sums = np.bincount(which, values, len(places)) / together
            self._put(self._load + load * self._count + places, column, sums / self._unit)
        for kind, first in enumerate(self._room):
            self._put(first + bins, column, memory[kind] / self._scale[kind])

    def _add_group(self, group: Sequence[int]) -> None:
        """Hosts of tables that must share one: a column a host, one of which is 1."""
        if self._bins == "cluster":
            return
        row = self._add_rows(1, 1.0, 1.0)
        columns = [self._add_column(1.0) for _ in range(self._menus.hosts)]
        for column in columns:
            self._put(row, column, 1.0)
        self._group_hosts |= dict.fromkeys(group, columns)

    def _add_option(self, table: int, index: int, option: Option) -> None:
        column = self._add_column(1.0)
        self._choices[column] = (table, index)
        self._put(self._pick + table, column, 1.0)
        tables = len(self._menus.options)
        rows = self._dearest + table + tables * np.arange(len(option.perf))
        self._put(rows, column, self._menus.heaviest(option) / self._unit)
        if self._averages is not None:
            rows = self._watched + np.arange(len(self._averages.loads))
            self._put(rows, column, self._averages.of(option, self._menus.ranks_per_host) / self._unit)
        if option.charge >= 0:
            self._put(self._charged + option.charge * tables + table, column, 1.0)
        if option.spread is Spread.EVERY_RANK:
            width, count = self._width, self._count
            self._put_loads(
                column,
                np.arange(count),
                option.perf.reshape(len(option.perf), count, width).sum(axis=2),
                option.memory.reshape(len(option.memory), count, width).sum(axis=2),
            )
        elif self._bins == "cluster":
            self._put_loads(column, 0, option.perf.sum(axis=1, keepdims=True), option.memory.sum(axis=1, keepdims=True))
        elif option.spread is Spread.ANY_RANK:
            self._add_shards(table, index, column, option, range(self._count))
        else:
            self._add_on_hosts(table, index, column, option)

    def _add_on_hosts(self, table: int, index: int, column: int, option: Option) -> None:
        """Blocks, or all shards, on hosts that are chosen."""
        menus, per_host = self._menus, self._menus.ranks_per_host
        blocks = option.shards // per_host if option.spread is Spread.HOST_BLOCKS else 1
        most = -(-blocks // menus.hosts)
        row = self._add_rows(1, 0.0, 0.0)
        self._put(row, column, -float(blocks))
        ranks_of_host = per_host // self._width
        for host in range(menus.hosts):
            place = self._add_column(float(most))
            self._blocks[place] = (table, host)
            self._put(row, place, 1.0)
            if table in self._group_hosts:
                link = self._add_rows(1, -np.inf, 0.0)
                self._put(link, place, 1.0)
                self._put(link, self._group_hosts[table][host], -float(most))
            if blocks >= menus.hosts:  # every host has as many before any has one more
                link = self._add_rows(1, 0.0, np.inf)
                self._put(link, place, 1.0)
                self._put(link, column, -float(blocks // menus.hosts))
            bins = np.arange(host * ranks_of_host, (host + 1) * ranks_of_host)
            if option.spread is Spread.HOST_BLOCKS:
                # Blocks of an option are alike; the least of each place keeps the bound where they are not.
                perf, memory = (
                    each.reshape(len(each), blocks, per_host)
                    .min(axis=1)
                    .reshape(len(each), ranks_of_host, self._width)
                    .sum(axis=2)
                    for each in (option.perf, option.memory)
                )
                self._put_loads(place, bins, perf, memory)
            elif self._bins == "hosts":
                self._put_loads(
                    place, host, option.perf.sum(axis=1, keepdims=True), option.memory.sum(axis=1, keepdims=True)
                )
            else:
                self._add_shards(table, index, place, option, bins)

    def _add_shards(self, table: int, index: int, column: int, option: Option, bins: Any) -> None:
        """Shards of which those that are alike are counted: ``column`` puts all of them into ``bins``."""
        alike = self._classes.setdefault((table, index), _alike(option))
        for number, members in enumerate(alike):
            first = int(members[0])
            row = self._add_rows(1, 0.0, 0.0)
            self._put(row, column, -float(len(members)))
            for place in bins:
                share = self._add_column(float(len(members)))
                self._shards[share] = (table, number, int(place))
                self._put(row, share, 1.0)
                self._put_loads(share, place, option.perf[:, [first]], option.memory[:, [first]])

    def _ranks(self, values: IntArray, choice: Sequence[int]) -> dict[int, list[int]]:
        """The rank of each shard of the chosen options."""
        hosts: dict[int, list[int]] = {}
        for column, (table, host) in self._blocks.items():
            hosts.setdefault(table, []).extend([host] * int(values[column]))
        counted: dict[tuple[int, int], list[int]] = {}
        for column, (table, number, place) in self._shards.items():
            counted.setdefault((table, number), []).extend([place] * int(values[column]))
        found: dict[int, list[int]] = {}
        per_host = self._menus.ranks_per_host
        for table, index in enumerate(choice):
            option = self._menus.options[table][index]
            if option.spread is Spread.EVERY_RANK:
                found[table] = list(range(self._menus.ranks))
            elif option.spread is Spread.HOST_BLOCKS:
                found[table] = [host * per_host + local for host in hosts[table] for local in range(per_host)]
            else:
                ranks = [0] * option.shards
                for number, members in enumerate(self._classes[table, index]):
                    for shard, rank in zip(members, counted[table, number], strict=True):
                        ranks[int(shard)] = rank
                found[table] = ranks
        return found


def _alike(option: Option) -> list[IntArray]:
    """Positions of shards with the same cost and bytes, class by class."""
    keys = np.concatenate([option.perf, option.memory]).T
    _, which = np.unique(keys, axis=0, return_inverse=True)
    which = which.ravel()
    return [np.flatnonzero(which == number).astype(np.int64) for number in range(int(which.max(initial=-1)) + 1)]
