"""Operations and bytes of a batch.

Legend: n ids of a batch, b bags, u distinct ids; n_k distinct prefixes of k digits (n_d = u); core k of shape
(p_k, r_{k-1}, q_k, r_k), Q_k = q_1 ... q_k (EL-Rec paper, sections III-A and III-B; docs/tensor_train.md).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate
from math import expm1
from operator import mul

import numpy as np
import numpy.typing as npt

from flexshard._internal import plain_sum
from flexshard.costmodels.tensor_train.reads import TTReads
from flexshard.tables import TTShape

__all__ = ["FLOAT_BYTES", "TTWork"]

FLOAT_BYTES = 4


@dataclass(frozen=True)
class TTWork:
    """What looking up a batch and going back takes, in the units that machines have rates for.

    Attributes:
        calls: 1.
        ids, bags: n, to be sorted, and b.
        pooled: numbers that pooling reads and writes, (n + b) · D.
        distinct, rows: u, and the numbers in their rows, u · D.
        prefixes: Σ n_k for the inner levels, k from 2 to d - 1.
        prefix_products: matrix products of those levels, one per digit that occurs.
        prefix_flops: their operations, Σ 2 · n_k · Q_k · r_{k-1} · r_k.
        prefix_numbers: what they write, Σ n_k · Q_k · r_k.
        suffix_flops: operations of the last core, 2 · u · D · r_{d-1}.
        parameters: numbers in the cores, which an update sweeps.
    """

    calls: float
    ids: float
    bags: float
    pooled: float
    distinct: float
    rows: float
    prefixes: float
    prefix_products: float
    prefix_flops: float
    prefix_numbers: float
    suffix_flops: float
    parameters: float

    @classmethod
    def of(cls, shape: TTShape, reads: TTReads) -> TTWork:
        """Work of a batch."""
        r, sizes = shape.bounds, list(accumulate(shape.dim_factors, mul))
        distinct = reads.prefixes[-1]
        inner = [(reads.prefixes[k], sizes[k], r[k], r[k + 1], shape.row_factors[k]) for k in range(1, shape.cores - 1)]
        return cls(
            calls=1.0,
            ids=reads.ids,
            bags=reads.bags,
            pooled=(reads.ids + reads.bags) * shape.embedding_dim,
            distinct=distinct,
            rows=distinct * shape.embedding_dim,
            prefixes=plain_sum(n for n, _, _, _, _ in inner),
            prefix_products=plain_sum(p * -expm1(-n / p) for n, _, _, _, p in inner),
            prefix_flops=plain_sum(2.0 * n * q * before * after for n, q, before, after, _ in inner),
            prefix_numbers=plain_sum(n * q * after for n, q, _, after, _ in inner),
            suffix_flops=2.0 * distinct * shape.embedding_dim * r[-2],
            parameters=float(shape.parameters),
        )

    @property
    def flops(self) -> float:
        """Operations of forward; backward has twice as many."""
        return self.prefix_flops + self.suffix_flops

    @property
    def nbytes(self) -> float:
        """Bytes that forward writes: products of prefixes, rows, pooled rows."""
        return FLOAT_BYTES * (self.prefix_numbers + self.rows + self.pooled)

    @property
    def array(self) -> npt.NDArray[np.float64]:
        """All of it, in order; shape (12,)."""
        return np.array([getattr(self, field.name) for field in fields(self)], np.float64)
