"""Files of rates: YAML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat

from flexshard._internal import DocumentFormat, PathLike, StrictModel, load_yaml, save_yaml
from flexshard.costmodels.local_rates import TableRates
from flexshard.costmodels.tensor_train.rates import DENSE, WORK, ShapeRates, TTRates
from flexshard.errors import DataError
from flexshard.tables import DATA_TYPES, OPTIMIZERS

__all__ = ["load_rates", "save_rates"]

FORMAT = DocumentFormat("flexshard.rates", 1, "a file of rates", "flexshard.rates", DataError, "calibrate again")


class ShapeSpec(StrictModel):
    """Rates of one tensor train."""

    model_config = ConfigDict(allow_inf_nan=False)

    rows: list[int]
    dims: list[int]
    ranks: list[int]
    step: dict[str, NonNegativeFloat]


class TableSpec(StrictModel):
    """Rates of one dense table: with pooling per call and id, without per call, row and byte."""

    model_config = ConfigDict(allow_inf_nan=False)

    rows: int
    dim: int
    pooled: list[NonNegativeFloat] = Field(min_length=2, max_length=2)
    look_up: list[NonNegativeFloat] = Field(min_length=3, max_length=3)
    update: list[NonNegativeFloat] = Field(min_length=3, max_length=3)
    length: PositiveFloat | None = None
    dtype: Literal[tuple(DATA_TYPES)] | None = None  # type: ignore[valid-type]
    optimizer: Literal[tuple(OPTIMIZERS)] | None = None  # type: ignore[valid-type]

    def rates(self) -> TableRates:
        (a, b, c), (d, e, f) = self.look_up, self.update
        kernel = self.length, self.dtype, self.optimizer
        return TableRates(self.rows, self.dim, tuple(self.pooled), (a, b, c), (d, e, f), *kernel)


class RatesSpec(StrictModel):
    """A file of rates, in seconds per unit."""

    model_config = ConfigDict(allow_inf_nan=False)

    machine: str
    dense: dict[str, NonNegativeFloat]
    step: dict[str, NonNegativeFloat]
    shapes: list[ShapeSpec]
    tables: list[TableSpec] = Field(default_factory=list)


def save_rates(rates: TTRates, path: PathLike) -> None:
    """See :meth:`TTRates.save`."""
    shapes = [
        {
            "rows": list(one.row_factors),
            "dims": list(one.dim_factors),
            "ranks": list(one.tt_ranks),
            "step": _named(one.step, WORK),
        }
        for one in rates.shapes
    ]
    body = {
        "machine": rates.machine,
        "dense": _named(rates.dense, DENSE),
        "step": _named(rates.step, WORK) if rates.step else {},
        "shapes": shapes,
    }
    if rates.tables:
        body["tables"] = [
            {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(one).items()}
            for one in rates.tables
        ]
    save_yaml(path, FORMAT, body)


def _named(rates: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    return {name: float(rate) for name, rate in zip(names, rates, strict=True)}


def load_rates(path: PathLike) -> TTRates:
    """See :meth:`TTRates.load`."""
    spec, _ = load_yaml(path, RatesSpec, FORMAT)

    def rates(given: dict[str, float], names: tuple[str, ...]) -> tuple[float, ...]:
        if set(given) != set(names):
            raise DataError(f"{path}: rates are of {', '.join(names)}; found {', '.join(given)}; calibrate again")
        return tuple(given[name] for name in names)

    shapes = (
        ShapeRates(tuple(one.rows), tuple(one.dims), tuple(one.ranks), rates(one.step, WORK)) for one in spec.shapes
    )
    tables = tuple(one.rates() for one in spec.tables)
    step = rates(spec.step, WORK) if spec.step or spec.shapes else ()
    return TTRates(spec.machine, step, rates(spec.dense, DENSE), tuple(shapes), tables)
