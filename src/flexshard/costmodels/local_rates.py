"""How fast a rank looks rows up and updates them: of dense tables that were measured, and of all others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from flexshard._internal import check_finite, plain_sum
from flexshard.errors import JobError
from flexshard.tables import DATA_TYPES, Table

__all__ = ["LocalRates", "TableRates", "closest_rates", "mean_rates"]

PerCallRowByte = tuple[float, float, float]


@dataclass(frozen=True)
class TableRates:
    """A dense table, as measured.

    Attributes:
        rows, dim: of the table.
        pooled: seconds per call and id of a step with pooling: lookup, backward and update.
        look_up, update: as of :class:`LocalRates`, without pooling.
        length: ids of a bag; None in files of earlier releases, which do not say.
        dtype, optimizer: as of :class:`Table`; None where any will do.
    """

    rows: int
    dim: int
    pooled: tuple[float, ...]
    look_up: PerCallRowByte
    update: PerCallRowByte
    length: float | None = None
    dtype: str | None = None
    optimizer: str | None = None

    def runs(self, dtype: str | None, optimizer: str | None) -> bool:
        """Whether rows of such tables are looked up and updated by the same kernels."""
        wanted = ((dtype, self.dtype), (optimizer, self.optimizer))
        return all(asked == own or asked is None or own is None for asked, own in wanted)

    @property
    def row_bytes(self) -> int:
        """Of a row of weights."""
        return self.dim * DATA_TYPES[self.dtype or "float32"].nbytes


def closest_rates(
    tables: Sequence[TableRates],
    rows: int,
    dim: int,
    *,
    dtype: str | None = None,
    optimizer: str | None = None,
    length: float | None = None,
) -> TableRates | None:
    """Those of a table of this size and kernel, of the nearest length; None if none was measured."""
    own = [one for one in tables if (one.rows, one.dim) == (rows, dim) and one.runs(dtype, optimizer)]
    if length is None or len(own) < 2:
        return next(iter(own), None)
    wanted = math.log(max(length, 1.0))
    return min(own, key=lambda one: abs(math.log(max(one.length or 1.0, 1.0)) - wanted))


def mean_rates(tables: Sequence[TableRates]) -> tuple[PerCallRowByte, PerCallRowByte]:
    """To look up and to update rows of tables that were not measured: per call and byte, means of those that were."""

    def mean(of: Callable[[TableRates], PerCallRowByte]) -> PerCallRowByte:
        call = [of(table)[0] for table in tables]
        per_byte = [of(table)[2] + of(table)[1] / table.row_bytes for table in tables]
        return plain_sum(call) / len(call), 0.0, plain_sum(per_byte) / len(per_byte)

    return mean(lambda table: table.look_up), mean(lambda table: table.update)


@dataclass(frozen=True)
class LocalRates:
    """How fast a rank looks rows up and updates them.

    Attributes:
        look_up: seconds per call, row and byte of rows looked up.
        update: seconds per call, row and byte of rows whose gradients are summed and applied.
        sweep: seconds per byte of weights with copies, all of which are updated.
        source: where the figures come from.
        tables: those that were measured themselves, which have rates of their own.
    """

    look_up: PerCallRowByte
    update: PerCallRowByte
    sweep: float
    source: str = ""
    tables: tuple[TableRates, ...] = ()

    def __post_init__(self) -> None:
        for name, values in (("look_up", self.look_up), ("update", self.update), ("sweep", (self.sweep,))):
            if any(check_finite(value, name, JobError) < 0 for value in values):
                raise JobError(f"{name} must be rates of at least 0 s, found {values}")

    @cached_property
    def _by_size(self) -> dict[tuple[int, int], list[TableRates]]:
        found: dict[tuple[int, int], list[TableRates]] = {}
        for one in self.tables:
            found.setdefault((one.rows, one.dim), []).append(one)
        return found

    @cached_property
    def _by_kernel(self) -> dict[tuple[str, str], tuple[PerCallRowByte, PerCallRowByte]]:
        """Means of tables of one data type and optimizer, where they differ."""
        kernels = {(one.dtype, one.optimizer) for one in self.tables if one.dtype and one.optimizer}
        return {
            (str(dtype), str(optimizer)): mean_rates([one for one in self.tables if one.runs(dtype, optimizer)])
            for dtype, optimizer in kernels
            if len(kernels) > 1
        }

    def measured(self, table: Table) -> TableRates | None:
        """Rates of a table that was measured itself; of several lengths, of that which is nearest to its own."""
        own = self._by_size.get((table.rows, table.dim), ())
        return closest_rates(
            own,
            table.rows,
            table.dim,
            dtype=table.dtype,
            optimizer=table.optimizer,
            length=table.profile.avg_length if len(own) > 1 else None,
        )

    def of(self, table: Table) -> tuple[PerCallRowByte, PerCallRowByte]:
        """To look up, and to update, rows of a table: its own, or else those of tables of its data type and optimizer,
        or of all.
        """
        own = self.measured(table)
        if own is not None:
            return own.look_up, own.update
        return self._by_kernel.get((table.dtype, table.optimizer), (self.look_up, self.update))

    @classmethod
    def of_bandwidth(cls, bytes_per_s: float) -> LocalRates:
        """Of a device that does nothing but move bytes through its memory: a lookup reads and writes a row; an update
        reads the gradient twice, to sort and to sum it, and reads and writes the row; a sweep reads gradient and row
        and writes the row.
        """
        one = 1.0 / bytes_per_s
        return cls((0.0, 0.0, 2 * one), (0.0, 0.0, 4 * one), 3 * one, "memory bandwidth")
