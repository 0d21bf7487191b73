"""Lookups of what a batch keeps alone (RecD paper, section 5: O5; section 7)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torchrec import EmbeddingBagCollection, PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from flexshard._internal import first_repeated, of_keys, there_are
from flexshard.embeddings.dedup.group import DedupedGroup
from flexshard.embeddings.dedup.inverse import InverseKeyedJaggedTensor
from flexshard.embeddings.dedup.jagged import DedupedJagged
from flexshard.embeddings.dedup.keyed import padded
from flexshard.embeddings.dedup.partial import PartialJaggedTensor
from flexshard.embeddings.dedup.selection import run_places
from flexshard.errors import DataError

__all__ = ["DedupedEmbeddingBagCollection", "DedupedEmbeddingCollection"]

Found: TypeAlias = DedupedJagged | PartialJaggedTensor | JaggedTensor


class _StockNames(nn.Module, FusedOptimizerModule):
    """Whose optimizer in backward has the names of its ``state_dict``, those without the collections inside."""

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """Of all sharded collections inside; empty before DistributedModelParallel has sharded them."""
        held = [part.fused_optimizer for part in self._collections() if isinstance(part, FusedOptimizerModule)]
        return CombinedOptimizer(held)

    def _collections(self) -> Sequence[nn.Module]:
        raise NotImplementedError


class DedupedEmbeddingCollection(_StockNames):
    """An EmbeddingCollection that looks up what a batch keeps: distinct rows, or shared buffers (O5).

    It holds the collection as ``collection``, so that DistributedModelParallel shards it as it would by itself: with
    TorchRec's sharders, or a FlexShard plan. Inverse indices stay where they are. Its ``state_dict`` and its fused
    optimizer have the collection's own names, so that weights and optimizer states of models with and without it load
    into each other.
    """

    def __init__(self, collection: nn.Module) -> None:
        """Wrap an EmbeddingCollection, sharded or not."""
        super().__init__()
        self.collection = collection
        self.register_state_dict_post_hook(_without_collection)
        self.register_load_state_dict_pre_hook(_with_collection)
        self.register_load_state_dict_post_hook(functools.partial(_named_from_outside, change=_outside_collection))

    def _collections(self) -> Sequence[nn.Module]:
        return [self.collection]

    @property
    def embeddings(self) -> Any:
        """The collection's tables, at the place that they have in ``state_dict``."""
        return self.collection.embeddings

    def forward(self, features: InverseKeyedJaggedTensor) -> dict[str, Found]:
        """Embeddings by feature: of distinct rows or buffers where it is in a group, of every sample where it is plain.

        Raises:
            DataError: a KeyedJaggedTensor.
        """
        _check_is_batch(features)
        return _by_feature(features, self.collection(features.distinct))


def _without_collection(_module: nn.Module, state: dict[str, Any], prefix: str, *_others: Any) -> None:
    _renamed(state, prefix, _outside_collection)


def _outside_collection(name: str) -> str:
    return name.removeprefix("collection.")


def _with_collection(module: nn.Module, state: dict[str, Any], prefix: str, *_others: Any) -> None:
    module._loaded_as = prefix
    _renamed(state, prefix, lambda name: name if name.startswith("collection.") else f"collection.{name}")


def _renamed(state: dict[str, Any], prefix: str, change: Callable[[str], str]) -> None:
    """Change the names of what is under a prefix, in place, as hooks have to."""
    for key in [key for key in state if key.startswith(prefix)]:
        state[prefix + change(key.removeprefix(prefix))] = state.pop(key)


def _named_from_outside(module: nn.Module, incompatible: Any, *, change: Callable[[str], str]) -> None:
    """Say which names were missing, or too many, as ``state_dict`` has them."""
    prefix = str(module._loaded_as)
    for names in (incompatible.missing_keys, incompatible.unexpected_keys):
        names[:] = [prefix + change(name.removeprefix(prefix)) if name.startswith(prefix) else name for name in names]


# What is wrapped stays whole where a pipeline traces the model to find out what its lookups are given.
@torch.fx.wrap
def _check_is_batch(features: Any) -> None:
    if isinstance(features, KeyedJaggedTensor):
        raise DataError(
            "found a KeyedJaggedTensor for a deduplicated batch; make one with"
            " InverseKeyedJaggedTensor.from_keyed_jagged(features, groups), whose groups may be none"
        )


