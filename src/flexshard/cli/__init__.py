"""The command line. Every command prints for people, or with ``--json`` for machines; bad input exits with 2."""

from __future__ import annotations

from flexshard._terminal import run
from flexshard.cli import _clusters, _compression, _data, _planning, _running, _sessions  # noqa: F401 - each registers its commands
from flexshard.cli._app import app

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the ``flexshard`` command."""
    run(app)
