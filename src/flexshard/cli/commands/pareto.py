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
    """Draw the frontier of memory against communication, with the paper's points.

    Example: flexshard pareto job.yaml -o pareto.png
    """
    check_output(output, "picture", inputs=[job], force=force)
    spec = job_with(job, tiers=tiers)
    with working("finding the frontier"):
        curve = planner.pareto(spec)
        plots.plot_pareto(curve, output)
    kinds = sorted({kind for point in curve.points for kind, _ in point.pooled})
    sizes = curve.group_sizes if any(sum(point.rows) for point in curve.points) else ()
    bounded = any(point.lower_bound_seconds is not None for point in curve.points)
    headings = ["memory per rank", "exposed"] + (["no less than"] if bounded else [])
    headings += [f"rows, g = {size}" for size in sizes] + [f"tables {kind}" for kind in kinds]
    details = headings[:1:-1]
    grid = new_grid("Points of the frontier, and beside it", ["point"], headings, details)
    for point in curve.marked:
        cells = [units.format_bytes(point.memory_bytes), units.format_seconds(point.exposed_seconds)]
        if bounded:
            bound = point.lower_bound_seconds
            cells.append("" if bound is None else units.format_seconds(bound))
        known = not kinds or point.pooled  # what baselines have is in their names
        cells += [f"{rows:,}" if known else "" for rows, _ in zip(point.rows, sizes, strict=False)]
        cells += [str(dict(point.pooled).get(kind, 0)) if known else "" for kind in kinds]
        grid.add_row(point.name, *cells)
    grid.caption = f"{len(curve.points):,} {'best' if bounded else 'optimal'} plans drawn in {output}"
    emit(asdict(curve), as_json=as_json, text=grid)
