"""``flexshard calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flexshard import calibration, planner
from flexshard.cli.app import AsJson, JobFile, app, written
from flexshard.cli.outputs import Force, check_output, check_place
from flexshard.cli.terminal import counting_progress


@app.command("calibrate")
def calibrate_command(
    job: JobFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="File of rates to write (YAML).")],
    rounds: Annotated[int, typer.Option(help="Rounds per batch; the least time counts.")] = 5,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the tables are.")] = "cpu",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Time lookups and updates of a job's tables on this machine, and of the tensor trains that it offers for them.

    Example: flexshard calibrate job.yaml -o rates.yaml
    """
    check_output(output, "flexshard.rates", inputs=[job], force=force)
    check_place(output)
    spec = planner.load_job(job)
    length_of = {table.name: table.profile.avg_length for table in spec.tables}
    shapes = [option.shape for options in spec.options.values() for option in options]
    lengths = [length_of[name] for name, options in spec.options.items() for _ in options]
    measure = calibration.calibrate  # the first to say what is missing
    tables = [
        calibration.DenseShape(table.rows, table.dim, table.profile.avg_length, table.dtype, table.optimizer)
        for table in spec.tables
    ]
    with counting_progress("calibrating", "shapes") as progress:
        rates = measure(
            shapes,
            lengths=lengths,
            tables=tables,
            batch_size=spec.batch_size,
            rounds=rounds,
            device=device,
            progress=progress,
        )
    rates.save(output)
    written(output, as_json)
