"""Bisection down to neighbouring floats, whatever their scale."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

__all__ = ["bisect_floats", "bits_alike", "first_passing"]


_MANY_COUNTS, _BITS_OF_MANY = 10_000, 20
_HIGHER, _NEAR_BITS = 1.1, 49  # times a float, the next that is tried, then ever more; bits of floats as near as that
_STEP_BITS, _STEP_GROWTH = 40, 4  # from a float that is near: to within 1e-3 of it first, then 16 times as far each


def bisect_floats(
    low: float, high: float, passes: Callable[[float], bool], *, bits: int = 0, near: float | None = None
) -> tuple[float, float]:
    """Neighbouring floats between which a test turns from failing to passing.

    Halves the distance of the bit patterns, so it takes at most 64 tries.

    Args:
        low, high: at least 0; the test fails at ``low`` and passes at ``high``.
        passes: the test.
        bits: of a float that need not be told apart: the two may be up to 2 to this power floats from each other.
        near: where the two may be; looked at first, which saves tries if they are.

    Returns:
        the largest float found to fail and the next one, which passes.
    """
    if near is not None and low < near < high:
        low, high = _around(near, low, high, passes)
    while (gap := _bits(high) - _bits(low)) > 1 << bits:
        middle = float(np.int64(_bits(low) + gap // 2).view(np.float64))
        low, high = (low, middle) if passes(middle) else (middle, high)
    return low, high


def first_passing(start: float, most: float, passes: Callable[[float], bool]) -> float | None:
    """A float from ``start`` on that passes a test, within some tenth of the least that does; None where none up to
    ``most`` does. Whatever is above one that passes does, too, and near ``start`` few tries are needed.
    """
    low, high, factor = start, start, _HIGHER
    while not passes(high):
        if high >= most:
            return None
        low, high, factor = high, min(high * factor, most), factor**2
    return bisect_floats(low, high, passes, bits=_NEAR_BITS)[1]


def bits_alike(counts: int) -> int:
    """Bits of prices and thresholds that need not be told apart, where rows have so many counts: of very many, some lie
    between any two, and 2e-10 of them is far below what the last row leaves over.
    """
    return _BITS_OF_MANY if counts > _MANY_COUNTS else 0


def _around(near: float, low: float, high: float, passes: Callable[[float], bool]) -> tuple[float, float]:
    """Closer ends than ``low`` and ``high``, by steps away from a float between them that grow."""
    passed = passes(near)
    at, step, end = near, 1 << _STEP_BITS, low if passed else high
    while abs(_bits(at) - _bits(end)) > step:
        further = float(np.int64(_bits(at) + (-step if passed else step)).view(np.float64))
        if passes(further) != passed:
            end = further
            break
        at, step = further, step << _STEP_GROWTH
    return (end, at) if passed else (at, end)


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))
