"""``flexshard pareto``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flexshard import planner, plots, units
from flexshard._internal import new_grid
from flexshard.cli.app import AsJson, JobFile, app
from flexshard.cli.job_options import Tiers, job_with
from flexshard.cli.outputs import Force, check_output
from flexshard.cli.terminal import emit, working


@app.command("pareto")
def pareto_command(
    job: JobFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="Picture to write: .png, .svg or .pdf.")],
    tiers: Tiers = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Draw the frontier of memory against communication, with the paper's points."""
    check_output(output, "picture", inputs=[job], force=force)
    spec = job_with(job, tiers=tiers)
    with working("finding the frontier"):
        curve = planner.pareto(spec)
        plots.plot_pareto(curve, output)
    headings = ("memory per rank", "exposed", *(f"rows, g = {size}" for size in curve.group_sizes))
    grid = new_grid("Points of the frontier, and beside it", ["point"], headings)
    for point in curve.marked:
        memory, seconds = units.format_bytes(point.memory_bytes), units.format_seconds(point.exposed_seconds)
        grid.add_row(point.name, memory, seconds, *(f"{rows:,}" for rows in point.rows))
    grid.caption = f"{len(curve.points):,} optimal plans drawn in {output}"
    emit(asdict(curve), as_json=as_json, text=grid)
