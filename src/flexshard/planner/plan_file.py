"""Plan files: versioned JSON, byte for byte the same for the same plan."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from flexshard._internal import DocumentFormat, PathLike, decode, digest_of, read_json, with_names, write_json
from flexshard.costmodels import Cost
from flexshard.errors import PlanError
from flexshard.planner.digest import cluster_fields, settings_fields
from flexshard.planner.plan import Plan

__all__ = ["FIELDS", "cost_document", "fingerprint", "load_plan", "plan_document", "plan_of", "save_plan"]

FORMAT = DocumentFormat("flexshard.plan", 2, "a plan", "plans", PlanError, "plan again", older=(1,))

# Attributes that files have under another name.
FIELDS = {"first_position": "first_rank"}

# Of costs, with what they are where a file does not say.
_CAME_LATER: dict[str, Any] = {
    "index_dedup_seconds": 0.0,
    "fullest_dynamic_bytes": None,
    "look_up_seconds": 0.0,
    "update_seconds": 0.0,
    "overlapped_look_up_seconds": 0.0,
    "overlapped_update_seconds": 0.0,
    "row_wise_update_seconds": 0.0,
    "host_memory_bytes": 0.0,
}

Body = dict[str, Any]


def plan_document(plan: Plan) -> Body:
    """A plan as the mapping that its file holds, fingerprint included; in the oldest format that says it all."""
    costs = (plan.predicted, *plan.baselines.values())
    version = 2 if any(one.content for cost in costs for one in cost.collectives) else 1
    return FORMAT.stamped({"fingerprint": plan.fingerprint, **_body(plan)}, version=version)


def save_plan(plan: Plan, path: PathLike) -> None:
    """See :meth:`Plan.save`."""
    write_json(path, plan_document(plan))


def fingerprint(plan: Plan) -> str:
    """See :attr:`Plan.fingerprint`."""
    return _digest(_body(plan))


def _digest(body: Body) -> str:
    # Where a profile lies is not part of what the plan says: the same job planned elsewhere is the same plan.
    tables = {
        part: [{key: value for key, value in table.items() if key != "profile_path"} for table in body[part]]
        for part in ("tables", "pooled")
        if part in body
    }
    return digest_of(body | tables)


def _body(plan: Plan) -> Body:
    return {
        "job_digest": plan.job_digest,
        "settings": _without(
            settings_fields(plan.settings),
            reduction="dense",
            translation="loader",
            index_dedup_seconds_per_id=1e-9,
            memory="mean",
            sample_order="file",
            objective="communication",
            dense_seconds=None,
            rates=None,
            host_memory=None,
            gap=0.002,
            constraints=(),
        ),
        "cluster": _without(
            cluster_fields(plan.cluster), hbm_bytes_per_s=None, ranks_per_link=1, host_bytes_per_s=None
        ),
        "predicted": cost_document(plan.predicted),
        "lower_bound_seconds": plan.lower_bound_seconds,
        "memory_price_seconds_per_gib": plan.memory_price_seconds_per_gib,
        "next_gib_seconds": plan.next_gib_seconds,
        "baselines": {name: cost_document(cost) for name, cost in plan.baselines.items()},
        "tables": [
            _table_document(asdict(table), index_dedup=plan.settings.index_dedup is True)
            for table in plan.tables.values()
        ],
        **_pooled_document(plan),
    }


def _pooled_document(plan: Plan) -> Body:
    """What plans with pooled tables say besides."""
    if plan.pooled_predicted is None:
        return {}
    return {
        "pooled": [_pooled_table(asdict(table)) for table in plan.pooled.values()],
        "pooled_predicted": cost_document(plan.pooled_predicted),
    }


def _pooled_table(table: Body) -> Body:
    others = [_without(one, dtype=None) for one in table["alternatives"]]
    return _without(table | {"alternatives": others}, cache_load_factor=None, dedup_factor=1.0)


def _table_document(table: Body, *, index_dedup: bool) -> Body:
    """As the file has it, where ``index_dedup`` is what its settings say of all tables."""
    usual: Body = {"reduction": "dense", "coldest_c": None, "first_holder": 0}
    tiers = [_without(with_names(tier, FIELDS), **usual) for tier in table["tiers"]]
    return _without(table | {"tiers": tiers}, dedup_factor=1.0, undeduplicated=(), index_dedup=index_dedup, cache=None)


def _without(document: Body, **usual: Any) -> Body:
    """Without fields that came later, where they say what holds without them: older plans keep their bytes."""
    return {key: value for key, value in document.items() if key not in usual or value != usual[key]}


def cost_document(cost: Cost) -> Body:
    """A cost's fields, and the seconds that follow from them for whoever reads the file without FlexShard."""
    calls = [_without(one, content="", excess_bytes=0.0) for one in asdict(cost)["collectives"]]
    return _without(asdict(cost), **_CAME_LATER) | {
        "collectives": calls,
        "dynamic_memory_p999_bytes": cost.dynamic_memory_p999_bytes,
        "dynamic_comm_seconds": cost.dynamic_comm_seconds,
        "static_comm_seconds": cost.static_comm_seconds,
        "exposed_seconds": cost.exposed_seconds,
    }


def load_plan(path: PathLike) -> Plan:
    """See :meth:`Plan.load`."""
    return plan_of(read_json(path, FORMAT, digest=_digest), str(path))


def plan_of(body: Body, where: str) -> Plan:
    """A plan from the body of its document.

    Raises:
        PlanError: a field is missing or of another type; names ``where``, the file, and the field.
    """
    fields_of_plan = dict(body)
    try:
        fields_of_plan["predicted"] = _cost(body["predicted"])
        fields_of_plan["baselines"] = {name: _cost(cost) for name, cost in body["baselines"].items()}
        if "pooled" in body:
            fields_of_plan["pooled"] = {table["name"]: table for table in body["pooled"]}
            fields_of_plan["pooled_predicted"] = _cost(body["pooled_predicted"])
        of_all = {"index_dedup": body["settings"]["index_dedup"] is True}
        fields_of_plan["tables"] = {table["name"]: of_all | _table(table) for table in body["tables"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{where}: a field is missing or of another type ({error!r}); {FORMAT.remedy}") from error
    return decode(Plan, fields_of_plan, where, FORMAT)


def _table(body: Body) -> Body:
    attributes = {name: attribute for attribute, name in FIELDS.items()}
    return body | {"tiers": [with_names(tier, attributes) for tier in body["tiers"]]}


def _cost(body: Body) -> Body:
    """Without the seconds that follow."""
    return {field.name: (_CAME_LATER | body)[field.name] for field in fields(Cost)}
