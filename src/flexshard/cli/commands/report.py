"""``flexshard report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexshard import executors, planner, report
from flexshard.cli.app import AsJson, PlanFile, app, written
from flexshard.cli.outputs import Force, check_output
from flexshard.cli.terminal import working


@app.command("report")
def report_command(
    plan: PlanFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="Page to write (HTML); it needs no network.")],
    job: Annotated[
        Path | None, typer.Option(help="The plan's job: adds the frontier, the tables' skew and the job itself.")
    ] = None,
    observed: Annotated[
        Path | None, typer.Option(help="What was observed of the plan: adds what ran beside it.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a plan as one page to share: what was decided and why, per table and rank.

    Example: flexshard report plan.json --job job.yaml -o report.html
    """
    check_output(output, "page", inputs=[plan, *(path for path in (job, observed) if path is not None)], force=force)
    loaded = planner.Plan.load(plan)
    problem = None if job is None else planner.load_job(job)
    with working("writing"):
        report.write_report(
            loaded,
            output,
            problem=problem,
            job_text=None if job is None else job.read_text(encoding="utf-8"),
            observed=None if observed is None else executors.Observation.load(observed),
            folder=plan.parent,
        )
    written(output, as_json)
