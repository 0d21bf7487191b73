"""Adagrad (Duchi, Hazan and Singer 2011)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flexshard.tables.optimizers.base import Optimizer, State, StepOptions

if TYPE_CHECKING:
    import torch

__all__ = ["Adagrad"]


class Adagrad(Optimizer):
    """``h += g²; w -= lr · g / (√h + eps)``, with a sum of squares per element."""

    name = "adagrad"
    torchrec = ("exact_adagrad", "adagrad")
    fbgemm = "EXACT_ADAGRAD"
    takes = ("eps",)
    states = (State("momentum1", per_row=False),)

    def change(
        self, gradient: torch.Tensor, weight: torch.Tensor, state: Mapping[str, torch.Tensor], options: StepOptions
    ) -> torch.Tensor:
        """See the class."""
        del weight
        sums = state["momentum1"]
        sums.addcmul_(gradient, gradient)
        change = gradient / sums.sqrt().add_(options.eps) * options.learning_rate
        return change if options.eps else change.masked_fill_(gradient == 0, 0.0)  # 0 / 0 of rows that nobody read