@torch.fx.wrap
def _by_feature(features: InverseKeyedJaggedTensor, outputs: Any) -> dict[str, Found]:
    return {name: _deduped(features, name, embeddings) for name, embeddings in outputs.items()}


def _deduped(features: InverseKeyedJaggedTensor, name: str, embeddings: JaggedTensor) -> Found:
    # Where several tables share a feature, TorchRec appends the table's name: feature@table.
    feature = name if name in features.keys() else name.rpartition("@")[0]
    group = features.group_of(feature)
    if group is None:
        return embeddings
    expanded = None
    if group.expanded_lengths is not None:
        expanded = group.expanded_lengths[group.keys.index(feature)]
    if group.runs is not None:
        return PartialJaggedTensor.of_runs(embeddings.values(), group.runs, group.inverse, expanded)
    return DedupedJagged(embeddings.values(), embeddings.lengths()[: group.num_distinct], group.inverse, expanded)


class DedupedEmbeddingBagCollection(_StockNames):
    """An EmbeddingBagCollection per group of features, so that pooled embeddings are sent once per distinct row (O5).

    A table is in one collection, so the features of a table are in one group or all plain. Of a partially deduplicated
    group, pieces of the buffer are pooled, looked up and sent once, and put together to each list's on every rank. A
    batch has the groups of the collection, or none at all.

    Names and order in ``state_dict``, names of the fused optimizer, the order of what comes out, and the weights to
    begin with (of one seed) are those of an EmbeddingBagCollection of ``tables``, whatever the groups.
    ``named_parameters()`` has the names of the collections inside, group by group: an optimizer of torch has its
    states in that order, and loads no stock model's.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        groups: Sequence[Sequence[str]] = (),
        *,
        partial: Sequence[Sequence[str]] = (),
        is_weighted: bool = False,
        device: torch.device | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Make the collections.

        Args:
            tables: EmbeddingBagConfigs.
            groups, partial: of features, as batches have them; features in none are plain.
            is_weighted, device: as for EmbeddingBagCollection.
            process_group: all ranks of a job in which tables are sharded row-wise over gloo, which needs as many rows
                on every rank: each group is filled up with empty ones to the most that any rank has (one all-reduce of
                a number per group and step).

        Raises:
            DataError: a table whose features are in different groups, or a group with no table.
        """
        super().__init__()
        every = [_checked_group(group) for group in (*groups, *partial)]
        group_of = {key: number for number, group in enumerate(every) for key in group}
        twice = first_repeated(key for group in every for key in group)
        if twice is not None:
            raise DataError(f"feature {twice!r} is named twice in the groups; a feature belongs to one group")
        tables_of: dict[int, list[Any]] = {}
        for table in tables:
            table.feature_names = table.feature_names or [table.name]  # as an EmbeddingBagCollection has them
            homes = {group_of.get(feature, -1) for feature in table.feature_names}
            if len(homes) > 1:
                raise DataError(
                    f"table {table.name!r} has features of different groups, {', '.join(table.feature_names)}; put them"
                    " in one group"
                )
            tables_of.setdefault(homes.pop(), []).append(table)
        known = {feature for table in tables for feature in table.feature_names}
        for number, group in enumerate(every):
            if number not in tables_of:
                raise DataError(f"no table has the features of group {number}, {', '.join(group)}")
            unknown = next((feature for feature in group if feature not in known), None)
            if unknown is not None:
                raise DataError(f"no table has feature {unknown!r} of group {number}; leave it out, or add its table")
        if partial and is_weighted:
            raise DataError("lists that share ids have no weights; put weighted features in groups, not in partial")
        self._groups = [list(group) for group in every]
        self._num_exact = len(groups)
        self._names = [name for names in get_embedding_names_by_table(list(tables)) for name in names]
        home_of = {table.name: _name(number) for number, held in tables_of.items() for table in held}
        self._home = {table.name: home_of[table.name] for table in tables}
        self._features = {
            _name(number): [feature for table in held for feature in table.feature_names]
            for number, held in tables_of.items()
        }
        self._is_mean = {
            name: table.pooling == PoolingType.MEAN
            for table, names in zip(tables, get_embedding_names_by_table(list(tables)), strict=True)
            for name in names
        }
        self._process_group = process_group
        stock = EmbeddingBagCollection(tables=list(tables), is_weighted=is_weighted, device=device)
        self.collections = nn.ModuleDict(
            {
                _name(number): _with_tables_of(stock, group_tables)
                for number, group_tables in tables_of.items()  # by their first table, as near to its order as can be
            }
        )
        self.register_state_dict_post_hook(_without_groups)
        self.register_load_state_dict_pre_hook(_with_groups)
        self.register_load_state_dict_post_hook(functools.partial(_named_from_outside, change=_outside_groups))

    def _collections(self) -> Sequence[nn.Module]:
        return list(self.collections.values())

    @property
    def embedding_bags(self) -> dict[str, Any]:
        """All tables by name, at the place that they have in ``state_dict``."""
        found: dict[str, Any] = {}
        for collection in self.collections.values():
            found |= dict(collection.embedding_bags.items())
        return found

    def forward(self, features: InverseKeyedJaggedTensor) -> KeyedTensor:
        """Pooled embeddings of every sample; shape (B, sum of dims), in the order of an EmbeddingBagCollection.

        Raises:
            DataError: the batch has other groups, or is a KeyedJaggedTensor.
        """
        _check_is_batch(features)
        if isinstance(features, InverseKeyedJaggedTensor) and not features.groups and self._groups:
            answers = [collection(_of(features, self._features[name])) for name, collection in self.collections.items()]
            return _in_order(self._names, answers)
        _check_same_groups(features, self._groups, self._num_exact, _name(-1) in self.collections)
        # All collections are asked before the first answer is awaited: sharded ones answer late.
        even = None if self._process_group is None else _evened(features, self._process_group)
        asked = {}
        for name, collection in self.collections.items():
            if name == _name(-1):
                asked[name] = collection(features.plain)
            else:
                number = _number(name)
                asked[name] = collection(features.groups[number].bags if even is None else even[number])
        return _side_by_side(features, asked, self._names, self._is_mean)


