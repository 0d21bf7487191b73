"""Tables as checkpoints have them: whole rows in order of id, in equal blocks over the ranks, whatever the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torchrec.distributed.shards_wrapper import LocalShardsWrapper

from flexshard._internal import on_all_ranks, weakly
from flexshard.errors import CacheError, CheckpointError
from flexshard.executors.sharding.sharded_tables import ShardedTables
from flexshard.executors.state.attendance import Attendance
from flexshard.executors.state.live_tensors import FRESH, STALE, HandedOut, LogicalShard
from flexshard.executors.state.rows_by_id import (
    block_rows,
    draw_rows,
    fill_rows,
    make_copies_alike,
    own_block,
    read_rows,
    write_rows,
)
from flexshard.executors.state.served_rows import adopt, publish, read_ids, write_ids
from flexshard.executors.state.served_shards import ServedShard, served_shard

__all__ = ["LaterTable", "LogicalTables", "check_keys", "tables_on_host"]

_INSTEAD = (
    "every rank has to call it: take `if rank == 0` away from it and keep it around what writes the file, or call"
    " flexshard.executors.full_state_dict(model) on every rank, which gives rank 0 whole tables"
)


_on_host: ContextVar[bool] = ContextVar("flexshard_tables_on_host", default=False)
_later: ContextVar[bool] = ContextVar("flexshard_tables_later", default=False)


@contextmanager
def tables_on_host(*, later: bool = False) -> Iterator[None]:
    """What a ``state_dict`` has of tables is in the host's memory, or is read only ``later``, one table at a time."""
    tokens = _on_host.set(True), _later.set(later)
    try:
        yield
    finally:
        _on_host.reset(tokens[0])
        _later.reset(tokens[1])


def _shard_of(value: Any) -> LogicalShard | None:
    """This rank's block, where it was handed out."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local if isinstance(local, LogicalShard) else None


def check_keys(missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Whether a checkpoint has what a model has; raises CheckpointError."""
    if missing:
        raise CheckpointError(f"the checkpoint has no {missing[0]}; load it with strict=False to keep what is there")
    if unexpected:
        raise CheckpointError(f"the checkpoint has {min(unexpected)}, which the model has not; strict=False ignores it")


@dataclass(frozen=True)
class LaterTable:
    """A table in a ``state_dict`` that has not been read."""

    logical: LogicalTables
    table: int
    name: str

    def whole(self) -> torch.Tensor | None:
        """As :meth:`LogicalTables.whole`."""
        return self.logical.whole(self.table, self.name)


