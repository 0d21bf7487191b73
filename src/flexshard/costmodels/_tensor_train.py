"""What a tensor-train table costs: memory, operations and bytes of a batch, and seconds at measured rates.

Legend: n ids of a batch, b bags, u distinct ids; n_k distinct prefixes of k digits (n_d = u); core k of shape
(p_k, r_{k-1}, q_k, r_k), Q_k = q_1 ... q_k (EL-Rec paper, sections III-A and III-B; docs/tensor_train.md).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from math import expm1, prod
from operator import mul

import numpy as np
import numpy.typing as npt
import yaml
from pydantic import BaseModel, ConfigDict, NonNegativeFloat

from flexshard._documents import load_yaml
from flexshard._files import write_text
from flexshard._tt_shape import TTShape
from flexshard.costmodels._cost import Cost, Overlap
from flexshard.costmodels._placement import collective
from flexshard.costmodels._table import OPTIMIZERS, Table, expected_distinct
from flexshard.errors import DataError
from flexshard.topologies import Cluster

__all__ = ["ShapeRates", "TTRates", "TTReads", "TTWork", "fit_rates", "tensor_train_cost"]

FloatArray = npt.NDArray[np.float64]

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
        missed = float(profile.rows @ np.exp(-unread) + table.rows - profile.rows_read) / table.rows
        found = []
        for size in (prod(shape.rows[k:]) for k in range(1, shape.cores)):
            if hashed:
                found.append(-(-table.rows // size) * (1.0 - missed ** min(size, table.rows)))
            else:
                found.append(_ordered_prefixes(unread, profile.rows, size))
        found.append(float(expected_distinct(p, distinct) @ profile.rows))
        return cls(distinct * profile.avg_length, float(batch_size), tuple(found))


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
        r, sizes = shape.bounds, list(accumulate(shape.dims, mul))
        distinct = reads.prefixes[-1]
        inner = [(reads.prefixes[k], sizes[k], r[k], r[k + 1], shape.rows[k]) for k in range(1, shape.cores - 1)]
        return cls(
            calls=1.0,
            ids=reads.ids,
            bags=reads.bags,
            pooled=(reads.ids + reads.bags) * shape.embedding_dim,
            distinct=distinct,
            rows=distinct * shape.embedding_dim,
            prefixes=sum(n for n, _, _, _, _ in inner),
            prefix_products=sum(p * -expm1(-n / p) for n, _, _, _, p in inner),
            prefix_flops=sum(2.0 * n * q * before * after for n, q, before, after, _ in inner),
            prefix_numbers=sum(n * q * after for n, q, _, after, _ in inner),
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


def fit_rates(work: Sequence[npt.ArrayLike], seconds: Sequence[float]) -> tuple[float, ...]:
    """Seconds per unit, at least 0, whose predictions differ least from what was measured, by shares of it.

    Args:
        work: of each measurement; shape (m, w).
        seconds: that each took; shape (m,).

    Raises:
        DataError: no measurements, or times that are not above 0.
    """
    from scipy.optimize import nnls  # takes longer to import than planning a table

    amounts, times = np.asarray(work, np.float64), np.asarray(seconds, np.float64)
    if amounts.ndim != 2 or len(amounts) != len(times) or not len(times) or not (times > 0).all():
        raise DataError(f"rates are fitted to times above 0, one for each amount of work; found {times.tolist()}")
    shares = amounts / times[:, None]
    scale = np.maximum(shares.max(axis=0), np.finfo(np.float64).tiny)
    found, _ = nnls(shares / scale, np.ones(len(times)))
    return tuple((found / scale).tolist())


@dataclass(frozen=True)
class ShapeRates:
    """Rates of one tensor train.

    Attributes:
        rows, dims, ranks: as in :class:`TTShape`.
        step: seconds per unit of :class:`TTWork`, in its order: lookup, backward and update.
    """

    rows: tuple[int, ...]
    dims: tuple[int, ...]
    ranks: tuple[int, ...]
    step: tuple[float, ...]


@dataclass(frozen=True)
class TTRates:
    """A machine, as far as lookups go; ``flexshard calibrate`` measures it.

    Attributes:
        machine: what it is, and when it was measured.
        step: seconds per unit of :class:`TTWork`, fitted to all shapes measured: for shapes that were not.
        dense: seconds per call, id, and number of the rows read, of a dense table's step.
        shapes: rates of the shapes measured.
    """

    machine: str
    step: tuple[float, ...]
    dense: tuple[float, ...]
    shapes: tuple[ShapeRates, ...] = ()

    def __post_init__(self) -> None:
        own = [(self.step, _WORK), (self.dense, _DENSE), *((shape.step, _WORK) for shape in self.shapes)]
        for rates, names in own:
            if len(rates) != len(names):
                raise DataError(f"rates are of {', '.join(names)}; found {len(rates)} numbers")

    def step_seconds(self, shape: TTShape, reads: TTReads) -> float:
        """Forward, backward and update of one batch."""
        wanted = (shape.rows, shape.dims, shape.ranks)
        own = next((r.step for r in self.shapes if (r.rows, r.dims, r.ranks) == wanted), self.step)
        return float(TTWork.of(shape, reads).array @ np.array(own))

    def dense_seconds(self, reads: float, dim: int) -> float:
        """Forward, backward and update of ``reads`` rows of a dense table."""
        return float(np.array([1.0, reads, reads * dim]) @ np.array(self.dense))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as YAML.

        Raises:
            OutputError: it could not be written.
        """
        shapes = [
            {
                "rows": list(own.rows),
                "dims": list(own.dims),
                "ranks": list(own.ranks),
                "step": _named(own.step, _WORK),
            }
            for own in self.shapes
        ]
        document = {
            "format": FORMAT,
            "version": VERSION,
            "machine": self.machine,
            "dense": _named(self.dense, _DENSE),
            "step": _named(self.step, _WORK),
            "shapes": shapes,
        }
        write_text(path, yaml.safe_dump(document, sort_keys=False))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TTRates:
        """Read what :meth:`save` wrote.

        Raises:
            DataError: not such a file; names file, line and field.
        """
        spec, _ = load_yaml(path, _RatesSpec, kind=FORMAT, version=VERSION, error_type=DataError)

        def rates(found: dict[str, float], names: tuple[str, ...]) -> tuple[float, ...]:
            if set(found) != set(names):
                raise DataError(f"{path}: rates are of {', '.join(names)}; found {', '.join(found)}; calibrate again")
            return tuple(found[name] for name in names)

        shapes = (
            ShapeRates(tuple(own.rows), tuple(own.dims), tuple(own.ranks), rates(own.step, _WORK))
            for own in spec.shapes
        )
        return cls(spec.machine, rates(spec.step, _WORK), rates(spec.dense, _DENSE), tuple(shapes))


_WORK = tuple(field.name for field in fields(TTWork))
_DENSE = ("calls", "ids", "numbers")


def _named(rates: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    return {name: float(rate) for name, rate in zip(names, rates, strict=True)}


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class _ShapeSpec(_Spec):
    rows: list[int]
    dims: list[int]
    ranks: list[int]
    step: dict[str, NonNegativeFloat]


class _RatesSpec(_Spec):
    """A file of rates, in seconds per unit."""

    machine: str
    dense: dict[str, NonNegativeFloat]
    step: dict[str, NonNegativeFloat]
    shapes: list[_ShapeSpec]


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
