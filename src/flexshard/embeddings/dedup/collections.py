"""Lookups, pooling and attention on distinct rows (RecD paper, section 5: O5, O6, O7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from flexshard._internal import first_repeated
from flexshard.embeddings.dedup.inverse import InverseKeyedJaggedTensor
from flexshard.embeddings.dedup.jagged import DedupedJagged
from flexshard.embeddings.dedup.keyed import padded
from flexshard.errors import DataError

__all__ = ["Deduped", "DedupedEmbeddingBagCollection", "DedupedEmbeddingCollection"]


class Deduped(nn.Module):
    """Any pooling or attention module, run once per distinct row (O7).

    The module's inputs and outputs have a row per sample in their first dimension; it must treat rows one by one (no
    batch normalisation, no dropout that should differ between samples of one session).
    """

    def __init__(self, module: nn.Module) -> None:
        """Wrap ``module``, which takes JaggedTensors (or what ``forward`` is given besides)."""
        super().__init__()
        self.module = module

    def forward(self, *sequences: DedupedJagged | JaggedTensor, **others: Any) -> Any:
        """Its output for every sample; shape (B, ...), for each tensor that it returns.

        Args:
            sequences: of features of one group, given to the module as JaggedTensors of R lists; or of plain features,
                for which it runs as it would by itself.
            others: given to it as they are.

        Raises:
            DataError: no sequences, or of different groups; or an output that has not a row per distinct row.
        """
        shared = _shared(sequences)
        return _expanded(self.module(*(_distinct(sequence) for sequence in sequences), **others), shared)


@torch.fx.wrap
def _shared(sequences: tuple[DedupedJagged | JaggedTensor, ...]) -> DedupedJagged | None:
    """One of them, all being of one group; None if they are plain."""
    if not sequences:
        raise DataError("a deduplicated module needs a sequence; call it with DedupedJagged values")
    deduped = [sequence for sequence in sequences if isinstance(sequence, DedupedJagged)]
    if not deduped:
        return None
    first = deduped[0]
    for other in deduped[1:]:
        if other.inverse is not first.inverse and not torch.equal(other.inverse, first.inverse):
            raise DataError("sequences of different groups have rows of their own; put their features in one group")
    if len(deduped) < len(sequences):
        raise DataError("a plain sequence has a row per sample; put its feature in the group of the others")
    return first


@torch.fx.wrap
def _distinct(sequence: DedupedJagged | JaggedTensor) -> JaggedTensor:
    return sequence.distinct() if isinstance(sequence, DedupedJagged) else sequence


@torch.fx.wrap
def _expanded(result: Any, shared: DedupedJagged | None) -> Any:
    """A module's outputs, for every sample."""
    if shared is None:
        return result
    rows = int(shared.lengths.numel())

    def expand(output: torch.Tensor) -> torch.Tensor:
        if output.shape[:1] != (rows,):
            raise DataError(f"the module returned shape {tuple(output.shape)} for {rows} distinct rows")
        return output.index_select(0, shared.inverse)

    return pytree.tree_map_only(torch.Tensor, expand, result)


class DedupedEmbeddingCollection(nn.Module):
    """An EmbeddingCollection that looks up distinct rows alone (O5).

    It holds the collection as ``collection``, so that DistributedModelParallel shards it as it would by itself: with
    TorchRec's sharders, or a FlexShard plan. Inverse indices stay where they are.
    """

    def __init__(self, collection: nn.Module) -> None:
        """Wrap an EmbeddingCollection, sharded or not."""
        super().__init__()
        self.collection = collection

    def forward(self, features: InverseKeyedJaggedTensor) -> dict[str, DedupedJagged | JaggedTensor]:
        """Embeddings by feature: of distinct rows where a feature is in a group, of every sample where it is plain."""
        return _by_feature(features, self.collection(features.distinct))


# What is wrapped stays whole where a pipeline traces the model to find out what its lookups are given.
@torch.fx.wrap
def _by_feature(features: InverseKeyedJaggedTensor, outputs: Any) -> dict[str, DedupedJagged | JaggedTensor]:
    return {name: _deduped(features, name, embeddings) for name, embeddings in outputs.items()}


def _deduped(features: InverseKeyedJaggedTensor, name: str, embeddings: JaggedTensor) -> DedupedJagged | JaggedTensor:
    # Where several tables share a feature, TorchRec appends the table's name: feature@table.
    feature = name if name in features.keys() else name.rpartition("@")[0]
    group = features.group_of(feature)
    if group is None:
        return embeddings
    expanded = None
    if group.expanded_lengths is not None:
        expanded = group.expanded_lengths[group.keys.index(feature)]
    return DedupedJagged(embeddings.values(), embeddings.lengths()[: group.num_distinct], group.inverse, expanded)


