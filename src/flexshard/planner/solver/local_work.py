"""What ranks do by themselves in a step: look rows up and update them, level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexshard.costmodels import LocalRates
from flexshard.tables import Table

__all__ = ["COUNTS_IN_FULL", "LocalShares", "busiest_rank_seconds", "seconds_per_read"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LocalShares:
    """What counts of the time to look rows up and to update them, between 0 and 1, as what links take counts under
    their weights (:mod:`flexshard.planner.solver.step_search`).

    Attributes:
        look_up, update: of rows that are not row-wise, which both are done while row-wise ones are on their way.
        row_wise_update: of row-wise ones, at least as much; looking them up counts in full.
    """

    look_up: float = 1.0
    update: float = 1.0
    row_wise_update: float = 1.0

    def of(self, per_read: FloatArray) -> FloatArray:
        """What counts of times of :func:`seconds_per_read` wherever rows are, and besides if they are row-wise; shape
        (2, T).
        """
        everywhere, row_wise = (self.look_up, self.update), (1.0 - self.look_up, self.row_wise_update - self.update)
        return np.asarray(np.array([everywhere, row_wise]) @ per_read.T)


COUNTS_IN_FULL = LocalShares()


def seconds_per_read(tables: Sequence[Table], rates: LocalRates | None) -> FloatArray:
    """Time to look a row up, and to update it, of each table, nothing where no rates are known; shape (T, 2)."""
    if rates is None:
        return np.zeros((len(tables), 2))
    found = np.array([rates.of(table) for table in tables])  # (T, 2, 3)
    row_bytes = np.array([table.row_bytes for table in tables], np.float64)
    return np.asarray(found[:, :, 1] + row_bytes[:, None] * found[:, :, 2])


def busiest_rank_seconds(
    reads: FloatArray, hottest: FloatArray, per_read: FloatArray, group_sizes: IntArray
) -> FloatArray:
    """Time to look up, and to update, the rows of each level on the rank that holds its hottest; shape (G, 2).

    Args:
        reads, hottest: lookups of one rank of each tier and of its hottest row; shape (T, G).
        per_read: of :func:`seconds_per_read`.
        group_sizes: of the levels; shape (G,).
    """
    # Of each level, the table whose hottest row takes longest.
    hot = (hottest[:, :, None] * per_read[:, None]).max(axis=0)
    return np.asarray(reads.T @ per_read + (group_sizes - 1)[:, None] * hot)
