"""Texts beside points, where they cover neither each other nor what is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

__all__ = ["label_points"]

FloatArray = npt.NDArray[np.float64]

_NEAR = 6.0  # points of the picture (1/72 inch) that a marker covers around its middle
_DISTANCES = (9, 22, 40, 62, 90)
_OUTSIDE = 20.0  # times as bad as covering something
# Right first, then left; above before below.
_WAYS = ((1, 0), (1, 1), (1, -1), (-1, 0), (-1, 1), (-1, -1), (0, 1), (0, -1))


def label_points(axes: Any, points: Sequence[tuple[float, float, str]], line: FloatArray | None = None) -> None:
    """Put a text beside each point; points that lie in one place share one, a line each.

    Args:
        axes: with its limits set.
        points: place and text of each.
        line: that texts keep clear of too; shape (n, 2).
    """
    figure = axes.figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    near = _NEAR * figure.dpi / 72
    places: list[FloatArray] = []
    texts: list[list[str]] = []
    for x, y, text in sorted(points, key=lambda point: -point[1]):  # so that texts come in the points' order
        place = axes.transData.transform((x, y))
        same = [at for at, other in enumerate(places) if np.hypot(*(place - other)) < near]
        if same:
            texts[same[0]].append(text)
        else:
            places.append(place)
            texts.append([text])
    taken = [Bbox.from_bounds(x - near, y - near, 2 * near, 2 * near) for x, y in places]
    if line is not None:
        taken += [Bbox.from_bounds(x - 2, y - 2, 4, 4) for x, y in _dense(axes.transData.transform(line))]
    for place, lines in zip(places, texts, strict=True):
        taken.append(_placed(axes, place, "\n".join(lines), taken, renderer))


def _placed(axes: Any, place: FloatArray, text: str, taken: Sequence[Bbox], renderer: Any) -> Bbox:
    """Write a text where it covers least; where it is."""
    at = axes.transData.inverted().transform(place)
    room = axes.get_window_extent(renderer).padded(4)
    best: tuple[float, Any, Bbox] | None = None
    for distance in _DISTANCES:
        for right, up in _WAYS:
            arrow = {"arrowstyle": "-", "color": "0.6", "lw": 0.6, "shrinkB": 4} if distance > _DISTANCES[0] else None
            note = axes.annotate(
                text,
                at,
                (right * distance, up * distance),
                textcoords="offset points",
                ha=("right", "center", "left")[right + 1],
                va=("top", "center", "bottom")[up + 1],
                fontsize=8.5,
                arrowprops=arrow,
                zorder=6,
            )
            box: Bbox = note.get_window_extent(renderer)
            covered = _area(box) - _common(box, room)
            bad = _OUTSIDE * covered + sum(_common(box, other) for other in taken)
            if best is None or bad < best[0]:
                if best is not None:
                    best[1].remove()
                best = bad, note, box
            else:
                note.remove()
            if bad == 0:
                return box
    assert best is not None
    return best[2]


def _dense(corners: FloatArray) -> FloatArray:
    """Places on a line through corners, a few pixels apart."""
    steps = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(corners, axis=0).T))])
    at = np.linspace(0.0, steps[-1], int(min(steps[-1] / 4, 2000)) + 2)
    return np.stack([np.interp(at, steps, corners[:, axis]) for axis in (0, 1)], axis=1)


def _area(box: Bbox) -> float:
    return float(box.width * box.height)


def _common(one: Bbox, other: Bbox) -> float:
    shared = Bbox.intersection(one, other)
    return 0.0 if shared is None else _area(shared)
