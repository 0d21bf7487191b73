"""What changes between two plans: rows that have other ranks, and bytes of one copy of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from flexshard._internal import deprecated_attribute, plain_sum, renamed_parameters, with_names
from flexshard.errors import PlanError
from flexshard.planner.plan import Plan, TablePlan, Tier
from flexshard.planner.plan_file import FIELDS
from flexshard.planner.pooled_plan import PooledShard, PooledTablePlan

__all__ = ["CacheChange", "Move", "PlanDiff", "PooledMove", "diff"]


@renamed_parameters(first_rank="first_position")
@dataclass(frozen=True)
class Move:
    """Rows of a table that go from one tier to another.

    Attributes:
        table: its name.
        source, target: group sizes; None where only one plan has the rows. The same where numbers of ranks, widths or
            types of rows are not, or rows of a tier have other ranks.
        first_position, rows: which rows, by their order of popularity in their plan's profile.
        nbytes: weights of these rows.
        begins: local ranks of the first of these rows, where they stay in a tier; None elsewhere, and of rows without
            copies: these are dealt to ranks in order of id, and where others come to be among them, or go, nearly all
            have another rank then (one in U may stay, which only profiles tell).
    """

    table: str
    source: int | None
    target: int | None
    first_position: int
    rows: int
    nbytes: int
    begins: tuple[int, int] | None = None

    first_rank = deprecated_attribute("first_rank", "first_position")


@dataclass(frozen=True)
class PooledMove:
    """A pooled table that is sharded or placed otherwise.

    Attributes:
        table: its name.
        source, target: its sharding types and ranks; None where only one plan has it.
        nbytes: weights that ranks need and do not have yet.
        held: how each plan holds it, where they do it otherwise: kernel, share of its rows in a cache, data type, rows
            and dimension, as "fused_uvm_caching of 0.2, float32 1,000 x 64"; or nothing.
    """

    table: str
    source: tuple[str, tuple[int, ...]] | None
    target: tuple[str, tuple[int, ...]] | None
    nbytes: int
    held: tuple[str, str] | None = None


@dataclass(frozen=True)
class CacheChange:
    """A table whose rows without copies come to be behind a cache, or no longer, or behind another one.

    Attributes:
        table: its name.
        source, target: places of the cache as a share of these rows; None for rows in the rank's own memory.
    """

    table: str
    source: float | None
    target: float | None


@dataclass(frozen=True)
class PlanDiff:
    """All moves between two plans.

    Attributes:
        moves: in order of tables and positions.
        reranked: tables whose profiles differ, so that equal positions may be other rows.
        pooled: moves of pooled tables.
        caches: that are there, gone or of another size.
    """

    moves: tuple[Move, ...]
    reranked: tuple[str, ...]
    pooled: tuple[PooledMove, ...] = ()
    caches: tuple[CacheChange, ...] = ()

    def document(self) -> dict[str, Any]:
        """As a mapping for machines, with the names of a plan's file."""
        document: dict[str, Any] = with_names(asdict(self), FIELDS)
        for later in ("pooled", "caches"):
            if not document[later]:
                del document[later]
        return document | {"rows": self.rows, "nbytes": self.nbytes}

    @property
    def rows(self) -> int:
        """Rows of tables without pooling that move; those that are gone, with their table or without it, do not."""
        sharded = {move.table for move in self.pooled}
        return sum(move.rows for move in self.moves if move.target is not None or move.table in sharded)

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of the weights of rows that move, not of what travels (:func:`replan` counts that); of
        tables that leave tiers for shards of TorchRec's, or come from them, once.
        """
        rows = plain_sum(move.nbytes for move in self.moves if move.target is not None)
        return rows + plain_sum(move.nbytes for move in self.pooled)


def diff(before: Plan, after: Plan) -> PlanDiff:
    """Rows that change their tier, or their ranks in it, between two plans, by position; raises PlanError for what is
    none.
    """
    for plan in (before, after):
        if not isinstance(plan, Plan):
            raise PlanError(f"plans are compared with plans, found {type(plan).__name__}; Plan.load reads one")
    moves: list[Move] = []
    for name in dict.fromkeys([*before.tables, *after.tables]):
        alike = before.cluster.world_size == after.cluster.world_size
        moves += _moves(name, before.tables.get(name), after.tables.get(name), alike=alike)
    both = [name for name in before.tables if name in after.tables]
    reranked = [n for n in both if before.tables[n].profile_digest != after.tables[n].profile_digest]
    pooled = [
        _pooled_move(name, before.pooled.get(name), after.pooled.get(name))
        for name in dict.fromkeys([*before.pooled, *after.pooled])
    ]
    shares = ((name, _share(before.tables[name]), _share(after.tables[name])) for name in both)
    caches = tuple(CacheChange(name, source, target) for name, source, target in shares if source != target)
    return PlanDiff(tuple(moves), tuple(reranked), tuple(move for move in pooled if move is not None), caches)


def _share(table: TablePlan) -> float | None:
    return None if table.cache is None else table.cache.load_factor


def _pooled_move(name: str, before: PooledTablePlan | None, after: PooledTablePlan | None) -> PooledMove | None:
    """How a pooled table moves; None where it stays as it is."""
    source, target = _where(before), _where(after)
    held_as = [_held(one) for one in (before, after) if one is not None]
    if source == target and len(set(held_as)) == 1:
        return None
    known = after or before
    assert known is not None
    # Weights of another type or width are written anew, wherever they are.
    anew = before is None or (before.dtype, before.dim) != (known.dtype, known.dim)
    held = () if before is None or anew else before.shards
    cells = 0
    for one in () if after is None else after.shards:
        there = sum(_shared(one, other) for other in held if other.rank == one.rank)
        cells += one.rows * one.columns - there
    kinds = (held_as[0], held_as[-1]) if len(set(held_as)) > 1 else None
    return PooledMove(name, source, target, cells * (known.row_bytes // known.dim), kinds)


def _held(table: PooledTablePlan) -> str:
    share = "" if table.cache_load_factor is None else f" of {table.cache_load_factor:.3g}"
    return f"{table.compute_kernel}{share}, {table.dtype} {table.rows:,} x {table.dim}"


def _where(table: PooledTablePlan | None) -> tuple[str, tuple[int, ...]] | None:
    return None if table is None else (table.sharding_type, tuple(shard.rank for shard in table.shards))


def _shared(one: PooledShard, other: PooledShard) -> int:
    """Numbers of a table that are in both shards."""
    rows = min(one.first_row + one.rows, other.first_row + other.rows) - max(one.first_row, other.first_row)
    last = min(one.first_column + one.columns, other.first_column + other.columns)
    columns = last - max(one.first_column, other.first_column)
    return max(rows, 0) * max(columns, 0)


def _moves(name: str, before: TablePlan | None, after: TablePlan | None, *, alike: bool) -> list[Move]:
    """Rows that change their tier, or their ranks in it; all of them where numbers of ranks are not ``alike``, or rows
    are not.
    """
    known = after or before
    assert known is not None
    row_bytes = known.row_bytes
    if before is not None and after is not None:
        alike = alike and (before.dim, before.dtype) == (after.dim, after.dtype)
    edges = sorted(
        {0}
        | {tier.first_position + tier.rows for table in (before, after) if table is not None for tier in table.tiers}
    )
    moves = []
    for first, last in pairwise(edges):
        source, target = _tier(before, first), _tier(after, first)
        sizes = (None if source is None else source.group_size, None if target is None else target.group_size)
        begins = None
        if source is not None and target is not None and alike and sizes[0] == sizes[1]:
            if target.strategy == "row_wise":  # dealt in order of id, those of other tiers left out
                stays = (source.first_position, source.first_holder) == (target.first_position, target.first_holder)
            else:
                begins = _holder(source, first), _holder(target, first)
                stays = begins[0] == begins[1]
            if stays:
                continue
        moves.append(Move(name, *sizes, first, last - first, (last - first) * row_bytes, begins))
    return moves


def _tier(table: TablePlan | None, position: int) -> Tier | None:
    """The tier that has a row; None if there is none."""
    tiers = () if table is None else table.tiers
    return next((t for t in tiers if t.first_position <= position < t.first_position + t.rows), None)


def _holder(tier: Tier, position: int) -> int:
    """Local rank of a row with copies."""
    return (position - tier.first_position + tier.first_holder) % tier.group_size
