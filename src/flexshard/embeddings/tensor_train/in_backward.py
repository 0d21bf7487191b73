"""What of a model is updated within the backward pass, and by nobody after it."""

from __future__ import annotations

from torch import nn

from flexshard.embeddings.tensor_train.table import TTTable

__all__ = ["updated_in_backward"]


def updated_in_backward(model: nn.Module) -> list[str]:
    """Names of the parameters of a model that tensor trains update within backward: DistributedDataParallel and
    DistributedModelParallel have to ignore them, since they never have a gradient.
    """
    found: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, TTTable) and module.core_optimizer is not None:
            found += [f"{path}.{name}" if path else name for name, _ in module.named_parameters()]
    return found
