"""Optimizer steps of tensor-train cores and of pinned rows, taken within the backward pass."""

from __future__ import annotations

import torch
import torch.distributed as dist

from flexshard._internal import check_finite
from flexshard.errors import TableError
from flexshard.tables import OPTIMIZERS, StepOptions

__all__ = ["FUSED", "CoreOptimizer", "at_least_0"]

# Those whose state a slice of a core can have.
FUSED = ("sgd", "adagrad", "rowwise_adagrad")


class CoreOptimizer:
    """What an optimizer does to slices of cores (a slice is to it what a row is), and to rows that are pinned.

    Attributes:
        name: "sgd", "adagrad" or "rowwise_adagrad".
        learning_rate, eps: as usual; they may be changed between steps.
        updates: steps so far: cores of a lookup must not have been updated before its backward pass.
    """

    def __init__(self, name: str, learning_rate: float, eps: float) -> None:
        """As :class:`TTTable` has them; raises TableError for numbers out of range."""
        if name not in FUSED:
            raise TableError(f"optimizer is one of {', '.join(FUSED)} or None, found {name!r}")
        self.name, self.updates = name, 0
        self.learning_rate, self.eps = at_least_0(learning_rate, "learning_rate"), at_least_0(eps, "eps")
        if not self.eps and self.has_state:
            raise TableError("eps must be above 0: numbers without a gradient yet would be divided by 0")

    @property
    def has_state(self) -> bool:
        """Whether it keeps sums of squares."""
        return bool(OPTIMIZERS[self.name].states)

    def new_state(self, rows: torch.Size, device: torch.device | str | None) -> torch.Tensor:
        """Zeros for slices or rows of this shape: as large, or one number each."""
        per_row = OPTIMIZERS[self.name].states[0].per_row
        return torch.zeros(rows[:1] if per_row else rows, device=device)

    def check_alone(self) -> None:
        """Check that no other rank has gradients of its own.

        Raises:
            TableError: the job has several ranks.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise TableError(
                f"optimizer {self.name!r} updates the cores within backward, where ranks have their own gradients;"
                " in a job of several ranks use optimizer=None and an optimizer after them"
            )

    @torch.no_grad()
    def step(self, values: torch.Tensor, gradient: torch.Tensor, state: torch.Tensor | None) -> None:
        """Update slices of a core, or rows, in place; shape (n, ...), state (n, ...) or (n,)."""
        values = values.detach()
        if state is None:
            values.add_(gradient.to(values.dtype), alpha=-self.learning_rate)
            return
        change = self.change(gradient, values, state)
        values.sub_(change.to(values.dtype))

    def change(self, gradient: torch.Tensor, values: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """What Adagrad takes off; of the gradient's shape. Updates the state in place."""
        flat = gradient.flatten(1)
        sums = state.unsqueeze(1) if state.dim() == 1 else state.flatten(1)
        weight, options = values.float().flatten(1), StepOptions(learning_rate=self.learning_rate, eps=self.eps)
        change = OPTIMIZERS[self.name].change(flat, weight, {"momentum1": sums}, options)
        return change.view(gradient.shape)


def at_least_0(value: float, name: str) -> float:
    """A finite number that is not negative; raises TableError."""
    number = check_finite(value, name, TableError)
    if number < 0:
        raise TableError(f"{name} must be at least 0, found {value}")
    return number
