"""Tables as checkpoints have them: whole rows in order of id, in equal blocks over the ranks, whatever the plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from flexshard.errors import CheckpointError
from flexshard.executors.comm.collectives import Label
from flexshard.executors.sharding.table_group import TableGroup
from flexshard.executors.state.row_transfer import RowTransfer

__all__ = ["from_logical", "to_logical"]


def to_logical(group: TableGroup, table: int, name: str) -> DTensor:
    """A table's weights or state as a ``DTensor`` of shape (E, D), or (E,), ``Shard(0)``; every rank must call it.

    Copies share the work: each sends another part of the rows.
    """
    process_group, rows = group.process_group, int(group.layout.num_rows[table])
    world, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    block = -(-rows // world)
    ids, values = [], []
    for level, store in enumerate(group.level_stores()):
        size = store.group_size
        ranks = group.groups[size]
        piece = group.layout.piece(table, level, ranks.local_rank)
        copies = world // size
        sent = np.arange(ranks.copy, len(piece.positions), copies)
        ids.append(group.ids_of(table, piece.positions)[sent])
        values.append(store.part(name)[piece.slots][torch.from_numpy(sent)])
    all_ids = torch.from_numpy(np.concatenate(ids)).to(group.device)
    label = Label(world, "checkpoint", (group.layout.tables[table],))
    transfer = RowTransfer(group.options.collectives, process_group, label)
    got_ids, got = transfer.send(all_ids, torch.cat(values), all_ids // block)
    local = got.new_empty(max(0, min(block, rows - rank * block)), got.shape[1])
    local[got_ids - rank * block] = got
    shape, stride = torch.Size((rows, got.shape[1])), torch.Size((got.shape[1], 1))
    if got.shape[1] == 1 and name != "weight":  # as TorchRec has a number per row
        local, shape, stride = local.view(-1), torch.Size((rows,)), torch.Size((1,))
    return DTensor.from_local(local, group.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


@torch.no_grad()
def from_logical(group: TableGroup, table: int, name: str, value: Any) -> None:
    """Take a table's weights or state from a whole tensor or a ``DTensor``; every rank must call it.

    Raises:
        CheckpointError: of another shape.
    """
    rows = int(group.layout.num_rows[table])
    width = group.traits.dim if name == "weight" else group.traits.spec.state_width(name, group.traits.dim)
    shape = tuple(value.shape)
    if shape != (rows, width) and not (width == 1 and shape == (rows,)):
        raise CheckpointError(
            f"table {group.layout.tables[table]!r}: {name} in the checkpoint has shape {shape}, the model has"
            f" {(rows, width)}; load it into the model that it was saved from"
        )
    if not isinstance(value, DTensor):
        group.fill(table, {name: value.view(rows, width)})
        return
    value = value.redistribute(group.mesh, [Shard(0)]) if value.placements != (Shard(0),) else value
    local = value.to_local().view(-1, width)
    world, rank = dist.get_world_size(group.process_group), dist.get_rank(group.process_group)
    block = -(-rows // world)
    label = Label(world, "checkpoint", (group.layout.tables[table],))
    transfer = RowTransfer(group.options.collectives, group.process_group, label)
    for level, store in enumerate(group.level_stores()):
        piece = group.layout.piece(table, level, group.groups[store.group_size].local_rank)
        ids = torch.from_numpy(group.ids_of(table, piece.positions)).to(group.device)
        answer = transfer.ask(ids, ids // block, lambda asked: local[asked - rank * block])
        store.part(name)[piece.slots].copy_(answer)
