"""Tables in the terminal, all of one look."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence

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
        self._texts, self._numbers, self._details = list(texts), list(numbers), list(details)
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """Add a row: a cell for each heading; those that are not given are empty."""
        self._rows.append((*cells, *[""] * (len(self._headings) - len(cells))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, the table and the caption, as rich prints them."""
        left_out: list[str] = []
        for detail in self._details:
            if self._least_width(left_out) <= options.max_width:
                break
            left_out.append(detail)
        # A terminal that is narrower still folds lines by itself; rich would cut numbers short instead.
        width = max(options.max_width, self._least_width(left_out))
        yield Text(self.title, style="italic")
        yield from console.render(self._table(left_out), options.update(max_width=width))
        if left_out:
            names = [heading for heading in self._headings if heading in left_out]
            yield Text(f"For want of room without {', '.join(names)}; --wide shows all columns.", style="dim")
        if self.caption:
            yield Text(self.caption)

    @property
    def _headings(self) -> list[str]:
        return self._texts + self._numbers

    def _least_width(self, left_out: Collection[str]) -> int:
        kept = self._kept(left_out)
        return sum(self._column_width(place) for place in kept) + 2 * len(kept)

    def _column_width(self, place: int) -> int:
        """Characters of a column; of one of texts that are long, as many as it has where they are folded."""
        longest = max(cell_len(text) for text in [self._headings[place], *(row[place] for row in self._rows)])
        return min(longest, _FOLDED) if place < len(self._texts) else longest

    def _kept(self, left_out: Collection[str]) -> list[int]:
        return [place for place, heading in enumerate(self._headings) if heading not in left_out]

    def _table(self, left_out: Collection[str]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for place in self._kept(left_out):
            heading, width = self._headings[place], self._column_width(place)
            if place < len(self._texts):
                table.add_column(heading, overflow="fold", min_width=width)
            else:
                table.add_column(heading, justify="right", no_wrap=True, min_width=width)
        for cells in self._rows:
            table.add_row(*(cells[place] for place in self._kept(left_out)))
        return table


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
