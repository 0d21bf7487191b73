"""Rows of one level on one rank: what every store of them offers."""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import nn

from flexshard.executors.comm.deferred_gradient import DeferredGradient
from flexshard.executors.stores.updates import OptimizerSpec

__all__ = ["RowStore", "with_deferred_gradient"]


class RowStore(nn.Module, abc.ABC):
    """Rows of one level on this rank.

    Attributes:
        group_size: g.
        spec: their optimizer.
    """

    def __init__(self, group_size: int, spec: OptimizerSpec) -> None:
        super().__init__()
        self.group_size, self.spec = group_size, spec

    @abc.abstractmethod
    def rows(self, slots: torch.Tensor, gradient: DeferredGradient) -> torch.Tensor:
        """Rows at slots (shape (R,)), shape (R, D), whose gradient is the deferred one."""

    @property
    @abc.abstractmethod
    def values(self) -> torch.Tensor:
        """Weights, shape (slots, D); writing to it changes them."""

    @abc.abstractmethod
    def states(self) -> dict[str, torch.Tensor]:
        """Optimizer state by TorchRec's names, shape (slots, 1) or (slots, D) each; writing changes it."""

    def part(self, name: str) -> torch.Tensor:
        """Weights ("weight") or a state by its name; writing changes it."""
        return self.values if name == "weight" else self.states()[name]

    @abc.abstractmethod
    def set_learning_rate(self, learning_rate: float) -> None:
        """From the next update on."""

    @abc.abstractmethod
    def begin_step(self, step: int) -> None:
        """The rows that are looked up next will be updated for the ``step``-th time (1 for the first)."""


class _Deferred(torch.autograd.Function):
    """Rows in the type in which they are sent; their gradient is the deferred one, in the kernel's own."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, deferred: DeferredGradient, dtype: torch.dtype) -> torch.Tensor:
        ctx.deferred, ctx.kernel_dtype = deferred, rows.dtype
        return rows.to(dtype) if rows.dtype != dtype else rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor, None, None]:
        gradient = ctx.deferred.take().to(ctx.kernel_dtype)
        return gradient * ctx.deferred.scale, None, None


def with_deferred_gradient(rows: torch.Tensor, deferred: DeferredGradient, dtype: torch.dtype) -> torch.Tensor:
    """Rows as another type, whose gradient is the deferred one whatever backward brings."""
    result: torch.Tensor = _Deferred.apply(rows, deferred, dtype)
    return result
