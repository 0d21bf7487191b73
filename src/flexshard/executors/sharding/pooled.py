"""TorchRec's ``EmbeddingBagCollection``, of whose tables some have their rows behind a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from flexshard._internal import segment_of, to_device, without_weights
from flexshard.executors.sharding.batches import Lookup
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
        self._means = {
            name
            for config, of_table in zip(configs, names, strict=True)
            if config.pooling == PoolingType.MEAN
            for name in of_table
        }
        self._dims = [config.embedding_dim for config in configs for _ in config.feature_names]

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return EmbeddingBagCollection

    def _of_torchrec(self, features: KeyedJaggedTensor, problem: object) -> KeyedJaggedTensor:
        given = super()._of_torchrec(features, problem)
        # TorchRec's kernels would use weights that the unsharded collection does not look at.
        return given if self._is_weighted else without_weights(given)

    def _assemble(
        self, features: KeyedJaggedTensor, others: LazyAwaitable[KeyedTensor] | None, rows: Sequence[torch.Tensor]
    ) -> KeyedTensor:
        samples = None
        if features.variable_stride_per_key():
            samples = dict(zip(*features.inverse_indices(), strict=True))
        sums = {}
        for group, values in enumerate(rows):
            lookups = [lookup for lookup in self.lookups if lookup.group == group]
            if not lookups:
                continue
            pooled, bags = self._pooled(features, lookups, values, self.groups[group].traits.output_dtype)
            if samples is None and [lookup.name for lookup in lookups] == self._names:
                # All of the output: one transposition, instead of as many parts as there are names.
                by_sample = pooled.view(len(lookups), features.stride(), pooled.shape[1]).transpose(0, 1)
                return KeyedTensor(self._names, self._dims, by_sample.flatten(1))
            for lookup, part in zip(lookups, pooled.split(bags), strict=True):
                sums[lookup.name] = part if samples is None else part.index_select(0, samples[lookup.feature])
        sums |= self._of_others(others, KeyedTensor.to_dict)
        return KeyedTensor(self._names, self._dims, torch.cat([sums[name] for name in self._names], 1))

    def _pooled(
        self, features: KeyedJaggedTensor, lookups: Sequence[Lookup], rows: torch.Tensor, output: torch.dtype
    ) -> tuple[torch.Tensor, list[int]]:
        """Sums or means of lookups' rows, (n, D), one lookup behind the other, by bag, in a type, (bags, D); and each
        lookup's number of bags.
        """
        strides = features.stride_per_key()
        places = {feature: place for place, feature in enumerate(features.keys())}
        which = [places[lookup.feature] for lookup in lookups]
        bags = [strides[place] for place in which]
        lengths = _parts(features.lengths(), np.cumsum([0, *strides]).tolist(), which).long()
        weights = None
        if self._is_weighted and features.weights_or_none() is not None:
            weights = _parts(features.weights(), features.offset_per_key(), which).to(rows.dtype)
            if self._torchrec and self.tables.layout.world_size > 1:
                weights = weights.detach()  # they get no gradients behind TorchRec's exchange: none, and not some
        means = [lookup.name in self._means for lookup in lookups]
        scale = None
        if any(means):
            scale = 1.0 / lengths.clamp(min=1).to(rows.dtype)
            if not all(means):
                mean = to_device(np.array(means), rows.device)[segment_of(np.array(bags), rows.device)]
                scale = torch.where(mean, scale, 1.0)
        pooled: torch.Tensor = _Pool.apply(rows, lengths, weights, scale)
        return pooled.to(output), bags


def _parts(values: torch.Tensor, ends: Sequence[int], which: Sequence[int]) -> torch.Tensor:
    """Parts of values, one behind the other; mostly all of them, as they stand."""
    if list(which) == list(range(len(ends) - 1)):
        return values
    return torch.cat([values[ends[part] : ends[part + 1]] for part in which])


class _Pool(torch.autograd.Function):
    """Sums of rows by bag. Backward is one look-up; that of torch's ``embedding_bag`` sorts its indices first."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None, scale: torch.Tensor | None
    ) -> torch.Tensor:
        """``lengths`` and ``scale`` of each bag, ``weights`` of each row."""
        ctx.save_for_backward(lengths, weights, scale, rows if ctx.needs_input_grad[2] else None)
        ctx.number = rows.shape[0]
        each = torch.arange(ctx.number, device=rows.device)
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
        pooled: torch.Tensor = torch.embedding_bag(rows, each, offsets, False, 0, False, weights, True)[0]
        return pooled if scale is None else pooled.mul_(scale.view(-1, 1))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None, None]:
        lengths, weights, scale, looked_up = ctx.saved_tensors
        if scale is not None:
            gradient = gradient * scale.view(-1, 1)
        rows = gradient.index_select(0, torch.repeat_interleave(lengths, output_size=ctx.number))
        of_weights = None if looked_up is None else (rows * looked_up).sum(1)
        return rows if weights is None else rows.mul_(weights.view(-1, 1)), None, of_weights, None
