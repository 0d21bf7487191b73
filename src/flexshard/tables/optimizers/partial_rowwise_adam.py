"""Adam with one second moment per row; planned with, not run yet."""

from __future__ import annotations

from flexshard.tables.optimizers.base import Optimizer, State

__all__ = ["PartialRowwiseAdam"]


class PartialRowwiseAdam(Optimizer):
    """FBGEMM's ``PARTIAL_ROWWISE_ADAM``."""

    name = "partial_rowwise_adam"
    torchrec = ("partial_row_wise_adam",)
    states = (State("exp_avg", per_row=False), State("exp_avg_sq", per_row=True))
