"""From one plan to another while a job is running: only rows that change tier or rank travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from flexshard import units
from flexshard._internal import PathLike, host_waits_for, on_all_ranks, to_device
from flexshard.errors import PlanError
from flexshard.executors.sharding.row_sharding import check_world, placement_of
from flexshard.executors.sharding.sequences import ShardedFlexShardEmbeddingCollection
from flexshard.executors.sharding.sharded_tables import ShardedTables, TableGroup
from flexshard.executors.state.rows_by_id import parts_of, transfer_of
from flexshard.executors.state.served_rows import adopt, publish
from flexshard.executors.stores.mapped import MappedStore
from flexshard.executors.stores.served import ServedStore
from flexshard.planner import FlexShardParameterSharding, FlexShardPlanner, Plan, TablePlan, moving_seconds, row_moves
from flexshard.profiling import AccessProfile

__all__ = ["Resharded", "reshard"]

_MOST_FORECAST = 1 << 28  # rows that are looked at one by one, while other ranks wait

Rows = dict[str, torch.Tensor]


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
    quiet: bool = False,
) -> Resharded:
    """Move every planned table of a running model to where another plan has it; every rank must call it.

    Weights and optimizer states go on as they are. Call it between steps, with no batch under way: a pipeline that
    prefetches has to be drained first. While a module's rows move, the old ones are in the host's memory: on CUDA a
    device holds its rows once, and up to 256 MiB of those on their way; their parameters of before have no rows then.
    If another rank is lost on the way, so is the model: load a checkpoint.

    Args:
        model: with modules sharded by :class:`FlexShardEmbeddingCollectionSharder`.
        new_plan: for the same tables and ranks.
        profiles, base: rankings of its rows, as :class:`flexshard.FlexShardPlanner` takes them.
        quiet: rank 0 does not print, before anything moves, what will and how long it takes over the plan's links
            (:func:`flexshard.planner.replan` says beforehand whether it pays).

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
        changes.append((module, shardings))
    rows = kept = nbytes = 0
    if not quiet and dist.get_rank(process_group) == 0:
        print(_forecast(changes, new_plan), flush=True)
    for module, shardings in changes:
        module.finish_writes()
        tables, moved = _moved(module.tables, shardings)
        rows, kept, nbytes = rows + moved.rows, kept + moved.kept, nbytes + moved.nbytes
        module.replace_tables(tables, new_plan.fingerprint)
    totals = torch.tensor([rows, nbytes, kept], device=changes[0][0].tables.device)
    dist.all_reduce(totals, group=process_group)
    return Resharded(*totals.tolist())


def _forecast(
    changes: list[tuple[ShardedFlexShardEmbeddingCollection, dict[str, FlexShardParameterSharding]]], plan: Plan
) -> str:
    """What will move, and how long that takes, in a sentence."""
    moved = kept = nbytes = 0
    if sum(int(module.tables.layout.num_rows.sum()) for module, _ in changes) > _MOST_FORECAST:
        return f"reshard: to plan {plan.fingerprint[:12]}; 'flexshard replan' says what moves in tables so large"
    for module, shardings in changes:
        now = module.tables
        planned = {name: shardings[name] for name in now.names}
        layout, bijections = placement_of(planned, now.layout.world_size)
        for index, name in enumerate(now.names):
            group = now.group_of(index)
            if now.served(index) is not None:  # its rows stay where they are
                continue
            numbers = sum(group.width_of(one) for one in group.columns)
            found = row_moves(
                (now.layout, index), (layout, index), now.bijections[index], bijections[index], numbers, table=name
            )
            moved, kept, nbytes = moved + found.moved, kept + found.kept, nbytes + found.nbytes
    seconds = moving_seconds(plan.cluster, nbytes)
    return (
        f"reshard: {moved:,} copies of rows ({units.format_bytes(nbytes)}) come from other ranks, {kept:,} stay; about"
        f" {units.format_seconds(seconds)} over {plan.cluster.name}'s links"
    )


def _check(modules: Mapping[str, ShardedFlexShardEmbeddingCollection], plan: Plan) -> None:
    """Whether the plan is for these modules' tables, all of them and no others."""
    known = set(plan.tables)
    for name, module in modules.items():
        if module.translated_ids:
            raise PlanError(
                f"collection {name!r}: its ids are translated ahead, to where rows are now; reshard a model that was"
                " sharded without translated_ids"
            )
        found = {}
        for table in module.tables.names:
            names = {table, f"{_plain_name(name)}.{table}"} & set(plan.tables)
            if not names:
                raise PlanError(f"the plan has no table {table!r} of {name!r}; plan for all of the model's tables")
            known -= names
            found[table] = plan.tables[min(names)]
            traits = module.tables.group_of(module.tables.names.index(table)).traits
            _check_cache(plan, found[table], traits.cache_load_factor)
        for group in module.tables.groups:
            if group.traits.cache_load_factor is not None:
                _check_rows_behind_cache(plan, [found[module.tables.names[table]] for table in group.tables])
    if known:
        raise PlanError(f"the plan has table {min(known)!r}, which the model has not; plan for this model")


