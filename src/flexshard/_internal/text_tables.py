"""Tables in the terminal, all of one look."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

__all__ = ["UNLIMITED", "Grid", "as_text", "new_grid"]

UNLIMITED = 100_000  # characters of a line that nobody wraps
_FOLDED = 28


class Grid:
    """Rows of cells under headings; where there is no room, its details are left out, and named below.

    Attributes:
        title: above the table.
        caption: below it.
    """

    def __init__(self, title: str, texts: Sequence[str], numbers: Sequence[str], details: Sequence[str]) -> None:
        self.title = title
        self.caption: str | None = None
        self._headings, self._texts, self._details = [*texts, *numbers], len(texts), list(details)
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """Add a row: a cell for each heading; those that are not given are empty."""
        self._rows.append((*cells, *[""] * (len(self._headings) - len(cells))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, the table and the caption, as rich prints them."""
        widths = [self._column_width(place) for place in range(len(self._headings))]
        kept = list(range(len(self._headings)))
        for detail in self._details:
            if _line_width(widths, kept) <= options.max_width:
                break
            kept = [place for place in kept if self._headings[place] != detail]
        # A terminal that is narrower still folds lines by itself; rich would cut numbers short instead.
        width = max(options.max_width, _line_width(widths, kept))
        yield Text(self.title, style="italic")
        yield from console.render(self._table(kept, widths), options.update(max_width=width))
        names = [heading for place, heading in enumerate(self._headings) if place not in kept]
        if names:
            yield Text(f"For want of room without {', '.join(names)}; --wide shows all columns.", style="dim")
        if self.caption:
            yield Text(self.caption)

    def _column_width(self, place: int) -> int:
        """Characters of a column; of one of texts that are long, as many as it has where they are folded."""
        longest = max(cell_len(text) for text in [self._headings[place], *(row[place] for row in self._rows)])
        return min(longest, _FOLDED) if place < self._texts else longest

    def _table(self, kept: Sequence[int], widths: Sequence[int]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for place in kept:
            if place < self._texts:
                table.add_column(self._headings[place], overflow="fold", min_width=widths[place])
            else:
                table.add_column(self._headings[place], justify="right", no_wrap=True, min_width=widths[place])
        for cells in self._rows:
            table.add_row(*(cells[place] for place in kept))
        return table


def _line_width(widths: Sequence[int], kept: Sequence[int]) -> int:
    return sum(widths[place] + 2 for place in kept)  # with a blank on either side


def new_grid(title: str, texts: Sequence[str], numbers: Sequence[str] = (), details: Sequence[str] = ()) -> Grid:
    """An empty table with columns of text (folded where they are long), then of numbers (never broken).

    Args:
        title: above it.
        texts, numbers: headings.
        details: headings of those that are left out where there is no room, the first of these first.
    """
    return Grid(title, texts, numbers, details)


def as_text(renderable: RenderableType, width: int = 118) -> str:
    """What rich would print, without colour."""
    console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False, markup=False, emoji=False)
    console.print(renderable, crop=False)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())
