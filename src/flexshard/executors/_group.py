"""Tables that travel together: those of one collection with the same dtype and optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torchrec.distributed.types import QuantizedCommCodecs

from flexshard.embeddings import IndexBijection
from flexshard.executors._exchange import Counts, Dispatch, Exchange, dispatch
from flexshard.executors._layout import Layout
from flexshard.executors._optimizers import OptimizerSpec
from flexshard.executors._stores import ReplicatedStore, RowStore, ShardedStore
from flexshard.executors._translation import CodeBook
from flexshard.topologies import level_groups

__all__ = ["GroupTraits", "TableGroup"]


@dataclass(frozen=True)
class GroupTraits:
    """What the tables of a group have in common.

    Attributes:
        dim: D.
        dtype: of weights, and of rows and gradients on the wire.
        spec: optimizer.
        index_dedup: whether repeated ids of a batch are sent once.
        output_dtype: of the rows that the model gets.
    """

    dim: int
    dtype: torch.dtype
    spec: OptimizerSpec
    index_dedup: bool
    output_dtype: torch.dtype = torch.float32


class TableGroup(nn.Module):
    """This rank's rows of a group of tables, and how the others' are reached.

    Attributes:
        layout: where every row lives.
        traits: what the tables share.
        bijections: ranking of each table, in the layout's order.
        books: codes of each table.
        stores: one per level.
    """

    def __init__(
        self,
        layout: Layout,
        traits: GroupTraits,
        bijections: Sequence[IndexBijection],
        *,
        process_group: Any,
        device: torch.device,
        codecs: QuantizedCommCodecs | None = None,
        translated_ids: bool = False,
    ) -> None:
        super().__init__()
        self.layout, self.traits, self.bijections = layout, traits, tuple(bijections)
        self.process_group, self.device = process_group, device
        self._codecs, self._translated_ids = codecs, translated_ids
        self.groups = level_groups(sorted({*layout.group_sizes, layout.world_size}), process_group)
        self.steps = 0
        # Where ids are translated ahead, it happens on the host.
        place = torch.device("cpu") if translated_ids else device
        self.books = [CodeBook(layout, index, bijection, place) for index, bijection in enumerate(bijections)]
        self._first_code = torch.from_numpy(layout.first_code.astype(layout.code_type)).to(device)
        self.stores = nn.ModuleList(self._store(level) for level in range(len(layout.group_sizes)))

    def _store(self, level: int) -> RowStore:
        layout, traits = self.layout, self.traits
        size, slots = layout.group_sizes[level], layout.slots[level]
        if size == layout.world_size:
            return ShardedStore(size, traits.spec, slots, traits.dim, traits.dtype, self.device)
        return ReplicatedStore(
            size,
            traits.spec,
            slots,
            layout.whole_slots[level],
            traits.dim,
            traits.dtype,
            self.device,
            self.groups[size].across,
            layout.tables,
        )

    def with_layout(self, layout: Layout, bijections: Sequence[IndexBijection], *, index_dedup: bool) -> TableGroup:
        """The same tables in another layout, rows and states still empty."""
        traits = replace(self.traits, index_dedup=index_dedup)
        group = TableGroup(
            layout,
            traits,
            bijections,
            process_group=self.process_group,
            device=self.device,
            codecs=self._codecs,
            translated_ids=self._translated_ids,
        )
        group.steps = self.steps
        return group

    def level_stores(self) -> list[RowStore]:
        """The stores with their own type."""
        return list(self.stores)

    def codes(self, lookups: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Codes of (table index, ids in the table) one after the other; shape (lookups,)."""
        parts = [self.books[table].codes(ids) for table, ids in lookups]
        if not parts:
            return self._first_code.new_empty(0)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def dispatch(self, codes: torch.Tensor) -> Dispatch:
        """A batch's codes, sorted by where they go."""
        return dispatch(codes.to(self._first_code.dtype), self._first_code, index_dedup=self.traits.index_dedup)

    def start(self, batch: Dispatch, status: int) -> Counts:
        """Tell the other ranks how many ids will come."""
        return Counts(self.layout, self.groups, batch.counts, status)

    def exchange(self, batch: Dispatch, sent: list[list[int]], received: list[list[int]]) -> Exchange:
        """Send the ids."""
        stores, dtype = self.level_stores(), self.traits.output_dtype
        return Exchange(self.layout, self.groups, stores, self._codecs, batch, sent, received, dtype)

    def begin_step(self) -> None:
        """Rows are about to be looked up; where gradients are wanted, they will be updated."""
        if torch.is_grad_enabled():
            self.steps += 1
            for store in self.level_stores():
                store.begin_step(self.steps)

    def own_rows(self, table: int) -> torch.Tensor:
        """This rank's rows of a table in the largest group that holds any; shape (n, D), sharing their memory."""
        level = int(np.flatnonzero(self.layout.rows[table])[-1])
        store = self.level_stores()[level]
        return store.values[self.layout.piece(table, level, self.groups[store.group_size].position).slots]

    def set_learning_rate(self, learning_rate: float) -> None:
        """Of all rows from the next update on."""
        for store in self.level_stores():
            store.set_learning_rate(learning_rate)

    @torch.no_grad()
    def fill(self, table: int, values: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's rows out of a whole table in order of id.

        Args:
            table: index of the table.
            values: "weight" of shape (E, D), or states of shape (E, 1) or (E, D), by name.
        """
        for level, store in enumerate(self.level_stores()):
            piece = self.layout.piece(table, level, self.groups[store.group_size].position)
            ids = torch.from_numpy(self.ids_of(table, piece.ranks))
            for name, whole in values.items():
                store.part(name)[piece.slots].copy_(whole[ids])

    def ids_of(self, table: int, ranks: range) -> npt.NDArray[np.int64]:
        """Row ids (int64) at ranks of a table; shape (n,)."""
        bijection = self.bijections[table]
        if bijection.is_identity:
            return np.arange(ranks.start, ranks.stop, ranks.step, dtype=np.int64)
        return bijection.row_at[ranks.start : ranks.stop : ranks.step].astype(np.int64)
