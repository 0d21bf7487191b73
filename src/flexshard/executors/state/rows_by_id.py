"""Rows of a table by id, wherever they live, in parts: what is on its way beside the tables stays small."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from flexshard._internal import to_device
from flexshard.executors.comm.collectives import Label
from flexshard.executors.sharding.sharded_tables import ShardedTables
from flexshard.executors.state.row_transfer import RowTransfer

__all__ = ["parts_of", "read_rows", "transfer_of", "write_rows"]

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
    values = group.store.part(name)
    row_bytes = values.shape[1] * values.element_size()
    transfer = transfer_of(tables, table, "checkpoint")
    for part in parts_of(len(wanted), longest, row_bytes):
        ids = np.arange(wanted.start + part.start, wanted.start + part.stop, dtype=np.int64)
        positions = np.asarray(tables.bijections[table].positions(ids), np.int64)
        holder, _, slots = tables.layout.holder(table, positions, tables.rank)
        rows = transfer.ask(
            to_device(slots - group.first_slot, tables.device),
            to_device(holder, tables.device),
            lambda asked: values[asked],
        )
        take(part, rows)


def write_rows(
    tables: ShardedTables,
    table: int,
    name: str,
    holders: Callable[[torch.Tensor], torch.Tensor],
    answer: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Let this rank's rows be what others say; every rank must call it.

    Args:
        name: "weight" or a state.
        holders: the rank that knows each id's row.
        answer: rows of ids that others ask this rank for, shape (n, width), on any device.
    """
    layout, store = tables.layout, tables.group_of(table).store
    tables.on_replace()
    values = store.part(name)
    row_bytes = values.shape[1] * values.element_size()
    transfer = transfer_of(tables, table, "checkpoint")
    for level, slots, positions in tables.held(table):
        longest, share = int(layout.depth[table, level]), tables.rank / layout.world_size
        for part in parts_of(len(positions), longest, row_bytes, share):
            ids = torch.from_numpy(tables.ids_of(table, positions[part])).to(tables.device)
            rows = transfer.ask(ids, holders(ids), lambda asked: answer(asked).to(tables.device))
            values[slots][part].copy_(rows)
    store.rows_written()