def _check_cache(plan: Plan, table: TablePlan, load_factor: float | None) -> None:
    """Whether a plan leaves a table behind its cache, or without one: rows do not move between host and device."""
    asked = plan.settings.host_memory is not None
    if (table.cache is not None and load_factor is None) or (asked and table.cache is None and load_factor is not None):
        now, then = ("without a cache", "behind one") if load_factor is None else ("behind a cache", "without one")
        raise PlanError(
            f"table {table.name!r} is {now}, and the plan has it {then}; save a checkpoint, and load it under the new"
            " plan"
        )


def _check_rows_behind_cache(plan: Plan, tables: Sequence[TablePlan]) -> None:
    """Whether a plan leaves the cache of some tables any rows at all."""
    world = plan.cluster.world_size
    if not any(tier.rows for table in tables for tier in table.tiers if tier.group_size == world):
        raise PlanError(
            f"tables {', '.join(table.name for table in tables)} are behind a cache, and the plan has copies of all of"
            " their rows on every rank or node, which are not cached; save a checkpoint, and load it under the new plan"
        )


def _plain_name(name: str) -> str:
    """A module's name in the model as it was before it was wrapped."""
    parts = name.split(".")
    while parts and parts[0] in ("_dmp_wrapped_module", "module"):
        parts = parts[1:]
    return ".".join(parts)


def _moved(old: ShardedTables, shardings: Mapping[str, FlexShardParameterSharding]) -> tuple[ShardedTables, Resharded]:
    """The tables where a plan has them, with their rows."""
    planned = {name: shardings[name] for name in old.names}
    index_dedup = frozenset(name for name, how in planned.items() if how.index_dedup)
    sources: list[Rows] = []
    for table in range(len(old.names)):
        if old.served(table) is not None:
            publish(old, table, old.group_of(table).columns)

    def make_room(group: int) -> None:
        sources.append(_rows_of(old.groups[group]))

    new = old.with_layout(
        *placement_of(planned, old.layout.world_size), index_dedup=index_dedup, before_group=make_room
    )
    moved = [_move_group(old, new, *group) for group in zip(old.groups, sources, new.groups, strict=True)]
    return new, Resharded(*(sum(numbers) for numbers in zip(*map(astuple, moved), strict=True)))


def _rows_of(group: TableGroup) -> Rows:
    """Weights and states of a group, on the host: as they are, or taken off their device."""
    if isinstance(group.store, ServedStore):
        return {}
    rows = {name: group.store.part(name) for name in group.columns}
    if not host_waits_for(group.store.values.device):
        return rows
    if isinstance(group.store, MappedStore):  # they are on the host
        group.store.release()
        return rows
    rows = {name: values.to("cpu", copy=True) for name, values in rows.items()}
    group.store.release()
    return rows


def _move_group(
    old: ShardedTables, new: ShardedTables, source: TableGroup, rows: Rows, target: TableGroup
) -> Resharded:
    """Fill the target's store from those that have its rows."""
    width = sum(target.width_of(name) for name in target.columns)
    moved = kept = 0

    def found(slots: npt.NDArray[np.int64]) -> torch.Tensor:
        at = to_device(slots, next(iter(rows.values())).device)
        return torch.cat([values.index_select(0, at).float() for values in rows.values()], dim=1).to(old.device)

    for table in target.tables:
        if new.served(table) is not None:
            adopt(new, table, target.columns)
            copied = [size < new.layout.world_size for size in new.layout.group_sizes]
            moved += sum(len(held[2]) for held, has in zip(new.held(table), copied, strict=True) if has)
            continue
        transfer = transfer_of(old, table, "reshard")
        for level, slots, positions in new.held(table):
            longest = int(new.layout.depth[table, level])
            for part in parts_of(len(positions), longest, 4 * width, old.rank / old.layout.world_size):
                ids = new.ids_of(table, positions[part])
                before = np.asarray(old.bijections[table].positions(ids), np.int64)
                holder, _, slot = old.layout.holder(table, before, old.rank)
                at, away = slot - source.first_slot, holder != old.rank
                got = transfer.ask(
                    to_device(at[away], old.device),
                    to_device(holder[away], old.device),
                    lambda asked: found(asked.cpu().numpy()),
                )
                result = got.new_empty(len(ids), width)
                result[to_device(np.flatnonzero(~away), old.device)] = found(at[~away])
                result[to_device(np.flatnonzero(away), old.device)] = got
                kept, moved = kept + int((~away).sum()), moved + int(away.sum())
                column = 0
                for name, values in rows.items():
                    end = column + values.shape[1]
                    target.store.part(name)[slots][part].copy_(result[:, column:end])
                    column = end
    if not isinstance(target.store, ServedStore):
        target.store.rows_written()
    return Resharded(moved, moved * width * 4, kept)
