"""Every optimizer, by its name here and by the names that TorchRec and FBGEMM have for it."""

from __future__ import annotations

from flexshard.tables.optimizers.adagrad import Adagrad
from flexshard.tables.optimizers.adam import Adam
from flexshard.tables.optimizers.base import Optimizer
from flexshard.tables.optimizers.lars_sgd import LarsSGD
from flexshard.tables.optimizers.partial_rowwise_adam import PartialRowwiseAdam
from flexshard.tables.optimizers.rowwise_adagrad import RowwiseAdagrad
from flexshard.tables.optimizers.sgd import SGD

__all__ = ["OPTIMIZERS", "STATE_BYTES", "optimizer_of_torchrec"]

OPTIMIZERS: dict[str, Optimizer] = {
    one.name: one for one in (SGD(), RowwiseAdagrad(), Adagrad(), Adam(), PartialRowwiseAdam(), LarsSGD())
}

# As (per element, per row): what ``flexshard.costmodels.OPTIMIZERS`` was.
STATE_BYTES = {name: (one.state_bytes_per_element, one.state_bytes(0)) for name, one in OPTIMIZERS.items()}


def optimizer_of_torchrec(name: str) -> Optimizer | None:
    """The optimizer that TorchRec's ``fused_params`` call by this value of ``EmbOptimType``; None if none does."""
    return next((one for one in OPTIMIZERS.values() if name in one.torchrec), None)
