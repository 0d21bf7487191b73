"""Two ways to bring the gradients of copies together (docs/model.md, "Replicated tiers").

Dense: all-reduce of every row that a rank holds. Sparse: each copy gathers the slots and gradients of the rows that any
copy touched. Legend: g group size, M = U/g copies, B batch size per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from flexshard._internal import renamed_parameters
from flexshard.costmodels.collectives import SLOT_BYTES, RowWidths
from flexshard.costmodels.overlap import Overlap, hidden_share
from flexshard.profiling import AccessProfile
from flexshard.tables import Table, expected_distinct
from flexshard.topologies import Cluster

__all__ = ["gathered_bytes", "row_reduction_seconds", "touched_rows"]

FloatArray = npt.NDArray[np.float64]


@renamed_parameters(first_rank="first_position")
def touched_rows(table: Table, batch_size: int, group_size: int, first_position: int, rows: int) -> tuple[float, float]:
    """Mean and variance of the number of rows of a tier, per rank, that its group reads in an iteration.

    A row that a share c of samples contains is read by some of the g·B samples of its group with probability q =
    ``1 - (1-c)^(gB)``; the g ranks hold equal shares.
    """
    sums = _KEPT.of(table.profile, table.distinct_samples(batch_size) * group_size)
    first, last = sums.before(first_position), sums.before(first_position + rows)
    return (last[0] - first[0]) / group_size, (last[1] - first[1]) / group_size


@dataclass(frozen=True, eq=False)
class _Sums:
    """Of q and q(1-q) over a table's rows, most popular first, so that those of a range of rows are a difference.

    Attributes:
        ends: first row behind those of each count; shape (K,).
        chance: q of a row of each count; shape (K,).
        means, variances: of all rows before each count, and before those that are never read; shape (K + 1,).
    """

    ends: npt.NDArray[np.int64]
    chance: FloatArray
    means: FloatArray
    variances: FloatArray

    @classmethod
    def of(cls, profile: AccessProfile, samples: float) -> _Sums:
        chance = expected_distinct(profile.sample_share, samples)
        of_rows = (chance * profile.rows, chance * (1 - chance) * profile.rows)
        return cls(np.cumsum(profile.rows), chance, *(np.concatenate([[0.0], np.cumsum(one)]) for one in of_rows))

    def before(self, position: int) -> tuple[float, float]:
        """Of all rows before one."""
        whole = int(np.searchsorted(self.ends, position, side="right"))
        means, variances = float(self.means[whole]), float(self.variances[whole])
        if whole < self.ends.size:
            part, chance = position - (int(self.ends[whole - 1]) if whole else 0), float(self.chance[whole])
            means, variances = means + chance * part, variances + chance * (1 - chance) * part
        return means, variances


class _KeptSums:
    """Sums of profiles that are there, worked out once: a plan asks for those of every level, again and again."""

    def __init__(self) -> None:
        self._sums: WeakKeyDictionary[AccessProfile, dict[float, _Sums]] = WeakKeyDictionary()
        self._counts = 0  # of all of them, those of profiles that are gone too

    def of(self, profile: AccessProfile, samples: float) -> _Sums:
        known = self._sums.get(profile, {}).get(samples)
        if known is None:
            known = _Sums.of(profile, samples)
            if self._counts + known.ends.size > _MOST_COUNTS:
                self._sums.clear()
                self._counts = 0
            self._sums.setdefault(profile, {})[samples] = known
            self._counts += known.ends.size
        return known


_MOST_COUNTS = 1 << 23  # 250 MB
_KEPT = _KeptSums()


def gathered_bytes(
    cluster: Cluster,
    group_size: int,
    touched: npt.ArrayLike,
    gradient_bytes: npt.ArrayLike,
    stores: npt.ArrayLike | None = None,
) -> float:
    """Buffer of the all-gather: slot and gradient of every touched row of every copy.

    All copies send as many entries of a store as the one that touched most of it: of M copies, about Blom's estimate of
    the largest of M normal numbers above the mean.

    Args:
        touched: mean and variance of each table's touched rows, as :func:`touched_rows` gives them; shape (T, 2).
        gradient_bytes: of a row of each table; shape (T,).
        stores: a number for each table, the same where tables are of one dimension, type and optimizer; shape (T,).
            None if all are.
    """
    copies = cluster.world_size // group_size
    entry = np.asarray(gradient_bytes, np.float64) + SLOT_BYTES
    mean, variance = np.asarray(touched, np.float64).reshape(-1, 2).T
    above = NormalDist().inv_cdf((copies - 0.375) / (copies + 0.25)) if copies > 1 else 0.0
    together = np.zeros(mean.size, np.int64) if stores is None else np.asarray(stores, np.int64)
    deviations = np.sqrt(np.bincount(together, variance * entry**2))
    return float(copies * (mean @ entry + above * deviations.sum()))


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
