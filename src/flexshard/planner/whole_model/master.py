"""The master problem of a whole model: an option for every table and a rank for every shard, so that the slowest rank
costs least and no rank holds more than its memory; and how far from the optimum that can be at most.

Bounds come from prices per byte (``lagrangian``) and from mixed-integer programs with ranks added up (``program``);
plans from annealing (``annealing``), which starts from the program's choice. Each makes the other's work smaller: no
option is looked at again that no plan better than the best has.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard._internal import has_numba, plain_sum
from flexshard.planner.gaps import relative_gap
from flexshard.planner.whole_model.annealing import Annealing, State, compile_loops, flat, place, rating
from flexshard.planner.whole_model.formulation import Bins, ProgramAnswer
from flexshard.planner.whole_model.lagrangian import lagrangian_bound, priced_options, totals
from flexshard.planner.whole_model.menus import Menus, undominated
from flexshard.planner.whole_model.program import program_columns, solve_menus_program
from flexshard.planner.whole_model.shortages import budget_error

__all__ = ["Assignment", "assign"]

_SAFETY = 1e-6  # what HiGHS may be off by
# Moves of the first round, of the longest, and between two looks at the clock: compiled, and in Python.
_MOVES, _PLAIN_MOVES = (30_000, 2_000_000, 20_000), (1_000, 20_000, 200)
_TINY = 1e-12  # instead of a bound of 0
# Turns of every schedule at most moves, without a better plan, after which none is expected: of one kind of load, and
# of several, where programs find more.
_TURNS, _PHASE_TURNS = 2, 1
_AIMS = (1.02, 1.1, 1.3, 2.0, 4.0, 16.0)  # times the bound: asked for in turn until a plan is found
# Temperatures at the beginning and the end, and steps by which the rating asked for falls, in turn.
_SCHEDULES = (
    ((0.02, 3e-4), 0.001),
    ((0.1, 1e-3), 0.005),
    ((0.02, 1e-4), 0.0003),
    ((0.1, 3e-4), 0.002),
    ((0.005, 5e-5), 0.0002),
)
_PHASE_SCHEDULES = (((0.005, 3e-4), 0.001), ((0.002, 1e-4), 0.003), ((0.02, 3e-4), 0.005))  # of several kinds of load
# Of the time that is left, for a program while no plan is known, which annealing finds; and what it has in any case.
_WITHOUT_PLAN, _SOON = 0.25, 2.0
_FAR = (10.0, 1e4)  # times the bound: ratings that programs look at, one after the other, while no plan is known
_SMALL_PROGRAM = 300  # columns, about, of a program that is solved to _EXACT, whatever gap was asked for
_EXACT = 5 * _SAFETY
# Columns, about, of a program that a plan within the gap is looked at with once more, its gap, and its nodes: it takes
# three seconds at most, and at times finds a plan that is better by nearly the gap.
_MIDDLE_PROGRAM, _MIDDLE_GAP, _MIDDLE_NODES = 500, 0.001, 200
# Columns, about, and nodes of programs with hosts or ranks one by one: while annealing goes on, and when it is over.
_MOST_COLUMNS, _NODES = 4_000, 1_000
_LAST_COLUMNS, _LAST_NODES = 6_000, 2_000


@dataclass(frozen=True)
class Assignment:
    """A plan of the whole model.

    Attributes:
        choice: of each table, ``Option.source`` of the option chosen.
        ranks: of each table, the rank of each shard.
        rating: cost of the slowest rank.
        lower_bound: no plan has a smaller rating.
        finished: whether no part of it stopped because time was up: then every machine finds the same plan and bound.
    """

    choice: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    rating: float
    lower_bound: float
    finished: bool

    @property
    def gap(self) -> float:
        """By what part of the optimum the rating can exceed it at most."""
        return relative_gap(self.rating, self.lower_bound)


def assign(menus: Menus, *, seconds: float, gap: float = 0.01, seed: int = 0) -> Assignment:
    """Choose and place.

    Args:
        menus: what to choose from.
        seconds: after which the best plan so far is returned.
        gap: proven, at which it stops.
        seed: of random numbers.

    Raises:
        BudgetError: no plan fits, with the tables and bytes that stand in the way; or none was found.
    """
    compile_loops()
    return _Master(menus, seconds, gap, seed).solve()


class _Master:
    """A search under way: the menus that are left, the best plan, the bound."""

    def __init__(self, menus: Menus, seconds: float, gap: float, seed: int) -> None:
        self._given = menus
        self._end = time.monotonic() + seconds
        self._gap, self._seed = gap, seed
        self._menus = undominated(menus)
        self._schedules = _SCHEDULES if len(menus.loads) == 1 else _PHASE_SCHEDULES
        self._turns = _TURNS if len(menus.loads) == 1 else _PHASE_TURNS
        self._lower, self._rating = 0.0, np.inf
        self._best: tuple[tuple[int, ...], tuple[tuple[int, ...], ...]] | None = None
        self._state: State | None = None
        self._start: tuple[int, ...] | None = None  # sources of the last program's choice
        self._timed_out = False
        self._by_time = False  # whether time ended a program's search
        self._share = _WITHOUT_PLAN  # of what is left, that a program has while no plan is known
        self._refuted: Bins | None = None  # with ranks added up like this, nothing fits

    def solve(self) -> Assignment:
        if not self._menus.options:
            return Assignment((), (), 0.0, 0.0, finished=True)
        if not all(self._menus.options):
            raise budget_error(self._given, refuted=False)
        self._look_at(self._menus)
        if not np.isfinite(self._lower):
            raise budget_error(self._given, refuted=True)
        self._solve_program("cluster")
        if self._refuted is None:
            self._search()
            self._polish()
        if self._best is None:
            by_sums = self._refuted == "cluster"
            unknown = self._refuted is None and (self._timed_out or self._by_time)
            raise budget_error(self._given, refuted=by_sums, timed_out=unknown)
        choice, ranks = self._best
        finished = not (self._timed_out or self._by_time)
        return Assignment(choice, ranks, self._rating, self._lower, finished)

    def _look_at(self, menus: Menus) -> None:
        """Go on with these menus."""
        self._menus, self._flat, self._sums = menus, flat(menus), totals(menus)
        # Of what options take, not of what bounds count of them.
        dearest = [max((float(o.perf.sum()) + menus.charge(o) for o in menu), default=0.0) for menu in menus.options]
        self._anything = plain_sum(dearest) * 2 + _TINY
        prices = lagrangian_bound(menus, self._sums)
        self._per_byte = prices.per_byte
        if self._best is None:  # later menus lack options: what they allow bounds better plans only
            self._lower = prices.bound

    def _search(self) -> None:
        moves, most, _ = _MOVES if has_numba() else _PLAIN_MOVES
        idle, last, programs = 0, False, list[Bins](["hosts", "ranks"])
        for number in range(1_000):
            better = self._anneal(number, moves)
            if self._best is not None:
                self._drop_hopeless()
            small = program_columns(self._menus, "ranks") <= _SMALL_PROGRAM
            if small:
                self._gap = min(self._gap, _EXACT)
            if self._done(number):
                return
            if programs and (small or number > (0 if self._best is not None else len(_AIMS))):
                self._solve_program(programs.pop(0))
                if self._done(number):
                    return
            idle = 0 if better else idle + 1
            over = idle >= self._turns * len(self._schedules) and moves == most and not programs
            if self._best is None and not programs and (over or number > 2 * len(_AIMS)):
                if not self._by_time or self._share == 1.0:
                    return
                self._share, programs = 1.0, ["ranks"]  # annealing finds nothing: that program has all of the time
            elif over:
                # What annealing does not improve, the program with ranks one by one does at times; or it proves more.
                known = self._rating
                if last:
                    return
                self._solve_program("ranks", _LAST_COLUMNS, _LAST_NODES)
                last, idle = True, 0
                if self._done(number) or self._rating == known:
                    return
            moves = min(2 * moves, most)

    def _polish(self) -> None:
        """A plan within the gap may be better still, which a program that is not large finds out soon."""
        close = self._rating <= self._lower * (1 + _MIDDLE_GAP)
        looked = self._gap <= _MIDDLE_GAP  # programs did, as closely, before the search ended
        if self._best is None or self._timed_out or close or looked:
            return
        self._gap = _MIDDLE_GAP
        self._solve_program("ranks", _MIDDLE_PROGRAM, _MIDDLE_NODES)

    def _done(self, number: int) -> bool:
        """Whether the plan is good enough, there is none, or time is up: the first plan is waited for, some rounds."""
        self._timed_out = self._timed_out or time.monotonic() >= self._end
        if self._best is None:
            return self._refuted is not None or (self._timed_out and number >= len(_AIMS))
        return self._timed_out or self._rating <= self._lower * (1 + self._gap)

    # -- plans

    def _anneal(self, number: int, moves: int) -> bool:
        """Anneal from the program's choice or from the best plan; whether that gives a better one."""
        heat, step = self._schedules[number % len(self._schedules)]
        state = self._state
        if state is None:
            # At last, anything that memory holds.
            aim = max(self._lower, _TINY) * _AIMS[number] if number < len(_AIMS) else self._anything
        else:
            aim = self._rating * (1 - step)
        if state is None or number % 2 == 0:
            state = place(self._flat, self._choice_to_start_from(aim), aim)
        floor = self._lower * (1 + _SAFETY)
        seed = self._seed * 1_000 + number
        annealing = Annealing(self._flat, state, aim=aim, floor=floor, moves=moves, seed=seed, heat=heat, step=step)
        part = (_MOVES if has_numba() else _PLAIN_MOVES)[2]
        while annealing.run(part):
            if self._best is not None and time.monotonic() >= self._end:
                self._timed_out = True
                break
        return annealing.plan is not None and self._keep(annealing.plan)

    def _keep(self, state: State) -> bool:
        """Take a plan if it is better than the best."""
        value = rating(self._flat, state)
        if value >= self._rating:
            return False
        self._rating, self._state = value, state
        options = [menu[i] for menu, i in zip(self._menus.options, self._indices(state), strict=True)]
        slots = self._flat.slot
        self._best = (
            tuple(option.source for option in options),
            tuple(tuple(state.ranks[s : s + o.shards].tolist()) for s, o in zip(slots, options, strict=False)),
        )
        return True

    def _indices(self, state: State) -> list[int]:
        return [int(option) for option in state.choice - self._flat.begin[:-1]]

    def _choice_to_start_from(self, aim: float) -> npt.NDArray[np.int64]:
        """Positions of the program's options; of those cheapest at the bound's prices where it has none."""
        choice: npt.NDArray[np.int64] = priced_options(self._sums, aim, self._per_byte).argmin(axis=1)
        if self._start is not None:
            for table, (menu, source) in enumerate(zip(self._menus.options, self._start, strict=True)):
                choice[table] = next((i for i, o in enumerate(menu) if o.source == source), choice[table])
        return choice + self._flat.begin[:-1]

    # -- bounds

    def _solve_program(self, bins: Bins, most_columns: int = _MOST_COLUMNS, nodes: int = _NODES) -> None:
        """Raise the bound by a program, and keep what it chooses."""
        if bins != "cluster" and program_columns(self._menus, bins) > most_columns:
            return
        # A plan that is better by less than the gap asked for need not be found: that there is no other is the proof.
        at_most = self._rating / (1 + self._gap) * (1 + 2 * _SAFETY)
        gap = self._gap * (0.9 if bins == "ranks" else 0.25)
        answer = self._answer(bins, at_most, gap, nodes)
        self._lower = max(self._lower, min(answer.bound, self._rating) * (1 - _SAFETY))
        if answer.choice is None:
            return
        self._start = tuple(menu[i].source for menu, i in zip(self._menus.options, answer.choice, strict=True))
        if answer.ranks:
            self._keep(self._state_of(answer.choice, [answer.ranks[t] for t in range(len(answer.choice))]))

    def _answer(self, bins: Bins, at_most: float, gap: float, nodes: int) -> ProgramAnswer:
        # Options that are thousands of times as dear as the others make programs hard to compute with.
        for limit in [self._lower * far for far in _FAR] if np.isinf(at_most) else [at_most]:
            answer = self._searched(bins, at_most=limit, gap=gap, nodes=nodes)
            self._timed_out = self._timed_out or time.monotonic() >= self._end
            if answer.choice is not None or not answer.proven:
                break
        if np.isinf(at_most) and answer.choice is None and answer.proven:
            # Nothing of a rating that programs can look at; whether memory allows anything at all.
            answer = self._searched(bins, gap=gap, nodes=nodes, costs=False)
            if answer.choice is None and answer.proven:
                self._refuted = bins
            return replace(answer, bound=limit)
        return replace(answer, bound=min(answer.bound, limit))

    def _searched(self, bins: Bins, **how: Any) -> ProgramAnswer:
        """Solve the program in the time that is left."""
        left = self._end - time.monotonic()
        seconds = left if self._best else max(left * self._share, min(left, _SOON))
        answer = solve_menus_program(self._menus, bins, seconds=seconds, **how)
        self._by_time = self._by_time or answer.out_of_time
        return answer

    def _state_of(self, indices: Sequence[int], ranks: Sequence[Sequence[int]]) -> State:
        """A plan as the arrays that annealing works on."""
        problem = self._flat
        state = State(
            problem.begin[:-1] + np.array(indices, np.int64),
            np.zeros(int(problem.slot[-1]), np.int64),
            np.full(len(self._menus.together), -1, np.int64),
        )
        for slot, where in zip(problem.slot, ranks, strict=False):
            state.ranks[slot : slot + len(where)] = where
        for number, group in enumerate(self._menus.together):
            state.host[number] = ranks[group[0]][0] // self._menus.ranks_per_host
        return state

    def _drop_hopeless(self) -> None:
        """Leave out options that, at the bound's prices, no better plan has; the best plan's own ones stay."""
        assert self._best is not None
        priced = priced_options(self._sums, self._rating, self._per_byte)
        least = priced.min(axis=1)
        others = least.sum() - self._per_byte @ self._menus.capacity.sum(axis=1)
        keep = (others - least[:, None] + priced) / self._menus.ranks < self._rating * (1 + 1e-9)
        sources, ranks = self._best
        indices = []
        kept = []
        for menu, flags, source in zip(self._menus.options, keep, sources, strict=True):
            menu_kept = tuple(o for o, flag in zip(menu, flags[: len(menu)], strict=True) if flag or o.source == source)
            kept.append(menu_kept)
            indices.append([o.source for o in menu_kept].index(source))
        if sum(map(len, kept)) == self._flat.begin[-1]:
            return
        self._look_at(self._menus.with_options(kept))
        self._state = self._state_of(indices, ranks)
