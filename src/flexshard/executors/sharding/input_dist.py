"""A batch's distribution ahead of a forward pass, for loops without a pipeline."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from flexshard.errors import PlanError
from flexshard.executors.sharding.batches import BatchPart
from flexshard.executors.sharding.joint import JointModules
from flexshard.executors.sharding.module import ShardedRowsModule

__all__ = ["start_input_dist"]


def start_input_dist(model: nn.Module, features: KeyedJaggedTensor | TensorDict) -> None:
    """Begin a batch for all collections of a model that are under a FlexShard plan, in one exchange, before its forward
    pass; every rank must call it.

    TorchRec's pipelines do so themselves. In a plain loop each collection would wait for an exchange of its own::

        start_input_dist(model, batch.features)
        loss = model(batch)

    Collections that have no feature in the batch are left alone; the batch must have the same ones on every rank. The
    others have to be given this very object before any that was not begun so, on every rank; those that are not given
    it at all cost their rows' way. The rows of all of them are looked up when the first one's are, so neither rows nor
    learning rates may be changed from then on until the last one has its own, and neither ids nor tensors of a
    ``state_dict()`` from this call on. If rows are updated, loaded or resharded in between, collections that come later
    look theirs up again. Not for collections inside ``torch.utils.checkpoint`` with ``use_reentrant=False``, which
    torch refuses in the backward pass: computing one of them again looks up its own rows alone.

    Args:
        model: sharded, or a part of such a model.
        features: as the collections will be given them.

    Raises:
        PlanError: no collection of the model is under a plan and looks up features of the batch.
    """
    batch = maybe_td_to_kjt(features)
    keys = set(batch.keys())
    parts: dict[JointModules, dict[int, BatchPart]] = {}
    with torch.no_grad():
        for module in model.modules():
            # One that lacks some of its features is refused on every rank, as it is without this.
            if isinstance(module, ShardedRowsModule) and not keys.isdisjoint(one.feature for one in module.lookups):
                parts.setdefault(module.joint, {})[module.index] = module.part_of(batch, features)
    if not parts:
        raise PlanError(
            "start_input_dist: no collection of the model is under a FlexShard plan and has features among"
            f" {', '.join(sorted(keys)[:5])}; give it the sharded model, and the batch that its collections get"
        )
    for joint, of_modules in parts.items():
        joint.start(of_modules)
