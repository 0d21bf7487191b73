"""A plan as a table for other tools, and as what a notebook shows."""

from __future__ import annotations

from html import escape

import pyarrow as pa

from flexshard import units
from flexshard.planner.plan import Plan

__all__ = ["frame_of_plan", "plan_html"]

_COLUMNS = pa.schema(
    [
        ("table", pa.string()),
        ("strategy", pa.string()),
        ("group_size", pa.int64()),
        ("rows", pa.int64()),
        ("first_row", pa.int64()),
        ("covered", pa.float64()),
        ("rank", pa.int64()),
    ]
)


def frame_of_plan(plan: Plan) -> pa.Table:
    """See :meth:`Plan.to_frame`."""
    rows: list[dict[str, object]] = []
    for table in plan.tables.values():
        rows += [
            {
                "table": table.name,
                "strategy": tier.strategy,
                "group_size": tier.group_size,
                "rows": tier.rows,
                "first_row": tier.first_position,
                "covered": tier.covered,
            }
            for tier in table.tiers
        ]
    for pooled in plan.pooled.values():
        rows += [
            {
                "table": pooled.name,
                "strategy": pooled.sharding_type,
                "rows": shard.rows,
                "first_row": shard.first_row,
                "rank": shard.rank,
            }
            for shard in pooled.shards
        ]
    return pa.Table.from_pylist(rows, schema=_COLUMNS)


def plan_html(plan: Plan) -> str:
    """See :meth:`Plan._repr_html_`."""
    cost, row_wise = plan.predicted, plan.baselines.get("row_wise")
    gain = ""
    if row_wise is not None:
        gain = f", {row_wise.exposed_seconds / max(cost.exposed_seconds, 1e-30):.3g} times less than row-wise"
    tables = len(plan.tables) + len(plan.pooled)
    said = (
        f"{tables} table{'s' if tables != 1 else ''} on {escape(plan.cluster.name)}, {plan.cluster.world_size:,} ranks:"
        f" {units.format_seconds(cost.exposed_seconds)} of exposed communication per step{gain},"
        f" {units.format_bytes(cost.memory_bytes)} per rank"
    )
    head = "".join(f"<th>{name}</th>" for name in ("table", "strategy", "group", "rows", "of accesses"))
    lines = []
    for row in frame_of_plan(plan).to_pylist():
        covered = "" if row["covered"] is None else f"{row['covered']:.1%}"
        cells = (escape(row["table"]), row["strategy"], row["group_size"] or "", f"{row['rows']:,}", covered)
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<p>{said}</p><table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
