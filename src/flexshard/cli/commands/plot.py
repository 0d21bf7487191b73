"""``flexshard plot``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from flexshard import planner, plots
from flexshard._internal import there_are
from flexshard.cli.app import AsJson, JobFile, app, written
from flexshard.cli.outputs import Force, check_output
from flexshard.errors import JobError
from flexshard.tables import Table


@app.command("plot")
def plot_command(
    what: Annotated[
        Literal["costs", "skew", "marginal", "step", "ranks"],
        typer.Argument(help="Figures 3, 4 and 5; the phases of a step; what every rank has."),
    ],
    job: JobFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="Picture to write: .png, .svg or .pdf.")],
    table: Annotated[
        str | None,
        typer.Option(help="One table of the job, which costs needs where there are several; all by default."),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Draw a figure of the FlexShard paper for the job's own profiles; or of its plan the phases of a step, or what
    every rank has of it.

    Example: flexshard plot skew job.yaml -o skew.png
    """
    check_output(output, "picture", inputs=[job], force=force)
    spec = planner.load_job(job)
    tables = [t for t in spec.tables if table in (None, t.name)]
    if not tables:
        raise JobError(f"{job}: no table {table!r}; {there_are(t.name for t in spec.tables)}")
    if what == "costs":
        if len(tables) > 1:
            raise JobError(f"{job}: has {len(tables)} tables; say which one to draw with --table")
        plots.plot_normalized_costs(tables[0], spec.cluster, spec.batch_size, output, overlap=spec.overlap)
    elif what == "skew":
        plots.plot_skew({t.name: t.profile for t in tables}, output)
    elif what == "marginal":
        plots.plot_marginal(planner.marginal_curve(_of(spec, tables)), output)
    elif what == "step":
        plots.plot_step(planner.solve(_of(spec, tables)), output)
    else:
        plots.plot_ranks(planner.solve(_of(spec, tables)), output)
    written(output, as_json)


def _of(job: planner.Job, tables: list[Table]) -> planner.Problem:
    """The job of these tables alone."""
    names = {table.name for table in tables}
    asked = {
        name: replace(
            one,
            with_tables=[other for other in one.with_tables if other in names],
            apart=[other for other in one.apart if other in names],
        )
        for name, one in job.constraints.items()
        if name in names
    }
    return replace(job, tables=tuple(tables), constraints=asked)
