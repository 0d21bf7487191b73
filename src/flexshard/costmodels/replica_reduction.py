"""Two ways to bring the gradients of copies together (docs/model.md, "Replicated tiers").

Dense: all-reduce of every row that a rank holds. Sparse: each copy gathers the slots and gradients of the rows that any
copy touched. Legend: g group size, M = U/g copies, B batch size per rank.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from flexshard._internal import renamed_parameters
from flexshard.costmodels.collectives import SLOT_BYTES, RowWidths
from flexshard.costmodels.overlap import Overlap, hidden_share
from flexshard.tables import Table, expected_distinct
from flexshard.topologies import Cluster

__all__ = ["gathered_bytes", "row_reduction_seconds", "touched_rows"]


@renamed_parameters(first_rank="first_position")
def touched_rows(table: Table, batch_size: int, group_size: int, first_position: int, rows: int) -> tuple[float, float]:
    """Mean and variance of the number of rows of a tier, per rank, that its group reads in an iteration.

    A row that a share c of samples contains is read by some of the g·B samples of its group with probability q =
    ``1 - (1-c)^(gB)``; the g ranks hold equal shares.
    """
    profile = table.profile
    ends = np.cumsum(profile.rows)
    end = first_position + rows
    inside = np.clip(ends, first_position, end) - np.clip(ends - profile.rows, first_position, end)
    q = expected_distinct(profile.sample_share, table.distinct_samples(batch_size) * group_size)
    return float(q @ inside) / group_size, float((q * (1 - q)) @ inside) / group_size


def gathered_bytes(cluster: Cluster, group_size: int, touched: npt.ArrayLike, gradient_bytes: npt.ArrayLike) -> float:
    """Buffer of the all-gather: slot and gradient of every touched row of every copy.

    All copies send as many entries as the one that touched most: of M copies, about Blom's estimate of the largest of M
    normal numbers above the mean.

    Args:
        touched: mean and variance of each table's touched rows, as :func:`touched_rows` gives them; shape (T, 2).
        gradient_bytes: of a row of each table; shape (T,).
    """
    copies = cluster.world_size // group_size
    entry = np.asarray(gradient_bytes, np.float64) + SLOT_BYTES
    mean, variance = np.asarray(touched, np.float64).reshape(-1, 2).T
    above = NormalDist().inv_cdf((copies - 0.375) / (copies + 0.25)) if copies > 1 else 0.0
    return float(copies * (mean @ entry + above * np.sqrt(variance @ entry**2)))


def row_reduction_seconds(
    cluster: Cluster, group_size: int, widths: RowWidths, hidden: Overlap | None
) -> tuple[float, float]:
    """Exposed seconds, without latencies, of reducing the gradients of a row's copies, and of gathering them where its
    group touches it; both 0 where it has no copies.
    """
    rates = cluster.level(group_size)
    if rates.all_reduce is None or rates.all_gather is None:
        return 0.0, 0.0
    reduce = (1 - hidden_share(hidden, "all_reduce", group_size, "replicas")) / rates.all_reduce.bytes_per_s
    gather = (1 - hidden_share(hidden, "all_gather", group_size, "touched_rows")) / rates.all_gather.bytes_per_s
    copies = cluster.world_size // group_size
    entry = copies * (widths.gradient_bytes + SLOT_BYTES)
    return widths.sum_bytes * reduce / group_size, entry * gather / group_size
