"""``flexshard drift``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flexshard import profiling
from flexshard._internal import new_grid
from flexshard.cli.app import AsJson, app
from flexshard.cli.terminal import emit


@app.command("drift")
def drift_command(
    before: Annotated[Path, typer.Argument(help="An earlier profile.")],
    now: Annotated[Path, typer.Argument(help="A later profile of the same table.")],
    as_json: AsJson = False,
) -> None:
    """Say how much of later data an earlier profile's hottest rows still cover.

    Example: flexshard drift monday.profile.parquet tuesday.profile.parquet
    """
    points = profiling.AccessProfile.load(before).drift(profiling.AccessProfile.load(now))
    headings = ("hottest", "rows", "covered then", "covered now", "best now", "rows kept")
    grid = new_grid("Drift", [], headings)
    for p in points:
        shares = (p.covered_before, p.covered_now, p.best_now, p.kept)
        grid.add_row(f"{p.cut:.2%}", f"{p.rows:,}", *(f"{share:.1%}" for share in shares))
    emit([asdict(point) for point in points], as_json=as_json, text=grid)
