"""Predicted beside observed traffic (FlexShard paper, Figure 6)."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from flexshard._internal import PathLike
from flexshard.plots.style import COLORS, STYLE, save

__all__ = ["plot_reduction"]


def plot_reduction(reductions: Mapping[str, tuple[float, float]], path: PathLike) -> None:
    """Predicted beside observed reduction of global all-to-all traffic against row-wise: Figure 6 of the paper.

    Args:
        reductions: (predicted, observed) share that each plan saves, by name.

    Raises:
        OutputError: the picture could not be written.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(4.0, 1.6 + 1.3 * len(reductions)), 4.2), layout="constrained")
        axes = figure.add_subplot()
        positions = np.arange(len(reductions))
        for offset, (label, color) in enumerate((("predicted", "white"), ("observed", COLORS[5]))):
            heights = [100 * pair[offset] for pair in reductions.values()]
            bars = axes.bar(positions + 0.38 * offset, heights, 0.36, label=label, color=color, edgecolor="black")
            axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        axes.set_xticks(positions + 0.19, list(reductions))
        axes.set_ylabel("global all-to-all bytes saved\nagainst row-wise, %")
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.12)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.15), ncols=2, frameon=False)
        save(figure, path)
