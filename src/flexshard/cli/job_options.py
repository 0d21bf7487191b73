"""Options that stand in for a job's own fields."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flexshard import planner
from flexshard._internal import name_and_value

if TYPE_CHECKING:
    from flexshard.planner import Job

__all__ = ["Budget", "Method", "Tiers", "job_with", "table_and_file"]

Tiers = Annotated[int | None, typer.Option(help="Most group sizes of the plan, instead of the job's.")]
Budget = Annotated[str | None, typer.Option(help="neutral, +2GiB, or a limit such as 40GiB, instead of the job's.")]
Method = Annotated[Literal["optimal", "paper"] | None, typer.Option(help="Instead of the job's.")]


def job_with(path: Path, **options: Any) -> Job:
    """A job file's job, with other values for the fields whose options were given."""
    job = planner.load_job(path)
    return replace(job, **{field: value for field, value in options.items() if value is not None})


def table_and_file(text: str, tables: Collection[str]) -> tuple[str | None, str]:
    """TABLE=FILE; no table where all of it is a file's name, in which there may be a "=" where a plan has one table."""
    name, file = name_and_value(text, tables)
    if name is None or name in tables or len(tables) > 1:
        return name, file
    return (name, file) if Path(file).exists() and not Path(text).exists() else (None, text)
