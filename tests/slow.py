"""Cases beyond the first few of many alike: ``make test`` leaves them out, ``make test-slow`` runs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["first"]


def first(number: int, cases: Iterable[Any]) -> list[Any]:
    """Cases, of which those after the first so many are slow ones."""
    return [case if index < number else pytest.param(case, marks=pytest.mark.slow) for index, case in enumerate(cases)]
