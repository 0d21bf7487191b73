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
from flexshard.executors.sharding.sharded_tables import ShardedTables, TableGroup
from flexshard.executors.sharding.sharder import check_world, placement_of
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

    def planned() -> list[tuple[str, ShardedFlexShardEmbeddingCollection, dict[str, FlexShardParameterSharding]]]:
        _check(modules, new_plan)
        return [
            (name, module, planner.shardings_of(_plain_name(name), module.configs_of_planned()))
            for name, module in modules.items()
        ]

    changes = []
    process_group = next(iter(modules.values())).tables.process_group
    for name, module, shardings in on_all_ranks(planned, PlanError, process_group):
        check_world(shardings, module.tables.process_group, name)
        module.finish_writes()
        changes.append((module, _new_tables(module.tables, shardings)))
    rows = kept = nbytes = 0
    for module, tables in changes:
        moved = _move(module.tables, tables)
        rows, kept, nbytes = rows + moved.rows, kept + moved.kept, nbytes + moved.nbytes
        module.replace_tables(tables, new_plan.fingerprint)
    totals = torch.tensor([rows, nbytes, kept], device=changes[0][1].device)
    dist.all_reduce(totals, group=changes[0][1].process_group)
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
        for table in module.tables.names:
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


def _new_tables(old: ShardedTables, shardings: Mapping[str, FlexShardParameterSharding]) -> ShardedTables:
    planned = {name: shardings[name] for name in old.names}
    index_dedup = any(how.index_dedup for how in planned.values())
    return old.with_layout(*placement_of(planned, old.layout.world_size), index_dedup=index_dedup)


def _move(old: ShardedTables, new: ShardedTables) -> Resharded:
    """Fill the new tables' stores from the old ones', wherever those are."""
    moved = [_move_group(old, new, *pair) for pair in zip(old.groups, new.groups, strict=True)]
    return Resharded(sum(m.rows for m in moved), sum(m.nbytes for m in moved), sum(m.kept for m in moved))


def _move_group(old: ShardedTables, new: ShardedTables, source: TableGroup, target: TableGroup) -> Resharded:
    names = ["weight", *source.traits.spec.state_names]
    flat = torch.cat([source.store.part(name).float() for name in names], dim=1)
    moved = kept = 0
    for table in target.tables:
        label = Label(old.layout.world_size, "reshard", (old.names[table],))
        transfer = RowTransfer(old.options.collectives, old.process_group, label)
        for _, slots, positions in new.held(table):
            ids = new.ids_of(table, positions)
            before = np.asarray(old.bijections[table].positions(ids), np.int64)
            holder, _, slot = old.layout.holder(table, before, old.rank)
            index = torch.from_numpy(slot - source.first_slot).to(old.device)
            here = torch.from_numpy(holder == old.rank).to(old.device)
            rows = flat.new_empty(len(ids), flat.shape[1])
            rows[here] = flat[index[here]]
            away = torch.from_numpy(holder).to(old.device)[~here]
            rows[~here] = transfer.ask(index[~here], away, lambda asked: flat[asked])
            kept, moved = kept + int(here.sum()), moved + int((~here).sum())
            column = 0
            for part in names:
                values = target.store.part(part)
                values[slots].copy_(rows[:, column : column + values.shape[1]])
                column += values.shape[1]
    return Resharded(moved, moved * flat.shape[1] * 4, kept)
