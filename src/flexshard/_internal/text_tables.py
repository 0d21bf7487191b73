"""Tables in the terminal, all of one look."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

__all__ = ["as_text", "new_grid"]


def new_grid(title: str, texts: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """An empty table with columns of text (folded where they are long), then of numbers (never broken)."""
    grid = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in texts:
        grid.add_column(heading, overflow="fold")
    for heading in numbers:
        grid.add_column(heading, justify="right", no_wrap=True)
    return grid


def as_text(renderable: RenderableType, width: int = 118) -> str:
    """What rich would print, without colour."""
    console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False, markup=False, emoji=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())
