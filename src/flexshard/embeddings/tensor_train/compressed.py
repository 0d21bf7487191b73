"""TorchRec's collections with tables that are partly tensor trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from flexshard._internal import with_flat_lengths

__all__ = ["CompressedEmbeddingBagCollection", "CompressedEmbeddingCollection"]


class _Compressed(nn.Module):
    """A collection whose tables are partly tensor trains.

    Attributes:
        collection: the other tables, which a sharder takes as it would; None if there are none.
        tables: the tensor trains, by table. Under DistributedModelParallel they are dense parameters: every rank has
            them whole, and their gradients are all-reduced.
    """

    def __init__(self, configs: Sequence[Any], collection: nn.Module | None, tables: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.collection = collection
        self.tables = nn.ModuleDict(dict(tables))
        names = get_embedding_names_by_table(list(configs))
        others = [config for config in configs if config.name not in tables]
        inner = iter(get_embedding_names_by_table(others) if others else [])
        self._names: list[tuple[str, str, str | None, int]] = []  # as before, feature, table or None, dimension
        self._features = {config.name: list(config.feature_names) for config in configs if config.name in tables}
        self._inner: dict[str, str] = {}  # name as before to the name that the remaining collection gives
        for config, feature_names in zip(configs, names, strict=True):
            mine = feature_names if config.name in tables else next(inner)
            for name, feature, now in zip(feature_names, config.feature_names, mine, strict=True):
                table = config.name if config.name in tables else None
                self._names.append((name, feature, table, config.embedding_dim))
                self._inner[name] = now


class CompressedEmbeddingCollection(_Compressed):
    """An EmbeddingCollection whose tables are partly tensor trains."""

    def __init__(
        self,
        configs: Sequence[Any],
        collection: nn.Module | None,
        tables: Mapping[str, nn.Module],
        *,
        need_indices: bool = False,
    ) -> None:
        """See :func:`compress`, which makes them."""
        super().__init__(configs, collection, tables)
        self._need_indices = need_indices

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Embeddings by feature, as the collection gave them."""
        dense_outputs = {} if self.collection is None else self.collection(features)
        return _sequences(self, features, dense_outputs)


class CompressedEmbeddingBagCollection(_Compressed):
    """An EmbeddingBagCollection whose tables are partly tensor trains."""

    def __init__(
        self,
        configs: Sequence[Any],
        collection: nn.Module | None,
        tables: Mapping[str, nn.Module],
        *,
        is_weighted: bool = False,
    ) -> None:
        """See :func:`compress`, which makes them."""
        super().__init__(configs, collection, tables)
        self._is_weighted = is_weighted

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled embeddings by feature, in the order in which the collection gave them."""
        dense_outputs = None if self.collection is None else self.collection(features)
        return _pooled(self, features, dense_outputs)


@torch.fx.wrap
def _sequences(module: Any, features: KeyedJaggedTensor, dense_outputs: Any) -> dict[str, JaggedTensor]:
    features = with_flat_lengths(features)
    # A table that several features share is looked up once, so that it is updated once.
    rows: dict[tuple[str, str], torch.Tensor] = {}
    for table, keys in module._features.items():
        values = [features[key].values() for key in keys]
        parts = module.tables[table](torch.cat(values)).float().split([part.numel() for part in values])
        rows |= {(table, key): part for key, part in zip(keys, parts, strict=True)}
    result = {}
    for name, feature, table, _ in module._names:
        if table is None:
            result[name] = dense_outputs[module._inner[name]]
        else:
            jagged = features[feature]
            ids = jagged.values() if module._need_indices else None  # where the collection puts them
            result[name] = JaggedTensor(rows[table, feature], lengths=jagged.lengths(), weights=ids)
    return result


@torch.fx.wrap
def _pooled(module: Any, features: KeyedJaggedTensor, dense_outputs: Any) -> KeyedTensor:
    features = with_flat_lengths(features)
    others = {} if dense_outputs is None else dense_outputs.to_dict()
    rows: dict[tuple[str, str], torch.Tensor] = {}
    for table, keys in module._features.items():
        ids = [features[key] for key in keys]
        lengths = torch.cat([part.lengths() for part in ids])
        offsets = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))
        weights = torch.cat([part.weights() for part in ids]) if module._is_weighted else None
        pooled = module.tables[table](torch.cat([part.values() for part in ids]), offsets, weights).float()
        bags = [part.lengths().numel() for part in ids]  # which features may have as many as they like
        rows |= {(table, key): part for key, part in zip(keys, pooled.split(bags), strict=True)}
    if features.inverse_indices_or_none() is not None:  # samples that share bags
        samples = dict(zip(*features.inverse_indices(), strict=True))
        rows = {(table, key): part.index_select(0, samples[key]) for (table, key), part in rows.items()}
    values = []
    for name, feature, table, _ in module._names:
        values.append(others[module._inner[name]] if table is None else rows[table, feature])
    return KeyedTensor(
        keys=[name for name, _, _, _ in module._names],
        length_per_key=[dim for _, _, _, dim in module._names],
        values=torch.cat(values, dim=1),
    )
