"""Methods: how rows are placed within a memory budget."""

from __future__ import annotations

from dataclasses import dataclass

from flexshard import units
from flexshard.planner.alternatives import alternatives_of
from flexshard.planner.named import Named
from flexshard.planner.plan import Alternative
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solver.dual_search import solve_instance
from flexshard.planner.solver.instance import Allocation, Instance
from flexshard.planner.solver.published import solve_published
from flexshard.planner.solver.step_search import communication_view, solve_step

__all__ = ["METHODS", "Method", "Optimal", "Placement", "Published"]


@dataclass(frozen=True, eq=False)
class Placement:
    """What a method found.

    Attributes:
        allocation: rows per table and tier.
        lower_bound_seconds: no placement within the budget is faster; of a step without its dense work.
        price: seconds that one more byte of budget saves; 0 where the budget does not bind.
        next_gib_seconds: of the best placement with one GiB more; None if the method does not say.
        alternatives: next best choices of each table; empty if the method does not say.
        instance: the problem as arrays, with the tables that are deduplicated; of a shortest step, under the weights of
            links with which it was found.
    """

    allocation: Allocation
    lower_bound_seconds: float
    price: float
    next_gib_seconds: float | None
    alternatives: tuple[tuple[Alternative, ...], ...]
    instance: Instance


class Method(Named):
    """A way to place rows.

    Attributes:
        tiers: the numbers of group sizes that it can be asked for; None for any.
    """

    tiers: tuple[int, ...] | None = None

    def place(self, variants: Variants, limit_bytes: float, tiers: int) -> Placement:
        """Rows in at most ``tiers`` group sizes, within a limit per rank.

        Raises:
            BudgetError: nothing fits; its ``least_bytes`` would.
        """
        raise NotImplementedError


class Optimal(Method):
    """Least exposed communication, or the shortest step (docs/model.md)."""

    name = "optimal"

    def place(self, variants: Variants, limit_bytes: float, tiers: int) -> Placement:
        """See :meth:`Variants.solve`; what a GiB more would save, and what else each table could have."""
        reduction = variants.problem.reduction
        if variants.problem.objective == "step":
            shortest = solve_step(variants, limit_bytes, tiers)
            instance, best = shortest.instance, shortest.solution
            plain = communication_view(variants).of(instance.deduplicated)
            more = shortest.within(limit_bytes + units.GIB)
        else:
            instance, best = variants.solve(limit_bytes, tiers)
            plain = None
            _, roomier = variants.solve(limit_bytes + units.GIB, tiers, start_price=best.price or None)
            more = roomier.seconds
        return Placement(
            best.allocation,
            best.lower_bound_seconds,
            best.price,
            min(best.seconds, more),
            tuple(alternatives_of(instance, best.allocation, limit_bytes, best.price, tiers, reduction, plain=plain)),
            instance,
        )


class Published(Method):
    """The published algorithm (FlexShard paper, section 4), beside the optimal one's bound."""

    name = "paper"
    tiers = (2, 3)

    def place(self, variants: Variants, limit_bytes: float, tiers: int) -> Placement:
        """See :func:`solve_published`; ids are deduplicated only if the problem says so."""
        instance = variants.fixed
        if variants.problem.objective == "step":
            best = solve_step(variants, limit_bytes, tiers).solution
        else:
            best = solve_instance(instance, limit_bytes, tiers)
        allocation = solve_published(instance, limit_bytes, tiers)
        none = ((),) * len(instance.tables)
        return Placement(allocation, best.lower_bound_seconds, best.price, None, none, instance)


METHODS: dict[str, Method] = {one.name: one for one in (Optimal(), Published())}
