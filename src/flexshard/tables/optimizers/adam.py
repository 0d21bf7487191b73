"""Adam (Kingma and Ba 2015), of the rows that a batch read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flexshard.tables.optimizers.base import Optimizer, State, StepOptions

if TYPE_CHECKING:
    import torch

__all__ = ["Adam"]


class Adam(Optimizer):
    """``m = β₁m + (1-β₁)g; v = β₂v + (1-β₂)g²; w -= lr · (m̂ / (√v̂ + eps) + λ·w)``, as FBGEMM has it: its weight decay λ
    is that of ``torch.optim.AdamW``.

    Rows that a batch did not read keep their moments and their weights; those that it read move, whatever their
    gradient.
    """

    name = "adam"
    torchrec = ("adam",)
    fbgemm = "ADAM"
    on_cpu = False
    takes = ("eps", "beta1", "beta2", "weight_decay")
    counts_steps = True
    moves_at_zero = True
    states = (State("exp_avg", per_row=False), State("exp_avg_sq", per_row=False))

    def change(
        self, gradient: torch.Tensor, weight: torch.Tensor, state: Mapping[str, torch.Tensor], options: StepOptions
    ) -> torch.Tensor:
        """See the class."""
        beta1, beta2, step = options.beta1, options.beta2, options.step
        mean = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).add_(self.square(gradient), alpha=1 - beta2)
        corrected = (square / (1 - beta2**step)).sqrt_().add_(options.eps)
        change = mean / (1 - beta1**step) / corrected
        if options.weight_decay:
            change.add_(weight, alpha=options.weight_decay)
        return change.mul_(options.learning_rate)

    def square(self, gradient: torch.Tensor) -> torch.Tensor:
        """What the second moment averages."""
        return gradient * gradient
