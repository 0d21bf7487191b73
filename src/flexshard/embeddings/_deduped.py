"""Lookups, pooling and attention on distinct rows (RecD paper, section 5: O5, O6, O7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from flexshard._values import first_repeated
from flexshard.embeddings._inverse import InverseKeyedJaggedTensor
from flexshard.embeddings._select import jagged_index_select
from flexshard.errors import DataError

__all__ = ["Deduped", "DedupedEmbeddingBagCollection", "DedupedEmbeddingCollection", "DedupedJagged"]


@dataclass(frozen=True)
class DedupedJagged:
    """A list of vectors for every distinct row, and which of them each sample has.

    Attributes:
        values: of all distinct rows; shape (N, ...).
        lengths: of each distinct row; shape (R,).
        inverse: the distinct row of each sample; shape (B,).
    """

    values: torch.Tensor
    lengths: torch.Tensor
    inverse: torch.Tensor

    def distinct(self) -> JaggedTensor:
        """The distinct rows alone; R lists."""
        return JaggedTensor(self.values, lengths=self.lengths)

    def expand(self) -> JaggedTensor:
        """Every sample's own list, without padding; gradients of a row's samples add up."""
        values, lengths = jagged_index_select(self.values, self.lengths, self.inverse)
        return JaggedTensor(values, lengths=lengths)

    def with_values(self, values: torch.Tensor) -> DedupedJagged:
        """The same lists of other vectors."""
        return DedupedJagged(values, self.lengths, self.inverse)


class Deduped(nn.Module):
    """Any pooling or attention module, run once per distinct row (O7).

    The module's inputs and outputs have a row per sample in their first dimension; it must treat rows one by one (no
    batch normalisation, no dropout that should differ between samples of one session).
    """

    def __init__(self, module: nn.Module) -> None:
        """Wrap ``module``, which takes JaggedTensors (or what ``forward`` is given besides)."""
        super().__init__()
        self.module = module

    def forward(self, *sequences: DedupedJagged, **others: Any) -> Any:
        """Its output for every sample; shape (B, ...), for each tensor that it returns.

        Args:
            sequences: of features of one group, given to the module as JaggedTensors of R lists.
            others: given to it as they are.

        Raises:
            DataError: no sequences, or of different groups; or an output that has not a row per distinct row.
        """
        if not sequences:
            raise DataError("a deduplicated module needs a sequence; call it with DedupedJagged values")
        inverse = sequences[0].inverse
        rows = int(sequences[0].lengths.numel())
        for other in sequences[1:]:
            if other.inverse is not inverse and not torch.equal(other.inverse, inverse):
                raise DataError("sequences of different groups have rows of their own; put their features in one group")
        found = self.module(*(sequence.distinct() for sequence in sequences), **others)

        def expand(output: torch.Tensor) -> torch.Tensor:
            if output.shape[:1] != (rows,):
                raise DataError(f"the module returned shape {tuple(output.shape)} for {rows} distinct rows")
            return output.index_select(0, inverse)

        return pytree.tree_map_only(torch.Tensor, expand, found)


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
        found = self.collection(features.distinct)
        return {name: _deduped(features, name, found[name]) for name in found}


def _deduped(features: InverseKeyedJaggedTensor, name: str, embeddings: JaggedTensor) -> DedupedJagged | JaggedTensor:
    # Where several tables share a feature, TorchRec appends the table's name: feature@table.
    group = features.group_of(name if name in features.keys() else name.rpartition("@")[0])
    if group is None:
        return embeddings
    return DedupedJagged(embeddings.values(), embeddings.lengths()[: group.num_distinct], group.inverse)


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
    ) -> None:
        """Make the collections.

        Args:
            tables: EmbeddingBagConfigs.
            groups: of features; features in none are plain.
            is_weighted, device: as for EmbeddingBagCollection.

        Raises:
            DataError: a table whose features are in different groups, or a group with no table.
        """
        super().__init__()
        place = {key: number for number, group in enumerate(groups) for key in group}
        twice = first_repeated(key for group in groups for key in group)
        if twice is not None:
            raise DataError(f"feature {twice!r} is named twice in the groups; a feature belongs to one group")
        tables_of: dict[int, list[Any]] = {}
        for table in tables:
            homes = {place.get(feature, -1) for feature in table.feature_names}
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
        self.collections = nn.ModuleDict(
            {
                _name(number): EmbeddingBagCollection(tables=own, is_weighted=is_weighted, device=device)
                for number, own in sorted(tables_of.items())
            }
        )

    def forward(self, features: InverseKeyedJaggedTensor) -> KeyedTensor:
        """Pooled embeddings of every sample; shape (B, sum of dims), in order of plain features, then groups.

        Raises:
            DataError: the batch has other groups.
        """
        if [group.keys for group in features.groups] != self._groups:
            raise DataError(
                f"the batch has groups {[group.keys for group in features.groups]}, the collection {self._groups}"
            )
        keys: list[str] = []
        dims: list[int] = []
        values: list[torch.Tensor] = []
        # All collections are asked before the first answer is awaited: sharded ones answer late.
        asked: dict[str, Any] = {}
        if _name(-1) in self.collections:
            if features.plain is None:
                raise DataError("the batch has no plain features, but tables of such; leave some out of the groups")
            asked[_name(-1)] = self.collections[_name(-1)](features.plain)
        for number, group in enumerate(features.groups):
            asked[_name(number)] = self.collections[_name(number)](group.jagged)
        for name, found in asked.items():
            pooled = found.values()
            if name != _name(-1):
                pooled = pooled.index_select(0, features.groups[int(name.removeprefix("group_"))].inverse)
            keys += found.keys()
            dims += found.length_per_key()
            values.append(pooled)
        return KeyedTensor(keys=keys, length_per_key=dims, values=torch.cat(values, dim=1))


def _name(number: int) -> str:
    return "plain" if number < 0 else f"group_{number}"


pytree.register_pytree_node(
    DedupedJagged,
    lambda lists: ([lists.values, lists.lengths, lists.inverse], None),
    lambda children, _: DedupedJagged(*children),
    serialized_type_name="flexshard.DedupedJagged",
)
