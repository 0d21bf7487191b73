"""Decisions on compression as files: versioned JSON, byte for byte the same for the same decision."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from flexshard._internal import (
    DocumentFormat,
    PathLike,
    decode,
    digest_of,
    format_of,
    read_json,
    with_names,
    write_json,
)
from flexshard.errors import PlanError
from flexshard.planner.compression.decision import CompressionPlan, TableChoice
from flexshard.planner.plan_file import plan_document, plan_of

__all__ = ["decision_document", "is_compression", "load_decision", "save_decision"]

FORMAT = DocumentFormat("flexshard.compression", 1, "a decision on compression", "plans", PlanError, "decide again")
# Attributes of a shape that files have under another name.
_FIELDS = {"row_factors": "rows", "dim_factors": "dims", "tt_ranks": "ranks"}
_ATTRIBUTES = {name: attribute for attribute, name in _FIELDS.items()}

Body = dict[str, Any]


def decision_document(decision: CompressionPlan) -> Body:
    """See :meth:`CompressionPlan.document`."""
    body: Body = {
        "budget_bytes": decision.budget_bytes,
        "memory_bytes": decision.memory_bytes,
        "step_seconds": decision.step_seconds,
        "lower_bound_seconds": decision.lower_bound_seconds,
        "memory_price_seconds_per_gib": decision.memory_price_seconds_per_gib,
        "loss": decision.loss,
        "loss_limit": decision.loss_limit,
        "tables": [_document(table) for table in decision.tables.values()],
        "plan": None if decision.plan is None else plan_document(decision.plan),
    }
    return FORMAT.stamped({"fingerprint": digest_of(body), **body})


def _document(table: TableChoice) -> Body:
    """As the file has it; ``sharding``, which came later, only where it says something."""
    document: Body = with_names(asdict(table), _FIELDS)
    for option in document["options"]:
        if not option["sharding"]:
            del option["sharding"]
    return document


def save_decision(decision: CompressionPlan, path: PathLike) -> None:
    """See :meth:`CompressionPlan.save`."""
    write_json(path, decision_document(decision))


def load_decision(path: PathLike) -> CompressionPlan:
    """See :meth:`CompressionPlan.load`."""
    body = read_json(path, FORMAT, digest=digest_of)
    plan = body.pop("plan", None)
    if plan is not None:
        plan = plan_of({key: plan[key] for key in plan if key not in ("format", "version", "fingerprint")}, str(path))
    try:
        tables = {table["name"]: _table(table) for table in body["tables"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{path}: a field is missing or of another type ({error!r}); {FORMAT.remedy}") from error
    decision = decode(CompressionPlan, body | {"tables": tables, "plan": None}, str(path), FORMAT)
    for table in decision.tables.values():
        if not 0 <= table.chosen < len(table.options):
            where = f"{path}: table {table.name!r}"
            raise PlanError(f"{where}: option {table.chosen} of {len(table.options)} was chosen; {FORMAT.remedy}")
    return replace(decision, plan=plan)


def _table(body: Body) -> Body:
    """With the attributes' names in its shapes; ``rows`` of a table is its own."""
    options = [
        option | {"shape": option["shape"] and with_names(option["shape"], _ATTRIBUTES)} for option in body["options"]
    ]
    return body | {"options": options}


def is_compression(path: PathLike) -> bool:
    """Whether a file is a :class:`CompressionPlan`, rather than a plan."""
    return format_of(path, PlanError) == FORMAT.name
