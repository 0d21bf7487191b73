"""``flexshard plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexshard import planner
from flexshard.cli.app import AsJson, JobFile, app
from flexshard.cli.job_options import Budget, Method, Tiers, job_with
from flexshard.cli.outputs import Force, check_output
from flexshard.cli.terminal import emit, say, working


@app.command("plan")
def plan_command(
    job: JobFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="Plan file to write (JSON).")],
    tiers: Tiers = None,
    budget: Budget = None,
    method: Method = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Decide where every row lives, and prove it."""
    check_output(output, "flexshard.plan", inputs=[job], force=force)
    with working("planning"):
        plan = job_with(job, tiers=tiers, budget=budget, method=method).solve()
    plan.save(output)
    emit(planner.plan_document(plan), as_json=as_json, text=planner.plan_renderable(plan))
    if not as_json:
        say(f"written to {output}, fingerprint {plan.fingerprint[:16]}")
