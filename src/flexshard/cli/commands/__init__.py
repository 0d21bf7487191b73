"""One file for each command; the groups below are those of ``flexshard --help``, in its order."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer

from flexshard.cli.app import app
from flexshard.cli.terminal import show_wide

__all__ = ["COMMANDS", "register"]

COMMANDS = {
    "Data and clusters": ("generate", "encode", "profile", "drift", "clusters", "measure", "calibrate"),
    "Decide": ("job", "plan", "pareto", "compress", "replan", "export"),
    "See why": ("explain", "report", "compare", "diff", "plot", "timeline", "replay"),
    "Stored samples": ("cluster_sessions", "duplication", "rewrite", "ingest"),
}


def register() -> None:
    """Import every command's file, which puts its command on the application, and say to which group it belongs."""
    for group, names in COMMANDS.items():
        for name in names:
            before = len(app.registered_commands)
            import_module(f"{__name__}.{name}")
            for command in app.registered_commands[before:]:
                command.rich_help_panel = group
                command.callback = _with_width(command.callback) if command.callback else None


_Wide = Annotated[bool, typer.Option("--wide", help="Print all columns of tables, whatever the terminal's width.")]


def _with_width(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with one option more, which all have in common."""

    @functools.wraps(command)
    def run(*, wide: bool, **options: Any) -> Any:
        show_wide(wide)
        return command(**options)

    signature = inspect.signature(command, eval_str=True)
    wide = inspect.Parameter("wide", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Wide)
    parameters = [*signature.parameters.values(), wide]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # what typer reads
    return run
