"""Which tables are compressed to tensor trains: the decision as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexshard._internal import PathLike, bound, check_finite
from flexshard.errors import PlanError, TableError
from flexshard.planner.plan import Plan
from flexshard.tables import TTShape

__all__ = ["CompressionPlan", "TTOption", "TableChoice", "TableOption"]


@dataclass(frozen=True)
class TTOption:
    """A tensor train that a table may become.

    Attributes:
        shape: factors and ranks.
        loss: what it costs in quality, in whatever unit the options of a job share: the relative error that
            ``compress`` reported, or points of AUC.
    """

    shape: TTShape
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.shape, TTShape):
            raise TableError(f"an option has a TTShape, found {self.shape!r}")
        loss = check_finite(self.loss, "an option's loss", TableError)
        if loss < 0:
            raise TableError(f"an option's loss is at least 0, found {self.loss}")
        object.__setattr__(self, "loss", loss)


@dataclass(frozen=True)
class TableOption:
    """One way to hold a table, and its predicted cost per rank and iteration.

    Attributes:
        shape: of the tensor train; None for tiers of rows (a FlexShard plan), and for shards of a pooled table.
        memory_bytes: static and expected dynamic memory.
        compute_seconds: lookups, backward and update.
        comm_seconds: exposed communication, latencies aside.
        loss: as given.
        priced_seconds: all time, and memory at the decision's price.
        sharding: of a pooled table that is no tensor train, such as "row_wise/fused".
    """

    shape: TTShape | None
    memory_bytes: float
    compute_seconds: float
    comm_seconds: float
    loss: float
    priced_seconds: float
    sharding: str = ""

    @property
    def seconds(self) -> float:
        """Compute and communication."""
        return self.compute_seconds + self.comm_seconds

    @property
    def name(self) -> str:
        """What it is, in words."""
        return (self.sharding or "tiers of rows") if self.shape is None else f"tensor train, {self.shape}"


@dataclass(frozen=True)
class TableChoice:
    """A table's options and which of them was taken.

    Attributes:
        name, rows, dim: of the table.
        options: tiers of rows, or the best sharding of a pooled table, first (where constraints leave one), then tensor
            trains in the order given.
        chosen: which one.
    """

    name: str
    rows: int
    dim: int
    options: tuple[TableOption, ...]
    chosen: int

    @property
    def option(self) -> TableOption:
        """What was taken."""
        return self.options[self.chosen]


@dataclass(frozen=True, eq=False)
class CompressionPlan:
    """Which tables are tensor trains, the plan of all others, and what a step takes.

    Attributes:
        tables: by name, in the order given.
        plan: of the tables that stay as they are; None if all are compressed.
        budget_bytes: per rank, for all tables.
        memory_bytes: what all tables need.
        step_seconds: predicted time of lookups, exposed communication and the problem's dense work per iteration.
        lower_bound_seconds: no choice within the budget takes less.
        memory_price_seconds_per_gib: what a little more memory would save, as of a GiB.
        loss, loss_limit: of all chosen options together, and the most that was allowed (None: any).
    """

    tables: Mapping[str, TableChoice]
    plan: Plan | None
    budget_bytes: float
    memory_bytes: float
    step_seconds: float
    lower_bound_seconds: float
    memory_price_seconds_per_gib: float
    loss: float
    loss_limit: float | None

    @property
    def shapes(self) -> dict[str, TTShape]:
        """Tensor trains by table, as :func:`flexshard.embeddings.compress` takes them."""
        return {name: table.option.shape for name, table in self.tables.items() if table.option.shape is not None}

    def table(self, name: str) -> TableChoice:
        """One table.

        Raises:
            PlanError: there is none of this name.
        """
        if name not in self.tables:
            raise PlanError(f"there is no table {name!r} in the decision; it has {', '.join(self.tables)}")
        return self.tables[name]

    def explain(self, name: str) -> str:
        """Why a table is compressed, or is not, in sentences.

        Raises:
            PlanError: there is no table of this name.
        """
        text: str = bound("flexshard.planner", "CompressionPlan.explain")(self, name)
        return text

    def document(self) -> dict[str, Any]:
        """All of it as a mapping for machines."""
        document: dict[str, Any] = bound("flexshard.planner", "CompressionPlan.document")(self)
        return document

    def save(self, path: PathLike) -> None:
        """Write as JSON: the same decision gives the same bytes.

        Raises:
            OutputError: it could not be written.
        """
        bound("flexshard.planner", "CompressionPlan.save")(self, path)

    @classmethod
    def load(cls, path: PathLike) -> CompressionPlan:
        """Read what :meth:`save` wrote.

        Raises:
            PlanError: not such a file, of another version, or changed since it was written.
        """
        decision: CompressionPlan = bound("flexshard.planner", "CompressionPlan.load")(path)
        return decision
