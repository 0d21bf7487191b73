"""Options that stand in for a job's own fields."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flexshard import planner

if TYPE_CHECKING:
    from flexshard.planner import Job

__all__ = ["Budget", "Method", "Tiers", "job_with"]

Tiers = Annotated[int | None, typer.Option(help="Most group sizes of the plan, instead of the job's.")]
Budget = Annotated[str | None, typer.Option(help="neutral, +2GiB, or a limit such as 40GiB, instead of the job's.")]
Method = Annotated[Literal["optimal", "paper"] | None, typer.Option(help="Instead of the job's.")]


def job_with(path: Path, **options: Any) -> Job:
    """A job file's job, with other values for the fields whose options were given."""
    job = planner.load_job(path)
    return replace(job, **{field: value for field, value in options.items() if value is not None})
