"""When searches that only make a placement or its bound a little better are to end; never, unless somebody says so.

By the clock they end where the user's timeout is over; by the work that they have done where they are not worth more,
since a plan must not depend on how busy a machine is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["ended_at", "is_enough"]


@dataclass
class _Left:
    """What is left: until a time of ``time.monotonic()``, and work."""

    until: float
    work: float


_LEFT: ContextVar[_Left | None] = ContextVar("_LEFT", default=None)


@contextmanager
def ended_at(until: float, work: float = float("inf")) -> Iterator[None]:
    """End such searches of this thread at a time of ``time.monotonic()``, or once they have done so much work; what is
    found then is a placement, and its bound holds.
    """
    token = _LEFT.set(_Left(until, work))
    try:
        yield
    finally:
        _LEFT.reset(token)


def is_enough(work: float = 0.0) -> bool:
    """Whether they are to end now.

    Args:
        work: what is about to be done, in microseconds that it took where its rate was measured.
    """
    left = _LEFT.get()
    if left is None:
        return False
    ended = left.work <= 0 or time.monotonic() >= left.until
    left.work -= work
    return ended
