"""Charts as SVG: bars from zero, and lines whose points say what they are when pointed at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

__all__ = ["COLOURS", "Bar", "Line", "bars", "legend", "lines"]

# Okabe and Ito (2008): told apart by colour-blind readers, and in grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_WIDTH, _LABEL = 720, 190


@dataclass(frozen=True)
class Bar:
    """A bar of parts, one after the other.

    Attributes:
        label: beside it.
        parts: how long each is, and what it is.
        text: behind it.
    """

    label: str
    parts: tuple[tuple[float, str], ...]
    text: str


@dataclass(frozen=True)
class Line:
    """A line through points.

    Attributes:
        label: in the legend.
        points: (x, y, what it is).
        marks: single points, (x, y, name, what it is), which are labelled.
        corners: of the line, (x, y), where it does not lead straight from point to point.
        bound: corners of what nothing is below, (x, y), dashed.
    """

    label: str
    points: tuple[tuple[float, float, str], ...]
    marks: tuple[tuple[float, float, str, str], ...] = ()
    corners: tuple[tuple[float, float], ...] = ()
    bound: tuple[tuple[float, float], ...] = ()


def bars(given: Sequence[Bar], *, limit: tuple[float, str] | None = None, what: str) -> str:
    """Horizontal bars from zero; ``limit`` is a line across them, and what it is."""
    longest = max([sum(size for size, _ in bar.parts) for bar in given] + ([limit[0]] if limit else []), default=0.0)
    scale = (_WIDTH - _LABEL - 150) / (longest or 1.0)
    height = 26 * len(given) + 30
    pieces = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(what)}">']
    for row, bar in enumerate(given):
        y, x = 26 * row + 6, float(_LABEL)
        pieces.append(f'<text x="{_LABEL - 8}" y="{y + 13}" class="end">{escape(_short(bar.label))}</text>')
        for number, (size, name) in enumerate(bar.parts):
            colour = COLOURS[number % len(COLOURS)]
            pieces.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(size * scale, 0.5):.1f}" height="17" fill="{colour}">'
                f"<title>{escape(bar.label)}: {escape(name)}</title></rect>"
            )
            x += size * scale
        pieces.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{escape(bar.text)}</text>')
    if limit is not None:
        x = _LABEL + limit[0] * scale
        pieces.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{height - 24}" class="limit"/>')
        pieces.append(f'<text x="{x:.1f}" y="{height - 8}" class="middle">{escape(limit[1])}</text>')
    return "".join([*pieces, "</svg>"])


def legend(names: Sequence[str]) -> str:
    """What colours of parts are."""
    items = [
        f'<span><i style="background:{COLOURS[number % len(COLOURS)]}"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    ]
    return f'<p class="legend">{"".join(items)}</p>'


def lines(
    given: Sequence[Line],
    *,
    x_title: str,
    y_title: str,
    show_x: Callable[[float], str],
    show_y: Callable[[float], str],
    log_x: bool = False,
    what: str,
) -> str:
    """Lines, the vertical axis from zero; every point says what it is."""
    across = [x for line in given for x, *_ in line.points] + [x for line in given for x, *_ in line.marks]
    up_to = [y for line in given for _, y, _ in line.points] + [y for line in given for _, y, *_ in line.marks]
    lowest, highest, top = min(across), max(across), max(up_to) or 1.0
    left, bottom, width, height = 84, 300, _WIDTH - 110, 270

    def place(x: float, y: float) -> tuple[float, float]:
        share = (
            (log10(x / lowest) / (log10(highest / lowest) or 1.0)) if log_x else (x - lowest) / (highest - lowest or 1)
        )
        return left + share * width, bottom - y / top * height

    def path_of(corners: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(x, y) for x, y in corners))

    pieces = [f'<svg viewBox="0 0 {_WIDTH} 350" role="img" aria-label="{escape(what)}">']
    for y in _ticks(0.0, top):
        _, at = place(lowest, y)
        pieces.append(f'<line x1="{left}" x2="{left + width}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>')
        pieces.append(f'<text x="{left - 8}" y="{at + 4:.1f}" class="end">{escape(show_y(y))}</text>')
    powers = [10.0**power for power in range(-9, 10)]
    shown = [power for power in powers if lowest <= power <= highest] if log_x else _ticks(lowest, highest)
    for x in shown:
        at, _ = place(x, 0.0)
        pieces.append(f'<text x="{at:.1f}" y="{bottom + 18}" class="middle">{escape(show_x(x))}</text>')
    for number, line in enumerate(given):
        colour = COLOURS[number % len(COLOURS)]
        path = path_of(line.corners or [(x, y) for x, y, _ in line.points])
        pieces.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if line.bound:
            pieces.append(f'<polyline points="{path_of(line.bound)}" fill="none" class="bound"/>')
        for x, y, said in line.points:
            at, up = place(x, y)
            tip = f"<title>{escape(said)}</title>"
            pieces.append(f'<circle cx="{at:.1f}" cy="{up:.1f}" r="3.5" fill="{colour}">{tip}</circle>')
        for x, y, name, said in line.marks:
            at, up = place(x, y)
            end = at > left + 0.7 * width
            where = f'x="{at + (-9 if end else 9):.1f}" y="{up - 6:.1f}"' + (' class="end"' if end else "")
            tip = f"<title>{escape(said)}</title>"
            pieces.append(f'<circle cx="{at:.1f}" cy="{up:.1f}" r="6" fill="none" class="mark">{tip}</circle>')
            pieces.append(f"<text {where}>{escape(name)}</text>")
    pieces.append(f'<text x="{left + width / 2}" y="{bottom + 40}" class="middle">{escape(x_title)}</text>')
    pieces.append(f'<text x="4" y="14">{escape(y_title)}</text>')
    return "".join([*pieces, "</svg>"])


def _ticks(low: float, high: float, number: int = 5) -> list[float]:
    span = high - low
    if span <= 0:
        return [low]
    step = 10.0 ** floor(log10(span / number))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= number)
    first = -(-low // step)
    return [step * (first + n) for n in range(int(high // step - first) + 1)]


def _short(label: str, most: int = 28) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"
