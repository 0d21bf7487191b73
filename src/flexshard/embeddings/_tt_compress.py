"""Chosen tables of TorchRec's collections as tensor trains (EL-Rec paper, section III)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from flexshard._tt_shape import TTShape
from flexshard.embeddings._tt_embedding import TTEmbedding, TTEmbeddingBag
from flexshard.errors import TableError

__all__ = ["CompressedEmbeddingBagCollection", "CompressedEmbeddingCollection", "CompressedTable", "compress"]


@dataclass(frozen=True)
class CompressedTable:
    """What became of one table.

    Attributes:
        name: its module's path, a dot, and its own name.
        shape: factors and ranks.
        error: relative error of the decomposition (Frobenius); None if it was started anew.
    """

    name: str
    shape: TTShape
    error: float | None


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
        for config, own in zip(configs, names, strict=True):
            mine = own if config.name in tables else next(inner)
            for name, feature, now in zip(own, config.feature_names, mine, strict=True):
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
        found = {} if self.collection is None else self.collection(features)
        return _sequences(self, features, found)


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
        found = None if self.collection is None else self.collection(features)
        return _pooled(self, features, found)


@torch.fx.wrap
def _sequences(module: Any, features: KeyedJaggedTensor, found: Any) -> dict[str, JaggedTensor]:
    # A table that several features share is looked up once, so that it is updated once.
    rows: dict[tuple[str, str], torch.Tensor] = {}
    for table, keys in module._features.items():
        values = [features[key].values() for key in keys]
        parts = module.tables[table](torch.cat(values)).split([part.numel() for part in values])
        rows |= {(table, key): part for key, part in zip(keys, parts, strict=True)}
    result = {}
    for name, feature, table, _ in module._names:
        if table is None:
            result[name] = found[module._inner[name]]
        else:
            own = features[feature]
            ids = own.values() if module._need_indices else None  # where the collection puts them
            result[name] = JaggedTensor(rows[table, feature], lengths=own.lengths(), weights=ids)
    return result


@torch.fx.wrap
def _pooled(module: Any, features: KeyedJaggedTensor, found: Any) -> KeyedTensor:
    others = {} if found is None else found.to_dict()
    rows: dict[tuple[str, str], torch.Tensor] = {}
    for table, keys in module._features.items():
        own = [features[key] for key in keys]
        lengths = torch.cat([part.lengths() for part in own])
        offsets = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))
        weights = torch.cat([part.weights() for part in own]) if module._is_weighted else None
        pooled = module.tables[table](torch.cat([part.values() for part in own]), offsets, weights).float()
        rows |= {(table, key): part for key, part in zip(keys, pooled.chunk(len(keys)), strict=True)}
    values = []
    for name, feature, table, _ in module._names:
        values.append(others[module._inner[name]] if table is None else rows[table, feature])
    return KeyedTensor(
        keys=[name for name, _, _, _ in module._names],
        length_per_key=[dim for _, _, _, dim in module._names],
        values=torch.cat(values, dim=1),
    )


def compress(
    model: nn.Module, tables: Mapping[str, int | TTShape | Mapping[str, Any]], *, decompose: bool = True
) -> tuple[nn.Module, list[CompressedTable]]:
    """Replace tables of a model's collections by tensor trains.

    Args:
        model: changed in place, before it is sharded; a model that is itself a collection is replaced, so take what is
            returned.
        tables: by name (or by their module's path, a dot, and their name, where several share a name) the rank, a
            shape such as ``CompressionPlan.shapes`` has, or arguments of :class:`TTEmbeddingBag` such as
            ``{"ranks": 32, "optimizer": "adagrad"}``.
        decompose: take over each table's weights by TT-SVD; else start anew, as a table that was not trained needs.

    Returns:
        the model, and what became of each table.

    Raises:
        TableError: a name that no table has, or that several have; arguments that a tensor train cannot have.
    """
    places = {
        (path, config.name): (module, config)
        for path, module in model.named_modules()
        if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection))
        for config in _configs(module)
    }
    paths: dict[int, list[str]] = {}  # a module may stand at several
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
    wanted: dict[str, dict[str, Any]] = {}  # by path: the arguments of each table
    for name, how in tables.items():
        found = [key for key in places if name in (key[1], f"{key[0]}.{key[1]}")]
        if not found:
            raise TableError(f"the model has no table {name!r}; it has {', '.join(_known(places))}")
        if len(found) > 1:
            raise TableError(f"several tables are called {name!r}: {', '.join(_known(found))}; give one in full")
        path, own = found[0]
        if own in wanted.get(path, {}):
            raise TableError(f"table {name!r} is named twice")
        if isinstance(how, TTShape):
            how = {"ranks": how.ranks, "rows": how.rows, "dims": how.dims}
        if not isinstance(how, (int, Mapping)):
            raise TableError(f"table {name!r} takes a rank or arguments of TTEmbeddingBag, found {how!r}")
        wanted.setdefault(path, {})[own] = {"ranks": how} if isinstance(how, int) else dict(how)
    made = {path: _compressed(model.get_submodule(path), own, path, decompose) for path, own in wanted.items()}
    for path, (module, _) in made.items():  # all of them, now that none has failed
        module.train(model.get_submodule(path).training)
        for place in paths[id(model.get_submodule(path))]:
            if place:
                parent, _, own_name = place.rpartition(".")
                setattr(model.get_submodule(parent), own_name, module)
            else:
                model = module
    return model, [entry for _, report in made.values() for entry in report]


def _known(places: Any) -> list[str]:
    return [f"{path}.{name}" if path else name for path, name in places]


def _configs(module: nn.Module) -> list[Any]:
    if isinstance(module, EmbeddingBagCollection):
        return list(module.embedding_bag_configs())
    return list(module.embedding_configs())


def _compressed(
    module: Any, chosen: Mapping[str, dict[str, Any]], path: str, decompose: bool
) -> tuple[nn.Module, list[CompressedTable]]:
    bags = isinstance(module, EmbeddingBagCollection)
    configs = _configs(module)
    held = module.embedding_bags if bags else module.embeddings
    made: dict[str, nn.Module] = {}
    report = []
    for config in configs:
        if config.name not in chosen:
            continue
        weight = held[config.name].weight
        how: dict[str, Any] = {"device": weight.device if weight.device.type != "meta" else None} | chosen[config.name]
        table: Any
        taken = {"mode", "include_last_offset", "padding_idx"} & set(chosen[config.name])
        if taken:
            raise TableError(f"table {config.name!r}: {taken.pop()} is the collection's to say")
        if bags:
            if config.pooling not in (PoolingType.SUM, PoolingType.MEAN):
                raise TableError(f"table {config.name!r} pools by {config.pooling}; tensor trains by sum or mean")
            mode = "sum" if config.pooling is PoolingType.SUM else "mean"
            how |= {"mode": mode, "include_last_offset": True}
        try:
            table = (TTEmbeddingBag if bags else TTEmbedding)(config.num_embeddings, config.embedding_dim, **how)
        except TypeError as wrong:
            raise TableError(f"table {config.name!r}: {str(wrong).split('() ')[-1]}") from wrong
        error = None
        if decompose:
            if weight.device.type == "meta":
                raise TableError(f"table {config.name!r} has no weights yet to decompose; give decompose=False")
            error = table.decompose_(weight.detach())
        made[config.name] = table
        report.append(CompressedTable(f"{path}.{config.name}" if path else config.name, table.shape, error))
    others = [config for config in configs if config.name not in made]
    rest: Any = None
    if others:
        kind = type(module)
        how = {"is_weighted": module.is_weighted()} if bags else {"need_indices": module.need_indices()}
        rest = kind(tables=others, device=torch.device("meta"), **how)
        kept = rest.embedding_bags if bags else rest.embeddings
        for config in others:
            kept[config.name] = held[config.name]  # the very parameters, with their optimizers
        rest._device = module._device if hasattr(module, "_device") else rest._device
    if bags:
        return CompressedEmbeddingBagCollection(configs, rest, made, is_weighted=module.is_weighted()), report
    return CompressedEmbeddingCollection(configs, rest, made, need_indices=module.need_indices()), report
