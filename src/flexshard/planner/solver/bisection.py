"""Bisection down to neighbouring floats, whatever their scale."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

__all__ = ["bisect_floats"]


def bisect_floats(low: float, high: float, passes: Callable[[float], bool], *, bits: int = 0) -> tuple[float, float]:
    """Neighbouring floats between which a test turns from failing to passing.

    Halves the distance of the bit patterns, so it takes at most 64 tries.

    Args:
        low, high: at least 0; the test fails at ``low`` and passes at ``high``.
        passes: the test.
        bits: of a float that need not be told apart: the two may be up to 2 to this power floats from each other.

    Returns:
        the largest float found to fail and the next one, which passes.
    """
    while (gap := _bits(high) - _bits(low)) > 1 << bits:
        middle = float(np.int64(_bits(low) + gap // 2).view(np.float64))
        low, high = (low, middle) if passes(middle) else (middle, high)
    return low, high


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))
