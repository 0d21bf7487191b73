"""Rows of a table by id, wherever they live, in parts: what is on its way beside the tables stays small."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from flexshard._internal import on_all_ranks, parts_by_bytes, to_device
from flexshard.errors import CacheError
from flexshard.executors.comm.collectives import Label
from flexshard.executors.sharding.sharded_tables import ShardedTables
from flexshard.executors.state.row_transfer import RowTransfer
from flexshard.executors.state.served_rows import adopt, publish, read_ids, write_ids

__all__ = [
    "block_rows",
    "draw_rows",
    "fill_rows",
    "make_copies_alike",
    "own_block",
    "parts_of",
    "read_rows",
    "transfer_of",
    "write_rows",
]

# Of the rows that a rank asks for at once. They are copied up to five times on their way.
_PART_BYTES = 32 << 20
_KEY_BYTES = 64  # ids, positions, ranks and slots of an entry


def parts_of(length: int, longest: int, row_bytes: int, first: float = 0.0) -> Iterator[slice]:
    """Parts of a range, as many on every rank.

    Args:
        length: of this rank's range.
        longest: of any rank's.
        row_bytes: of an entry.
        first: where to begin, as a share of the range: ranks whose ranges are alike then ask different ranks.
    """
    rows = max(_PART_BYTES // (row_bytes + _KEY_BYTES), 1)
    number = -(-longest // rows)
    shift = int(first * number)
    for index in range(number):
        start = (index + shift) % number * rows
        yield slice(min(start, length), min(start + rows, length))


def block_rows(tables: ShardedTables, table: int) -> int:
    """Rows of a rank's block of a table as checkpoints have it; the last ranks' may have fewer."""
    return -(-int(tables.layout.num_rows[table]) // tables.layout.world_size)


def own_block(tables: ShardedTables, table: int) -> range:
    """Ids of this rank's block."""
    size = block_rows(tables, table)
    return range(int(tables.layout.num_rows[table]))[tables.rank * size : (tables.rank + 1) * size]


def transfer_of(tables: ShardedTables, table: int, what: str) -> RowTransfer:
    """How a table's rows travel between all ranks."""
    label = Label(tables.layout.world_size, what, (tables.names[table],))
    return RowTransfer(tables.options.collectives, tables.process_group, label)


def read_rows(
    tables: ShardedTables,
    table: int,
    name: str,
    wanted: range,
    longest: int,
    take: Callable[[slice, torch.Tensor], None],
) -> None:
    """Read a table's rows from the ranks that have them; every rank must call it, with ids of its own.

    Args:
        name: "weight" or a state.
        wanted: ids.
        longest: most ids that any rank wants.
        take: called with a part of ``wanted``, as indices in it, and its rows, shape (n, width), on the tables' device.
    """
    group = tables.group_of(table)
    if tables.served(table) is not None:
        publish(tables, table, [name])

        def served() -> None:
            for part in parts_by_bytes(len(wanted), group.row_bytes(name)):
                take(part, read_ids(tables, table, [name], wanted[part])[name])

        on_all_ranks(served, CacheError, tables.process_group)
        return
    values = group.store.part(name)
    transfer = transfer_of(tables, table, "checkpoint")
    for part in parts_of(len(wanted), longest, group.row_bytes(name)):
        ids = np.arange(wanted.start + part.start, wanted.start + part.stop, dtype=np.int64)
        positions = np.asarray(tables.bijections[table].positions(ids), np.int64)
        holder, _, slots = tables.layout.holder(table, positions, tables.rank)
        rows = transfer.ask(
            to_device(slots - group.first_slot, tables.device),
            to_device(holder, tables.device),
            lambda asked: values[asked],
        )
        take(part, rows)