class LogicalTables:
    """Weights and optimizer states of a module's planned tables, as ``state_dict`` gives and takes them."""

    def __init__(self, tables: ShardedTables, container: str) -> None:
        """``container``: the module's attribute that holds its tables."""
        self._container = container
        self._attendance = Attendance(tables.process_group)
        self._handed_out: list[HandedOut] = []
        self.tables = tables

    @property
    def tables(self) -> ShardedTables:
        """Whose they are."""
        return self._tables

    @tables.setter
    def tables(self, tables: ShardedTables) -> None:
        self._tables = tables
        tables.on_update = weakly(self.rows_change)

    def parameter_name(self, table: str) -> str:
        """Of a table's rows among the module's parameters, in its ``state_dict`` and in its optimizer's."""
        return f"{self._container}.{table}.weight"

    # -- out

    def wait_for_all(self, call: str) -> None:
        """Until every rank has come to a call; see :class:`Attendance`. Then take over what was written to.

        Raises:
            CacheError: a rank's cache has newer rows than somebody wrote; on every rank.
        """
        self._attendance.wait(call, _INSTEAD)
        if any(group.store.ahead for group in self.tables.groups):
            on_all_ranks(self._flush, CacheError, self.tables.process_group)
        self.take_written()

    def _flush(self) -> None:
        for group in self.tables.groups:
            group.store.flush()

    def hand_out(self, table: int, name: str) -> DTensor | LaterTable:
        """A table's weights or state as a ``DTensor`` of shape (E, D), or (E,), ``Shard(0)``; every rank must call it.

        Until the next training step it may be written to in place.
        """
        if _later.get():
            return LaterTable(self, table, name)
        tables = self.tables
        later = _on_host.get() and tables.served(table) is not None
        with torch.inference_mode(False), torch.no_grad():  # tensors of inference do not count what is written to them
            block = self._empty(table, name, "meta") if later else self._block(table, name)
        rows, width = int(tables.layout.num_rows[table]), block.shape[1]
        shape, stride = torch.Size((rows, width)), torch.Size((width, 1))
        if width == 1 and name != "weight":  # as TorchRec has a number per row
            block, shape, stride = block.view(-1), torch.Size((rows,)), torch.Size((1,))
        first = min(tables.rank * block_rows(tables, table), rows)
        if later:
            publish(tables, table, [name])
            return DTensor.from_local(
                self._on_servers(table, name, block, first),
                tables.mesh_on_host,
                [Shard(0)],
                run_check=False,
                shape=shape,
                stride=stride,
            )
        same = (table, name, False, block.device)
        known = next((e for e in self._handed_out if (e.table, e.name, e.stale, e.block.device) == same), None)
        holder = None if known is None else known.holder()
        if known is None or holder is None:
            known, holder = HandedOut.of(table, name, block, weakly(self._prune))
            self._handed_out.append(known)
        else:  # the same tensor as before, as TorchRec's: writing to either is writing to both
            known.refresh(block)
        shard = LogicalShard(known.block, (first,) + (0,) * (block.ndim - 1), holder)
        mesh = tables.mesh if block.device.type == tables.device.type else tables.mesh_on_host
        return DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def _prune(self) -> None:
        """Forget what nobody holds any more."""
        self._handed_out = [entry for entry in self._handed_out if not entry.over]

    def _on_servers(self, table: int, name: str, block: torch.Tensor, first: int) -> ServedShard:
        """A block that begins at a row and is read from servers, and written to them, when a checkpoint is."""
        tables = self.tables
        return ServedShard.of(
            block,
            (first,) + (0,) * (block.ndim - 1),
            lambda ids: read_ids(tables, table, [name], ids)[name],
            lambda ids, rows: write_ids(tables, table, ids, {name: rows}),
        )

    def _empty(self, table: int, name: str, device: torch.device | str) -> torch.Tensor:
        """Room for this rank's rows by id; shape (n, width)."""
        group = self.tables.group_of(table)
        wanted = own_block(self.tables, table)
        return torch.empty(len(wanted), group.width_of(name), dtype=group.dtype_of(name), device=device)

    def _block(self, table: int, name: str) -> torch.Tensor:
        """This rank's rows by id; shape (n, width)."""
        tables = self.tables
        wanted, size = own_block(tables, table), block_rows(tables, table)
        block = self._empty(table, name, torch.device("cpu") if _on_host.get() else tables.device)
        read_rows(tables, table, name, wanted, size, lambda part, rows: block[part].copy_(rows))
        return block

    @torch.no_grad()
    def whole(self, table: int, name: str) -> torch.Tensor | None:
        """A table's weights or state in order of id, shape (E, width), on the first rank's host; every rank must call
        it.
        """
        tables = self.tables
        rows, group = int(tables.layout.num_rows[table]), tables.group_of(table)
        wanted = range(rows if tables.rank == 0 else 0)
        result = torch.empty(len(wanted), group.width_of(name), dtype=group.dtype_of(name))
        read_rows(tables, table, name, wanted, rows, lambda part, rows: result[part].copy_(rows))
        return result if tables.rank == 0 else None

    # -- in

    @torch.no_grad()
    def take(self, table: int, name: str, value: Any) -> None:
        """Take a table's weights or state from a whole tensor or a ``DTensor``; every rank must call it.

        Raises:
            CheckpointError: of another shape.
        """
        tables = self.tables
        rows, group = int(tables.layout.num_rows[table]), tables.group_of(table)
        width = group.width_of(name)
        shape = tuple(value.shape)
        if shape != (rows, width) and not (width == 1 and shape == (rows,)):
            raise CheckpointError(
                f"table {tables.names[table]!r}: {name} in the checkpoint has shape {shape}, the model has"
                f" {(rows, width)}; load it into the model that it was saved from"
            )
        shard = _shard_of(value)

        def check() -> None:
            if shard is not None:
                shard.check_current()

        on_all_ranks(check, CheckpointError, tables.process_group)
        loaded = None if shard is None else shard.holder
        self._outdate([entry for entry in self._handed_out if (entry.table, entry.name) == (table, name)], loaded)
        if not isinstance(value, DTensor):
            fill_rows(tables, table, {name: value.view(rows, width)})
            return
        if served_shard(value) is not None:  # what was loaded is on the servers
            adopt(tables, table, [name])
            return
        on_all_ranks(lambda: self._check_owner(table, value), CheckpointError, tables.process_group)
        if value.placements != (Shard(0),):
            value = value.redistribute(tables.mesh, [Shard(0)])
        block = value.to_local()
        self._take_block(table, name, block.local_shards()[0] if isinstance(block, LocalShardsWrapper) else block)

    @torch.no_grad()
    def draw(self, table: int, draw: Callable[[torch.Tensor], object]) -> None:
        """Let a table's weights be what ``draw`` fills tensors with; every rank must call it."""
        self._outdate([entry for entry in self._handed_out if (entry.table, entry.name) == (table, "weight")])
        draw_rows(self.tables, table, draw)

    def _check_owner(self, table: int, value: DTensor) -> None:
        """Whether this rank's part of a table is its own: ranks that save to one file leave one rank's part in it.

        Raises:
            CheckpointError: it is another rank's, or of another number of ranks.
        """
        tables = self.tables
        saved, here = value.device_mesh, tables.mesh
        if saved.size() == here.size() and saved.get_coordinate() == here.get_coordinate():
            return
        coordinate = saved.get_coordinate()
        whose = "no rank's" if coordinate is None else f"rank {coordinate[0]}'s"
        raise CheckpointError(
            f"rank {tables.rank} of {here.size()}: the checkpoint's part of table {tables.names[table]!r} is {whose} of"
            f" {saved.size()}, as when several ranks save to one file; save with save_checkpoint() or"
            " torch.distributed.checkpoint, or full_state_dict(model) on rank 0"
        )

    def _take_block(self, table: int, name: str, block: torch.Tensor) -> None:
        """Take every rank's rows by id."""
        tables = self.tables
        write_rows(tables, table, name, block.view(len(block), tables.group_of(table).width_of(name)))

    # -- what is written to in place

    def rows_change(self) -> None:
        """Rows are looked up to be updated, or are updated: what was handed out is no longer what they are.

        Raises:
            CheckpointError: somebody wrote to it while this step's batch was under way already.
        """
        self.check_nothing_written()
        self._outdate(self._handed_out)

    def check_nothing_written(self) -> None:
        """Rows of a batch under way are looked up or updated.

        Raises:
            CheckpointError: somebody wrote to what was handed out, too late for this batch.
        """
        if self.written() == FRESH:
            raise CheckpointError(
                f"rank {self.tables.rank}: tensors of state_dict() were written to while a batch was under way (between"
                " forward and backward, in a pipeline, or after start_input_dist), too late for it; call"
                " load_state_dict() with them between two steps"
            )

    def _outdate(self, entries: Iterable[HandedOut], loaded: Any = None) -> None:
        for entry in entries:
            entry.outdate(loaded)
        self._prune()

    def written(self) -> int:
        """Whether somebody wrote to what was handed out on this rank: 0, :data:`FRESH` or :data:`STALE`."""
        return max((STALE if entry.stale else FRESH for entry in self._handed_out if entry.written), default=0)

    @torch.no_grad()
    def take_written(self) -> None:
        """Take over what was written to on any rank since the last training step; every rank must call it."""
        tables = self.tables
        entries = [entry for entry in self._handed_out if not entry.stale]
        entries.sort(key=lambda entry: entry.written)  # of two, on the host and on the device, the one written to
        fresh = {(entry.table, entry.name): entry for entry in entries}
        mine = [key for key, entry in fresh.items() if entry.written]
        every: list[Any] = [None] * tables.layout.world_size
        dist.all_gather_object(every, (mine, tables.copies_written()), group=tables.process_group)
        if any(copies for _, copies in every):
            make_copies_alike(tables)
        for table, name in sorted({key for keys, _ in every for key in keys}):
            entry = fresh.get((table, name))
            current = self._block(table, name)  # of a rank that nobody wrote to, and where it was let go
            self._take_block(table, name, current if entry is None or not entry.written else entry.block)
        for entry in entries:
            entry.version = entry.block._version
        self._prune()
