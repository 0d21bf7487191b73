"""What a tensor-train table costs: memory, operations and bytes of a batch, and seconds at measured rates.

Legend: n ids of a batch, b bags, u distinct ids; n_k distinct prefixes of k digits (n_d = u); core k of shape
(p_k, r_{k-1}, q_k, r_k), Q_k = q_1 ... q_k (EL-Rec paper, sections III-A and III-B; docs/tensor_train.md).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from pydantic import BaseModel, ConfigDict, Field

from flexshard._documents import load_yaml
from flexshard._files import write_text
from flexshard._tt_shape import TTShape
from flexshard.costmodels._placement import collective
from flexshard.costmodels._cost import Cost, Overlap
from flexshard.costmodels._table import OPTIMIZERS, Table, expected_distinct
from flexshard.errors import DataError
from flexshard.topologies import Cluster

__all__ = ["Rates", "TTRates", "TTReads", "TTWork", "fit_rates", "tensor_train_cost"]

FORMAT, VERSION = "flexshard.rates", 1
FLOAT_BYTES = 4


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
        found = [float(rest.size)]
        for factor in reversed(shape.rows[1:]):
            rest = np.unique(rest // factor)
            found.append(float(rest.size))
        return cls(float(np.size(ids)), bags, tuple(found[::-1]))

    @classmethod
    def expected(cls, table: Table, batch_size: int, shape: TTShape, *, hashed: bool = False) -> TTReads:
        """Expected of a rank's batch, from the table's access profile.

        Args:
            table: with its profile.
            batch_size: B.
            shape: gives the digits.
            hashed: rows are numbered anyhow; by default by how often they are read, as an index bijection by frequency
                numbers them.
        """
        profile = table.profile
        p, distinct = profile.counts / profile.num_samples, table.distinct_samples(batch_size)
        unread = -distinct * np.log1p(-np.minimum(p, 1.0 - 2**-53))  # -log of the chance that a batch has it not
        below = [prod(shape.rows[k:]) for k in range(1, shape.cores)]
        # Least chances of a row not being read, summed over the rows of a prefix.
        sums = np.concatenate([[0.0], np.cumsum(unread * profile.rows)])
        ranks = np.concatenate([[0], np.cumsum(profile.rows)])
        missed = float(profile.rows @ np.exp(-unread) + table.rows - profile.rows_read) / table.rows
        found = []
        for size in below:
            if hashed:
                found.append(
                    min(-(-table.rows // size), prod(shape.rows) // size) * (1.0 - missed ** min(size, table.rows))
                )
            else:
                edges = np.minimum(size * np.arange(-(-profile.rows_read // size) + 1), profile.rows_read)
                found.append(float(-np.expm1(-np.diff(np.interp(edges, ranks, sums))).sum()))
        found.append(float(expected_distinct(p, distinct) @ profile.rows))
        return cls(distinct * profile.avg_length, float(batch_size), tuple(found))


@dataclass(frozen=True)
class TTWork:
    """What looking up a batch and going back takes, in the units that machines have rates for.

    Attributes:
        calls: 1.
        ids: n, to be sorted.
        pooled: numbers that pooling reads and writes, (n + b) · D.
        prefix_products: matrix products of inner levels, one per digit that occurs.
        prefix_flops: their operations, Σ 2 · n_k · Q_k · r_{k-1} · r_k for k from 2 to d - 1.
        prefix_numbers: what they write, Σ n_k · Q_k · r_k.
        suffix_flops: operations of the last core, 2 · u · D · r_{d-1}.
        suffix_numbers: what it reads and writes, u · (Q_{d-1} · r_{d-1} + q_d · r_{d-1} + D).
        parameters: numbers in the cores, which an update sweeps.
    """

    calls: float
    ids: float
    pooled: float
    prefix_products: float
    prefix_flops: float
    prefix_numbers: float
    suffix_flops: float
    suffix_numbers: float
    parameters: float

    @classmethod
    def of(cls, shape: TTShape, reads: TTReads) -> TTWork:
        """Work of a batch."""
        r, sizes = shape.bounds, list(accumulate(shape.dims, mul))
        distinct = reads.prefixes[-1]
        inner = [(reads.prefixes[k], sizes[k], r[k], r[k + 1], shape.rows[k]) for k in range(1, shape.cores - 1)]
        return cls(
            calls=1.0,
            ids=reads.ids,
            pooled=(reads.ids + reads.bags) * shape.embedding_dim,
            prefix_products=sum(p * -np.expm1(-n / p) for n, _, _, _, p in inner),
            prefix_flops=sum(2.0 * n * q * before * after for n, q, before, after, _ in inner),
            prefix_numbers=sum(n * q * after for n, q, _, after, _ in inner),
            suffix_flops=2.0 * distinct * shape.embedding_dim * r[-2],
            suffix_numbers=distinct * ((sizes[-2] + shape.dims[-1]) * r[-2] + shape.embedding_dim),
            parameters=float(shape.parameters),
        )

    @property
    def array(self) -> npt.NDArray[np.float64]:
        """All of it, in order; shape (9,)."""
        return np.array([getattr(self, field.name) for field in fields(self)], np.float64)


@dataclass(frozen=True)
class Rates:
    """Seconds per unit of work on one machine, as :func:`fit_rates` finds them.

    Attributes:
        per_unit: in the order of the fields of :class:`TTWork` (or of a dense lookup's call, ids and numbers).
    """

    per_unit: tuple[float, ...]

    def seconds(self, work: npt.NDArray[np.float64]) -> float:
        """Of so much work; shape (len(per_unit),)."""
        return float(np.asarray(self.per_unit) @ work)


def fit_rates(work: Sequence[npt.NDArray[np.float64]], seconds: Sequence[float]) -> Rates:
    """Rates of at least 0 whose predictions differ least from what was measured, by shares of it.

    Args:
        work: of each measurement; shape (m, w).
        seconds: that each took; shape (m,).

    Raises:
        DataError: fewer measurements than would tell, or times that are not above 0.
    """
    from scipy.optimize import nnls

    amounts, times = np.asarray(work, np.float64), np.asarray(seconds, np.float64)
    if amounts.ndim != 2 or len(amounts) != len(times) or not len(times) or not (times > 0).all():
        raise DataError(f"rates are fitted to times above 0, one for each amount of work; found {times.tolist()}")
    shares = amounts / times[:, None]
    scale = np.maximum(shares.max(axis=0), np.finfo(np.float64).tiny)
    found, _ = nnls(shares / scale, np.ones(len(times)))
    return Rates(tuple((found / scale).tolist()))


@dataclass(frozen=True)
class TTRates:
    """A machine, as far as lookups go.

    Attributes:
        machine: what it is, and when it was measured.
        forward, step: rates of tensor trains, without and with backward and a fused update.
        dense: rates of a dense table's step: calls, ids, and numbers of the rows read.
    """

    machine: str
    forward: Rates
    step: Rates
    dense: Rates

    def step_seconds(self, shape: TTShape, reads: TTReads) -> float:
        """Forward, backward and update of one batch."""
        return self.step.seconds(TTWork.of(shape, reads).array)

    def forward_seconds(self, shape: TTShape, reads: TTReads) -> float:
        """Forward of one batch."""
        return self.forward.seconds(TTWork.of(shape, reads).array)

    def dense_seconds(self, reads: float, dim: int) -> float:
        """Forward, backward and update of ``reads`` rows of a dense table."""
        return self.dense.seconds(np.array([1.0, reads, reads * dim]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as YAML.

        Raises:
            OutputError: it could not be written.
        """
        names = [field.name for field in fields(TTWork)]
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "machine": self.machine,
            "forward": dict(zip(names, self.forward.per_unit, strict=True)),
            "step": dict(zip(names, self.step.per_unit, strict=True)),
            "dense": dict(zip(_DENSE, self.dense.per_unit, strict=True)),
        }
        write_text(path, yaml.safe_dump(document, sort_keys=False))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TTRates:
        """Read what :meth:`save` wrote.

        Raises:
            DataError: not such a file; names file, line and field.
        """
        spec, _ = load_yaml(path, _RatesSpec, kind=FORMAT, version=VERSION, error_type=DataError)
        forward, step = (
            Rates(tuple(getattr(own, f.name) for f in fields(TTWork))) for own in (spec.forward, spec.step)
        )
        dense = Rates(tuple(getattr(spec.dense, name) for name in _DENSE))
        return cls(spec.machine, forward, step, dense)


