"""Tables that travel together: those of one collection with the same dtype and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed.types import QuantizedCommCodecs

from flexshard._internal import level_groups
from flexshard.costmodels import Layout
from flexshard.embeddings import IndexBijection
from flexshard.executors.comm.bucketized_ids import BucketizedIds, bucketize
from flexshard.executors.comm.collectives import Collectives
from flexshard.executors.comm.exchange import Exchange, ExchangeContext
from flexshard.executors.comm.splits import Splits, SplitsExchange
from flexshard.executors.sharding.translation import LocationTable
from flexshard.executors.stores.base import RowStore
from flexshard.executors.stores.replicated import ReplicatedStore
from flexshard.executors.stores.sharded import ShardedStore
from flexshard.executors.stores.updates import OptimizerSpec

__all__ = ["GroupOptions", "GroupTraits", "TableGroup"]


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


@dataclass(frozen=True)
class GroupOptions:
    """How a group of tables is carried out, besides what its tables are.

    Attributes:
        process_group: of all ranks.
        device: of rows and batches.
        codecs: TorchRec's, of embeddings and gradients.
        translated_ids: whether ids come as locations.
        collectives: what carries tensors to other ranks.
        sharded_store: makes the store of rows without copies.
    """

    process_group: dist.ProcessGroup
    device: torch.device
    codecs: QuantizedCommCodecs | None = None
    translated_ids: bool = False
    collectives: Collectives = Collectives()  # noqa: RUF009 - it has no state
    sharded_store: Callable[..., RowStore] = ShardedStore


class TableGroup(nn.Module):
    """This rank's rows of a group of tables, and how the others' are reached.

    Attributes:
        layout: where every row lives.
        traits: what the tables share.
        bijections: order of popularity of each table's rows, in the layout's order of tables.
        options: how it is carried out.
        location_tables: of each table.
        stores: one per level.
    """

    def __init__(
        self, layout: Layout, traits: GroupTraits, bijections: Sequence[IndexBijection], options: GroupOptions
    ) -> None:
        super().__init__()
        self.layout, self.traits, self.bijections, self.options = layout, traits, tuple(bijections), options
        self.groups = level_groups(sorted({*layout.group_sizes, layout.world_size}), options.process_group)
        self.steps = 0
        # Where ids are translated ahead, it happens on the host.
        device = torch.device("cpu") if options.translated_ids else options.device
        self.location_tables = [
            LocationTable(layout, index, bijection, device) for index, bijection in enumerate(bijections)
        ]
        self._first_location = torch.from_numpy(layout.first_location.astype(layout.location_type)).to(options.device)
        self.stores = nn.ModuleList(self._store(level) for level in range(len(layout.group_sizes)))

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Of all ranks."""
        return self.options.process_group

    @property
    def device(self) -> torch.device:
        """Of its rows."""
        return self.options.device

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks, as checkpoints name them; it goes with the group, since it holds the process group."""
        return DeviceMesh.from_group(self.process_group, self.device.type)

    def _store(self, level: int) -> RowStore:
        layout, traits, device = self.layout, self.traits, self.options.device
        size, slots = layout.group_sizes[level], layout.slots[level]
        if size == layout.world_size:
            return self.options.sharded_store(size, traits.spec, slots, traits.dim, traits.dtype, device)
        across = self.groups[size].across
        assert across is not None
        return ReplicatedStore(
            size,
            traits.spec,
            slots,
            layout.whole_slots[level],
            traits.dim,
            traits.dtype,
            device,
            across,
            layout.tables,
            self.options.collectives,
        )

    def with_layout(self, layout: Layout, bijections: Sequence[IndexBijection], *, index_dedup: bool) -> TableGroup:
        """The same tables in another layout, rows and states still empty."""
        group = TableGroup(layout, replace(self.traits, index_dedup=index_dedup), bijections, self.options)
        group.steps = self.steps
        return group

    def level_stores(self) -> list[RowStore]:
        """The stores with their own type."""
        return list(self.stores)

    def locations(self, lookups: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Locations of (table index, ids in the table) one after the other; shape (lookups,)."""
        parts = [self.location_tables[table].locations(ids) for table, ids in lookups]
        if not parts:
            return self._first_location.new_empty(0)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def bucketize(self, locations: torch.Tensor) -> BucketizedIds:
        """A batch's locations, sorted by where they go."""
        first = self._first_location
        return bucketize(locations.to(first.dtype), first, index_dedup=self.traits.index_dedup)

    def exchange_splits(self, batch: BucketizedIds, status: int) -> SplitsExchange:
        """Tell the other ranks how many ids will come."""
        return SplitsExchange(self.layout, self.groups, self.options.collectives, batch.counts, status)

    def exchange(self, batch: BucketizedIds, splits: Splits) -> Exchange:
        """Send the ids."""
        options = self.options
        context = ExchangeContext(
            self.layout,
            self.groups,
            self.level_stores(),
            options.collectives,
            options.codecs,
            self.traits.output_dtype,
        )
        return Exchange(context, batch, splits)

    def begin_step(self) -> None:
        """Rows are about to be looked up; where gradients are wanted, they will be updated."""
        if torch.is_grad_enabled():
            self.steps += 1
            for store in self.level_stores():
                store.begin_step(self.steps)

    def local_rows(self, table: int) -> torch.Tensor:
        """This rank's rows of a table in the largest group that holds any; shape (n, D), sharing their memory."""
        level = int(np.flatnonzero(self.layout.rows[table])[-1])
        store = self.level_stores()[level]
        return store.values[self.layout.piece(table, level, self.groups[store.group_size].local_rank).slots]

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
            piece = self.layout.piece(table, level, self.groups[store.group_size].local_rank)
            ids = torch.from_numpy(self.ids_of(table, piece.positions))
            for name, whole in values.items():
                store.part(name)[piece.slots].copy_(whole[ids])

    def ids_of(self, table: int, positions: range) -> npt.NDArray[np.int64]:
        """Row ids (int64) at positions of a table; shape (n,)."""
        bijection = self.bijections[table]
        if bijection.is_identity:
            return np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)
        return bijection.row_at[positions.start : positions.stop : positions.step].astype(np.int64)
