"""What a whole model takes at least while it is open which tables without pooling are in tiers of rows.

At a price of memory every table is what costs least, options of the master problem or tiers of rows: that sum, less the
memory there is, bounds all choices (Lagrange). Prices come from placements met so far, whose own prices are asked for
next (column generation). A table that may not be what it is better off as makes the sum greater by what that costs
more: what takes it beyond the best plan is ruled out without a look.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard._internal import plain_sum
from flexshard.costmodels import kind_of
from flexshard.errors import BudgetError
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solver.dual_search import price_range
from flexshard.planner.solver.step_search import bounding_view, weighted_view
from flexshard.planner.whole_model.lagrangian import Totals, lagrangian_bound, totals
from flexshard.planner.whole_model.master import assign
from flexshard.planner.whole_model.menus import Menus, Option, undominated
from flexshard.planner.whole_model.pooled_menus import HBM
from flexshard.planner.whole_model.program import solve_menus_program

__all__ = ["Relaxation", "Relaxed"]

FloatArray = npt.NDArray[np.float64]
Kind = tuple[int, str, str]  # of a class of tables

_PRICES, _SAME = 8, 1e-3  # tried of memory; two that are one
_BISECTIONS = 40
_IN_TIERS = 1 << 30  # sources of options that are tiers, from here on
_SAFETY = 1e-9  # of a bound, for sums of float64


@dataclass(frozen=True)
class Relaxed:
    """Plans of which it is open where some tables are.

    Attributes:
        bound: none of them takes less; infinite where none fits. Of those that were ruled out it says no more than
            that they take as much as the one known.
        inside, outside: tables that every plan better than the one known has in tiers, and not in tiers.
        better_outside: of the others, those that are better off sharded at the bound's prices.
        most_decided: that of the others to which it makes the most of a difference; None where there are no others.
    """

    bound: float
    inside: frozenset[str]
    outside: frozenset[str]
    better_outside: frozenset[str]
    most_decided: str | None


class Relaxation:
    """Bounds of all plans with some tables in tiers of rows and some not."""

    def __init__(
        self,
        menus: Menus,
        received: Mapping[str, float],
        rows: Variants,
        limit: float,
        tiers: int,
        weights: FloatArray | None = None,
    ) -> None:
        """Of a problem.

        Args:
            menus: of the tables that TorchRec shards in any case, those that it may, and dense work; with the memory
                that there is for all tables, those in tiers too.
            received: bytes that every rank has of each table's rows if it is sharded.
            rows: all tables without pooling that may be in tiers.
            limit: memory per rank, of everything.
            tiers: how many there may be.
            weights: under which steps of a plan were bounded, of which the search knows none better.
        """
        # Charges are paid once for all options; here they are added where it is known which ones there are.
        alone = None if menus.alone is None else menus.alone[: len(menus.loads)]
        self._menus = undominated(replace(menus, alone=alone), with_kinds=(HBM,))
        self._sums, self._hbm = totals(self._menus), self._menus.kinds.index(HBM)
        view = _bounding(rows, limit, tiers) if weights is None else weighted_view(rows, weights)
        # Gradients may be gathered in several ways, and tiers may be at several choices of levels.
        self._ways = [
            (one, levels)
            for one in view.views(tiers)
            for levels in one.plain.level_subsets(tiers)
            if one.plain.gathering is None or one.plain.gathering.is_at(levels)
        ]
        self._view = view
        self._names = [table.name for table in rows.problem.tables]
        self._of_rows = {name: index for index, name in enumerate(self._names)}
        self._of_menus = {name: index for index, name in enumerate(self._menus.tables) if name in self._of_rows}
        self._room = self._menus.capacity.sum(axis=1)
        self._received = received
        for name, row in self._of_menus.items():
            self._sums.memory[self._hbm, row] += received[name] * self._menus.ranks
        self._charges = np.zeros_like(self._sums.perf)
        for row, menu in enumerate(self._menus.options):
            self._charges[row, : len(menu)] = [self._menus.charge(option) for option in menu]
        self._known: dict[float, tuple[FloatArray, FloatArray]] = {}

    def at(self, inside: Collection[str], outside: Collection[str], known: float) -> Relaxed:
        """Plans with some tables in tiers and some not, of which those that take less than ``known`` matter."""
        within, without = frozenset(inside), frozenset(outside)
        while True:
            prices = self._prices(within, without)
            bound = np.inf if prices is None else self._bound(prices, within, without)
            if prices is None or bound >= known:
                ruled_out = (within, without) != (frozenset(inside), frozenset(outside))  # since they take that much
                return Relaxed(min(bound, known) if ruled_out else bound, within, without, frozenset(), None)
            open_tables = [name for name in self._of_menus if name not in within and name not in without]
            value, tiers, sharded = self._values(known, prices, within, open_tables)
            more = [(each - np.minimum(tiers, sharded)) / self._menus.ranks for each in (sharded, tiers)]
            more[0] = more[0] + self._more_charged(known, within, open_tables)
            refuted = [(value[:, None] + each > known * (1 + _SAFETY)).all(axis=0) for each in more]
            must, must_not = ({open_tables[i] for i in np.flatnonzero(mask)} for mask in refuted)
            if must & must_not:
                return Relaxed(known, within, without, frozenset(), None)
            if not must and not must_not:
                break
            within, without = within | must, without | must_not
        value, tiers, sharded = self._values(bound, prices, within, open_tables)
        way = int(value.argmin())
        differences = np.abs(np.nan_to_num(tiers[way] - sharded[way], nan=0.0))
        better = frozenset(name for name, out in zip(open_tables, sharded[way] < tiers[way], strict=True) if out)
        most = open_tables[int(differences.argmax())] if open_tables else None
        return Relaxed(bound, within, without, better, most)

    def choice(self, relaxed: Relaxed, seconds: float) -> frozenset[str] | None:
        """Tables not in tiers in a plan that is likely to fit, of placements met so far; None where none was found."""
        try:
            found = assign(self._with_placements(relaxed, self._received), seconds=seconds)
        except BudgetError:
            return None
        return frozenset(name for name, row in self._of_menus.items() if found.choice[row] < _IN_TIERS)

    def fits(self, relaxed: Relaxed, seconds: float) -> bool:
        """Whether any plan may fit: a program has not proven that all ranks together cannot hold any."""
        menus = undominated(self._with_placements(relaxed, {}))
        answer = solve_menus_program(menus, "cluster", gap=1.0, seconds=seconds, costs=False)
        return answer.choice is not None or not answer.proven

    def _with_placements(self, relaxed: Relaxed, received: Mapping[str, float]) -> Menus:
        """The menus with placements met so far as options of the tables that may be in tiers, and those in any case as
        one more table. What ranks receive of others is spread over their shards.
        """
        ranks, hbm, menus = self._menus.ranks, self._hbm, self._menus
        placements = [self._best_of_ways(price) for price in sorted(self._known)]

        def in_tiers(rows: Sequence[int]) -> tuple[Option, ...]:
            return tuple(
                menus.alike("tiers", hbm, float(took[rows].sum()), float(nbytes[rows].sum()), _IN_TIERS + number)
                for number, (took, nbytes) in enumerate(placements)
            )

        options = []
        for name, menu in zip(menus.tables, menus.options, strict=True):
            if name in self._of_menus:
                nbytes = ranks * received.get(name, 0.0)
                sharded = () if name in relaxed.inside else tuple(_heavier(one, hbm, nbytes) for one in menu)
                options.append(sharded if name in relaxed.outside else (*sharded, *in_tiers([self._of_rows[name]])))
            else:
                options.append(menu)
        always = [index for index, name in enumerate(self._names) if name not in self._of_menus]
        return replace(menus, tables=(*menus.tables, "(in tiers)"), options=(*options, in_tiers(always)))

    # -- prices and bounds

    def _prices(self, inside: frozenset[str], outside: frozenset[str]) -> FloatArray | None:
        """Of a byte of each kind of memory, those at which the bound is about greatest; shape (kinds,). None where
        nothing fits.
        """
        tried = [0.0, self._most]
        prices = np.zeros(len(self._menus.kinds))
        for _ in range(_PRICES):
            found = lagrangian_bound(self._menus, self._with_tiers(tried, inside, outside))
            if not np.isfinite(found.bound):
                return None
            prices = found.per_byte
            price = float(prices[self._hbm])
            if any(abs(price - other) <= _SAME * price for other in tried):
                break
            tried.append(price)
        return prices

    def _with_tiers(self, prices: Sequence[float], inside: frozenset[str], outside: frozenset[str]) -> Totals:
        """The menus' sums with tiers of rows as further options, as they are at some prices; those in tiers in any
        case as one more table.
        """
        ranks, count, most = self._menus.ranks, len(prices), self._sums.perf.shape[1]
        tables = self._sums.perf.shape[0] + 1
        perf, largest = (np.full((tables, most + count), np.inf) for _ in range(2))
        memory = np.zeros((len(self._menus.kinds), tables, most + count))
        perf[:-1, :most], largest[:-1, :most] = self._sums.perf, self._sums.largest
        memory[:, :-1, :most] = self._sums.memory
        for column, price in enumerate(prices, start=most):
            seconds, nbytes = (ranks * each for each in self._best_of_ways(price))
            for name, row in self._of_menus.items():
                if name in inside:
                    perf[row, :most] = np.inf
                if name not in outside:
                    index = self._of_rows[name]
                    perf[row, column], largest[row, column] = seconds[index], 0.0
                    memory[self._hbm, row, column] = nbytes[index]
            always = [index for index, name in enumerate(self._names) if name not in self._of_menus]
            perf[-1, column], largest[-1, column] = seconds[always].sum(), 0.0
            memory[self._hbm, -1, column] = nbytes[always].sum()
        return Totals(perf, memory, largest)

    def _tiers_at(self, price: float) -> tuple[FloatArray, FloatArray]:
        """Seconds and bytes of a rank of each table in tiers, at what is best at a price, of each way; shape (ways, T)
        each.
        """
        if price not in self._known:
            found = [view.cheapest(levels, price)[:2] for view, levels in self._ways]
            self._known[price] = np.array([one for one, _ in found]), np.array([one for _, one in found])
        return self._known[price]

    def _best_of_ways(self, price: float) -> tuple[FloatArray, FloatArray]:
        """Seconds and bytes of a rank of each table in tiers, in the best of all ways at a price; shape (T,) each."""
        seconds, nbytes = self._tiers_at(price)
        best = (seconds + price * nbytes).argmin(axis=0)[None]
        return np.take_along_axis(seconds, best, axis=0)[0], np.take_along_axis(nbytes, best, axis=0)[0]

    def _values(
        self, rating: float, prices: FloatArray, inside: frozenset[str], open_tables: Sequence[str]
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """What all tables cost a rank on average where no option is dearer than the rating, of each way, shape (ways,);
        and what each of the open ones costs all ranks in tiers, and sharded, shape (ways, open) each.
        """
        ranks = self._menus.ranks
        perf = np.where(self._sums.largest <= rating, self._sums.perf, np.inf)
        least = (perf + (prices[:, None, None] * self._sums.memory).sum(axis=0)).min(axis=1, initial=np.inf)
        seconds, nbytes = self._tiers_at(float(prices[self._hbm]))
        of_rows = ranks * (seconds + prices[self._hbm] * nbytes)
        undecided = {self._of_menus[name] for name in (*inside, *open_tables)}
        in_menus = plain_sum(float(value) for row, value in enumerate(least) if row not in undecided)
        in_tiers = [i for i, name in enumerate(self._names) if name in inside or name not in self._of_menus]
        tiers = of_rows[:, [self._of_rows[name] for name in open_tables]]
        sharded = np.broadcast_to([float(least[self._of_menus[name]]) for name in open_tables], tiers.shape)
        total = in_menus + of_rows[:, in_tiers].sum(axis=1) + np.minimum(tiers, sharded).sum(axis=1)
        once = self._calls(in_tiers) + self._charged(rating, undecided)
        return (total - prices @ self._room) / ranks + once, tiers, sharded

    def _least_charges(self, rating: float) -> FloatArray:
        """Of each menu, the least charge of an option that is not dearer than the rating; shape (N,)."""
        charges = np.where(self._sums.largest <= rating, self._charges, np.inf)
        return np.asarray(charges.min(axis=1, initial=np.inf))

    def _charged(self, rating: float, undecided: Collection[int]) -> float:
        """What plans pay in charges at least, if all menus but these have an option."""
        least = self._least_charges(rating)
        return max((float(one) for row, one in enumerate(least) if row not in undecided), default=0.0)

    def _more_charged(self, rating: float, inside: frozenset[str], open_tables: Sequence[str]) -> FloatArray:
        """What plans pay more, at least, if each of the open tables is not in tiers; shape (open,)."""
        undecided = {self._of_menus[name] for name in (*inside, *open_tables)}
        least = self._least_charges(rating)[[self._of_menus[name] for name in open_tables]]
        return np.maximum(least - self._charged(rating, undecided), 0.0)

    def _bound(self, prices: FloatArray, inside: frozenset[str], outside: frozenset[str]) -> float:
        """The least rating that these prices do not refute."""
        open_tables = [name for name in self._of_menus if name not in inside and name not in outside]

        def least(rating: float) -> float:
            return float(self._values(rating, prices, inside, open_tables)[0].min())

        low = least(np.inf)
        if not np.isfinite(low):
            return np.inf
        finite = self._sums.largest[np.isfinite(self._sums.largest)]
        high = max(low, float(finite.max(initial=0.0)))
        if least(low) <= low:
            return low * (1 - _SAFETY)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if least(middle) > middle:
                low = middle
            else:
                high = middle
        return low * (1 - _SAFETY)

    # -- calls

    def _calls(self, in_tiers: Sequence[int]) -> FloatArray:
        """What calls take at least where these tables are in tiers, those of one class, which all go with; of each way,
        shape (ways,).
        """
        kinds = {self._kinds[index] for index in in_tiers}
        if not kinds:
            return np.zeros(len(self._ways))
        return np.asarray(np.min([self._call_seconds[kind] for kind in kinds], axis=0))

    @cached_property
    def _kinds(self) -> list[Kind]:
        """The class of each table that may be in tiers."""
        return [kind_of(table) for table in self._view.problem.tables]

    @cached_property
    def _call_seconds(self) -> dict[Kind, FloatArray]:
        """Of one table of each class by itself: seconds of calls, of each way; shape (ways,)."""
        problem: Any = self._view.problem
        found = {}
        for kind in dict.fromkeys(self._kinds):
            table = problem.tables[self._kinds.index(kind)]
            alone = Variants(replace(problem, tables=(table,)), self._view.plain.level_order).plain
            own = alone.index_dedup_seconds + float(alone.local_seconds.sum())
            found[kind] = np.array([alone.latency_seconds(levels) - own for _, levels in self._ways])
        return found

    @cached_property
    def _most(self) -> float:
        """A price at which memory alone counts."""
        return price_range(self._view.plain)[1]


def _heavier(option: Option, kind: int, nbytes: float) -> Option:
    """The same with so many bytes more, spread over its shards."""
    memory = option.memory.copy()
    memory[kind] += nbytes / option.shards
    return replace(option, memory=memory)


def _bounding(rows: Variants, limit: float, tiers: int) -> Variants:
    """The problem under whose weights tiers bound steps; the problem itself where communication is planned."""
    if rows.problem.objective != "step":
        return rows
    try:
        return bounding_view(rows, limit, tiers)
    except BudgetError as error:
        return bounding_view(rows, error.least_bytes, tiers)