_DENSE = ("calls", "ids", "numbers")


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class _WorkSpec(_Spec):
    calls: float = Field(ge=0)
    ids: float = Field(ge=0)
    pooled: float = Field(ge=0)
    prefix_products: float = Field(ge=0)
    prefix_flops: float = Field(ge=0)
    prefix_numbers: float = Field(ge=0)
    suffix_flops: float = Field(ge=0)
    suffix_numbers: float = Field(ge=0)
    parameters: float = Field(ge=0)


class _DenseSpec(_Spec):
    calls: float = Field(ge=0)
    ids: float = Field(ge=0)
    numbers: float = Field(ge=0)


class _RatesSpec(_Spec):
    """A file of rates."""

    machine: str
    forward: _WorkSpec
    step: _WorkSpec
    dense: _DenseSpec


def tensor_train_cost(
    table: Table, cluster: Cluster, shape: TTShape, reads: TTReads, *, overlap: Overlap | None = None
) -> Cost:
    """Memory and communication of a table as a tensor train that every rank holds.

    Cores, their gradients, the bucket that is all-reduced and the optimizer's state are static; rows and products of
    one batch, with their gradients, are dynamic. All in float32, as products are.
    """
    r, sizes = shape.bounds, list(accumulate(shape.dims, mul))
    nbytes = float(FLOAT_BYTES * shape.parameters)
    state, _ = OPTIMIZERS[table.optimizer]
    products = sum(reads.prefixes[k] * sizes[k] * r[k + 1] for k in range(1, shape.cores - 1))
    rate = cluster.level(1).all_reduce
    return Cost(
        static_memory_bytes=nbytes * (3.0 + state / FLOAT_BYTES),
        dynamic_memory_bytes=2.0 * FLOAT_BYTES * (reads.prefixes[-1] * shape.embedding_dim + products),
        rows_read=reads.ids,
        collectives=() if rate is None else (collective("all_reduce", 1, rate, nbytes, overlap),),
        dynamic_memory_sigma_bytes=None,
    )
