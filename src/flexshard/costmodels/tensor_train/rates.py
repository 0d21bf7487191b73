"""Rates of a machine, fitted to measured steps: seconds per unit of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from flexshard._internal import PathLike, bound, deprecated_attribute, renamed_parameters
from flexshard.costmodels.local_rates import LocalRates, TableRates, closest_rates, mean_rates
from flexshard.costmodels.tensor_train.reads import TTReads
from flexshard.costmodels.tensor_train.work import TTWork
from flexshard.errors import DataError
from flexshard.tables import TTShape

__all__ = ["DENSE", "WORK", "ShapeRates", "TTRates", "fit_rates"]

# Units of work of tensor trains, and of dense tables, in the order of their rates.
WORK = tuple(field.name for field in fields(TTWork))
DENSE = ("calls", "ids", "numbers")


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
    scaled_rates, _ = nnls(shares / scale, np.ones(len(times)))
    return tuple((scaled_rates / scale).tolist())


@renamed_parameters(rows="row_factors", dims="dim_factors", ranks="tt_ranks")
@dataclass(frozen=True)
class ShapeRates:
    """Rates of one tensor train.

    Attributes:
        row_factors, dim_factors, tt_ranks: as in :class:`TTShape`.
        step: seconds per unit of :class:`TTWork`, in its order: lookup, backward and update.
    """

    row_factors: tuple[int, ...]
    dim_factors: tuple[int, ...]
    tt_ranks: tuple[int, ...]
    step: tuple[float, ...]

    rows = deprecated_attribute("rows", "row_factors")
    dims = deprecated_attribute("dims", "dim_factors")
    ranks = deprecated_attribute("ranks", "tt_ranks")


@dataclass(frozen=True)
class TTRates:
    """A machine, as far as lookups go; ``flexshard calibrate`` measures it.

    Attributes:
        machine: what it is, and when it was measured.
        step: seconds per unit of :class:`TTWork`, fitted to all shapes measured: for shapes that were not; empty where
            none were.
        dense: seconds per call, id, and number of the rows read, of a dense table's step.
        shapes: rates of the shapes measured.
        tables: dense tables measured.
    """

    machine: str
    step: tuple[float, ...]
    dense: tuple[float, ...]
    shapes: tuple[ShapeRates, ...] = ()
    tables: tuple[TableRates, ...] = ()

    def __post_init__(self) -> None:
        fitted = [(self.dense, DENSE), *((shape.step, WORK) for shape in self.shapes)]
        if self.step or self.shapes:
            fitted.append((self.step, WORK))
        for rates, names in fitted:
            if len(rates) != len(names):
                raise DataError(f"rates are of {', '.join(names)}; found {len(rates)} numbers")

    def step_seconds(self, shape: TTShape, reads: TTReads) -> float:
        """Forward, backward and update of one batch."""
        wanted = (shape.row_factors, shape.dim_factors, shape.tt_ranks)
        rates = next((r.step for r in self.shapes if (r.row_factors, r.dim_factors, r.tt_ranks) == wanted), self.step)
        if not rates:
            raise DataError(f"{self.machine}: no tensor train was measured; calibrate a job that offers some")
        return float(TTWork.of(shape, reads).array @ np.array(rates))

    @property
    def local(self) -> LocalRates:
        """Of lookups and updates of dense tables without pooling, for planning steps. Tables that were not measured
        have the mean of those that were (of their data type and optimizer, if any was). Copies are swept as fast as so
        many rows are updated, slower than they are.

        Raises:
            DataError: the rates are of an earlier release, which did not measure this.
        """
        if not self.tables:
            raise DataError(f"{self.machine}: no dense table was measured by itself; calibrate again")

        look_up, update = mean_rates(self.tables)
        return LocalRates(look_up, update, update[2], self.machine, self.tables)

    def dense_seconds(
        self,
        reads: float,
        dim: int,
        rows: int | None = None,
        *,
        dtype: str | None = None,
        optimizer: str | None = None,
        length: float | None = None,
    ) -> float:
        """Forward, backward and update of ``reads`` rows of a dense table, with pooling; of one that was measured, by
        its own rates: of its data type and optimizer, and the nearest length, where they are given.
        """
        kernel = {"dtype": dtype, "optimizer": optimizer}
        own = None if rows is None else closest_rates(self.tables, rows, dim, **kernel, length=length)
        if own is not None:
            return float(np.array([1.0, reads]) @ np.array(own.pooled))
        return float(np.array([1.0, reads, reads * dim]) @ np.array(self.dense))

    def save(self, path: PathLike) -> None:
        """Write as YAML.

        Raises:
            OutputError: it could not be written.
        """
        bound("flexshard.costmodels", "TTRates.save")(self, path)

    @classmethod
    def load(cls, path: PathLike) -> TTRates:
        """Read what :meth:`save` wrote.

        Raises:
            DataError: not such a file; names file, line and field.
        """
        rates: TTRates = bound("flexshard.costmodels", "TTRates.load")(path)
        return rates
