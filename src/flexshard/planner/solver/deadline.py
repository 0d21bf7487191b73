"""When searches that only make a placement or its bound a little better are to end; never, unless somebody says so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["ended_at", "time_is_up"]

_UNTIL: ContextVar[float] = ContextVar("_UNTIL", default=float("inf"))


@contextmanager
def ended_at(until: float) -> Iterator[None]:
    """End such searches of this thread at a time of ``time.monotonic()``; what is found then is a placement, and its
    bound holds.
    """
    token = _UNTIL.set(until)
    try:
        yield
    finally:
        _UNTIL.reset(token)


def time_is_up() -> bool:
    """Whether they are to end now."""
    return time.monotonic() >= _UNTIL.get()
