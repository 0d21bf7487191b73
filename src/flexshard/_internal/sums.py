"""Sums that are the same on every Python."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import Any, TypeVar

__all__ = ["plain_sum"]

_Number = TypeVar("_Number")


def plain_sum(numbers: Iterable[_Number], start: Any = 0) -> _Number:
    """One after the other, so that plans have the same bytes and fingerprints everywhere: ``sum`` of floats is rounded
    otherwise from Python 3.12 on.
    """
    total: _Number = reduce(add, numbers, start)
    return total
