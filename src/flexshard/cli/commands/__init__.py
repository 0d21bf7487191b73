"""One file for each command; the list below is the order in which ``flexshard --help`` prints them."""

from __future__ import annotations

from importlib import import_module

__all__ = ["COMMANDS", "register"]

COMMANDS = (
    "clusters",
    "measure",
    "calibrate",
    "compress",
    "encode",
    "profile",
    "drift",
    "generate",
    "job",
    "plan",
    "pareto",
    "plot",
    "explain",
    "report",
    "compare",
    "diff",
    "replan",
    "replay",
    "timeline",
    "cluster_sessions",
    "duplication",
    "rewrite",
    "ingest",
)


def register() -> None:
    """Import every command's file, which puts its command on the application."""
    for name in COMMANDS:
        import_module(f"{__name__}.{name}")
