"""How a plan reaches TorchRec: the sharding of one table, as ``DistributedModelParallel`` carries it to the sharder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchrec.distributed.types import ParameterSharding

from flexshard.planner.constraints import TIERS
from flexshard.planner.plan import TablePlan

__all__ = ["FLEX_SHARD", "FlexShardParameterSharding"]

FLEX_SHARD = TIERS


@dataclass
class FlexShardParameterSharding(ParameterSharding):
    """A table's tiers.

    Attributes:
        table: the table's part of the plan.
        world_size, ranks_per_node: of the cluster that it is for.
        fingerprint: of the plan.
        index_dedup: whether a batch's repeated ids of the table are sent once.
        ranked_rows: ids of the rows that need places of their own, hottest first; None where there are none, or all
            rows are one tier and no profile was given. Not sent to other ranks: each reads its own.
    """

    table: TablePlan | None = None
    world_size: int = 0
    ranks_per_node: int = 0
    fingerprint: str = ""
    index_dedup: bool = False
    ranked_rows: Any = None
