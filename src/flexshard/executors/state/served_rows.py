"""Rows on embedding servers, read and written by id, in parts.

What servers have is older than what trainers have of rows that are in a cache or have copies: trainers publish it
before anybody reads, and adopt what others have written. Every rank must call what is said to be collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from flexshard._internal import on_all_ranks, parts_by_bytes
from flexshard.errors import CacheError
from flexshard.executors.servers.embedding_servers import ServedTables
from flexshard.executors.sharding.sharded_tables import ShardedTables

__all__ = ["adopt", "make_on_servers", "publish", "read_ids", "write_ids"]


def make_on_servers(tables: ShardedTables) -> None:
    """Take in those tables that are to be on servers, all zeros; collective."""
    for table in range(len(tables.names)):
        store, group = tables.served(table), tables.group_of(table)
        if store is not None:
            columns = {
                name: (group.width_of(name), str(group.dtype_of(name)).removeprefix("torch.")) for name in group.columns
            }
            store.on_servers.make(tables.names[table], int(tables.layout.num_rows[table]), columns)


def read_ids(tables: ShardedTables, table: int, names: Sequence[str], ids: range) -> dict[str, torch.Tensor]:
    """What servers have of rows; shape (n, width) each."""
    return _servers(tables, table).read([(tables.names[table], _array(ids))], names)


def write_ids(tables: ShardedTables, table: int, ids: range, rows: dict[str, torch.Tensor]) -> None:
    """Let servers have these rows, shape (n, width) each; nobody may have newer ones."""
    _servers(tables, table).write([(tables.names[table], _array(ids))], rows)


def publish(tables: ShardedTables, table: int, names: Sequence[str]) -> None:
    """Let servers have what trainers have; collective."""
    store, servers = tables.served(table), _servers(tables, table)
    assert store is not None

    def work() -> None:
        store.flush()
        for first, part, ids in _copied(tables, table):
            if first:
                rows = {name: store.copied(name, part) for name in names}
                servers.write([(tables.names[table], ids)], rows)

    on_all_ranks(work, CacheError, tables.process_group)


def adopt(tables: ShardedTables, table: int, names: Sequence[str], write: Callable[[], None] | None = None) -> None:
    """Let trainers have what servers have, once every rank has written what it writes; collective."""
    store, servers = tables.served(table), _servers(tables, table)
    assert store is not None
    tables.on_replace()
    on_all_ranks(store.flush, CacheError, tables.process_group)  # nothing newer comes after what is written
    if write is not None:
        on_all_ranks(write, CacheError, tables.process_group)

    def work() -> None:
        for _, part, ids in _copied(tables, table):
            for name, rows in servers.read([(tables.names[table], ids)], names).items():
                store.copied(name, part).copy_(rows)
        store.rows_written()

    on_all_ranks(work, CacheError, tables.process_group)


def _servers(tables: ShardedTables, table: int) -> ServedTables:
    store = tables.served(table)
    assert store is not None
    return store.on_servers


def _copied(tables: ShardedTables, table: int) -> Iterator[tuple[bool, slice, np.ndarray]]:
    """This rank's rows with copies, in parts: whether it is the first to have them, their slots in the store, ids."""
    group = tables.group_of(table)
    row_bytes = sum(group.row_bytes(name) for name in group.columns)
    for level, slots, positions in tables.held(table):
        size = tables.layout.group_sizes[level]
        if size < tables.layout.world_size:
            for part in parts_by_bytes(len(positions), row_bytes):
                where = slice(slots.start + part.start, slots.start + part.stop)
                yield tables.rank < size, where, tables.ids_of(table, positions[part])


def _array(ids: range) -> np.ndarray:
    return np.arange(ids.start, ids.stop, dtype=np.int64)