def _with_tables_of(stock: EmbeddingBagCollection, tables: list[Any]) -> EmbeddingBagCollection:
    """A collection of some of the tables, whose numbers were drawn when those of all were, in the order of all."""
    part = EmbeddingBagCollection(tables=tables, is_weighted=stock.is_weighted(), device=torch.device("meta"))
    part._device = stock.device
    for table in tables:
        part.embedding_bags[table.name] = stock.embedding_bags[table.name]
    return part


def _checked_group(group: Any) -> list[str]:
    if isinstance(group, str) or not all(isinstance(feature, str) for feature in group):
        raise DataError(f"a group is a list of features' names, found {group!r}; write groups as [['history']]")
    return list(group)


def _without_groups(module: nn.Module, state: dict[str, Any], prefix: str, *_others: Any) -> None:
    _renamed(state, prefix, _outside_groups)
    place = {table: number for number, table in enumerate(module._home)}
    own = [name for name in state if name.startswith(f"{prefix}embedding_bags.")]
    for name in sorted(own, key=lambda name: place.get(name.removeprefix(prefix).split(".")[1], -1)):
        state[name] = state.pop(name)  # in the tables' order, as a stock collection has them


def _outside_groups(name: str) -> str:
    parts = name.split(".", 2)
    return parts[2] if parts[0] == "collections" and len(parts) > 2 else name


def _with_groups(module: nn.Module, state: dict[str, Any], prefix: str, *_others: Any) -> None:
    module._loaded_as = prefix
    homes: dict[str, str] = module._home

    def home(name: str) -> str:
        kind, _, rest = name.partition(".")
        table = rest.partition(".")[0]
        return f"collections.{homes[table]}.{name}" if kind == "embedding_bags" and table in homes else name

    _renamed(state, prefix, home)


def _of(features: InverseKeyedJaggedTensor, keys: Sequence[str]) -> KeyedJaggedTensor:
    """These features of a plain batch."""
    plain = features.plain
    assert plain is not None  # a batch without groups has nothing else
    missing = next((key for key in keys if key not in plain.keys()), None)
    if missing is not None:
        raise DataError(f"no feature {missing!r} in the batch; {there_are(plain.keys())}")
    return of_keys(plain, list(dict.fromkeys(keys)))


