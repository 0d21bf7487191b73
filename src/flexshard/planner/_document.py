"""Plan files: versioned JSON, byte for byte the same for the same plan."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from flexshard._files import read_text, write_text
from flexshard.costmodels import Collective, Cost
from flexshard.errors import ClusterError, PlanError
from flexshard.planner._plan import Alternative, Plan, Settings, TablePlan, Tier
from flexshard.topologies import Cluster, CollectiveRate, Level

__all__ = [
    "cost_document",
    "fingerprint",
    "format_of",
    "load_plan",
    "plan_document",
    "plan_of",
    "read_json",
    "save_plan",
]

FORMAT, VERSION = "flexshard.plan", 1


def plan_document(plan: Plan) -> dict[str, Any]:
    """A plan as the mapping that its file holds, fingerprint included."""
    return {"format": FORMAT, "version": VERSION, "fingerprint": plan.fingerprint, **_body(plan)}


def _body(plan: Plan) -> dict[str, Any]:
    return {
        "job_digest": plan.job_digest,
        "settings": _without(asdict(plan.settings), reduction="dense", translation="loader"),
        "cluster": asdict(plan.cluster),
        "predicted": cost_document(plan.predicted),
        "lower_bound_seconds": plan.lower_bound_seconds,
        "memory_price_seconds_per_gib": plan.memory_price_seconds_per_gib,
        "next_gib_seconds": plan.next_gib_seconds,
        "baselines": {name: cost_document(cost) for name, cost in plan.baselines.items()},
        "tables": [_table_document(table) for table in plan.tables.values()],
    }


def _table_document(table: TablePlan) -> dict[str, Any]:
    document = asdict(table)
    document["tiers"] = [_without(tier, reduction="dense") for tier in document["tiers"]]
    return _without(document, dedup_factor=1.0, undeduplicated=())


def _without(document: dict[str, Any], **usual: Any) -> dict[str, Any]:
    """Without fields that came later, where they say what holds without them: older plans keep their bytes."""
    return {key: value for key, value in document.items() if key not in usual or value != usual[key]}


def cost_document(cost: Cost) -> dict[str, Any]:
    """A cost's fields, and the seconds that follow from them for whoever reads the file without FlexShard."""
    return asdict(cost) | {
        "dynamic_memory_p999_bytes": cost.dynamic_memory_p999_bytes,
        "dynamic_comm_seconds": cost.dynamic_comm_seconds,
        "static_comm_seconds": cost.static_comm_seconds,
        "exposed_seconds": cost.exposed_seconds,
    }


def fingerprint(plan: Plan) -> str:
    """See :attr:`Plan.fingerprint`."""
    return _digest(_body(plan))


def _digest(body: dict[str, Any]) -> str:
    # Where a profile lies is not part of what the plan says: the same job planned elsewhere is the same plan.
    tables = [{key: value for key, value in table.items() if key != "profile_path"} for table in body["tables"]]
    body = body | {"tables": tables}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """See :meth:`Plan.save`."""
    write_text(path, json.dumps(plan_document(plan), indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """See :meth:`Plan.load`."""
    document = read_json(path, kind=FORMAT, version=VERSION, digest=_digest)
    try:
        return plan_of(document)
    except (KeyError, TypeError, ValueError, AttributeError, ClusterError) as error:
        raise PlanError(f"{path}: a field of the plan is missing or of another type ({error!r}); plan again") from error


def format_of(path: str | os.PathLike[str]) -> str | None:
    """The ``format`` of a JSON file; None where it has none."""
    try:
        document = json.loads(read_text(path, PlanError))
    except (ValueError, RecursionError):
        return None
    found = document.get("format") if isinstance(document, dict) else None
    return found if isinstance(found, str) else None


def read_json(
    path: str | os.PathLike[str], *, kind: str, version: int, digest: Callable[[dict[str, Any]], str]
) -> dict[str, Any]:
    """The body of a JSON file of one ``kind`` and version that has not been changed since it was written.

    Raises:
        PlanError: it is not such a file.
    """
    text = read_text(path, PlanError)
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise PlanError(f"{path}:{error.lineno}: not valid JSON: {error.msg}; make the plan again") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: not a plan: {str(error).splitlines()[0]}; make the plan again") from error
    if not isinstance(document, dict) or document.pop("format", None) != kind:
        raise PlanError(f"{path}: not a plan; expected a JSON object with 'format': '{kind}'")
    found_version = document.pop("version", None)
    if found_version != version:
        raise PlanError(
            f"{path}: version {found_version!r} of plans is unknown; this FlexShard reads {version}: plan again"
        )
    expected = document.pop("fingerprint", None)
    try:
        found = digest(document)
    except (KeyError, TypeError, AttributeError, ValueError):
        found = None
    if found != expected:
        raise PlanError(f"{path}: its content does not match its fingerprint; it was edited or damaged: plan again")
    return document


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that a plan may hold")


def plan_of(body: dict[str, Any]) -> Plan:
    """A plan from the body of its document."""
    settings = dict(body["settings"])
    settings["overlap"] = tuple((name, share) for name, share in settings["overlap"])
    tables = [_table(table) for table in body["tables"]]
    return Plan(
        cluster=_cluster(body["cluster"]),
        settings=Settings(**settings),
        tables={table.name: table for table in tables},
        predicted=_cost(body["predicted"]),
        baselines={name: _cost(cost) for name, cost in body["baselines"].items()},
        lower_bound_seconds=body["lower_bound_seconds"],
        memory_price_seconds_per_gib=body["memory_price_seconds_per_gib"],
        next_gib_seconds=body["next_gib_seconds"],
        job_digest=body["job_digest"],
    )


def _table(body: dict[str, Any]) -> TablePlan:
    tiers = tuple(Tier(**tier) for tier in body["tiers"])
    alternatives = tuple(
        Alternative(**(entry | {"group_sizes": tuple(entry["group_sizes"])})) for entry in body["alternatives"]
    )
    other = tuple((int(size), int(rows)) for size, rows in body.get("undeduplicated", ()))
    changed = {"features": tuple(body["features"]), "tiers": tiers, "alternatives": alternatives}
    return TablePlan(**(body | changed | {"undeduplicated": other}))


def _cost(body: dict[str, Any]) -> Cost:
    own = {field.name: body[field.name] for field in fields(Cost)}
    return Cost(**(own | {"collectives": tuple(Collective(**entry) for entry in body["collectives"])}))


def _cluster(body: dict[str, Any]) -> Cluster:
    levels = tuple(
        Level(
            level["group_size"],
            None if level["all_to_all"] is None else CollectiveRate(**level["all_to_all"]),
            None if level["all_reduce"] is None else CollectiveRate(**level["all_reduce"]),
        )
        for level in body["levels"]
    )
    return Cluster(**(body | {"levels": levels}))
