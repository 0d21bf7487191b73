"""How gradients of copies are brought together: all rows of a replicated tier reduced, or those that were touched
gathered.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flexshard.costmodels import Cost
from flexshard.planner.named import Named
from flexshard.planner.solver.gathered import cheapest_tiers, gathered_of_tiers, replicated
from flexshard.planner.solver.instance import Allocation, Instance

__all__ = ["REDUCTIONS", "Auto", "Dense", "Reduction", "Sparse", "cost_of_reduced", "cost_with_reductions"]

BoolArray = npt.NDArray[np.bool_]


class Reduction(Named):
    """Which tiers gather the rows that were touched instead of reducing all."""

    def sparse_tiers(self, instance: Instance, allocation: Allocation) -> BoolArray:
        """Tiers whose gradients are gathered; shape (T, G), in the instance's order of levels."""
        raise NotImplementedError


class Dense(Reduction):
    """All-reduce of every row."""

    name = "dense"

    def sparse_tiers(self, instance: Instance, allocation: Allocation) -> BoolArray:
        """None."""
        return np.zeros_like(replicated(instance, allocation))


class Sparse(Reduction):
    """All-gather of the rows that were touched."""

    name = "sparse"

    def sparse_tiers(self, instance: Instance, allocation: Allocation) -> BoolArray:
        """All that have copies."""
        return replicated(instance, allocation)


class Auto(Reduction):
    """Whichever is predicted to take less."""

    name = "auto"

    def sparse_tiers(self, instance: Instance, allocation: Allocation) -> BoolArray:
        """See :func:`flexshard.planner.solver.gathered.cheapest_tiers`."""
        return cheapest_tiers(instance, allocation)


REDUCTIONS: dict[str, Reduction] = {one.name: one for one in (Dense(), Sparse(), Auto())}


def cost_with_reductions(instance: Instance, allocation: Allocation, sparse: BoolArray) -> Cost:
    """The six metrics of an allocation whose marked tiers gather the rows that were touched."""
    cost = instance.cost(allocation)
    if not sparse.any():
        return cost
    gathered = gathered_of_tiers(instance, allocation, sparse)
    calls = instance.collectives(allocation, instance.tier_reads(allocation), sparse, gathered)
    return replace(cost, collectives=calls)


def cost_of_reduced(instance: Instance, allocation: Allocation, reduction: Reduction) -> Cost:
    """The same with the tiers gathered that a reduction gathers."""
    return cost_with_reductions(instance, allocation, reduction.sparse_tiers(instance, allocation))