@torch.fx.wrap
def _check_same_groups(
    features: InverseKeyedJaggedTensor, groups: list[list[str]], num_exact: int, plain: bool
) -> None:
    batch_groups = [group.keys for group in features.groups]
    if batch_groups != groups:
        raise DataError(f"the batch has groups {batch_groups}, the collection {groups}")
    for number, group in enumerate(features.groups):
        if (group.runs is None) != (number < num_exact):
            found, due = ("exactly", "partially") if group.runs is None else ("partially", "exactly")
            raise DataError(
                f"the batch deduplicates {', '.join(group.keys)} {found}, the collection {due}; name them in"
                " 'groups' or in 'partial' of both"
            )
    if plain and features.plain is None:
        raise DataError("the batch has no plain features, but the collection has tables of such")


@torch.fx.wrap
def _evened(features: InverseKeyedJaggedTensor, process_group: dist.ProcessGroup) -> list[KeyedJaggedTensor]:
    """What each group pools, with as many rows as any rank has."""
    bags = [group.bags for group in features.groups]
    most = torch.tensor([each.stride() for each in bags], device=features.device())
    dist.all_reduce(most, dist.ReduceOp.MAX, process_group)
    return [padded(each, rows) for each, rows in zip(bags, most.tolist(), strict=True)]


@torch.fx.wrap
def _side_by_side(
    features: InverseKeyedJaggedTensor, asked: dict[str, Any], names: list[str], is_mean: dict[str, bool]
) -> KeyedTensor:
    """Pooled embeddings of all collections, for every sample."""
    found = []
    for name, answer in asked.items():
        rows = KeyedTensor(answer.keys(), answer.length_per_key(), answer.values())
        number = _number(name)
        if number >= 0:
            group = features.groups[number]
            pooled = rows.values() if group.runs is None else _put_together(group, rows, is_mean)
            rows = KeyedTensor(rows.keys(), rows.length_per_key(), pooled.index_select(0, group.inverse))
        found.append(rows)
    return _in_order(names, found)


def _put_together(group: DedupedGroup, rows: KeyedTensor, is_mean_of: dict[str, bool]) -> torch.Tensor:
    """Of pooled pieces of a group's buffer, what each distinct list pools; shape (R, sum of dims)."""
    runs, is_mean = group.runs, [is_mean_of[name] for name in rows.keys()]  # sharded collections have their own order
    assert runs is not None
    pieces, pooled = runs.segments, rows.values()[: runs.segments.lengths.numel()]
    widths = torch.tensor(rows.length_per_key(), device=pooled.device)
    mean = torch.tensor(is_mean, device=pooled.device).repeat_interleave(widths, output_size=pooled.shape[1])
    if any(is_mean):  # a piece's mean weighs as much as it has ids
        pooled = pooled * torch.where(mean, pieces.lengths[:, None], 1)
    places = run_places(pieces.first.long(), pieces.counts, pieces.total)
    begins = torch.cumsum(pieces.counts, 0) - pieces.counts
    if not pieces.total:
        return pooled.new_zeros(runs.lengths.numel(), pooled.shape[1]) + 0 * pooled.sum()
    lists = functional.embedding_bag(places, pooled, begins, mode="sum")
    if any(is_mean):
        lists = lists / torch.where(mean, runs.lengths[:, None].clamp(min=1), 1)
    return lists


def _in_order(names: list[str], found: Sequence[KeyedTensor]) -> KeyedTensor:
    """All of them side by side, in the order of an EmbeddingBagCollection."""
    columns: dict[str, tuple[torch.Tensor, int]] = {}
    for rows in found:
        parts = rows.values().split(rows.length_per_key(), dim=1)
        columns |= dict(zip(rows.keys(), zip(parts, rows.length_per_key(), strict=True), strict=True))
    values = torch.cat([columns[name][0] for name in names], dim=1)
    return KeyedTensor(keys=list(names), length_per_key=[columns[name][1] for name in names], values=values)


def _name(number: int) -> str:
    return "plain" if number < 0 else f"group_{number}"


def _number(name: str) -> int:
    return -1 if name == "plain" else int(name.removeprefix("group_"))
