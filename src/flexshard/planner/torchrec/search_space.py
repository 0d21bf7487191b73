"""TorchRec's search space as menus of the master problem."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import PartitionByType, ShardingOption
from torchrec.distributed.types import ShardingType

from flexshard.errors import PlanError
from flexshard.planner.torchrec.distinct_shards import PricedOption
from flexshard.planner.whole_model.menus import Menus, Option, Spread

__all__ = ["menus_of"]

_SIMPLE = ("data_parallel", "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise")
_MEMORY = ("HBM", "host memory", "SSD")


def menus_of(options: Sequence[PricedOption], reserved: Topology) -> Menus:
    """Menus of a search space, on the ranks of a topology from which storage is reserved."""
    tables: dict[tuple[str, str], list[Option]] = {}
    groups: dict[str, set[tuple[str, str]]] = {}
    for source, each in enumerate(options):
        option = each.option
        key = (option.path, option.name)
        if option.dependency is not None:
            groups.setdefault(option.dependency, set()).add(key)
        spread = _spread(option)
        if spread is None:
            raise PlanError(
                f"table {option.name!r}: column_wise shards in a key-value store need ranks of their own, which"
                " OptimalShardingPlanner does not look for; constrain the table to other sharding types or kernels, or"
                " use EmbeddingShardingPlanner"
            )
        name = f"{option.sharding_type}/{option.compute_kernel}"
        tables.setdefault(key, []).append(Option(name, spread, each.perf, each.storage, source))
    positions = {key: position for position, key in enumerate(tables)}
    storages = [device.storage for device in reserved.devices]
    return Menus(
        tables=tuple(f"{path}.{name}" if path else name for path, name in tables),
        # In an order of their own: TorchRec's depends on how its sets of names happen to be ordered in a process.
        options=tuple(tuple(sorted(menu, key=_simplest_first)) for menu in tables.values()),
        capacity=np.maximum([[getattr(s, kind) for s in storages] for kind in ("hbm", "ddr", "ssd")], 0.0),
        kinds=_MEMORY,
        ranks_per_host=reserved.intra_group_size,
        together=tuple(tuple(sorted(positions[key] for key in group)) for group in groups.values() if len(group) > 1),
    )


def _simplest_first(option: Option) -> tuple[int, str]:
    """Of options that cost the same the first is taken: a table whole rather than as its only column shard."""
    sharding_type = option.name.partition("/")[0]
    return _SIMPLE.index(sharding_type) if sharding_type in _SIMPLE else len(_SIMPLE), option.name


def _spread(option: ShardingOption) -> Spread | None:
    """Where TorchRec lays an option's shards; None for columns in a key-value store, which need ranks of their own."""
    if option.partition_by == PartitionByType.UNIFORM.value:
        return Spread.EVERY_RANK
    if option.partition_by == PartitionByType.MULTI_HOST.value:
        return Spread.HOST_BLOCKS
    if option.partition_by == PartitionByType.HOST.value:
        by_row = option.sharding_type == ShardingType.TABLE_ROW_WISE.value
        return Spread.HOST_BLOCKS if by_row else Spread.ONE_HOST
    if option.sharding_type == ShardingType.COLUMN_WISE.value and option.compute_kernel == "key_value":
        return None
    return Spread.ANY_RANK
