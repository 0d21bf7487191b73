"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flexshard.tables.optimizers.base import Optimizer, StepOptions

if TYPE_CHECKING:
    import torch

__all__ = ["SGD"]


class SGD(Optimizer):
    """``w -= lr · g``."""

    name = "sgd"
    torchrec = ("exact_sgd", "sgd")
    fbgemm = "EXACT_SGD"

    def change(
        self, gradient: torch.Tensor, weight: torch.Tensor, state: Mapping[str, torch.Tensor], options: StepOptions
    ) -> torch.Tensor:
        """See the class."""
        del weight, state
        return gradient * options.learning_rate
