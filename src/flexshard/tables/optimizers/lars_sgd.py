"""SGD with momentum and a rate for each row (LARS, You et al. 2017), as FBGEMM's ``LARS_SGD``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flexshard.tables.optimizers.base import Optimizer, State, StepOptions

if TYPE_CHECKING:
    import torch

__all__ = ["LarsSGD"]


class LarsSGD(Optimizer):
    """``r = lr · eta · |w| / (|g| + λ|w|); m = μm + r(g + λw); w -= m``, norms of a row and momentum μ.

    Where a row and its gradient are both 0, FBGEMM divides 0 by 0; here the row stays.
    """

    name = "lars_sgd"
    torchrec = ("lars_sgd",)
    fbgemm = "LARS_SGD"
    on_cpu = False
    takes = ("momentum", "eta", "weight_decay")
    moves_at_zero = True
    states = (State("momentum1", per_row=False),)

    def change(
        self, gradient: torch.Tensor, weight: torch.Tensor, state: Mapping[str, torch.Tensor], options: StepOptions
    ) -> torch.Tensor:
        """See the class."""
        size, decay = weight.norm(dim=1, keepdim=True), options.weight_decay
        slope = gradient.norm(dim=1, keepdim=True) + decay * size
        rate = (options.learning_rate * options.eta * size / slope).nan_to_num_(nan=0.0, posinf=0.0)
        momentum: torch.Tensor = state["momentum1"].mul_(options.momentum)
        return momentum.add_(rate * gradient.add(weight, alpha=decay))
