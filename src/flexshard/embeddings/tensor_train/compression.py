"""Chosen tables of TorchRec's collections as tensor trains (EL-Rec paper, section III)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_configs import PoolingType

from flexshard.embeddings.tensor_train.compressed import (
    CompressedEmbeddingBagCollection,
    CompressedEmbeddingCollection,
)
from flexshard.embeddings.tensor_train.decomposition import LARGE_ERROR, of_rank, warn_of_error
from flexshard.embeddings.tensor_train.embedding import TTEmbedding, TTEmbeddingBag
from flexshard.errors import TableError
from flexshard.tables import TTShape

__all__ = ["CompressedTable", "compress"]


@dataclass(frozen=True)
class CompressedTable:
    """What became of one table.

    Attributes:
        name: its module's path, a dot, and its own name.
        shape: factors and TT ranks.
        error: relative error of the decomposition (Frobenius); None if it was started anew.
    """

    name: str
    shape: TTShape
    error: float | None

    def __str__(self) -> str:
        shape = self.shape
        ranks = " x ".join(map(str, shape.tt_ranks))
        size = f"{shape.num_embeddings:,} x {shape.embedding_dim} by TT ranks {ranks}: {shape.parameters:,} numbers"
        error = "" if self.error is None else f", relative error {self.error:.3g}"
        return f"{self.name}: {size}, {shape.compression:.3g} times fewer{error}"


def compress(
    model: nn.Module,
    tables: Mapping[str, int | TTShape | Mapping[str, Any]],
    *,
    decompose: bool = True,
    allow_larger: bool = False,
) -> tuple[nn.Module, list[CompressedTable]]:
    """Replace tables of a model's collections by tensor trains.

    Args:
        model: changed in place, before it is sharded; a model that is itself a collection is replaced, so take what is
            returned.
        tables: by name (or by their module's path, a dot, and their name, where several share a name) the rank, a
            shape such as ``CompressionPlan.shapes`` has, or arguments of :class:`TTEmbeddingBag` such as
            ``{"tt_ranks": 32, "optimizer": "adagrad"}``.
        decompose: take over each table's weights by TT-SVD; else start anew, as a table that was not trained needs.
        allow_larger: whether a tensor train may have as many numbers as the table or more.

    Returns:
        the model, and what became of each table; as a string, its size and error in one line.

    Raises:
        TableError: a name that no table has, or that several have; arguments that a tensor train cannot have; one that
            saves nothing.

    Warns:
        UserWarning: a decomposition that keeps less than three quarters of a table's squares (relative error above
            0.5), with a rank that would keep them. To find it, the table is decomposed at twice the rank, and so on.
    """
    tables_by_path = {
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
        matches = [key for key in tables_by_path if name in (key[1], f"{key[0]}.{key[1]}")]
        if not matches:
            raise TableError(f"the model has no table {name!r}; it has {', '.join(_known(tables_by_path))}")
        if len(matches) > 1:
            raise TableError(f"several tables are called {name!r}: {', '.join(_known(matches))}; give one in full")
        path, table = matches[0]
        if table in wanted.get(path, {}):
            raise TableError(f"table {name!r} is named twice")
        if isinstance(how, TTShape):
            how = {"tt_ranks": how.tt_ranks, "row_factors": how.row_factors, "dim_factors": how.dim_factors}
        if not isinstance(how, (int, Mapping)):
            raise TableError(f"table {name!r} takes a rank or arguments of TTEmbeddingBag, found {how!r}")
        wanted.setdefault(path, {})[table] = {"tt_ranks": how} if isinstance(how, int) else dict(how)
    made: dict[str, tuple[nn.Module, list[CompressedTable]]] = {}
    for path, chosen in wanted.items():
        made[path] = _compressed(model.get_submodule(path), chosen, path, decompose, allow_larger)
    for path, (module, _) in made.items():  # all of them, now that none has failed
        module.train(model.get_submodule(path).training)
        for module_path in paths[id(model.get_submodule(path))]:
            if module_path:
                parent, _, own_name = module_path.rpartition(".")
                setattr(model.get_submodule(parent), own_name, module)
            else:
                model = module
    return model, [entry for _, report in made.values() for entry in report]


def _known(keys: Any) -> list[str]:
    return [f"{path}.{name}" if path else name for path, name in keys]


def _configs(module: nn.Module) -> list[Any]:
    if isinstance(module, EmbeddingBagCollection):
        return list(module.embedding_bag_configs())
    return list(module.embedding_configs())


def _check_smaller(name: str, shape: TTShape) -> None:
    dense = shape.num_embeddings * shape.embedding_dim
    if shape.parameters < dense:
        return
    fitting = bisect_left(range(1, max(shape.tt_ranks) + 1), dense, key=lambda rank: of_rank(shape, rank).parameters)
    remedy = f"ranks up to {fitting} make it smaller" if fitting else "no rank makes it smaller with these factors"
    raise TableError(
        f"table {name!r}: a tensor train of {shape.parameters:,} numbers saves nothing of {dense:,}; {remedy}"
        " (allow_larger=True takes it all the same)"
    )


def _compressed(
    module: Any, chosen: Mapping[str, dict[str, Any]], path: str, decompose: bool, allow_larger: bool
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
        if not allow_larger:
            _check_smaller(config.name, table.shape)
        error = None
        if decompose:
            if weight.device.type == "meta":
                raise TableError(f"table {config.name!r} has no weights yet to decompose; give decompose=False")
            error = table.decompose_(weight.detach())
            if error > LARGE_ERROR:
                warn_of_error(f"table {config.name!r}", weight.detach(), table.shape, error, stacklevel=4)
        made[config.name] = table.requires_grad_(weight.requires_grad)
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
