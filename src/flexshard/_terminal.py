"""What all commands share: consoles, progress bars, machine output, and errors in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from flexshard.errors import FlexShardError

__all__ = ["counting_progress", "emit", "run", "say"]


def say(text: RenderableType) -> None:
    """Print for a person, on standard output."""
    # Into a pipe or a file rich would fold at 80 columns; tables need more.
    Console(width=None if sys.stdout.isatty() else 118, highlight=False).print(text)


def emit(document: Any, *, as_json: bool, text: RenderableType) -> None:
    """Print a result for a machine or for a person."""
    if as_json:
        sys.stdout.write(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    else:
        say(text)


@contextmanager
def counting_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with rate and remaining time on standard error; nothing where that is not a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(show_speed=False),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None, rate="")

        def update(done: int, total: int) -> None:
            speed = progress.tasks[0].speed
            rate = "" if speed is None else f"{speed:,.0f} rows/s"
            progress.update(task, completed=done, total=total, rate=rate)

        yield update


def run(app: Callable[[], Any]) -> None:
    """Run a typer application; an error that FlexShard raises becomes one line and exit code 2."""
    try:
        app()
    except FlexShardError as error:
        line = " ".join(str(error).split())
        sys.stderr.write(f"flexshard: error: {line}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("flexshard: interrupted\n")
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has had enough
        sys.stderr.close()
        sys.exit(0)
