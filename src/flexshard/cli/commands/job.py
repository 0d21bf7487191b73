"""``flexshard job``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flexshard import planner, topologies
from flexshard.cli.app import AsJson, app, written
from flexshard.cli.outputs import Force, check_output


@app.command("job")
def job_command(
    profiles: Annotated[list[Path], typer.Argument(help="Profiles; one table for each.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Job file to write.")],
    cluster: Annotated[
        str,
        typer.Option(help="A preset, preset:nodes, or a cluster file.", autocompletion=topologies.preset_names),
    ],
    batch_size: Annotated[int, typer.Option(help="Samples per rank.")],
    dim: Annotated[int, typer.Option(help="Embedding dimension of all tables.")],
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "float64"], typer.Option(help="Type of the weights.")
    ] = "float32",
    optimizer: Annotated[str, typer.Option(help="Optimizer of the tables.")] = "rowwise_adagrad",
    budget: Annotated[str, typer.Option(help="neutral, +2GiB, or a limit such as 40GiB.")] = "neutral",
    tiers: Annotated[int, typer.Option(help="Most group sizes of the plan.")] = 3,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a job file for some profiles, to plan as it is or to edit first.

    Example: flexshard job item.profile.parquet --cluster dgx-h100:4 --batch-size 4096 --dim 128 -o job.yaml
    """
    check_output(output, "flexshard.job", inputs=[*profiles, cluster], force=force)
    planner.save_job(
        output,
        profiles,
        cluster=cluster,
        batch_size=batch_size,
        dim=dim,
        dtype=dtype,
        optimizer=optimizer,
        budget=budget,
        tiers=tiers,
    )
    written(output, as_json)
