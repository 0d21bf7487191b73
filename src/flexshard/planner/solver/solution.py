"""What the solver finds, and its certificate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexshard.planner.solver.instance import Allocation

__all__ = ["Solution"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Solution:
    """An optimal allocation and its certificate.

    Attributes:
        allocation: rows per table and tier.
        seconds: exposed communication.
        lower_bound_seconds: no plan within the budget is faster.
        price: λ, seconds that one more byte of budget saves; 0 where the budget does not bind.
        levels: indices of the levels that were allowed.
    """

    allocation: Allocation
    seconds: float
    lower_bound_seconds: float
    price: float
    levels: IntArray
