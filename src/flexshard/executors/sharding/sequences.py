"""TorchRec's ``EmbeddingCollection`` under a FlexShard plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from flexshard.embeddings import jagged_index_select
from flexshard.executors.sharding.batches import Lookup
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
        lengths_of = features.lengths().split(features.stride_per_key())
        ids_of = None
        if self._need_indices:
            sizes = features.length_per_key()
            ids_of = features.values()[: sum(sizes)].split(sizes)
        for lookup, place, looked_up in self._per_lookup(features, rows):
            values, lengths = looked_up, lengths_of[place]
            ids = None if ids_of is None else ids_of[place]
            if samples is not None:  # lists that several samples share
                shared = samples[lookup.feature]
                if ids is not None:
                    ids, _ = jagged_index_select(ids, lengths, shared)
                values, lengths = jagged_index_select(values, lengths, shared)
            output[lookup.name] = JaggedTensor(values=values, lengths=lengths, weights=ids)
        output |= self._of_others(others, dict)
        return {name: output[name] for name in self._names}  # in the collection's order, whoever shards a table

    def _per_lookup(
        self, features: KeyedJaggedTensor, rows: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Lookup, int, torch.Tensor]]:
        """Of each planned table's lookups: where the batch has their feature, and a row for each id."""
        places = {feature: place for place, feature in enumerate(features.keys())}
        lengths = features.length_per_key()
        parts = []
        for index, values in enumerate(rows):
            sizes = [lengths[places[lookup.feature]] for lookup in self.lookups if lookup.group == index]
            # Backward of a split copies gradients together, which one part does not need.
            parts.append(iter(values.split(sizes) if len(sizes) > 1 else (values,)))
        for lookup in self.lookups:
            yield lookup, places[lookup.feature], next(parts[lookup.group])
