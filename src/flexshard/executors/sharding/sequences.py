"""TorchRec's ``EmbeddingCollection`` under a FlexShard plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from flexshard.embeddings import jagged_index_select
from flexshard.executors.sharding.module import ShardedRowsModule
from flexshard.executors.sharding.sharded_tables import ShardedTables

__all__ = ["ShardedFlexShardEmbeddingCollection"]


class ShardedFlexShardEmbeddingCollection(ShardedRowsModule):
    """An ``EmbeddingCollection`` whose rows live where a plan puts them: a row for each id."""

    container = "embeddings"

    def __init__(
        self, configs: Sequence[EmbeddingConfig], tables: ShardedTables, *, need_indices: bool = False, **shared: Any
    ) -> None:
        """As :class:`ShardedRowsModule`, and whether ids come back with the rows."""
        super().__init__(configs, tables, **shared)
        self._need_indices = need_indices

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return EmbeddingCollection

    def _assemble(
        self,
        features: KeyedJaggedTensor,
        others: LazyAwaitable[dict[str, JaggedTensor]] | None,
        rows: Sequence[torch.Tensor],
    ) -> dict[str, JaggedTensor]:
        samples = None
        if features.variable_stride_per_key():
            samples = dict(zip(*features.inverse_indices(), strict=True))
        output = {}
        for lookup, jagged, looked_up in self._per_lookup(features, rows):
            values, lengths = looked_up, jagged.lengths()
            ids = jagged.values() if self._need_indices else None
            if samples is not None:  # lists that several samples share
                shared = samples[lookup.feature]
                if ids is not None:
                    ids, _ = jagged_index_select(ids, lengths, shared)
                values, lengths = jagged_index_select(values, lengths, shared)
            output[lookup.name] = JaggedTensor(values=values, lengths=lengths, weights=ids)
        return output | self._of_others(others, dict)
