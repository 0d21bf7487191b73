"""The command line. Every command prints for people, or with ``--json`` for machines; bad input exits with 2.

May import: all rooms. A command has a file of its own in commands/, which names rooms as modules
(``planner.load_job``): so nothing but the command that runs is imported in full.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``flexshard`` command."""
    import os
    import signal

    def interrupted(*_: object) -> None:
        os.write(2, b"flexshard: interrupted\n")
        os._exit(130)

    before = signal.signal(signal.SIGINT, interrupted)  # nothing has begun: what is being imported need not see it
    from flexshard.cli.app import app
    from flexshard.cli.commands import register
    from flexshard.cli.terminal import run

    register()
    signal.signal(signal.SIGINT, before)
    run(app)
