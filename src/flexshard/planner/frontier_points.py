"""The frontier of memory against communication, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexshard import units

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
        lower_bound_seconds: of every plan with so much memory; None where the point is an optimum, to within 1e-4.
        pooled: sharding types of pooled tables, and how many tables have each.
    """

    name: str
    memory_bytes: float
    exposed_seconds: float
    rows: tuple[int, ...]
    waits_seconds: float = 0.0
    lower_bound_seconds: float | None = None
    pooled: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, repr=False)
class ParetoCurve:
    """The frontier, and points to compare with.

    Attributes:
        group_sizes: g per entry of the points' ``rows``.
        points: the frontier in order of memory; each takes less time than the one before.
        marked: named points. "greatest_memory_saving", "memory_neutral" (where row-wise fits the cluster) and
            "communication_neutral" lie on the frontier.
        neutral_bytes: memory of row-wise.
        title: what was planned, in a few words.
        bounds: memory in order, and seconds that no plan of at most so much is below; empty where points are optima.
    """

    group_sizes: tuple[int, ...]
    points: tuple[ParetoPoint, ...]
    marked: tuple[ParetoPoint, ...]
    neutral_bytes: float
    title: str = ""
    bounds: tuple[tuple[float, float], ...] = ()

    def __repr__(self) -> str:
        if not self.points:
            return "ParetoCurve(no points)"
        first, last = self.points[0], self.points[-1]
        ends = (
            f"{units.format_bytes(one.memory_bytes)} and {units.format_seconds(one.exposed_seconds)}"
            for one in (first, last)
        )
        return f"ParetoCurve({len(self.points)} points, {' to '.join(ends)})"

    @property
    def corners(self) -> tuple[tuple[float, float], ...]:
        """The frontier as a line, in bytes and seconds: straight where rows move one by one, a step where a collective
        comes or goes or where whole tables move.
        """
        line: list[tuple[float, float]] = []
        before: tuple[bool, ...] = ()
        for point in self.points:
            used = tuple(rows > 0 for rows in point.rows)
            if line and (used != before or point.pooled):
                line.append((point.memory_bytes, line[-1][1]))
            line.append((point.memory_bytes, point.exposed_seconds))
            before = used
        return tuple(line)

    @property
    def bound_corners(self) -> tuple[tuple[float, float], ...]:
        """What no plan is below, as a line of steps between the frontier's ends, in bytes and seconds; empty where
        points are optima.
        """
        least, most = self.points[0].memory_bytes, self.points[-1].memory_bytes
        line, before = list[tuple[float, float]](), least
        for memory, seconds in self.bounds:
            if memory >= least and before < most:
                line += [(before, seconds), (min(memory, most), seconds)]
                before = memory
        return tuple(line)

    def mark(self, name: str) -> ParetoPoint:
        """A marked point by name; KeyError if there is none."""
        for point in self.marked:
            if point.name == name:
                return point
        raise KeyError(name)


def with_bounds(
    frontier: Sequence[ParetoPoint], bounds: Sequence[tuple[float, float]]
) -> tuple[tuple[ParetoPoint, ...], tuple[tuple[float, float], ...]]:
    """Points with the highest of the bounds that hold for them, those of budgets of at least their memory; and the
    bounds as a curve's.

    Args:
        frontier: in order of memory.
        bounds: bytes, and seconds that no plan within them is below.
    """
    memory, seconds = np.array(sorted(bounds)).T
    highest = np.maximum.accumulate(seconds[::-1])[::-1]  # what holds with more memory does with less
    holds = np.append(highest, 0.0)[np.searchsorted(memory, [p.memory_bytes * (1 - 1e-12) for p in frontier])]
    points = (
        replace(point, lower_bound_seconds=min(bound, point.exposed_seconds))
        for point, bound in zip(frontier, holds.tolist(), strict=True)
    )
    return tuple(points), tuple(zip(memory.tolist(), highest.tolist(), strict=True))
