"""The application, and what its commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexshard.cli.terminal import emit, say

__all__ = ["AsJson", "JobFile", "PlanFile", "app", "written"]

app = typer.Typer(
    name="flexshard",
    help="Decide row by row where embedding tables live on a GPU cluster, and prove the plan optimal.\n\n"
    "Begin with: flexshard profile, flexshard job, flexshard plan; each has --help with an example.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
JobFile = Annotated[Path, typer.Argument(help="Job file (YAML); write one with 'flexshard job'.")]
PlanFile = Annotated[Path, typer.Argument(help="What 'flexshard plan' wrote (JSON).")]


def written(path: Path, as_json: bool) -> None:
    """Say where a result lies."""
    emit({"path": str(path)}, as_json=as_json, text=f"written to {path}")


def _version(wanted: bool) -> None:
    if wanted:
        from flexshard import __version__

        say(f"flexshard {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    del version
