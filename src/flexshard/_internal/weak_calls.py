"""Calls that do not keep alive whom they call."""

from __future__ import annotations

import weakref
from collections.abc import Callable

__all__ = ["weakly"]


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Calls a method for as long as its object lives, and does not keep it alive."""
    own = weakref.WeakMethod(method)

    def call() -> None:
        alive = own()
        if alive is not None:
            alive()

    return call