class DedupedEmbeddingBagCollection(nn.Module):
    """An EmbeddingBagCollection per group of features, so that pooled embeddings are sent once per distinct row (O5).

    A table is in one collection, so the features of a table are in one group or all plain. ``groups`` must be those
    of the batches that it is given.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        groups: Sequence[Sequence[str]],
        *,
        is_weighted: bool = False,
        device: torch.device | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Make the collections.

        Args:
            tables: EmbeddingBagConfigs.
            groups: of features; features in none are plain.
            is_weighted, device: as for EmbeddingBagCollection.
            process_group: all ranks of a job in which tables are sharded row-wise over gloo, which needs as many rows
                on every rank: each group is filled up with empty ones to the most that any rank has (one all-reduce of
                a number per group and step).

        Raises:
            DataError: a table whose features are in different groups, or a group with no table.
        """
        super().__init__()
        group_of = {key: number for number, group in enumerate(groups) for key in group}
        twice = first_repeated(key for group in groups for key in group)
        if twice is not None:
            raise DataError(f"feature {twice!r} is named twice in the groups; a feature belongs to one group")
        tables_of: dict[int, list[Any]] = {}
        for table in tables:
            homes = {group_of.get(feature, -1) for feature in table.feature_names}
            if len(homes) > 1:
                raise DataError(
                    f"table {table.name!r} has features of different groups, {', '.join(table.feature_names)}; put them"
                    " in one group"
                )
            tables_of.setdefault(homes.pop(), []).append(table)
        for number, group in enumerate(groups):
            if number not in tables_of:
                raise DataError(f"no table has the features of group {number}, {', '.join(group)}")
        self._groups = [list(group) for group in groups]
        self._process_group = process_group
        self.collections = nn.ModuleDict(
            {
                _name(number): EmbeddingBagCollection(tables=group_tables, is_weighted=is_weighted, device=device)
                for number, group_tables in sorted(tables_of.items())
            }
        )

    def forward(self, features: InverseKeyedJaggedTensor) -> KeyedTensor:
        """Pooled embeddings of every sample; shape (B, sum of dims), in order of plain features, then groups.

        Raises:
            DataError: the batch has other groups.
        """
        _check_same_groups(features, self._groups, _name(-1) in self.collections)
        # All collections are asked before the first answer is awaited: sharded ones answer late.
        even = None if self._process_group is None else _evened(features, self._process_group)
        asked = {}
        for name, collection in self.collections.items():
            if name == _name(-1):
                asked[name] = collection(features.plain)
            else:
                number = _number(name)
                asked[name] = collection(features.groups[number].jagged if even is None else even[number])
        return _side_by_side(features, asked)


@torch.fx.wrap
def _check_same_groups(features: InverseKeyedJaggedTensor, groups: list[list[str]], plain: bool) -> None:
    batch_groups = [group.keys for group in features.groups]
    if batch_groups != groups:
        raise DataError(f"the batch has groups {batch_groups}, the collection {groups}")
    if plain and features.plain is None:
        raise DataError("the batch has no plain features, but the collection has tables of such")


@torch.fx.wrap
def _evened(features: InverseKeyedJaggedTensor, process_group: dist.ProcessGroup) -> list[KeyedJaggedTensor]:
    """Every group, with as many rows as any rank has."""
    most = torch.tensor([group.num_distinct for group in features.groups], device=features.device())
    dist.all_reduce(most, dist.ReduceOp.MAX, process_group)
    return [padded(group.jagged, rows) for group, rows in zip(features.groups, most.tolist(), strict=True)]


@torch.fx.wrap
def _side_by_side(features: InverseKeyedJaggedTensor, asked: dict[str, Any]) -> KeyedTensor:
    """Pooled embeddings of all collections, for every sample."""
    keys: list[str] = []
    dims: list[int] = []
    values: list[torch.Tensor] = []
    for name, rows in asked.items():
        pooled = rows.values()
        keys += rows.keys()
        dims += rows.length_per_key()
        number = _number(name)
        values.append(pooled if number < 0 else pooled.index_select(0, features.groups[number].inverse))
    return KeyedTensor(keys=keys, length_per_key=dims, values=torch.cat(values, dim=1))


def _name(number: int) -> str:
    return "plain" if number < 0 else f"group_{number}"


def _number(name: str) -> int:
    return -1 if name == "plain" else int(name.removeprefix("group_"))
