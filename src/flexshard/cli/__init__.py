"""The command line. Every command prints for people, or with ``--json`` for machines; bad input exits with 2.

May import: all rooms. A command has a file of its own in commands/, which names rooms as modules
(``planner.load_job``): so nothing but the command that runs is imported in full.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``flexshard`` command."""
    from flexshard.cli.app import app
    from flexshard.cli.commands import register
    from flexshard.cli.terminal import run

    register()
    run(app)
