"""With which rank each tier of a placement begins, and which ranks so hold the hottest rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexshard.costmodels import by_rank, first_holders, lookup_bytes
from flexshard.planner.solver.instance import Allocation, Instance
from flexshard.profiling import splitmix64
from flexshard.tables import Table

__all__ = ["HottestRows", "holders_apart", "hottest_rows"]

IntArray = npt.NDArray[np.int64]

_HOT_ROWS = 1 << 16  # looked at one by one, of all tables and levels together
_MOST_PLACES = 1 << 22


@dataclass(frozen=True, eq=False)
class HottestRows:
    """Each table's hottest rows at one level.

    Attributes:
        group_size: g.
        first: position of each table's first; shape (T,).
        there: which of the k rows there are; shape (T, k).
        group: index of each one's count in its table; shape (T, k).
        holder: local rank that holds each; shape (T, k).
    """

    group_size: int
    first: IntArray
    there: npt.NDArray[np.bool_]
    group: IntArray
    holder: IntArray

    def turned(self, by: IntArray) -> HottestRows:
        """The same where each table's rows begin so many ranks later; shape (T,)."""
        return replace(self, holder=(self.holder + by[:, None]) % self.group_size)


def hottest_rows(instance: Instance, allocation: Allocation) -> dict[int, HottestRows]:
    """Of each level that several ranks share, with the first of each table with local rank 0."""
    levels = np.flatnonzero((instance.group_sizes > 1) & allocation.any(axis=0)).tolist()
    hot_rows = int(np.clip(_HOT_ROWS // (len(instance.tables) * max(len(levels), 1)), 16, 4096))
    found, ends = {}, np.cumsum(allocation, axis=1)
    for level in levels:
        size, rows = int(instance.group_sizes[level]), allocation[:, level]
        first = ends[:, level] - rows
        position = first[:, None] + np.arange(hot_rows)
        there = np.arange(hot_rows) < rows[:, None]
        group = instance.groups_within(np.where(there, position, 0))
        group = np.minimum(group, np.diff(instance.starts)[:, None] - 1)
        holder = (position - first[:, None]) % size
        if size == instance.cluster.world_size and level == instance.group_sizes.size - 1:
            holder = _dealt_by_id(instance.tables, position, there, holder, size)
        found[level] = HottestRows(size, first, there, group, holder)
    return found


def holders_apart(instance: Instance, hottest: Mapping[int, HottestRows]) -> IntArray:
    """Local rank that holds the first row of each tier, so that the hottest rows of all do not fall to one; shape
    (T, G).

    A level's calls wait for the rank that serves most bytes. Only the hottest rows are looked at: the others are dealt
    evenly in every case.
    """
    row_bytes = np.array([lookup_bytes(one.row_bytes, one.gradient_bytes)[1] for one in instance.widths])
    found = np.zeros((len(instance.tables), instance.group_sizes.size), np.int64)
    for level, of_level in hottest.items():
        reads = np.where(of_level.there, instance.reads[instance.starts[:-1, None] + of_level.group], 0.0)
        nbytes = reads * row_bytes[instance.table_kind, None]
        found[:, level] = first_holders(by_rank(nbytes, of_level.holder, of_level.group_size))
    return found


def _dealt_by_id(
    tables: Sequence[Table], position: IntArray, there: npt.NDArray[np.bool_], holder: IntArray, size: int
) -> IntArray:
    """Which of ``size`` ranks hold the rows at these places of each table, dealt by id, shape (T, k); of rows whose ids
    the profile does not know, any, and of tables without rows there those of ``holder``.
    """
    dealt = (splitmix64(position, 1) % np.uint64(size)).astype(np.int64)
    for index, table in enumerate(tables):
        profile = table.profile
        if profile.row_counts is None or not there[index, 0]:
            continue
        places, known = int(position[index, 0]), int(there[index].sum())
        if places + known <= _MOST_PLACES:
            ids = profile.hottest_rows(places + known)
            placed, hot = np.sort(ids[:places]), ids[places:]
            dealt[index, : hot.size] = (hot - np.searchsorted(placed, hot)) % size
    return np.where(there[:, :1], dealt, holder)
