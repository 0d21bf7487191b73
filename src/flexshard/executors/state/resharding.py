"""From one plan to another while a job is running: only rows that change tier or rank travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from flexshard._internal import PathLike, on_all_ranks
from flexshard.errors import PlanError
from flexshard.executors.comm.collectives import Label
from flexshard.executors.sharding.module import ShardedFlexShardEmbeddingCollection
from flexshard.executors.sharding.sharder import check_world, placement_of
from flexshard.executors.sharding.table_group import TableGroup
from flexshard.executors.state.row_transfer import RowTransfer
from flexshard.planner import FlexShardParameterSharding, FlexShardPlanner, Plan
from flexshard.profiling import AccessProfile

__all__ = ["Resharded", "reshard"]


@dataclass(frozen=True)
class Resharded:
    """What moved, over all ranks.

    Attributes:
        rows: row copies that came from another rank.
        nbytes: their weights and optimizer states, as they travelled (float32).
        kept: row copies that the rank had already.
    """

    rows: int
    nbytes: int
    kept: int


@torch.no_grad()
def reshard(
    model: nn.Module,
    new_plan: Plan,
    *,
    profiles: Mapping[str, AccessProfile | PathLike] | None = None,
    base: PathLike = ".",
) -> Resharded:
    """Move every planned table of a running model to where another plan has it; every rank must call it.

    Weights and optimizer states go on as they are. Call it between steps, with no batch under way: a pipeline that
    prefetches has to be drained first. While rows move, a rank holds the old ones, the new ones and a float32 copy of
    the old ones with their states.

    Args:
        model: with modules sharded by :class:`FlexShardEmbeddingCollectionSharder`.
        new_plan: for the same tables and ranks.
        profiles, base: rankings of its rows, as :class:`flexshard.FlexShardPlanner` takes them.

    Raises:
        PlanError: the plan is for other tables, rows or ranks, or differs between ranks, or ids are translated ahead of
            a module, for where its rows are now; nothing has moved then.
    """
    modules = {
        name: part for name, part in model.named_modules() if isinstance(part, ShardedFlexShardEmbeddingCollection)
    }
    if not modules:
        raise PlanError("the model has no module under a FlexShard plan; shard it first")
    planner = FlexShardPlanner(new_plan, profiles=profiles, base=Path(base))

    def planned() -> list[tuple[str, ShardedFlexShardEmbeddingCollection, int, dict[str, FlexShardParameterSharding]]]:
        _check(modules, new_plan)
        return [
            (name, module, index, planner.shardings_of(_plain_name(name), module.configs_of(group)))
            for name, module in modules.items()
            for index, group in enumerate(module.groups)
        ]

    changes = []
    process_group = next(iter(modules.values())).groups[0].process_group
    for name, module, index, shardings in on_all_ranks(planned, PlanError, process_group):
        check_world(shardings, module.groups[index].process_group, name)
        changes.append((module, index, _new_group(module.groups[index], shardings)))
    rows = kept = nbytes = 0
    for module, index, group in changes:
        moved = _move(module.groups[index], group)
        rows, kept, nbytes = rows + moved.rows, kept + moved.kept, nbytes + moved.nbytes
        module.replace_group(index, group, new_plan.fingerprint)
    totals = torch.tensor([rows, nbytes, kept], device=changes[0][2].device)
    dist.all_reduce(totals, group=changes[0][2].process_group)
    return Resharded(*totals.tolist())


def _check(modules: Mapping[str, ShardedFlexShardEmbeddingCollection], plan: Plan) -> None:
    """Whether the plan is for these modules' tables, all of them and no others."""
    known = set(plan.tables)
    for name, module in modules.items():
        if module.translated_ids:
            raise PlanError(
                f"collection {name!r}: its ids are translated ahead, to where rows are now; reshard a model that was"
                " sharded without translated_ids"
            )
        for table in (table for group in module.groups for table in group.layout.tables):
            names = {table, f"{_plain_name(name)}.{table}"} & set(plan.tables)
            if not names:
                raise PlanError(f"the plan has no table {table!r} of {name!r}; plan for all of the model's tables")
            known -= names
    if known:
        raise PlanError(f"the plan has table {min(known)!r}, which the model has not; plan for this model")


def _plain_name(name: str) -> str:
    """A module's name in the model as it was before it was wrapped."""
    parts = name.split(".")
    while parts and parts[0] in ("_dmp_wrapped_module", "module"):
        parts = parts[1:]
    return ".".join(parts)


def _new_group(old: TableGroup, shardings: Mapping[str, FlexShardParameterSharding]) -> TableGroup:
    planned = {name: shardings[name] for name in old.layout.tables}
    index_dedup = next(iter(planned.values())).index_dedup
    return old.with_layout(*placement_of(planned, old.layout.world_size), index_dedup=index_dedup)


def _move(old: TableGroup, new: TableGroup) -> Resharded:
    """Fill the new group's stores from the old one's, wherever those are."""
    rank = dist.get_rank(old.process_group)
    names = ["weight", *old.traits.spec.state_names]
    stores = old.level_stores()
    packed = [torch.cat([store.part(name).float() for name in names], dim=1) for store in stores]
    first = np.concatenate([[0], np.cumsum([len(rows) for rows in packed])])
    flat = torch.cat(packed)
    moved = kept = 0
    for table, name in enumerate(old.layout.tables):
        label = Label(old.layout.world_size, "reshard", (name,))
        transfer = RowTransfer(old.options.collectives, old.process_group, label)
        for level, store in enumerate(new.level_stores()):
            piece = new.layout.piece(table, level, new.groups[store.group_size].local_rank)
            ids = new.ids_of(table, piece.positions)
            before = np.asarray(old.bijections[table].positions(ids), np.int64)
            holder, held_level, slot = old.layout.holder(table, before, rank)
            index = torch.from_numpy(first[held_level] + slot).to(old.device)
            here = torch.from_numpy(holder == rank).to(old.device)
            rows = flat.new_empty(len(ids), flat.shape[1])
            rows[here] = flat[index[here]]
            away = torch.from_numpy(holder).to(old.device)[~here]
            rows[~here] = transfer.ask(index[~here], away, lambda asked: flat[asked])
            kept, moved = kept + int(here.sum()), moved + int((~here).sum())
            column = 0
            for part in names:
                target = store.part(part)
                width = target.shape[1]
                target[piece.slots].copy_(rows[:, column : column + width])
                column += width
    return Resharded(moved, moved * flat.shape[1] * 4, kept)
