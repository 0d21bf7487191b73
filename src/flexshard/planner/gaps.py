"""How far a plan may be from the best."""

from __future__ import annotations

import math

__all__ = ["relative_gap"]


def relative_gap(rating: float, lower_bound: float) -> float:
    """By what part of the bound a rating exceeds it."""
    if rating <= lower_bound:
        return 0.0
    return rating / lower_bound - 1 if lower_bound > 0 else math.inf
