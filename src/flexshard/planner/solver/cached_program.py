"""One option of every table within a rank's memory and its host's: mixtures of options, and whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard.planner.solver.cached_rows import Options, Side, hottest

__all__ = ["Chosen", "Mixture", "Room", "best_mixture", "best_of_each", "waits_of"]

FloatArray = npt.NDArray[np.float64]

_SHORT = 1e6  # options, at their longest, that a unit of memory too much costs
_TOLERANCE, _NODES = 1e-9, 20_000
_TRIES = 4
_FEASIBLE = 2  # of HiGHS's solution statuses


@dataclass(frozen=True)
class Room:
    """Bytes of a rank's memory, beside what every placement holds, and of its host's; and of how many tables."""

    hbm_bytes: float
    host_bytes: float
    tables: int

    @property
    def units(self) -> tuple[float, float]:
        """What bytes are counted in, so that numbers are near 1."""
        return max(abs(self.hbm_bytes), 1.0), max(self.host_bytes, 1.0)

    def over(self, options: Options) -> tuple[float, float]:
        """Bytes by which options exceed it, beyond what the order of a sum makes."""
        used = float(options.hbm_bytes.sum()), float(options.host_bytes.sum())
        most = self.hbm_bytes, self.host_bytes
        found = [max(a - b - 1e-12 * abs(b), 0.0) for a, b in zip(used, most, strict=True)]
        return found[0], found[1]


@dataclass(frozen=True, eq=False)
class Mixture:
    """Options in shares that together take least.

    Attributes:
        shares: of each; shape (N,).
        seconds: that they take.
        prices: seconds that one more byte of a rank's memory saves, and one of its host's.
        fits: whether memory is enough for any.
    """

    shares: FloatArray
    seconds: float
    prices: tuple[float, float]
    fits: bool


@dataclass(frozen=True, eq=False)
class Chosen:
    """One option of each table, if some were found, and what no choice is below.

    Attributes:
        options: in the tables' order; None if none fits or none was found.
        seconds: with waits for the hottest rows.
        lower_bound_seconds: infinite if nothing fits.
    """

    options: Options | None
    seconds: float
    lower_bound_seconds: float


def _of_tables(options: Options, tables: int) -> Any:
    """Which table each option is of, as a sparse matrix (T, N)."""
    from scipy import sparse

    count = options.table.size
    return sparse.csr_array((np.ones(count), (options.table, np.arange(count))), shape=(tables, count))


def best_mixture(pool: Options, room: Room) -> Mixture:
    """The linear program over options; memory that is too little costs more than any option saves."""
    from scipy import sparse
    from scipy.optimize import linprog

    second, units = max(float(pool.seconds.max()), 1e-300), room.units
    count, tables = pool.table.size, room.tables
    used = np.stack([pool.hbm_bytes / units[0], pool.host_bytes / units[1]])
    program: Any = linprog
    result = program(
        np.concatenate([pool.seconds / second, np.full(2, _SHORT * tables)]),
        A_ub=sparse.csr_array(np.hstack([used, -np.eye(2)])),
        b_ub=[room.hbm_bytes / units[0], room.host_bytes / units[1]],
        A_eq=sparse.hstack([_of_tables(pool, tables), sparse.csr_array((tables, 2))]).tocsr(),
        b_eq=np.ones(tables),
        bounds=(0.0, None),
        method="highs",
    )
    assert result.x is not None  # it is feasible, and no option takes less than no time
    duals = np.maximum(-result.ineqlin.marginals, 0.0) * second / np.array(units)
    fits = bool(result.x[count:].max() <= 10 * _TOLERANCE)
    return Mixture(result.x[:count], float(result.fun) * second, (float(duals[0]), float(duals[1])), fits)


def waits_of(sides: Sequence[Side], options: Options) -> FloatArray:
    """How long each level waits for the hottest row of options there; shape (N, G)."""
    waits = np.zeros((options.table.size, sides[0].instance.group_sizes.size))
    for side in sides:
        of = np.flatnonzero(options.once == side.once)
        waits[of] = side.instance.hot_seconds_per_read[options.table[of]] * hottest(side.instance, options[of])
    return waits


def best_of_each(
    sides: Sequence[Side], pool: Options, room: Room, *, gap: float, seconds: float, proves: bool
) -> Chosen:
    """The choice of options that takes least, with the waits of every level for its hottest row.

    Args:
        proves: whether the bound is looked at.
        gap: relative, at which the solver stops.
        seconds: after which it does; nodes end it before, so that every machine gets the same.
    """
    waits = waits_of(sides, pool)
    scale = max(best_mixture(pool, room).seconds, 1e-300)
    least, bound = room, -np.inf
    for _ in range(_TRIES):
        # HiGHS is at times wrong about what is best; where its bound counts, another tree has to say the same.
        seeds = (0, 1) if proves else (0,)
        answers = [_solved(pool, waits, least, scale, gap, seconds / len(seeds), seed) for seed in seeds]
        taken = min(answers, key=lambda answer: answer[1])[0]
        dual = min(answer[2] for answer in answers)
        bound = dual if least is room else bound  # of the memory that there is
        if taken is None:
            break
        options = pool[taken]
        over = room.over(options)
        if not any(over):
            total = float(options.seconds.sum()) + float(waits[taken].max(axis=0).sum())
            return Chosen(options, total, min(bound, total))
        # The solver takes sums that are a little too large for equal.
        least = Room(least.hbm_bytes - 2 * over[0], least.host_bytes - 2 * over[1], room.tables)
    return Chosen(None, np.inf, bound)


def _solved(
    pool: Options, waits: FloatArray, room: Room, scale: float, gap: float, seconds: float, seed: int
) -> tuple[npt.NDArray[np.int64] | None, float, float]:
    """Which options are taken, in the tables' order, or None; what they take, and the bound."""
    import highspy
    from scipy import sparse

    count, levels, tables, units = pool.table.size, waits.shape[1], room.tables, room.units
    of_table = _of_tables(pool, tables)
    waiting = np.flatnonzero(waits.any(axis=0))
    rows = [sparse.hstack([of_table, sparse.csr_array((tables, levels))])]
    used = np.stack([pool.hbm_bytes / units[0], pool.host_bytes / units[1]])
    rows.append(sparse.csr_array(np.hstack([used, np.zeros((2, levels))])))
    for level in waiting.tolist():  # no table's hottest row makes a level wait longer than all do
        ends = np.zeros((tables, levels))
        ends[:, level] = -1.0
        rows.append(sparse.hstack([of_table.multiply(waits[:, level][None] / scale), sparse.csr_array(ends)]))
    matrix = sparse.vstack(rows).tocsc()
    least = np.concatenate([np.ones(tables), np.full(2 + tables * waiting.size, -np.inf)])
    most = np.concatenate(
        [np.ones(tables), [room.hbm_bytes / units[0], room.host_bytes / units[1]], np.zeros(tables * waiting.size)]
    )
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = count + levels, matrix.shape[0]
    program.col_cost_ = np.concatenate([pool.seconds / scale, np.ones(levels)])
    program.col_lower_ = np.zeros(count + levels)
    program.col_upper_ = np.concatenate([np.ones(count), np.full(levels, np.inf)])
    program.row_lower_, program.row_upper_ = least, most
    program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    program.a_matrix_.start_ = matrix.indptr.astype(np.int32)
    program.a_matrix_.index_, program.a_matrix_.value_ = matrix.indices.astype(np.int32), matrix.data
    kinds = highspy.HighsVarType
    program.integrality_ = [kinds.kInteger] * count + [kinds.kContinuous] * levels
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    options = {
        "output_flag": False,
        "threads": 1,
        "random_seed": seed,
        "time_limit": min(seconds, 1e6),
        "mip_max_nodes": _NODES,
        "mip_rel_gap": gap,
        "mip_abs_gap": 0.0,
        "mip_feasibility_tolerance": _TOLERANCE,
        "primal_feasibility_tolerance": _TOLERANCE,
    }
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.passModel(program)
    # A process that used HiGHS with another number of threads could not use it again.
    solver.resetGlobalScheduler(True)
    solver.run()
    if solver.modelStatusToString(solver.getModelStatus()) == "Infeasible":
        return None, np.inf, np.inf
    info = solver.getInfo()
    # What the solver's tolerances may have added.
    bound = float(info.mip_dual_bound) * scale if np.isfinite(info.mip_dual_bound) else -np.inf
    bound -= 100 * _TOLERANCE * abs(bound)
    if info.primal_solution_status != _FEASIBLE:
        return None, np.inf, bound
    taken = np.flatnonzero(np.rint(np.array(solver.getSolution().col_value)[:count]) > 0)
    taken = taken[np.argsort(pool.table[taken], kind="stable")]
    if taken.size != tables:
        return None, np.inf, bound
    return taken, float(info.objective_function_value) * scale, bound
