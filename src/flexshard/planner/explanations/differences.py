"""What changes between two plans: rows and bytes that move."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from flexshard._internal import deprecated_attribute, renamed_parameters, with_names
from flexshard.planner.plan import Plan, TablePlan
from flexshard.planner.plan_file import FIELDS

__all__ = ["Move", "PlanDiff", "diff"]


@renamed_parameters(first_rank="first_position")
@dataclass(frozen=True)
class Move:
    """Rows of a table that go from one tier to another.

    Attributes:
        table: its name.
        source, target: group sizes; None where only one plan has the rows.
        first_position, rows: which rows, by their order of popularity in their plan's profile.
        nbytes: weights of these rows.
    """

    table: str
    source: int | None
    target: int | None
    first_position: int
    rows: int
    nbytes: int

    first_rank = deprecated_attribute("first_rank", "first_position")


@dataclass(frozen=True)
class PlanDiff:
    """All moves between two plans.

    Attributes:
        moves: in order of tables and positions.
        reranked: tables whose profiles differ, so that equal positions may be other rows.
    """

    moves: tuple[Move, ...]
    reranked: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As a mapping for machines, with the names of a plan's file."""
        document: dict[str, Any] = with_names(asdict(self), FIELDS)
        return document | {"rows": self.rows, "nbytes": self.nbytes}

    @property
    def rows(self) -> int:
        """Rows that move."""
        return sum(move.rows for move in self.moves)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that move."""
        return sum(move.nbytes for move in self.moves)


def diff(before: Plan, after: Plan) -> PlanDiff:
    """Rows that change their tier between two plans, by position."""
    moves: list[Move] = []
    for name in dict.fromkeys([*before.tables, *after.tables]):
        moves += _moves(name, before.tables.get(name), after.tables.get(name))
    both = [name for name in before.tables if name in after.tables]
    reranked = [n for n in both if before.tables[n].profile_digest != after.tables[n].profile_digest]
    return PlanDiff(tuple(moves), tuple(reranked))


def _moves(name: str, before: TablePlan | None, after: TablePlan | None) -> list[Move]:
    known = after or before
    assert known is not None
    row_bytes = known.row_bytes
    edges = sorted(
        {0}
        | {tier.first_position + tier.rows for table in (before, after) if table is not None for tier in table.tiers}
    )
    moves = []
    for first, last in pairwise(edges):
        source, target = _group_size(before, first), _group_size(after, first)
        if source != target:
            moves.append(Move(name, source, target, first, last - first, (last - first) * row_bytes))
    return moves


def _group_size(table: TablePlan | None, position: int) -> int | None:
    if table is None:
        return None
    return next((t.group_size for t in table.tiers if t.first_position <= position < t.first_position + t.rows), None)
