"""Packages that need not be installed."""

from __future__ import annotations

import importlib
from functools import cache

__all__ = ["has_numba", "has_triton"]


@cache  # a package that is missing is looked for in all of the path every time
def _has(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def has_numba() -> bool:
    """Whether loops can be compiled."""
    return _has("numba")


def has_triton() -> bool:
    """Whether kernels for GPUs can be compiled."""
    return _has("triton")
