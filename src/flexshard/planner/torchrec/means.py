"""Tables of means that TorchRec trains wrongly."""

from __future__ import annotations

import warnings

from torch import nn
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from flexshard.costmodels import CUT_BY_ROWS

__all__ = ["warn_of_means"]


def warn_of_means(module: nn.Module, plan: ShardingPlan, *, stacklevel: int) -> ShardingPlan:
    """The plan, with a UserWarning if it has a table of means cut by rows beside tables of the same collection that are
    sharded otherwise: TorchRec 1.8 divides the sums of those others by their lengths, too.
    """
    for fqn, part in module.named_modules():
        shardings = plan.plan.get(fqn)
        if not isinstance(part, EmbeddingBagCollection) or not isinstance(shardings, EmbeddingModuleShardingPlan):
            continue
        types = {name: one.sharding_type for name, one in shardings.items()}
        means = [config.name for config in part.embedding_bag_configs() if config.pooling is PoolingType.MEAN]
        cut = [name for name in means if types.get(name) in CUT_BY_ROWS]
        if cut and len(set(types.values())) > 1:
            warnings.warn(
                f"table {cut[0]!r} of {fqn or 'the model'} is averaged and cut by rows ({types[cut[0]]}) beside tables"
                " that are sharded otherwise, which TorchRec 1.8 trains wrongly; let ParameterConstraints keep it whole"
                " (table_wise, column_wise), or pool by sums",
                UserWarning,
                stacklevel=stacklevel + 1,
            )
    return plan