def write_rows(tables: ShardedTables, table: int, name: str, block: torch.Tensor) -> None:
    """Let a table's rows be those of every rank's block, shape (n, width), on any device; every rank must call it.

    Args:
        name: "weight" or a state.
    """
    if tables.served(table) is not None:
        _write_served(tables, table, {name: block})
        return
    layout, group = tables.layout, tables.group_of(table)
    tables.on_replace()
    values, size = group.store.part(name), block_rows(tables, table)
    transfer, first = transfer_of(tables, table, "checkpoint"), tables.rank * size
    for level, slots, positions in tables.held(table):
        longest, share = int(layout.depth[table, level]), tables.rank / layout.world_size
        for part in parts_of(len(positions), longest, group.row_bytes(name), share):
            ids = torch.from_numpy(tables.ids_of(table, positions[part])).to(tables.device)
            rows = transfer.ask(ids, ids // size, lambda asked: block[asked.to(block.device) - first].to(tables.device))
            values[slots][part].copy_(rows)
    group.store.rows_written()


def _write_served(tables: ShardedTables, table: int, blocks: Mapping[str, torch.Tensor]) -> None:
    """Let servers have every rank's block."""
    ids, group = own_block(tables, table), tables.group_of(table)
    row_bytes = sum(group.row_bytes(name) for name in blocks)

    def write() -> None:
        for part in parts_by_bytes(len(ids), row_bytes):
            rows = {
                name: block[part].to("cpu", tables.group_of(table).dtype_of(name)) for name, block in blocks.items()
            }
            write_ids(tables, table, ids[part], rows)

    adopt(tables, table, list(blocks), write)


@torch.no_grad()
def fill_rows(tables: ShardedTables, table: int, values: Mapping[str, torch.Tensor]) -> None:
    """Take this rank's rows out of a whole table in order of id; every rank must call it. Copies are alike then, though
    ranks may give different tables: one of those that have a row gives it.

    Args:
        table: index of the table.
        values: "weight" of shape (E, D), or states of shape (E, 1) or (E, D), by name.
    """
    if tables.served(table) is not None:
        ids = own_block(tables, table)
        _write_served(tables, table, {name: whole[ids.start : ids.stop] for name, whole in values.items()})
        return
    store = tables.group_of(table).store
    tables.on_replace()
    for level, slots, positions in tables.held(table):
        ids = torch.from_numpy(tables.ids_of(table, positions))
        for name, whole in values.items():
            part = store.part(name)[slots]
            part.copy_(whole[ids])
            tables.make_alike(level, part)
    store.rows_written()


@torch.no_grad()
def make_copies_alike(tables: ShardedTables) -> None:
    """Let all copies of a row have the weights of the first one, where somebody wrote to them on some rank; every rank
    must call it.
    """
    tables.on_replace()
    for table in range(len(tables.names)):
        served, store = tables.served(table), tables.group_of(table).store
        for level, slots, positions in tables.held(table):
            if tables.has_copies(level) and len(positions):
                rows = store.part("weight")[slots] if served is None else served.copied("weight", slots)
                tables.make_alike(level, rows)
    for group in tables.groups:
        if tables.served(group.tables.start) is None:  # caches may have newer rows than servers, and have no copies
            group.store.rows_written()
    tables.take_writes()


@torch.no_grad()
def draw_rows(tables: ShardedTables, table: int, draw: Callable[[torch.Tensor], object]) -> None:
    """Let new rows be what ``draw`` fills a tensor with; every rank must call it."""
    group = tables.group_of(table)
    if tables.served(table) is not None:
        ids = own_block(tables, table)

        def write() -> None:
            for part in parts_by_bytes(len(ids), group.row_bytes("weight")):
                drawn = torch.empty(len(ids[part]), group.traits.dim, dtype=group.traits.dtype)
                draw(drawn)
                write_ids(tables, table, ids[part], {"weight": drawn})

        adopt(tables, table, ["weight"], write)
        return
    tables.on_replace()
    values = group.store.part("weight")
    for level, slots, _ in tables.held(table):
        drawn = torch.empty_like(values[slots])
        draw(drawn)
        tables.make_alike(level, drawn)
        values[slots] = drawn
    group.store.rows_written()
