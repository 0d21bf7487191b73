"""Tables of several modules as one exchange has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from flexshard.costmodels import Layout, RowWidths, TableClass, step_collectives
from flexshard.errors import FlexShardError, PlanError
from flexshard.executors.comm.bucketized_ids import BucketizedIds, Buckets, bucketize
from flexshard.executors.comm.context import ExchangeContext
from flexshard.executors.comm.delayed_sync import DelayedSync
from flexshard.executors.comm.exchange import Exchange
from flexshard.executors.comm.splits import Splits, SplitsExchange, Status
from flexshard.executors.comm.wire import Wire
from flexshard.executors.sharding.batches import BatchPart, BatchProblem, error_of
from flexshard.executors.sharding.sharded_tables import ShardedTables
from flexshard.executors.stores.replicas import CopiedRows, ReplicaReduction

__all__ = ["JointTables"]


class JointTables:
    """Tables of one or several modules, sharded alike, as an exchange has them.

    Attributes:
        layout: of all.
        classes: of each module, as indices.
        first_table: of each module.
    """

    def __init__(
        self,
        modules: Sequence[ShardedTables],
        members: tuple[int, ...],
        sync: DelayedSync,
        rows_change: Callable[[], None],
    ) -> None:
        """``members``: the modules, as their model counts them; ``rows_change`` is called before an update."""
        self._modules, self._options = modules, modules[0].options
        self.layout = Layout.joined([module.layout for module in modules])
        self.first_table = list(accumulate((len(module.names) for module in modules), initial=0))[:-1]
        groups = [group for module in modules for group in module.groups]
        self.classes = [range(*pair) for pair in pairwise(accumulate(map(len, (m.groups for m in modules)), initial=0))]
        self._groups = modules[0].process_groups
        for module in modules[1:]:
            self._groups = self._groups | module.process_groups
        self._type = torch.int32 if self.layout.location_type is np.int32 else torch.int64
        device = self._options.device
        self._shifts = [
            torch.from_numpy(module.layout.shift_into(self.layout, table)).to(device)
            for module, table in zip(modules, self.first_table, strict=True)
        ]
        classes, slots = [], []
        for module, table in zip(modules, self.first_table, strict=True):
            for group in module.groups:
                tables = range(table + group.tables.start, table + group.tables.stop)
                row_bytes = group.traits.dim * group.traits.dtype.itemsize
                moves = group.traits.spec.moves_at_zero
                classes.append(TableClass(tables, RowWidths.of(group.traits.dim, row_bytes, moves_at_zero=moves)))
                slots.append(int(self.layout.table_slots[tables.start]))
        slots.append(self.layout.num_slots)
        self._buckets = Buckets(self.layout.num_buckets, tuple(slots[:-1]), slots[-1], self._type, device)
        self._reductions: dict[tuple[int, ...], list[ReplicaReduction | None]] = {}
        dims, codecs = tuple(group.traits.dim for group in groups), self._options.codecs
        self._context = ExchangeContext(
            self.layout,
            step_collectives(self.layout, classes),
            self._groups,
            [group.store for group in groups],
            tuple(slots),
            self.classes,
            self._reductions_of,
            self._options.collectives,
            Wire(dims, tuple(group.traits.dtype for group in groups), codecs and codecs.forward),
            # Sums of 16-bit gradients would lose what is small and overflow on what is large.
            Wire(dims, (torch.float32,) * len(dims), codecs and codecs.backward),
            [group.traits.gathered_dtype for group in groups],
            self._before_update,
            self.check,
            device,
        )
        self._members, self._sync, self._rows_change = members, sync, rows_change

    def check(self) -> None:
        """Whether rows are still where they were.

        Raises:
            PlanError: they were moved.
        """
        moved = [name for module in self._modules if module.replaced for name in module.names]
        if moved:
            raise PlanError(
                f"tables {', '.join(moved[:3])}: this batch was begun before reshard() moved their rows, and would read"
                " and train the old ones; let pipelines come to their end before (progress(iter(())) until"
                " StopIteration), or reset() them and give them these batches again"
            )

    def _before_update(self, module: int, look_up: object) -> None:
        self._rows_change()
        self._modules[module].on_update()
        self._modules[module].count_update(look_up)

    def _reductions_of(self, members: tuple[int, ...]) -> list[ReplicaReduction | None]:
        """Of the copies of some modules' rows, of each level."""
        if members not in self._reductions:
            self._reductions[members] = [self._reduction(members, size) for size in self.layout.group_sizes]
        return self._reductions[members]

    def _reduction(self, members: tuple[int, ...], size: int) -> ReplicaReduction | None:
        across = self._groups[size].across
        if across is None:
            return None
        copied = [
            CopiedRows(module.layout, size, group.tables, group.store)
            for module in (self._modules[member] for member in members)
            for group in module.groups
        ]
        return ReplicaReduction(size, self.layout.tables, copied, across, self._options.collectives)

    def bucketize(self, parts: Sequence[BatchPart]) -> BucketizedIds:
        """A batch's lookups of every module, sorted by where they go."""
        locations = [part.locations.to(self._type) for part in parts]
        if len(parts) > 1:
            locations = [
                (own + shift[own // max(module.layout.num_slots, 1)]).to(self._type)
                for own, shift, module in zip(locations, self._shifts, self._modules, strict=True)
            ]
        together = torch.cat(locations) if len(parts) > 1 else locations[0]
        lookups = [count for part in parts for count in part.lookups]
        once = [table for part in parts for table in part.once]
        if self.layout.world_size == 1 and not any(which for _, which in once):
            return BucketizedIds.unsorted(together, lookups)
        return bucketize(together, lookups, self._buckets, index_dedup=once)

    def first_outside(self, found: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """The first table that ids lie outside of, from those of modules among their own tables, shape (1,) each; as
        many as there are tables if there is none.
        """
        if len(self._modules) == 1:
            return found[0][1]
        joined = [
            torch.where(
                table < len(self._modules[module].names), table + self.first_table[module], len(self.layout.tables)
            )
            for module, table in found
        ]
        return torch.stack(joined).amin(0)

    def exchange_splits(self, batch: BucketizedIds, status: torch.Tensor) -> SplitsExchange:
        """Tell the other ranks how many ids will come."""
        return SplitsExchange(self.layout, self._groups, self._options.collectives, batch.counts, status)

    def exchange(self, batch: BucketizedIds, splits: Splits) -> Exchange:
        """Send the ids."""
        return Exchange(self._context, batch, splits, self._members, self._sync)

    def error_of(self, status: Sequence[Status], problem: BatchProblem | None) -> FlexShardError | None:
        """What this rank raises after every rank has given its word."""
        return error_of(status, self.layout.tables, self.rank, problem)

    @property
    def rank(self) -> int:
        """Of this process."""
        return self._modules[0].rank
