"""A training step, phase by phase."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from flexshard._internal import PathLike
from flexshard.planner import Plan, title_of
from flexshard.plots.style import STYLE, literal, save

__all__ = ["plot_step"]

# Colours of one kind by content, and hatched where it is not communication, so that it reads in print too.
_LOOK = {
    "find distinct ids": ("white", "...."),
    "counts": ("0.92", ""),
    "ids": ("#B5DDF2", ""),
    "pooled ids": ("#B5DDF2", "oo"),
    "sequence ids": ("#B5DDF2", "++"),
    "pooled look up": ("white", "//"),
    "look up": ("white", "////"),
    "embeddings": ("#56B4E9", ""),
    "embeddings and gradients": ("#0072B2", ""),
    "pooled sums": ("#56B4E9", "oo"),
    "sequence rows": ("#56B4E9", "++"),
    "dense": ("white", "xxxx"),
    "gradients": ("#E69F00", ""),
    "pooled gradients": ("#E69F00", "oo"),
    "sequence gradients": ("#E69F00", "++"),
    "pooled update": ("white", "\\\\"),
    "update": ("white", "\\\\\\\\"),
}


def plot_step(plan: Plan, path: PathLike) -> None:
    """Predicted phases of a step under the plan and the baselines, one after the other.

    Raises:
        OutputError: the picture could not be written.
    """
    bars = {name: {phase.name: phase.seconds for phase in plan.phases_of(cost)} for name, cost in plan.costs.items()}
    present = [name for name in _LOOK if any(name in phases for phases in bars.values())]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 1.4 + 0.42 * len(bars)), layout="constrained")
        axes = figure.add_subplot()
        places = np.arange(len(bars))[::-1]
        left = np.zeros(len(bars))
        for name in present:
            width = 1e3 * np.array([phases.get(name, 0.0) for phases in bars.values()])
            color, hatch = _LOOK[name]
            axes.barh(places, width, 0.62, left, color=color, hatch=hatch, edgecolor="black", lw=0.6, label=name)
            left += width
        for place, total in zip(places, left, strict=True):
            axes.annotate(f" {total:.3g}", (total, place), va="center", fontsize=8.5)
        axes.set_yticks(places, [literal(name) for name in bars])
        axes.set_xlim(0, 1.12 * left.max(initial=0.0) or 1.0)
        known = "" if plan.settings.dense_seconds is not None else ", without dense work"
        axes.set_xlabel(f"step [ms], links at once in each phase{known}")
        axes.set_title(literal(title_of([*plan.tables, *plan.pooled], plan.cluster, plan.settings.batch_size)))
        figure.legend(
            loc="outside upper center", ncols=min(len(present), 5 if plan.pooled else 8), fontsize=8.5, frameon=False
        )
        save(figure, path)
