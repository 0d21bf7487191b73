"""Tables as checkpoints have them: whole rows in order of id, in equal blocks over the ranks, whatever the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from flexshard.errors import CheckpointError
from flexshard.executors._collectives import Label, all_to_all
from flexshard.executors._group import TableGroup

__all__ = ["ask_rows", "from_logical", "send_rows", "to_logical"]


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
        own = group.groups[size]
        piece = group.layout.piece(table, level, own.position)
        copies = world // size
        mine = np.arange(own.copy, len(piece.ranks), copies)
        ids.append(group.ids_of(table, piece.ranks)[mine])
        values.append(store.part(name)[piece.slots][torch.from_numpy(mine)])
    all_ids = torch.from_numpy(np.concatenate(ids)).to(group.device)
    label = Label(world, "checkpoint", (group.layout.tables[table],))
    got_ids, got = send_rows(all_ids, torch.cat(values), all_ids // block, process_group, label)
    local = got.new_empty(max(0, min(block, rows - rank * block)), got.shape[1])
    local[got_ids - rank * block] = got
    shape, stride = torch.Size((rows, got.shape[1])), torch.Size((got.shape[1], 1))
    if got.shape[1] == 1 and name != "weight":  # as TorchRec has a number per row
        local, shape, stride = local.view(-1), torch.Size((rows,)), torch.Size((1,))
    return DTensor.from_local(local, _mesh(group), [Shard(0)], run_check=False, shape=shape, stride=stride)


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
    value = value.redistribute(_mesh(group), [Shard(0)]) if value.placements != (Shard(0),) else value
    local = value.to_local().view(-1, width)
    world, rank = dist.get_world_size(group.process_group), dist.get_rank(group.process_group)
    block = -(-rows // world)
    label = Label(world, "checkpoint", (group.layout.tables[table],))
    for level, store in enumerate(group.level_stores()):
        piece = group.layout.piece(table, level, group.groups[store.group_size].position)
        ids = torch.from_numpy(group.ids_of(table, piece.ranks)).to(group.device)
        answer = ask_rows(ids, ids // block, lambda asked: local[asked - rank * block], group.process_group, label)
        store.part(name)[piece.slots].copy_(answer)


def send_rows(
    keys: torch.Tensor, values: torch.Tensor, ranks: torch.Tensor, process_group: Any, label: Label
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send each (key, row) to a rank.

    Args:
        keys, ranks: shape (n,); values: shape (n, width).

    Returns:
        the keys and rows that came, in order of their senders.
    """
    order, out, back = _announce(ranks, process_group, label)
    got_keys, got = keys.new_empty(sum(back)), values.new_empty(sum(back), values.shape[1])
    waiting = [
        all_to_all(got_keys, keys[order].contiguous(), back, out, process_group, label),
        all_to_all(got, values[order].contiguous(), back, out, process_group, label),
    ]
    for pending in waiting:
        pending.wait()
    return got_keys, got


def ask_rows(
    keys: torch.Tensor,
    ranks: torch.Tensor,
    answer: Callable[[torch.Tensor], torch.Tensor],
    process_group: Any,
    label: Label,
) -> torch.Tensor:
    """Ask ranks for rows by key; ``answer`` gives those that others ask this rank for.

    Args:
        keys, ranks: shape (n,).

    Returns:
        the rows in the keys' order; shape (n, width).
    """
    order, out, back = _announce(ranks, process_group, label)
    asked = keys.new_empty(sum(back))
    all_to_all(asked, keys[order].contiguous(), back, out, process_group, label).wait()
    found = answer(asked).contiguous()
    got = found.new_empty(keys.numel(), found.shape[1])
    all_to_all(got, found, out, back, process_group, label).wait()
    result = torch.empty_like(got)
    result[order] = got
    return result


def _announce(ranks: torch.Tensor, process_group: Any, label: Label) -> tuple[torch.Tensor, list[int], list[int]]:
    """The order that sorts entries by the rank that each goes to, how many go to each rank, and how many will come."""
    sent = torch.bincount(ranks, minlength=dist.get_world_size(process_group))
    received = torch.empty_like(sent)
    all_to_all(received, sent, None, None, process_group, label).wait()
    return torch.argsort(ranks, stable=True), sent.tolist(), received.tolist()


_meshes: dict[Any, DeviceMesh] = {}


def _mesh(group: TableGroup) -> DeviceMesh:
    if group.process_group not in _meshes:
        _meshes[group.process_group] = DeviceMesh.from_group(group.process_group, group.device.type)
    return _meshes[group.process_group]
