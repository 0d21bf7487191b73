"""Pieces of HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["paragraph", "spoken", "table"]


def paragraph(*sentences: str) -> str:
    """Sentences, which may hold markup."""
    return f"<p>{' '.join(sentences)}</p>"


def spoken(name: str) -> str:
    """A name of a strategy or of a baseline as people say it."""
    return name.replace("_", " ")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, texts: int = 1) -> str:
    """A table that scrolls where it is wide; columns after the first ``texts`` are numbers."""
    top = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>" if head else ""
    lines = []
    for row in rows:
        cells = [
            f"<td{'' if number < texts else ' class=n'}>{escape(str(cell))}</td>" for number, cell in enumerate(row)
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<div class=scroll><table>{top}{''.join(lines)}</table></div>"
