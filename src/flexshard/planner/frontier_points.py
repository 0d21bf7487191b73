"""The frontier of memory against communication, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["ParetoCurve", "ParetoPoint", "with_bounds"]


@dataclass(frozen=True)
class ParetoPoint:
    """A plan on or beside the frontier.

    Attributes:
        name: "greatest_memory_saving", "memory_neutral", "communication_neutral", "full_replication" and "row_wise"
            (FlexShard paper, Figure 5), "paper_2_tier", "paper_3_tier", with pooled tables "table_wise"; "" for the
            others.
        memory_bytes: per rank.
        exposed_seconds: per iteration.
        rows: rows per group size, in the order of the curve's ``group_sizes``.
        waits_seconds: the part of it in which ranks wait for the owners of the hottest rows.
        lower_bound_seconds: of every plan with so much memory; None where the point is an optimum.
        pooled: sharding types of pooled tables, and how many tables have each.
    """

    name: str
    memory_bytes: float
    exposed_seconds: float
    rows: tuple[int, ...]
    waits_seconds: float = 0.0
    lower_bound_seconds: float | None = None
    pooled: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class ParetoCurve:
    """The frontier, and points to compare with.

    Attributes:
        group_sizes: g per entry of the points' ``rows``.
        points: the frontier in order of memory; each takes less time than the one before.
        marked: named points. "greatest_memory_saving", "memory_neutral" (where row-wise fits the cluster) and
            "communication_neutral" lie on the frontier.
        neutral_bytes: memory of row-wise.
        title: what was planned, in a few words.
    """

    group_sizes: tuple[int, ...]
    points: tuple[ParetoPoint, ...]
    marked: tuple[ParetoPoint, ...]
    neutral_bytes: float
    title: str = ""

    def mark(self, name: str) -> ParetoPoint:
        """A marked point by name; KeyError if there is none."""
        for point in self.marked:
            if point.name == name:
                return point
        raise KeyError(name)


def with_bounds(frontier: Sequence[ParetoPoint], bounds: Sequence[tuple[float, float]]) -> list[ParetoPoint]:
    """Points with the highest of the bounds that hold for them: those of budgets of at least their memory.

    Args:
        frontier: in order of memory.
        bounds: bytes, and seconds that no plan within them is below.
    """
    left, least, found = sorted(bounds), 0.0, list(frontier)
    for index in range(len(found) - 1, -1, -1):
        point = found[index]
        while left and left[-1][0] >= point.memory_bytes * (1 - 1e-12):
            least = max(least, left.pop()[1])
        found[index] = replace(point, lower_bound_seconds=min(least, point.exposed_seconds))
    return found
