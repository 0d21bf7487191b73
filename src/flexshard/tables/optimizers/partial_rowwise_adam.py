"""Adam with one second moment per row, as FBGEMM's ``PARTIAL_ROWWISE_ADAM``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexshard.tables.optimizers.adam import Adam
from flexshard.tables.optimizers.base import State

if TYPE_CHECKING:
    import torch

__all__ = ["PartialRowwiseAdam"]


class PartialRowwiseAdam(Adam):
    """Adam with ``v = β₂v + (1-β₂)·mean(g²)``."""

    name = "partial_rowwise_adam"
    torchrec = ("partial_row_wise_adam",)
    fbgemm = "PARTIAL_ROWWISE_ADAM"
    states = (State("exp_avg", per_row=False), State("exp_avg_sq", per_row=True))

    def square(self, gradient: torch.Tensor) -> torch.Tensor:
        """The mean over a row."""
        return (gradient * gradient).mean(1, keepdim=True)
