"""``flexshard diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexshard import planner, units
from flexshard._internal import new_grid
from flexshard.cli.app import AsJson, PlanFile, app
from flexshard.cli.terminal import emit
from flexshard.errors import PlanError


@app.command("diff")
def diff_command(
    before: PlanFile,
    after: Annotated[Path, typer.Argument(help="Another plan file.")],
    as_json: AsJson = False,
) -> None:
    """Say which rows have other ranks under two plans, and how many bytes one copy of them is; and which tables that
    TorchRec shards are sharded otherwise.

    Example: flexshard diff plan.json other.json
    """
    plans = [planner.Plan.load(path) for path in (before, after)]
    names = [list(plan.tables) + list(plan.pooled) for plan in plans]
    if not set(names[0]) & set(names[1]):
        few = [", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "") for listed in names]
        raise PlanError(f"{before} and {after} have no table in common: one is of {few[0]}, the other of {few[1]}")
    changes = planner.diff(*plans)
    grid = new_grid("Moves", ["table"], ["from group", "to group", "positions", "rows", "weights"], ("positions",))
    for move in changes.moves:
        positions = f"{move.first_position:,} to {move.first_position + move.rows - 1:,}"
        ends = ["-" if size is None else str(size) for size in (move.source, move.target)]
        if move.begins is not None:
            ends = [f"{size}, from rank {rank}" for size, rank in zip(ends, move.begins, strict=True)]
        grid.add_row(move.table, *ends, positions, f"{move.rows:,}", units.format_bytes(move.nbytes))
    for pooled in changes.pooled:
        sides = ["-" if side is None else f"{side[0]} on {_ranks(side[1])}" for side in (pooled.source, pooled.target)]
        grid.add_row(pooled.table, *sides, "by TorchRec", "", units.format_bytes(pooled.nbytes))
    note = "".join(
        f"\n{name}: the two plans order rows by different profiles, so equal positions may be other rows."
        for name in changes.reranked
    )
    dealt = [move.table for move in changes.moves if move.source == move.target and move.begins is None]
    if not all(_anew(table, *plans) for table in dealt):
        note += (
            "\nRows without copies are dealt to ranks in order of id, those with copies left out; where these change,"
            " all of the others are counted, though one or other keeps its rank."
        )
    note += "".join(f"\n{change.table}: {_cached(change)}." for change in changes.caches)
    note += "".join(f"\n{one.table}: {one.held[0]}, then {one.held[1]}." for one in changes.pooled if one.held)
    said = []
    if changes.moves:
        nbytes = units.format_bytes(sum(move.nbytes for move in changes.moves))
        said.append(f"{changes.rows:,} rows have other ranks, one copy of them is {nbytes}")
    if changes.pooled:
        nbytes = units.format_bytes(sum(one.nbytes for one in changes.pooled))
        number = len(changes.pooled)
        said.append(
            f"{number:,} table{'s are' if number > 1 else ' is'} sharded otherwise by TorchRec, {nbytes} of weights"
        )
    grid.caption = "; ".join(said) + note
    same = f"All {'positions' if changes.reranked else 'rows'} have the same ranks.{note}"
    emit(changes.document(), as_json=as_json, text=grid if said else same)


def _anew(name: str, *plans: planner.Plan) -> bool:
    """Whether all rows of a table are, for another number of ranks, or in another width or type."""
    return len({(plan.cluster.world_size, plan.table(name).dim, plan.table(name).dtype) for plan in plans}) > 1


def _ranks(ranks: tuple[int, ...]) -> str:
    distinct = sorted(set(ranks))
    return f"{len(distinct)} ranks" if len(distinct) > 4 else f"rank{'s' * (len(distinct) > 1)} {str(distinct)[1:-1]}"


def _cached(change: planner.CacheChange) -> str:
    if change.target is None:
        return "is no longer behind a cache"
    if change.source is None:
        return f"comes to be behind a cache of {change.target:.2%} of its rows without copies"
    now, before = f"{change.target:.2%}", f"{change.source:.2%}"
    if now == before:
        now, before = f"{change.target:.6%}", f"{change.source:.6%}"
    return f"its cache has places for {now} of its rows without copies, not {before}"
