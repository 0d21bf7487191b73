"""Cases beyond the first few of many alike: ``make test`` leaves them out, ``make test-slow`` runs them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest

__all__ = ["crossed", "first"]


def first(number: int, cases: Iterable[Any]) -> list[Any]:
    """Cases, of which those after the first so many are slow ones."""
    return [case if index < number else pytest.param(case, marks=pytest.mark.slow) for index, case in enumerate(cases)]


def crossed(*axes: Collection[Any]) -> list[Any]:
    """Every combination of values, slow but for as few as have each value in one of them."""
    few = {tuple(index % len(axis) for axis in axes) for index in range(max(map(len, axes)))}
    return [
        pytest.param(*case, marks=() if indices in few else pytest.mark.slow)
        for case, indices in zip(product(*axes), product(*(range(len(axis)) for axis in axes)), strict=True)
    ]
