"""What a table is: sizes, data type, optimizer, access profile; deduplication; shapes of tensor trains.

May import: errors, units, _internal, profiling. No torch.
"""

from typing import TYPE_CHECKING

from flexshard._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from flexshard.tables.data_types import (
        DATA_TYPES as DATA_TYPES,
        DataType as DataType,
        data_type_of_torchrec as data_type_of_torchrec,
    )
    from flexshard.tables.dedup_factors import (
        combined_dedup_factor as combined_dedup_factor,
        dedup_factor as dedup_factor,
        dedup_len as dedup_len,
    )
    from flexshard.tables.optimizers.base import Optimizer as Optimizer, State as State, StepOptions as StepOptions
    from flexshard.tables.optimizers.registry import (
        OPTIMIZERS as OPTIMIZERS,
        optimizer_of_torchrec as optimizer_of_torchrec,
    )
    from flexshard.tables.table import (
        Table as Table,
        check_table_name as check_table_name,
        expected_distinct as expected_distinct,
        place_bytes as place_bytes,
        translation_bytes as translation_bytes,
    )
    from flexshard.tables.tensor_train_shape import KEPT_SHARE as KEPT_SHARE, TTShape as TTShape

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "data_types": ["DATA_TYPES", "DataType", "data_type_of_torchrec"],
        "dedup_factors": ["combined_dedup_factor", "dedup_factor", "dedup_len"],
        "optimizers.base": ["Optimizer", "State", "StepOptions"],
        "optimizers.registry": ["OPTIMIZERS", "optimizer_of_torchrec"],
        "table": ["Table", "check_table_name", "expected_distinct", "place_bytes", "translation_bytes"],
        "tensor_train_shape": ["KEPT_SHARE", "TTShape"],
    },
)
