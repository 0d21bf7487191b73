"""Gradients of looked-up rows that are still on their way from other ranks when backward gets to the lookup."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexshard.executors.comm.collectives import PendingCollective

__all__ = ["DeferredGradient"]


class DeferredGradient:
    """Stands between a lookup and its gradient, and hands it over once it has arrived.

    Attributes:
        scale: what the gradient still has to be multiplied by.
    """

    def __init__(self) -> None:
        self._pending: PendingCollective | None = None
        self._gradient: Callable[[], torch.Tensor] | None = None
        self.scale = 1.0

    def expect(self, pending: PendingCollective | None, gradient: Callable[[], torch.Tensor], scale: float) -> None:
        """``gradient()`` gives it once ``pending`` is over; it still has to be multiplied by ``scale``."""
        self._pending, self._gradient, self.scale = pending, gradient, scale

    def take(self) -> torch.Tensor:
        """The gradient of the looked-up rows before it is scaled, shape (R, D)."""
        assert self._gradient is not None
        if self._pending is not None:
            self._pending.wait()
        gradient = self._gradient()
        self._pending = self._gradient = None
        return gradient
