"""The cost of one row as a straight line in w, one line per group size (docs/model.md).

Divided by D·s, memory is ``memory_fixed + memory_per_read · w`` and exposed communication ``comm_fixed +
comm_per_read · w``, the same for all tables of equal κ, dimension, type and optimizer. Latencies are not in it: α is
paid per call and iteration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from flexshard._internal import plain_sum
from flexshard.costmodels.collectives import RowWidths, WireTable
from flexshard.costmodels.overlap import Overlap, hidden_share
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["Breakpoints", "PricedTable", "RowLines", "breakpoints", "normalized_costs", "row_lines"]

FloatArray = npt.NDArray[np.float64]


class PricedTable(WireTable, Protocol):
    """A table, as far as the costs of its rows go."""

    @property
    def kappa_replicated(self) -> float: ...  # noqa: D102 - as a Table has them
    @property
    def kappa_sharded(self) -> float: ...  # noqa: D102 - as a Table has it


@dataclass(frozen=True, eq=False)
class RowLines:
    """Lines of one row per group size, in the cluster's order of levels; shape (G,) each, per byte of the row.

    Attributes:
        group_sizes: g.
        memory_fixed: κ_g / g, in bytes.
        memory_per_read: 1 for g = 1, else 2, in bytes.
        comm_fixed: exposed all-reduce of gradients, 1 / (g · β_ar) where they have as many bytes as the row, in s.
        comm_per_read: exposed all-to-alls of id, row and gradient, in seconds.
    """

    group_sizes: tuple[int, ...]
    memory_fixed: FloatArray
    memory_per_read: FloatArray
    comm_fixed: FloatArray
    comm_per_read: FloatArray


def row_lines(table: PricedTable, cluster: Cluster, overlap: Overlap | None = None, *, id_bytes: int = 4) -> RowLines:
    """Lines of a table's rows on this cluster."""
    sizes, world, widths = cluster.group_sizes, cluster.world_size, RowWidths.of_table(table)
    comm_fixed, comm_per_read = [], []
    for level in cluster.levels:
        fixed = per_read = 0.0
        if level.all_reduce is not None:
            shown = 1.0 - hidden_share(overlap, "all_reduce", level.group_size, "replicas")
            fixed = shown * widths.sum_bytes / (level.group_size * level.all_reduce.bytes_per_s)
        if level.all_to_all is not None:
            carried = (("ids", id_bytes), ("embeddings", widths.row_bytes), ("gradients", widths.gradient_bytes))
            shown_bytes = plain_sum(
                (1.0 - hidden_share(overlap, "all_to_all", level.group_size, content)) * nbytes
                for content, nbytes in carried
            )
            per_read = shown_bytes / level.all_to_all.bytes_per_s
        comm_fixed.append(fixed / table.row_bytes)
        comm_per_read.append(per_read / table.row_bytes)
    kappa = [table.kappa_sharded if g == world else table.kappa_replicated for g in sizes]
    return RowLines(
        sizes,
        np.array(kappa) / np.array(sizes),
        np.array([1.0 + (g > 1) for g in sizes]),
        np.array(comm_fixed),
        np.array(comm_per_read),
    )


@dataclass(frozen=True)
class Breakpoints:
    """Row probabilities from which on a strategy costs no more than row-wise (paper, section 4.2); inf if never.

    Attributes:
        memory: p where both need the same memory. ``(κ - κ_U/U) / B`` for data-parallel.
        communication: p where both take the same time.
    """

    memory: float
    communication: float

    @property
    def both(self) -> float:
        """The p from which on the strategy is better in both."""
        return max(self.memory, self.communication)


def breakpoints(
    table: Table, cluster: Cluster, group_size: int, batch_size: int, overlap: Overlap | None = None
) -> Breakpoints:
    """Where equation (1) of the paper equals 1, for ``group_size`` against row-wise."""
    lines = row_lines(table, cluster, overlap)
    k, u = cluster.group_sizes.index(group_size), len(cluster.group_sizes) - 1
    memory = _crossing(lines.memory_fixed, lines.memory_per_read, k, u)
    communication = _crossing(lines.comm_fixed, lines.comm_per_read, k, u)
    return Breakpoints(memory / batch_size, communication / batch_size)


def _crossing(fixed: FloatArray, per_read: FloatArray, k: int, u: int) -> float:
    """The w from which on line k is not above line u."""
    above, gained = float(fixed[k] - fixed[u]), float(per_read[u] - per_read[k])
    if above <= 0 and gained >= 0:
        return 0.0
    return above / gained if gained > 0 else float("inf")


def normalized_costs(
    table: Table,
    cluster: Cluster,
    group_size: int,
    batch_size: int,
    p: npt.ArrayLike,
    overlap: Overlap | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Memory and communication of a strategy over those of row-wise, as functions of p or L/E: equation (1).

    Args:
        p: row probabilities (or L/E of a whole table), above 0; shape (n,).

    Returns:
        memory and communication ratios, shape (n,) each.
    """
    lines = row_lines(table, cluster, overlap)
    k, u = cluster.group_sizes.index(group_size), len(cluster.group_sizes) - 1
    w = batch_size * np.asarray(p, dtype=np.float64)
    memory = lines.memory_fixed[:, None] + lines.memory_per_read[:, None] * w
    comm = lines.comm_fixed[:, None] + lines.comm_per_read[:, None] * w
    with np.errstate(divide="ignore", invalid="ignore"):
        return memory[k] / memory[u], comm[k] / comm[u]
