"""``flexshard explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexshard import planner
from flexshard.cli.app import AsJson, app
from flexshard.cli.terminal import emit


@app.command("explain")
def explain_command(
    plan: Annotated[Path, typer.Argument(help="What 'flexshard plan' or 'compress' wrote (JSON).")],
    table: Annotated[str | None, typer.Argument(help="A table of the plan; none shows the whole plan.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say why tiers end where they do, or a table is compressed, what else would cost, and what memory is worth.

    Example: flexshard explain plan.json items
    """
    if planner.is_compression(plan):
        decision = planner.CompressionPlan.load(plan)
        texts = {name: decision.explain(name) for name in (decision.tables if table is None else [table])}
        emit(texts, as_json=as_json, text="\n\n".join(texts.values()))
        return
    loaded = planner.Plan.load(plan)
    if table is None and len(loaded.tables) + len(loaded.pooled) > 1:
        emit(planner.plan_document(loaded), as_json=as_json, text=planner.plan_renderable(loaded))
        return
    explanation = planner.explain(loaded, table)
    emit(explanation.document(), as_json=as_json, text=explanation.text)
