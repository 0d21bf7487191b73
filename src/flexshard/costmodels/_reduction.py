"""Two ways to bring the gradients of copies together (docs/model.md, "Replicated tiers").

Dense: all-reduce of every row that a rank holds. Sparse: each copy gathers the slots and gradients of the rows that any
copy touched. Legend: g group size, M = U/g copies, B batch size per rank.
"""

from __future__ import annotations

import numpy as np

from flexshard.costmodels._cost import Collective, Overlap
from flexshard.costmodels._table import Table, expected_distinct
from flexshard.topologies import Cluster

__all__ = ["REDUCTIONS", "SLOT_BYTES", "dense_reduction", "gathered_bytes", "sparse_reduction", "touched_rows"]

REDUCTIONS = ("dense", "sparse", "auto")
SLOT_BYTES = 4


def touched_rows(table: Table, batch_size: int, group_size: int, first_rank: int, rows: int) -> float:
    """Expected number of rows of a tier, per rank, that its group reads in an iteration.

    A row of probability p is read by some of the g·B samples of its group with probability ``1 - (1-p)^(gB)``; the g
    ranks hold equal shares.
    """
    profile = table.profile
    ends = np.cumsum(profile.rows)
    inside = np.clip(ends, first_rank, first_rank + rows) - np.clip(ends - profile.rows, first_rank, first_rank + rows)
    p = profile.counts / profile.num_samples
    return float(expected_distinct(p, batch_size * group_size) @ inside) / group_size


def gathered_bytes(table: Table, cluster: Cluster, group_size: int, touched: float) -> float:
    """Buffer of the all-gather: slot and gradient of every touched row of every copy."""
    return cluster.world_size / group_size * touched * (table.row_bytes + SLOT_BYTES)


def dense_reduction(cluster: Cluster, group_size: int, nbytes: float, overlap: Overlap) -> Collective:
    """All-reduce of ``nbytes`` per rank across the groups of a level."""
    rate = cluster.level(group_size).all_reduce
    assert rate is not None
    hidden = overlap.get(("all_reduce", group_size), 0.0)
    return Collective("all_reduce", group_size, 1, nbytes, rate.alpha_seconds, rate.bytes_per_s, hidden)


def sparse_reduction(cluster: Cluster, group_size: int, nbytes: float, overlap: Overlap) -> Collective:
    """All-gather of ``nbytes`` per rank across the groups of a level, after one of how many rows there are.

    Where a level does not say what an all-gather costs, it is taken to need half the all-reduce's time per byte of its
    buffer: rings send (M-1)/M of it once instead of twice. α counts twice, for the message ahead.
    """
    level = cluster.level(group_size)
    rate = level.all_gather
    assert rate is not None
    hidden = overlap.get(("all_gather", group_size), overlap.get(("all_reduce", group_size), 0.0))
    return Collective("all_gather", group_size, 1, nbytes, 2 * rate.alpha_seconds, rate.bytes_per_s, hidden)
