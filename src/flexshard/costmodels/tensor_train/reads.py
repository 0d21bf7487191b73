"""What the ids of a batch have in common, counted or expected.

Legend: n ids of a batch, b bags, u distinct ids; n_k distinct prefixes of k digits (n_d = u); core k of shape
(p_k, r_{k-1}, q_k, r_k), Q_k = q_1 ... q_k (EL-Rec paper, sections III-A and III-B; docs/tensor_train.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from flexshard.tables import Table, TTShape, expected_distinct

__all__ = ["TTReads"]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TTReads:
    """What the ids of a batch have in common.

    Attributes:
        ids: n.
        bags: b.
        prefixes: n_1 to n_d; shape (d,).
    """

    ids: float
    bags: float
    prefixes: tuple[float, ...]

    @classmethod
    def of(cls, ids: npt.ArrayLike, bags: float, shape: TTShape) -> TTReads:
        """Counted on a batch; ids of shape (n,)."""
        rest = np.unique(np.asarray(ids, np.int64))
        distinct = [float(rest.size)]
        for factor in reversed(shape.row_factors[1:]):
            rest = np.unique(rest // factor)
            distinct.append(float(rest.size))
        return cls(float(np.size(ids)), bags, tuple(distinct[::-1]))

    @classmethod
    def expected(cls, table: Table, batch_size: int, shape: TTShape, *, hashed: bool = False) -> TTReads:
        """Expected of a rank's batch, from the table's access profile.

        Args:
            table: with its profile.
            batch_size: B.
            shape: gives the digits.
            hashed: rows are in arbitrary order; by default in that of how often they are read, which an index bijection
                by frequency gives them.
        """
        profile = table.profile
        p, distinct = profile.sample_share, table.distinct_samples(batch_size)
        unread = -distinct * np.log1p(-np.minimum(p, 1.0 - 2**-53))  # -log of the chance that a batch has it not
        missed = float(profile.rows @ np.exp(-unread) + table.rows - profile.rows_read) / table.rows
        prefixes = []
        for size in (prod(shape.row_factors[k:]) for k in range(1, shape.cores)):
            if hashed:
                prefixes.append(-(-table.rows // size) * (1.0 - missed ** min(size, table.rows)))
            else:
                prefixes.append(_ordered_prefixes(unread, profile.rows, size))
        prefixes.append(float(expected_distinct(p, distinct) @ profile.rows))
        return cls(distinct * profile.avg_length, float(batch_size), tuple(prefixes))


def _ordered_prefixes(unread: FloatArray, rows: npt.NDArray[np.int64], size: int) -> float:
    """Expected prefixes of ``size`` rows each that a batch reads any row of, rows being in order of their counts.

    Rows are independent: the chance that a prefix is not read is the product of those of its rows. Prefixes of equal
    rows are equal, so only those that lie between two counts are looked at one by one.

    Args:
        unread: -log of the chance that a row of each count is not read; shape (K,).
        rows: of each count; shape (K,).
        size: rows of a prefix.
    """
    ends = np.cumsum(rows)
    starts = ends - rows
    within = np.maximum(ends // size - -(-starts // size), 0)
    whole_ones = float(within @ -np.expm1(-size * unread))
    between = np.unique(ends[ends % size != 0] // size)
    edges = np.minimum(np.stack([between, between + 1]) * size, ends[-1])
    sums = np.interp(edges, np.concatenate([[0], ends]), np.concatenate([[0.0], np.cumsum(unread * rows)]))
    return whole_ones + float(-np.expm1(sums[0] - sums[1]).sum())
