"""Which tables are compressed to tensor trains, and why: the decision as a value and as a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flexshard import units
from flexshard._files import write_text
from flexshard._tt_shape import TTShape
from flexshard._values import finite
from flexshard.errors import ClusterError, PlanError, TableError
from flexshard.planner._document import format_of, plan_document, plan_of, read_json
from flexshard.planner._plan import Plan

__all__ = ["CompressionPlan", "TTOption", "TableChoice", "TableOption", "is_compression"]

FORMAT, VERSION = "flexshard.compression", 1


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
        loss = finite(self.loss, "an option's loss", TableError)
        if loss < 0:
            raise TableError(f"an option's loss is at least 0, found {self.loss}")
        object.__setattr__(self, "loss", loss)


@dataclass(frozen=True)
class TableOption:
    """One way to hold a table, and its predicted cost per rank and iteration.

    Attributes:
        shape: of the tensor train; None for tiers of rows (a FlexShard plan).
        memory_bytes: static and expected dynamic memory.
        compute_seconds: lookups, backward and update.
        comm_seconds: exposed communication, latencies aside.
        loss: as given.
        priced_seconds: all time, and memory at the decision's price.
    """

    shape: TTShape | None
    memory_bytes: float
    compute_seconds: float
    comm_seconds: float
    loss: float
    priced_seconds: float

    @property
    def seconds(self) -> float:
        """Compute and communication."""
        return self.compute_seconds + self.comm_seconds

    @property
    def name(self) -> str:
        """What it is, in words."""
        return "tiers of rows" if self.shape is None else f"tensor train, {self.shape}"


@dataclass(frozen=True)
class TableChoice:
    """A table's options and which of them was taken.

    Attributes:
        name, rows, dim: of the table.
        options: tiers of rows first, then tensor trains in the order given.
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
        step_seconds: predicted time of lookups and of exposed communication per iteration.
        lower_bound_seconds: no choice within the budget takes less.
        memory_price_seconds_per_gib: what one more GiB would save at the margin.
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
        table = self.table(name)
        chosen = table.option
        lines = [
            f"{name}: {table.rows:,} rows x {table.dim}, {chosen.name}.",
            f"  {_words(chosen)} per rank and iteration"
            + (f", {chosen.shape.compression:.0f} times fewer numbers than the table." if chosen.shape else "."),
        ]
        price = self.memory_price_seconds_per_gib
        if price:
            lines.append(f"The budget binds: memory is worth {units.format_seconds(price)} per GiB at the margin.")
        else:
            lines.append("The budget does not bind: the least time wins.")
        for index, option in enumerate(table.options):
            if index == table.chosen:
                continue
            more = option.priced_seconds - chosen.priced_seconds
            same = abs(more) <= 1e-6 * chosen.priced_seconds
            verdict = f"{units.format_seconds(abs(more))} {'more' if more >= 0 else 'less'} in all"
            verdict = "the same in all" if same else verdict
            reason = self._reason(table, option, more)
            lines.append(f"  As {option.name} it would need {_words(option)}: {verdict}{reason}.")
        if len(table.options) == 1:
            lines.append("  No tensor train was offered for it.")
        return "\n".join(lines)

    def _reason(self, table: TableChoice, option: TableOption, more: float) -> str:
        """Why something that is faster, or cheaper at the price of memory, was not taken."""
        if more >= 0 and option.seconds >= table.option.seconds:
            return ""
        if self.memory_bytes - table.option.memory_bytes + option.memory_bytes > self.budget_bytes:
            return ", but beyond the budget"
        loss = self.loss - table.option.loss + option.loss
        if self.loss_limit is not None and loss > self.loss_limit:
            return f", but beyond the loss allowed ({loss:.4g} above {self.loss_limit:.4g})"
        return "" if more >= 0 else ", but tables are taken whole, and other choices pay for it"

    def document(self) -> dict[str, Any]:
        """All of it as a mapping for machines."""
        body: dict[str, Any] = {
            "budget_bytes": self.budget_bytes,
            "memory_bytes": self.memory_bytes,
            "step_seconds": self.step_seconds,
            "lower_bound_seconds": self.lower_bound_seconds,
            "memory_price_seconds_per_gib": self.memory_price_seconds_per_gib,
            "loss": self.loss,
            "loss_limit": self.loss_limit,
            "tables": [asdict(table) for table in self.tables.values()],
            "plan": None if self.plan is None else plan_document(self.plan),
        }
        return {"format": FORMAT, "version": VERSION, "fingerprint": _fingerprint(body), **body}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON: the same decision gives the same bytes.

        Raises:
            OutputError: it could not be written.
        """
        write_text(path, json.dumps(self.document(), indent=1, allow_nan=False, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CompressionPlan:
        """Read what :meth:`save` wrote.

        Raises:
            PlanError: not such a file, of another version, or changed since it was written.
        """
        body = read_json(path, kind=FORMAT, version=VERSION, digest=_fingerprint)
        try:
            tables = [_choice(entry) for entry in body.pop("tables")]
            plan = body.pop("plan")
            if plan is not None:
                plan = plan_of({k: v for k, v in plan.items() if k not in ("format", "version", "fingerprint")})
            limit = body.pop("loss_limit")
            numbers = {name: float(value) for name, value in body.items()}
            return cls(
                tables={table.name: table for table in tables},
                plan=plan,
                loss_limit=None if limit is None else float(limit),
                **numbers,
            )
        except (ClusterError, TableError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"{path}: a field is missing or of another type ({error!r}); decide again") from error


def is_compression(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a :class:`CompressionPlan`, rather than a plan."""
    return format_of(path) == FORMAT


def _words(option: TableOption) -> str:
    return (
        f"{units.format_bytes(option.memory_bytes)}, {units.format_seconds(option.compute_seconds)} of lookups and"
        f" {units.format_seconds(option.comm_seconds)} of communication"
    )


def _fingerprint(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _choice(body: dict[str, Any]) -> TableChoice:
    options = tuple(
        TableOption(
            shape=None if entry["shape"] is None else _shape(entry["shape"]),
            **{name: float(value) for name, value in entry.items() if name != "shape"},
        )
        for entry in body["options"]
    )
    if not 0 <= body["chosen"] < len(options):
        raise ValueError(f"option {body['chosen']} of {len(options)} was chosen")
    return TableChoice(**(body | {"options": options}))


def _shape(body: dict[str, Any]) -> TTShape:
    rows, dims, ranks = (tuple(body[name]) for name in ("rows", "dims", "ranks"))
    return TTShape(body["num_embeddings"], body["embedding_dim"], rows, dims, ranks)
