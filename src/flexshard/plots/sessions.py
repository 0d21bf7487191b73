"""Figures of the RecD paper: sessions, and what they repeat."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from flexshard._internal import PathLike
from flexshard.ingestion import Duplication
from flexshard.plots.style import COLORS, STYLE, plain, save

__all__ = ["plot_duplication", "plot_sessions"]


def plot_sessions(duplication: Duplication, path: PathLike) -> None:
    """Samples per session, in the dataset and in a batch: Figure 3 of the RecD paper.

    Raises:
        OutputError: the picture could not be written.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for axes, sizes, where in (
            (left, duplication.session_sizes, "the dataset"),
            (right, duplication.batch_session_sizes, f"a batch of {duplication.batch_size:,}"),
        ):
            largest = max(int(sizes.max(initial=1)), 1)
            edges = np.unique(np.round(np.geomspace(1, largest + 1, 40)))
            number, _ = np.histogram(sizes, edges)
            # Bins hold one size or several: per size, so that a wide one does not look like more.
            axes.stairs(number / np.diff(edges), edges, fill=True, facecolor=COLORS[5], edgecolor="black", lw=0.8)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter(plain)
            axes.xaxis.set_minor_formatter(NullFormatter())
            mean = float(sizes.mean()) if sizes.size else 0.0
            axes.axvline(mean, color="black", ls="--", lw=1)
            axes.set_xlabel(f"samples per session in {where}")
            axes.set_ylabel("sessions of each size")
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_title(f"mean {mean:.2f} (dashed)")
        figure.suptitle(_title(duplication), fontsize=10.5)
        save(figure, path)


def plot_duplication(duplication: Duplication, path: PathLike) -> None:
    """Exact and partial duplication of each feature, the most first: Figure 4 of the RecD paper.

    Raises:
        OutputError: the picture could not be written.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 3.8), layout="constrained")
        both = figure.subplots(1, 2, sharey=True)
        for axes, number, what in ((both[0], 0, "exact"), (both[1], 1, "partial")):
            features = sorted(duplication.features, key=lambda one: -getattr(one, what))
            shares = [100 * getattr(one, what) for one in features]
            few = len(features) <= 12
            axes.bar(range(len(shares)), shares, 0.8 if few else 1.0, color=COLORS[5], edgecolor="black", lw=0.6)
            for weighted, style in ((False, "--"), (True, ":")):
                mean = 100 * duplication.overall(weighted=weighted)[number]
                of = "ids (by length)" if weighted else "features"
                axes.axhline(mean, color="black", ls=style, lw=1.2, label=f"all {of}: {mean:.1f} %")
            if few:
                axes.set_xticks(range(len(shares)), [one.feature for one in features], rotation=30, ha="right")
            else:
                axes.set_xlabel("feature")
            axes.grid(axis="x", visible=False)
            axes.set_ylim(0, 100)
            if not any(shares):
                axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", va="center", color="gray")
            where = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
            axes.legend(title=f"{what} duplicates", fontsize=8.5, title_fontsize=10, frameon=False, **where)
        both[0].set_ylabel("% of samples' lists (left), of ids (right)")
        figure.suptitle(_title(duplication), fontsize=10.5)
        save(figure, path)


def _title(duplication: Duplication) -> str:
    sessions = int(duplication.session_sizes.size)
    return f"{duplication.rows:,} samples of {sessions:,} sessions, batch {duplication.batch_size:,}"
