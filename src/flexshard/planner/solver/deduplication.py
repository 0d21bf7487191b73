"""Which tables' repeated ids to send once per batch: fewer rows and ids to move, for the time to find distinct ones.

At a price of memory every table takes the cheaper of both, which bounds every choice from below; the tables that do so
where the budget is met are then planned row by row, and while that bound is not met so is every choice that bounds at
several prices do not rule out. With few tables every choice is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard.errors import BudgetError
from flexshard.planner.solver.bisection import bisect_floats, bits_alike
from flexshard.planner.solver.build import ToPlan, all_once, build_instance
from flexshard.planner.solver.deadline import is_enough
from flexshard.planner.solver.dual_search import (
    bound_at_price,
    cheapest_tables,
    price_range,
    solve_instance,
    subsets_of,
)
from flexshard.planner.solver.gathered import MANY_COUNTS, reduced_seconds
from flexshard.planner.solver.gathering import Gathering, GatheringCosts, latency_of_gathering
from flexshard.planner.solver.instance import Instance, memory_limit
from flexshard.planner.solver.solution import Solution
from flexshard.planner.solver.table_bounds import TableCosts
from flexshard.planner.solver.table_choices import (
    ROUNDED,
    between,
    climb,
    is_good,
    making_up,
    most_of_best,
    plan_lowest,
)

__all__ = ["Variants"]

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_TABLES_TRIED, _FEW_TABLES, _FEW_COUNTS = 2, 4, 2_000
_CLOSE = 1e-4  # part of a bound, that is not looked into
_PRICES, _TABLE_WORK = 24, 2.0  # the latter in microseconds, of a table at a price
# Prices at which others may make up for one table, how far from the one of the bound, and of how many counts at most.
_PRICES_NEAR, _NEAR, _FEW_TO_PRICE = 33, 30.0, 100_000


@dataclass(frozen=True, eq=False)
class _Joint:
    """Lagrangian bound of all choices of tables with rows at some levels, the choices of the prices beside the budget,
    and the price that just meets it.
    """

    levels: IntArray
    bound: float
    ends: tuple[BoolArray, BoolArray]
    price: float


@dataclass(frozen=True, eq=False)
class Variants:
    """A problem with any of its tables deduplicated.

    Attributes:
        problem: what to plan.
        order: of the cluster's levels; by their time per read by default.
        like: the same tables and batches under other costs, whose counts need not be put together again.
    """

    problem: ToPlan
    order: IntArray | None = None
    like: Variants | None = None

    @cached_property
    def plain(self) -> Instance:
        """Every lookup sent: what "neutral" means, and what the published algorithm plans."""
        return build_instance(self.problem, None, self.order, None if self.like is None else self.like.plain)

    @cached_property
    def once(self) -> Instance:
        """Every table's distinct ids."""
        return all_once(self.plain, None if self.like is None else self.like.once)

    @property
    def are_chosen(self) -> bool:
        """Whether tables are to be deduplicated where it pays; on one rank, which sends nothing, in memory, or in
        lookups.
        """
        return self.problem.index_dedup == "auto"

    @property
    def fixed(self) -> Instance:
        """As the problem says, where it does not leave the choice; then plain."""
        return self.once if self.problem.index_dedup is True else self.plain

    @property
    def sides(self) -> tuple[Instance, ...]:
        """What each table may be: all sent, and distinct ids alone; or as the problem says."""
        return (self.plain, self.once) if self.are_chosen else (self.fixed,)

    def of(self, deduplicated: BoolArray) -> Instance:
        """With these tables deduplicated, shape (T,)."""
        if not deduplicated.any():
            return self.plain
        if deduplicated.all():
            return self.once
        key = deduplicated.tobytes()
        if key not in self._latest:
            self._latest.clear()
            self._latest[key] = self._mixed(deduplicated)
        return self._latest[key]

    @cached_property
    def _latest(self) -> dict[bytes, Instance]:
        """What some tables deduplicated came to last, by which they are: it is planned, and then written down."""
        return {}

    def _mixed(self, deduplicated: BoolArray) -> Instance:
        plain, once = self.plain, self.once
        counts = np.repeat(deduplicated, np.diff(plain.starts))
        reads = plain.reads.copy()
        cum_units: npt.NDArray[Any] = plain.cum_units.astype(once.cum_units.dtype)
        np.copyto(reads, once.reads, where=counts)
        np.copyto(cum_units, once.cum_units, where=counts)
        unit_reads = np.where(deduplicated, once.unit_reads, plain.unit_reads)
        return replace(plain, deduplicated=deduplicated, reads=reads, cum_units=cum_units, unit_reads=unit_reads)

    def solve(self, limit_bytes: float, tiers: int, *, start_price: float | None = None) -> tuple[Instance, Solution]:
        """The best choice of tables, and placement of rows, within a budget; where gradients of copies may be gathered,
        of what that takes.

        Raises:
            BudgetError: nothing fits; its ``least_bytes`` would.
        """
        if self.problem.reduction == "dense":
            return self._solve(limit_bytes, tiers, start_price)
        found: list[tuple[Instance, Solution]] = []
        errors: list[BudgetError] = []
        for view in self.views(tiers):
            if found:
                instance, best = min(found, key=lambda pair: pair[1].seconds)
                bound = view._bound(limit_bytes, tiers, best.price)
                if bound >= best.seconds * (1 - _CLOSE):  # nothing to be gained there
                    found.append((instance, replace(best, lower_bound_seconds=bound)))
                    continue
            try:
                found += view._solve_gathered(limit_bytes, tiers, start_price)
            except BudgetError as error:
                errors.append(error)
        if not found:
            raise min(errors, key=lambda error: error.least_bytes)
        instance, best = min(found, key=lambda pair: pair[1].seconds)
        bound = min(one.lower_bound_seconds for _, one in found)
        return self.of(instance.deduplicated), replace(best, lower_bound_seconds=min(best.seconds, bound))

    def _solve_gathered(
        self, limit_bytes: float, tiers: int, start_price: float | None
    ) -> list[tuple[Instance, Solution]]:
        """The same, by what gathering takes in the end. Where all is to be gathered of very many counts, tiers are
        those of reductions, or there are none with copies.
        """
        reduced = self._with(None)
        many = self.problem.reduction == "sparse" and self.plain.reads.size > MANY_COUNTS
        instance, best = (reduced if many else self)._solve(limit_bytes, tiers, start_price)
        found = [(instance, best)]
        if many:
            best = replace(best, lower_bound_seconds=self._bound(limit_bytes, tiers, best.price))
            row_wise = instance.uniform(instance.cluster.world_size)
            found = [(instance, best), (instance, replace(best, allocation=row_wise))]
            found = [one for one in found if instance.memory_bytes(one[1].allocation) <= memory_limit(limit_bytes)]
        final = []
        for instance, one in found:
            plain = reduced.of(instance.deduplicated)
            sparse = self.problem.reduction.sparse_tiers(plain, one.allocation)
            final.append((plain, replace(one, seconds=reduced_seconds(plain, one.allocation, sparse))))
        return final

    def _with(self, gathering: Gathering | None) -> Variants:
        """The same with gradients brought together in another way."""
        if self.plain.gathering is gathering:
            return self
        view = Variants(self.problem, self.order)
        needed = ("plain", "once") if self.are_chosen or self.problem.index_dedup is True else ("plain",)
        view.__dict__.update({name: replace(getattr(self, name), gathering=gathering) for name in needed})
        return view

    def views(self, tiers: int) -> Iterator[Variants]:
        """The same with gradients gathered at every choice of levels with copies, where they may be, at none first;
        always at all of them if nothing else is wanted.
        """
        plain, reduction = self.plain, self.problem.reduction
        if reduction == "dense":
            yield self
            return
        copied = np.flatnonzero(plain.group_sizes < plain.cluster.world_size).tolist()
        always = reduction == "sparse"
        if not always:
            yield self
        costs = GatheringCosts(
            plain.tables, plain.cluster, plain.batch_size, plain.overlap, plain.group_sizes, plain.starts
        )
        latency = latency_of_gathering(plain.cluster, len(plain.widths), plain.overlap, plain.group_sizes)
        for size in [len(copied)] if always else range(1, min(len(copied), tiers) + 1):
            for levels in combinations(copied, size):
                there = np.zeros_like(latency)  # copies elsewhere are reduced
                there[list(levels)] = latency[list(levels)]
                gathering = Gathering(costs, there, levels, always, reduction.sparse_tiers)
                yield self._with(gathering)

    def _solve(self, limit_bytes: float, tiers: int, start_price: float | None) -> tuple[Instance, Solution]:
        if not self.are_chosen:
            return self.fixed, solve_instance(self.fixed, limit_bytes, tiers, start_price=start_price)
        masks, joint = self._candidates(limit_bytes, tiers, start_price)
        bound, price = (None, start_price) if joint is None else (joint.bound, joint.price)
        found: list[tuple[Instance, Solution]] = []
        errors: list[BudgetError] = []

        def plan(mask: BoolArray, known: float | None = None) -> None:
            instance = self.of(mask)
            known = most_of_best(found) if known is None else known
            try:
                one = solve_instance(instance, limit_bytes, tiers, start_price=price, known_seconds=known)
                found.append((instance, one))
            except BudgetError as error:
                errors.append(error)

        *others, last = masks
        plan(last)  # mostly all tables deduplicated, which is what others have to beat, and needs the least memory
        for mask in self._in_order_of_bounds(others, limit_bytes, tiers, found):
            plan(mask)
        if bound is not None and all(one.seconds > bound * (1 + _CLOSE) for _, one in found):
            none = np.zeros(len(self.problem.tables), np.bool_)
            for mask in (none, ~none):  # never worse than either
                if not any(np.array_equal(mask, tried) for tried in masks):
                    plan(mask)
        if joint is not None and found:
            (seconds, memory), (less_seconds, less_memory) = self._of_sides(joint.levels, joint.price)
            if not is_good(found, joint.bound):
                for mask in self._others_making_up(joint, limit_bytes):
                    if not any(np.array_equal(mask, one.deduplicated) for one, _ in found):
                        plan(mask)
                costs = self._costs_below(most_of_best(found), limit_bytes, tiers, joint.price)
                bound = max(joint.bound, plan_lowest(costs, joint.bound, self.plain, found, plan))
                saved = seconds - less_seconds + joint.price * (memory - less_memory)
                climb(saved, bound, self.plain, found, plan)
        if not found:
            raise min(errors, key=lambda error: error.least_bytes)
        instance, best = min(found, key=lambda pair: (pair[1].seconds, int(pair[0].deduplicated.sum())))
        least = min(one.lower_bound_seconds for _, one in found) if bound is None else bound
        return instance, replace(best, lower_bound_seconds=min(best.seconds, least))

    def _others_making_up(self, joint: _Joint, limit_bytes: float) -> list[BoolArray]:
        """See :func:`making_up`; at prices near that of the bound."""
        prices = joint.price * np.geomspace(1 / _NEAR, _NEAR, _PRICES_NEAR)
        if self.plain.reads.size > _FEW_TO_PRICE or is_enough(_TABLE_WORK * prices.size * len(self.problem.tables)):
            return []
        at = np.array([self._of_sides(joint.levels, price) for price in prices.tolist()])  # (K, 2, 2, T)
        return making_up(at[:, :, 0], at[:, :, 1], prices, memory_limit(limit_bytes))

    def _costs_below(self, known: float, limit_bytes: float, tiers: int, near: float) -> list[TableCosts]:
        """What tables cost at prices around one, wherever all together may take less than ``known`` seconds."""
        prices = near * np.concatenate([[1.0, 0.0], np.geomspace(1e-3, 1e6, _PRICES)])
        costs = []
        for levels in subsets_of(self.plain, tiers):
            latency = self.plain.latency_seconds(levels)
            first = self._table_costs(levels, prices[:1], latency, limit_bytes)
            if first.bound < known:
                long = is_enough(_TABLE_WORK * prices.size * len(self.problem.tables))
                costs.append(first if long else self._table_costs(levels, prices, latency, limit_bytes))
        return costs

    def _table_costs(self, levels: IntArray, prices: FloatArray, latency: float, limit_bytes: float) -> TableCosts:
        """What tables cost at prices, beyond what all take to be looked up as they are sent by default."""
        at = [self._of_sides(levels, price) for price in prices.tolist()]
        seconds, memory = np.moveaxis(np.array(at), 2, 0)  # (K, 2, T) each
        sides = seconds - self._by_default + prices[:, None, None] * memory
        return TableCosts(sides.swapaxes(0, 1), latency - memory_limit(limit_bytes) * prices)

    def _in_order_of_bounds(
        self,
        masks: Sequence[BoolArray],
        limit_bytes: float,
        tiers: int,
        found: Sequence[tuple[Instance, Solution]],
    ) -> Iterator[BoolArray]:
        """Choices of tables whose bound, at the price of memory of what was found first, is not above the best that
        was found by then; in their own order where bounds are the same, and all where nothing was found.
        """
        if not found:
            yield from masks
            return
        price = found[0][1].price
        bounds = [bound_at_price(self.of(mask), limit_bytes, tiers, price) for mask in masks]
        for index in np.argsort(bounds, kind="stable").tolist():
            if bounds[index] > most_of_best(found):
                return
            yield masks[index]

    def _candidates(
        self, limit_bytes: float, tiers: int, start_price: float | None
    ) -> tuple[list[BoolArray], _Joint | None]:
        """Choices of tables to plan, and what bounds all others, None where there are no others."""
        count = len(self.problem.tables)
        if count <= _TABLES_TRIED or (count <= _FEW_TABLES and self.plain.reads.size <= _FEW_COUNTS):
            return [np.array(mask) for mask in product((False, True), repeat=count)], None
        best: _Joint | None = None
        # The largest choices of levels first: their bounds rule most of the others out. Of equals, the smallest.
        for levels in reversed(subsets_of(self.plain, tiers)):
            found = self._joint(levels, limit_bytes, best, start_price if best is None else best.price)
            if found is not None and (best is None or found.bound <= best.bound):
                best = found
        if best is None:
            # Where none fits, deduplicating all needs the least memory there is.
            return [np.ones(count, np.bool_)], None
        return list({mask.tobytes(): mask for mask in between(*best.ends)}.values()), best

    def _joint(self, levels: IntArray, limit_bytes: float, best: _Joint | None, near: float | None) -> _Joint | None:
        """Lagrangian bound of all choices with rows at some levels, and those of the prices beside the budget; None
        where nothing fits, or the bound is above the ``best`` known. The price may be ``near`` that, if it is known.
        """
        limit = memory_limit(limit_bytes)
        latency = self.plain.latency_seconds(levels)

        def at(price: float) -> tuple[float, float, BoolArray]:
            return self._cheapest(levels, price)

        floor, ceiling = self._prices
        if best is not None:
            seconds, memory, _ = at(best.price)  # at any price there is a bound
            if seconds + best.price * (memory - limit) + latency > best.bound * (1 + ROUNDED):
                return None
        if at(floor)[1] <= limit:
            return _Joint(levels, at(0.0)[0] + latency, (at(floor)[2], at(floor)[2]), floor)
        if at(ceiling)[1] > limit:
            return None
        bits = bits_alike(self.plain.reads.size)
        low, high = bisect_floats(floor, ceiling, lambda price: at(price)[1] <= limit, bits=bits, near=near)
        ends = [(price, *at(price)) for price in (low, high)]
        bound = max(seconds + price * (memory - limit) for price, seconds, memory, _ in ends)
        return _Joint(levels, bound + latency, (ends[0][3], ends[1][3]), high)

    @cached_property
    def _prices(self) -> tuple[float, float]:
        """As :func:`price_range`, of finding distinct ids, too, where nothing else takes time."""
        floor, ceiling = price_range(self.plain)
        once = self.plain.once_seconds[self.plain.once_seconds > 0]
        if not self.are_chosen or not once.size:
            return floor, ceiling
        most_bytes = self.plain.memory_bytes(self.plain.uniform(1)) + 1
        return min(floor, 1e-12 * float(once.min()) / most_bytes), max(ceiling, 1e12 * float(once.max()))

    def _cheapest(self, levels: IntArray, price: float) -> tuple[float, float, BoolArray]:
        """Seconds without latencies, and memory, of tables whose rows are where they cost least at a price, and which
        of these tables are deduplicated. What all take to be looked up as they are sent by default is a latency.
        """
        seconds, memory, once = self.cheapest(levels, price)
        return float((seconds - self._by_default).sum()), float(memory.sum()), once

    @property
    def _by_default(self) -> FloatArray:
        """Seconds of each table to be looked up as it is sent by default; shape (T,)."""
        default = self.plain if self.are_chosen else self.fixed
        return np.asarray(default.local_seconds + np.where(default.deduplicated, default.once_seconds, 0.0))

    def cheapest(self, levels: IntArray, price: float) -> tuple[FloatArray, FloatArray, BoolArray]:
        """Of each table whose rows are where they cost least at a price: seconds without those of calls, memory, and
        whether it is deduplicated; shape (T,) each.
        """
        (seconds, memory), (less_seconds, less_memory) = self._of_sides(levels, price)
        better = less_seconds + price * less_memory < seconds + price * memory
        once = better if self.are_chosen else self.fixed.deduplicated
        return np.where(better, less_seconds, seconds), np.where(better, less_memory, memory), once

    def _of_sides(self, levels: IntArray, price: float) -> tuple[tuple[FloatArray, FloatArray], ...]:
        """Seconds and memory of each table as all are sent, and as distinct ids are, or as the problem says."""
        found = []
        for side in self.sides:
            seconds, memory = cheapest_tables(side, levels, price)
            # Rows that are not sent are not looked up either.
            local = side.local_seconds + np.where(side.deduplicated, side.once_seconds, 0.0)
            found.append((seconds + local, memory + side.table_held_bytes))
        return found[0], found[-1]

    def _bound(self, limit_bytes: float, tiers: int, price: float) -> float:
        """No placement within a budget takes less, whatever the price at which this is said."""
        limit, fixed, bounds = memory_limit(limit_bytes), self.plain if self.are_chosen else self.fixed, [np.inf]
        for levels in subsets_of(fixed, tiers):
            seconds, memory, _ = self._cheapest(levels, price)
            bounds.append(seconds + price * (memory - limit) + fixed.latency_seconds(levels))
        return min(bounds)
