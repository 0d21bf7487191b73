"""One file for each command; the groups below are those of ``flexshard --help``, in its order."""

from __future__ import annotations

from importlib import import_module

from flexshard.cli.app import app

__all__ = ["COMMANDS", "register"]

COMMANDS = {
    "Data and clusters": ("generate", "encode", "profile", "drift", "clusters", "measure", "calibrate"),
    "Decide": ("job", "plan", "pareto", "compress", "replan"),
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
