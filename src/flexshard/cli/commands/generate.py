"""``flexshard generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexshard import profiling
from flexshard.cli.app import AsJson, app, written
from flexshard.cli.outputs import Force, check_output
from flexshard.cli.terminal import working


@app.command("generate")
def generate_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="Parquet file to write.")],
    rows: Annotated[int, typer.Option(help="Rows of the table.")] = 1_000_000,
    samples: Annotated[int, typer.Option(help="Samples, one list of ids each.")] = 100_000,
    length: Annotated[float, typer.Option(help="Mean ids per sample.")] = 100.0,
    exponent: Annotated[float, typer.Option(help="Of the power law of popularity.")] = 1.05,
    column: Annotated[str, typer.Option(help="Name of the column.")] = "items",
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write power-law sequences, to try FlexShard without data.

    Example: flexshard generate -o clicks.parquet --rows 1000000 --samples 40000 --length 200
    """
    check_output(output, "parquet", force=force)
    with working("generating"):
        profiling.write_power_law_sequences(
            output, rows=rows, samples=samples, mean_length=length, exponent=exponent, column=column, seed=seed
        )
    written(output, as_json)
