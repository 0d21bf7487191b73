"""The mixed-integer program of a whole-model plan, with ranks one by one, host by host, or all together.

With ranks added up, shards that fit a group of ranks together need not fit its ranks one by one: the program is a
relaxation, and its bound holds. It has far fewer variables then, and no ranks to exchange for one another, which is
what such programs spend their time on; what is left out is how shards share a rank.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard.planner.whole_model.formulation import Bins, Formulation, LoadDuals, ProgramAnswer
from flexshard.planner.whole_model.lagrangian import lagrangian_bound
from flexshard.planner.whole_model.menus import Menus, Spread

__all__ = ["load_duals", "program_columns", "solve_menus_program"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_FEASIBLE = 2  # of HiGHS's solution statuses
_ABOVE = 1 + 1e-4  # times a bound: what the second search looks for plans below
# HiGHS's options of the second search: another tree, without heuristics, since it is expected to find nothing.
_OTHERWISE = {"random_seed": 1, "mip_allow_restart": False, "mip_heuristic_effort": 0.0} | dict.fromkeys(
    (f"mip_heuristic_run_{name}" for name in ("feasibility_jump", "rins", "rens", "root_reduced_cost")), False
)


def solve_menus_program(
    menus: Menus,
    bins: Bins,
    *,
    at_most: float = np.inf,
    gap: float,
    seconds: float,
    nodes: int = 1_000_000,
    threads: int = 1,
    costs: bool = True,
    twice: bool = True,
) -> ProgramAnswer:
    """Solve the program with HiGHS, and search once more, in another tree, for what the first search says is not there.

    HiGHS 1.15 at times calls such a program solved that has a better solution. What two searches agree on counts: the
    lower of their bounds, and the better of their solutions.

    Args:
        menus: undominated.
        bins: what is added up: nothing ("ranks"), the ranks of a host, or all.
        at_most: rating of a plan that is known; only better ones are looked for.
        gap: relative, at which the solver stops.
        seconds: after which the solver stops with what it has; half of them, and what it leaves, for the second search.
        nodes: after which a search stops with what it has.
        threads: of the solver; its answer depends on how many.
        costs: whether they are looked at; otherwise any plan will do that memory allows, and the bound is 0.
        twice: whether to search once more.
    """
    end = time.monotonic() + seconds

    def searched(at_most: float, seconds: float, options: dict[str, Any]) -> ProgramAnswer:
        limits = {"time_limit": min(seconds, 1e6), "mip_rel_gap": gap, "mip_max_nodes": nodes, "threads": threads}
        return _search(menus, bins, at_most, limits | options, costs=costs)

    first = searched(at_most, seconds / 2 if twice else seconds, {})
    says_nothing = first.bound <= 0 and (first.choice is not None or not first.proven)
    if not twice or says_nothing:
        return first
    # A solution just above the first bound must not end it at a lower bound than that.
    options = _OTHERWISE | {"mip_rel_gap": min(gap, _ABOVE - 1)}
    second = searched(min(at_most, first.bound * _ABOVE), end - time.monotonic(), options)
    better = second if second.rating < first.rating else first
    return replace(
        better,
        bound=min(first.bound, second.bound),
        proven=first.proven and second.proven,
        out_of_time=first.out_of_time or second.out_of_time,
    )


def _search(menus: Menus, bins: Bins, at_most: float, limits: dict[str, Any], *, costs: bool) -> ProgramAnswer:
    """Solve the program once, with HiGHS's options ``limits``."""
    seconds = limits["time_limit"]
    if seconds <= 0 or any(not any(menus.dearest(o) <= at_most for o in menu) for menu in menus.options):
        return ProgramAnswer(0.0 if seconds <= 0 else np.inf, None, proven=seconds > 0, out_of_time=seconds <= 0)
    # Ratings near 1: the solver's tolerances are absolute.
    unit = (at_most if np.isfinite(at_most) else lagrangian_bound(menus).bound) or 1.0
    if not np.isfinite(unit):
        return ProgramAnswer(np.inf, None, proven=True)
    if not costs:
        unit = np.inf  # whatever costs is nothing then
    build = Formulation(menus, bins, at_most, unit)
    solver = build.loaded()
    # Nodes, not time, end what takes too long, so that every machine gets the same answer.
    for name, value in {"mip_abs_gap": 0.0, **limits}.items():
        solver.setOptionValue(name, value)
    solver.run()
    status = solver.modelStatusToString(solver.getModelStatus())
    if status == "Infeasible":
        return ProgramAnswer(np.inf, None, proven=True)
    info = solver.getInfo()
    bound = float(info.mip_dual_bound) * unit if costs and np.isfinite(info.mip_dual_bound) else 0.0
    out_of_time = status == "Time limit reached"
    if info.primal_solution_status != _FEASIBLE:
        return ProgramAnswer(bound, None, out_of_time=out_of_time)
    values = np.array(solver.getSolution().col_value)
    answer = build.answer(np.rint(values).astype(np.int64), bound, status == "Optimal")
    rating = float(info.objective_function_value) * unit if costs else 0.0
    return replace(answer, rating=rating, out_of_time=out_of_time)


def load_duals(menus: Menus) -> LoadDuals | None:
    """What bounds each kind of load where options may be taken in part and all ranks are added up; None where nothing
    fits, or the solver says so.
    """
    unit = lagrangian_bound(menus).bound or 1.0
    return Formulation(menus, "cluster", np.inf, unit).load_duals() if np.isfinite(unit) else None


def program_columns(menus: Menus, bins: Bins) -> int:
    """About how many columns the program has: one an option, and one a bin of shards that may lie anywhere; where
    there is one kind of load, which annealing is better at, one a bin of every option.
    """
    count = {"cluster": 1, "hosts": menus.hosts, "ranks": menus.ranks}[bins]
    if len(menus.loads) == 1 and not menus.charges:
        return count * sum(map(len, menus.options))
    hosts = min(count, menus.hosts)
    of_spread = {Spread.EVERY_RANK: 1, Spread.HOST_BLOCKS: 1 + hosts}
    return sum(of_spread.get(option.spread, 1 + count) for _, option in menus.pairs())
