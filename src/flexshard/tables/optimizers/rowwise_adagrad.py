"""Adagrad with one sum of squares per row, as DLRM trains its tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flexshard.tables.optimizers.base import Optimizer, State, StepOptions

if TYPE_CHECKING:
    import torch

__all__ = ["RowwiseAdagrad"]


class RowwiseAdagrad(Optimizer):
    """``h += mean(g²); w -= lr · g / (√h + eps)``; with weight decay λ as FBGEMM has it: ``g += λ·w`` first (L2), or
    ``w -= lr · λ·w`` besides (decoupled).
    """

    name = "rowwise_adagrad"
    torchrec = ("exact_row_wise_adagrad", "row_wise_adagrad")
    fbgemm = "EXACT_ROWWISE_ADAGRAD"
    takes = ("eps", "weight_decay", "weight_decay_mode")
    states = (State("momentum1", per_row=True),)

    def change(
        self, gradient: torch.Tensor, weight: torch.Tensor, state: Mapping[str, torch.Tensor], options: StepOptions
    ) -> torch.Tensor:
        """See the class."""
        sums, decay = state["momentum1"], options.weight_decay
        if not decay:
            sums.add_((gradient * gradient).mean(1, keepdim=True))
            change = gradient / sums.sqrt().add_(options.eps) * options.learning_rate
            return change if options.eps else change.masked_fill_(gradient == 0, 0.0)  # 0 / 0 of rows that nobody read
        decayed = decay * weight
        if options.decay_mode == "l2":
            gradient = gradient + decayed
        sums.add_((gradient * gradient).mean(1, keepdim=True))
        change = gradient / sums.sqrt().add_(options.eps)
        if not options.eps:
            change.masked_fill_(gradient == 0, 0.0)
        return (change if options.decay_mode == "l2" else change + decayed) * options.learning_rate
