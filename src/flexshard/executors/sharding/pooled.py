"""TorchRec's ``EmbeddingBagCollection``, of whose tables some have their rows behind a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from flexshard.executors.sharding.module import ShardedRowsModule
from flexshard.executors.sharding.sharded_tables import ShardedTables

__all__ = ["ShardedFlexShardEmbeddingBagCollection"]


class ShardedFlexShardEmbeddingBagCollection(ShardedRowsModule):
    """An ``EmbeddingBagCollection`` whose rows come to the ranks that ask for them, each once, and are added up there.

    (TorchRec's row-wise tables send sums: of many rows a bag that is less, of few it is more.)
    """

    container = "embedding_bags"

    def __init__(
        self, configs: Sequence[EmbeddingBagConfig], tables: ShardedTables, *, is_weighted: bool, **shared: Any
    ) -> None:
        """As :class:`ShardedRowsModule`, and whether ids have weights."""
        super().__init__(configs, tables, **shared)
        self._is_weighted = is_weighted
        names = get_embedding_names_by_table(list(configs))
        self._modes = {
            name: "mean" if config.pooling == PoolingType.MEAN else "sum"
            for config, of_table in zip(configs, names, strict=True)
            for name in of_table
        }
        self._names = [name for of_table in names for name in of_table]
        self._dims = [config.embedding_dim for config in configs for _ in config.feature_names]

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return EmbeddingBagCollection

    def _of_torchrec(self, features: KeyedJaggedTensor, problem: object) -> KeyedJaggedTensor:
        given = super()._of_torchrec(features, problem)
        if self._is_weighted or given.weights_or_none() is None:
            return given
        # TorchRec's kernels would use weights that the unsharded collection does not look at.
        strides = given.stride_per_key_per_rank() if given.variable_stride_per_key() else None
        inverse = given.inverse_indices_or_none()
        return KeyedJaggedTensor(
            given.keys(),
            given.values(),
            lengths=given.lengths(),
            stride=None if strides is not None else given.stride(),
            stride_per_key_per_rank=strides,
            inverse_indices=inverse,
        )

    def _assemble(
        self, features: KeyedJaggedTensor, others: LazyAwaitable[KeyedTensor] | None, rows: Sequence[torch.Tensor]
    ) -> KeyedTensor:
        samples = None
        if features.variable_stride_per_key():
            samples = dict(zip(*features.inverse_indices(), strict=True))
        sums = {}
        for lookup, jagged, values in self._per_lookup(features, rows):
            pooled = self._pooled(values, jagged, self._modes[lookup.name])
            sums[lookup.name] = pooled if samples is None else pooled.index_select(0, samples[lookup.feature])
        sums |= self._of_others(others, KeyedTensor.to_dict)
        return KeyedTensor(self._names, self._dims, torch.cat([sums[name] for name in self._names], 1))

    def _pooled(self, rows: torch.Tensor, jagged: JaggedTensor, mode: str) -> torch.Tensor:
        """Sums or means of a feature's rows, (n, D), by bag; shape (bags, D)."""
        each = torch.arange(rows.shape[0], device=rows.device)
        # Without weights all count once; they get no gradients, as they get none behind TorchRec's exchange.
        given = jagged.weights_or_none() if self._is_weighted else None
        weights = None if given is None else given.detach().to(rows.dtype)
        offsets = jagged.offsets().to(each.dtype)
        return nn.functional.embedding_bag(
            each, rows, offsets, mode=mode, per_sample_weights=weights, include_last_offset=True
        )
