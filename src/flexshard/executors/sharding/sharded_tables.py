"""Tables of one dimension, type and optimizer: what a rank keeps in one store."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed.types import QuantizedCommCodecs

from flexshard._internal import host_waits_for, level_groups
from flexshard.costmodels import Layout
from flexshard.embeddings import IndexBijection
from flexshard.errors import PlanError
from flexshard.executors.comm.collectives import Collectives
from flexshard.executors.servers.embedding_servers import ServedTables
from flexshard.executors.sharding.batches import version_of
from flexshard.executors.sharding.joint_locations import JointLocations, TableIds
from flexshard.executors.sharding.translation import LocationTable
from flexshard.executors.stores.base import RowStore
from flexshard.executors.stores.cached import CachedStore
from flexshard.executors.stores.fused import FusedStore
from flexshard.executors.stores.mapped import MappedStore
from flexshard.executors.stores.memory import MemoryStore
from flexshard.executors.stores.served import ServedRange, ServedStore
from flexshard.executors.stores.updates import OptimizerSpec

__all__ = ["GroupOptions", "GroupTraits", "ShardedTables", "TableGroup"]


@dataclass(frozen=True)
class GroupTraits:
    """What the tables of a group have in common.

    Attributes:
        dim: D.
        dtype: of weights, and of rows on the wire.
        spec: optimizer.
        output_dtype: of what the model gets, rows or their sums.
        pooled: whether it gets sums.
        cache_load_factor: of the rows without copies, how many fit into a cache of rows that are kept on the host; None
            for rows that are not.
    """

    dim: int
    dtype: torch.dtype
    spec: OptimizerSpec
    output_dtype: torch.dtype = torch.float32
    cache_load_factor: float | None = None
    pooled: bool = False

    @property
    def gathered_dtype(self) -> torch.dtype:
        """Of rows that come from other ranks: 16 bits would not hold their sums, though they may hold a mean."""
        return torch.float32 if self.pooled else self.output_dtype


@dataclass(frozen=True)
class GroupOptions:
    """How tables are carried out, besides what they are.

    Attributes:
        process_group: of all ranks.
        device: of rows and batches.
        codecs: TorchRec's, of embeddings and gradients.
        translated_ids: whether ids come as locations.
        index_dedup: tables whose repeated ids of a batch are sent once.
        collectives: what carries tensors to other ranks.
        store: makes the store of a group's rows.
        servers: where rows behind caches are; None for this process.
    """

    process_group: dist.ProcessGroup
    device: torch.device
    codecs: QuantizedCommCodecs | None = None
    translated_ids: bool = False
    index_dedup: frozenset[str] = frozenset()
    collectives: Collectives = Collectives()  # noqa: RUF009 - it has no state
    store: Callable[..., RowStore] = FusedStore
    servers: ServedTables | None = None


@dataclass(frozen=True)
class TableGroup:
    """This rank's rows of tables with the same traits.

    Attributes:
        traits: what the tables share.
        tables: indices in the layout, one after the other.
        first_slot: of the layout, where the store begins.
        store: the rows.
    """

    traits: GroupTraits
    tables: range
    first_slot: int
    store: RowStore

    @property
    def columns(self) -> tuple[str, ...]:
        """What a row has: "weight" and its states."""
        return ("weight", *self.traits.spec.state_names)

    def width_of(self, name: str) -> int:
        """Numbers per row of weights ("weight") or of a state."""
        return self.traits.dim if name == "weight" else self.traits.spec.state_width(name, self.traits.dim)

    def dtype_of(self, name: str) -> torch.dtype:
        """Their type."""
        return self.traits.dtype if name == "weight" else torch.float32

    def row_bytes(self, name: str) -> int:
        """Bytes per row."""
        return self.width_of(name) * self.dtype_of(name).itemsize

    def store_slots(self, slots: slice) -> slice:
        """A part of the rank's slots as part of the store."""
        return slice(slots.start - self.first_slot, slots.stop - self.first_slot)


class ShardedTables:
    """A module's planned tables on this rank, and how the others' rows are reached.

    Attributes:
        layout: where every row lives; tables of one group stand together.
        bijections: order of popularity of each table's rows, in the layout's order of tables.
        options: how they are carried out.
        groups: tables by their traits.
        process_groups: of ranks, by group size.
        on_update: called before rows are updated.
        on_replace: called before rows are written to by what all ranks call.
        location_tables: of each table.
        replaced: the module has others now.
    """

    def __init__(
        self,
        layout: Layout,
        traits: Sequence[GroupTraits],
        bijections: Sequence[IndexBijection],
        options: GroupOptions,
        *,
        before_group: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``traits`` of each table; equal ones stand together. ``before_group`` is called before memory is taken for
        the rows of one.
        """
        self.layout, self.traits, self.bijections, self.options = layout, tuple(traits), tuple(bijections), options
        self.process_groups = level_groups(sorted({*layout.group_sizes, layout.world_size}), options.process_group)
        self._steps = torch.zeros(1, dtype=torch.long)
        # Of look-ups to be trained, as long as they can be, the number of their update; 0 before it.
        self._updates: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self.replaced = False
        self.on_update: Callable[[], None] = lambda: None
        self.on_replace: Callable[[], None] = lambda: None
        # Where ids are translated ahead, it happens on the host.
        device = torch.device("cpu") if options.translated_ids else options.device
        self.location_tables = [
            LocationTable(layout, index, bijection, device) for index, bijection in enumerate(bijections)
        ]
        if host_waits_for(device) and self.location_tables:
            _ = self._joint_locations  # before rows take the memory
        self.groups: list[TableGroup] = []
        self._writes: list[int] = []  # by others, to each group's rows, that were taken over
        for index, (same, members) in enumerate(groupby(range(len(traits)), traits.__getitem__)):
            before_group(index)
            self.groups.append(self._group(same, list(members)))
        self.take_writes()

    def _group(self, traits: GroupTraits, tables: list[int]) -> TableGroup:
        members = range(tables[0], tables[-1] + 1)
        first, end = self.layout.table_slots[[members.start, members.stop]].tolist()
        make: Callable[..., RowStore] = self.options.store
        if make is FusedStore and self.options.device.type == "cpu" and not traits.spec.optimizer.on_cpu:
            make = MemoryStore  # FBGEMM has no such kernel there
        if traits.cache_load_factor is not None:
            make = self._cached(make, traits.cache_load_factor, members)
        store = make(traits.spec, end - first, traits.dim, traits.dtype, self.options.device)
        return TableGroup(traits, members, first, store)

    def _cached(self, make: Callable[..., RowStore], load_factor: float, tables: range) -> Callable[..., RowStore]:
        """What makes the store of tables whose rows without copies are kept on the host, behind a cache."""
        layout = self.layout
        label = f"rank {self.rank}, tables {', '.join(self.names[table] for table in tables)}"
        level = [index for index, size in enumerate(layout.group_sizes) if size == layout.world_size]
        rows = int(layout.depth[tables.start : tables.stop, level].sum())
        if not rows:
            raise PlanError(
                f"tables {', '.join(self.names[table] for table in tables)}: every rank has copies of all of their"
                " rows, which are not cached; leave them out of cache_load_factors"
            )
        how: dict[str, Any] = {"cache_rows": math.ceil(load_factor * rows), "cache": make, "label": label}
        first = int(layout.table_slots[tables.start])
        ranges = [self._served(table, level[0], first) for table in tables if layout.depth[table, level[0]]]
        if self.options.servers is not None:
            return partial(ServedStore, **how, tables=self.options.servers, ranges=ranges)
        if not host_waits_for(self.options.device):
            return partial(CachedStore, **how)
        return partial(MappedStore, **how, ranges=[served.slots for served in ranges])

    def _served(self, table: int, level: int, first_slot: int) -> ServedRange:
        """The rows of a level that are this rank's, on servers; ``first_slot`` of the layout is the store's first."""
        layout, ids_of = self.layout, self.bijections[table].rows
        positions = layout.piece(table, level, self.rank).positions
        start = int(layout.first_slot[table, level]) - first_slot
        slots = range(start, start + int(layout.depth[table, level]))
        begin, step = positions.start, positions.step
        return ServedRange(self.names[table], slots, lambda n: ids_of(begin + step * n).astype(np.int64))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tables."""
        return self.layout.tables

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Of all ranks."""
        return self.options.process_group

    @cached_property
    def rank(self) -> int:
        """Of this process among them."""
        return dist.get_rank(self.options.process_group)

    @property
    def steps(self) -> torch.Tensor:
        """Updates so far; shape (1,). Writing changes it."""
        return self._steps

    @property
    def device(self) -> torch.device:
        """Of the rows."""
        return self.options.device

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks, as checkpoints name them; it goes with the tables, since it holds the process group."""
        return DeviceMesh.from_group(self.process_group, self.device.type)

    @cached_property
    def mesh_on_host(self) -> DeviceMesh:
        """The same ranks, of tensors on the host."""
        return DeviceMesh.from_group(self.process_group, "cpu")

    def with_layout(
        self,
        layout: Layout,
        bijections: Sequence[IndexBijection],
        *,
        index_dedup: frozenset[str],
        before_group: Callable[[int], None],
    ) -> ShardedTables:
        """The same tables in another layout, rows and states still empty."""
        options = replace(self.options, index_dedup=index_dedup)
        tables = ShardedTables(layout, self.traits, bijections, options, before_group=before_group)
        tables._steps = self._steps  # checkpoints know the tensor
        return tables

    # -- a step

    def locations(
        self, lookups: TableIds
    ) -> tuple[torch.Tensor, list[int], list[tuple[int, bool]], torch.Tensor | None]:
        """Of a batch's lookups, in order of tables; how many each group has; how many each table has, with whether its
        ids are sent once; and the first table that they lie outside of, where only the device knows.
        """
        counts = [0] * len(self.groups)
        of_tables: dict[int, int] = {}
        for table, number in zip(lookups.tables, lookups.lengths, strict=True):
            counts[self._group_of[table]] += number
            of_tables[table] = of_tables.get(table, 0) + number
        once = [(number, self.names[table] in self.options.index_dedup) for table, number in of_tables.items()]
        parts, outside = self._located(lookups)
        if len(parts) == 1:
            return parts[0], counts, once, outside
        return torch.cat([torch.empty(0, dtype=torch.int32, device=self.device), *parts]), counts, once, outside

    def _located(self, lookups: TableIds) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
        """Locations of a batch's lookups, in their order."""
        if host_waits_for(self.device):
            return self._joint_locations.locations(lookups)
        if self.options.translated_ids:
            return lookups.ids, None
        tables = (self.location_tables[table] for table in lookups.tables)
        return [table.locations(ids) for table, ids in zip(tables, lookups.ids, strict=True)], None

    @cached_property
    def _joint_locations(self) -> JointLocations:
        """Of all tables, on a device."""
        return JointLocations(self.location_tables, translated=self.options.translated_ids)

    @cached_property
    def _group_of(self) -> list[int]:
        """Which group each table is in."""
        return [index for index, group in enumerate(self.groups) for _ in group.tables]

    def group_of(self, table: int) -> TableGroup:
        """The group that a table is in."""
        return self.groups[self._group_of[table]]

    def take_failure(self) -> tuple[int, str] | None:
        """The first table of a group whose store has failed beside the steps, and how."""
        failed = ((group.tables.start, group.store.take_failure()) for group in self.groups)
        own = f"rank {self.rank}, "  # said again where it is raised
        return next(((table, str(error).removeprefix(own)) for table, error in failed if error is not None), None)

    def begin_step(self) -> None:
        """The rows that are looked up next may be updated, for all that is known after those looked up before."""
        self._begin_step(int(self._steps) + 1 + sum(not number for number in self._updates.values()))

    def looked_up(self, look_up: object) -> None:
        """They were, and may be updated for as long as what looked them up lives."""
        self._updates[look_up] = 0

    def count_update(self, look_up: object) -> None:
        """They are updated now; again, perhaps, which counts once, as FBGEMM has it."""
        if not self._updates.get(look_up):
            self._steps += 1
            self._updates[look_up] = int(self._steps)
        self._begin_step(self._updates[look_up])

    def _begin_step(self, step: int) -> None:
        for group in self.groups:
            group.store.begin_step(step)

    def moments(self) -> list[tuple[int, float]]:
        """Of which step each group's updates are now, and their learning rates."""
        return [group.store.moment for group in self.groups]

    def restore(self, moments: Sequence[tuple[int, float]]) -> None:
        """Be there again."""
        for group, (step, rate) in zip(self.groups, moments, strict=True):
            group.store.begin_step(step)
            group.store.set_learning_rate(rate)

    def train(self, mode: bool) -> None:
        """As ``nn.Module.train``."""
        for group in self.groups:
            group.store.train(mode)

    # -- rows by table

    def parameter(self, table: int) -> nn.Parameter:
        """This rank's rows of a table, those with copies first; shape (slots, D), sharing their memory."""
        group = self.group_of(table)
        first, end = self.layout.table_slots[[table, table + 1]].tolist()
        return group.store.parameter(group.store_slots(slice(first, end)))

    def held(self, table: int) -> list[tuple[int, slice, range]]:
        """What this rank holds of a table: (level, slots in its store, positions), level by level."""
        group, pieces = self.group_of(table), []
        for level, size in enumerate(self.layout.group_sizes):
            piece = self.layout.piece(table, level, self.process_groups[size].local_rank)
            pieces.append((level, group.store_slots(piece.slots), piece.positions))
        return pieces

    def served(self, table: int) -> ServedStore | None:
        """The store of a table whose rows are on servers."""
        store = self.group_of(table).store
        return store if isinstance(store, ServedStore) else None

    def copies_written(self) -> bool:
        """Whether somebody wrote to parameters with copies since :meth:`take_writes`, perhaps otherwise than on other
        ranks; what is written through ``data`` is not counted.
        """
        return bool(self._writes) and self._counted_writes() != self._writes

    def take_writes(self) -> None:
        """Copies are alike, whatever was written to them."""
        copies = any(map(self.has_copies, range(len(self.layout.group_sizes))))
        self._writes = self._counted_writes() if copies else []

    def _counted_writes(self) -> list[int]:
        return [version_of(group.store.flat) for group in self.groups]

    def has_copies(self, level: int) -> bool:
        """Whether several ranks have the rows of a level."""
        return self.process_groups[self.layout.group_sizes[level]].across is not None

    def make_alike(self, level: int, rows: torch.Tensor) -> None:
        """Let every copy of a level's rows be the first one's; every rank must call it."""
        across = self.process_groups[self.layout.group_sizes[level]].across
        if across is not None:
            dist.broadcast(rows, dist.get_process_group_ranks(across)[0], group=across)

    def ids_of(self, table: int, positions: range) -> npt.NDArray[np.int64]:
        """Row ids (int64) at positions of a table; shape (n,)."""
        held = np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)
        return self.bijections[table].rows(held).astype(np.int64, copy=False)
