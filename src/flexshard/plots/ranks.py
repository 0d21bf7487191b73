"""What every rank has of a plan: time and memory, stacked by table."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from flexshard._internal import PathLike
from flexshard.costmodels import StepWork, step_seconds
from flexshard.errors import PlanError
from flexshard.planner import Plan, title_of
from flexshard.plots.style import COLORS, GRAY, STYLE, literal, memory_unit, save

__all__ = ["plot_ranks"]

FloatArray = npt.NDArray[np.float64]

_SHADES = {"tiers of rows": "0.45", "received": "0.85"}  # of what is no table


def plot_ranks(plan: Plan, path: PathLike) -> None:
    """How long tables that TorchRec shards keep every rank busy in a step, and what it holds, stacked by table. Those
    in tiers of rows, of which every rank has the same, are one band.

    Raises:
        PlanError: TorchRec shards none, so that all ranks have the same.
        OutputError: the picture could not be written.
    """
    if plan.pooled_predicted is None:
        raise PlanError("TorchRec shards no table of the plan: every rank has the same of the others, up to a row")
    seconds, memory = _bands(plan)
    scale, unit = memory_unit(max(float(sum(memory.values()).max()), 1.0))  # type: ignore[union-attr]
    names = list(dict.fromkeys([*seconds, *memory]))
    colors = dict(zip((name for name in names if name in plan.pooled), COLORS, strict=False))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 6.0), layout="constrained")
        axes = figure.subplots(2, 1, sharex=True)
        for axis, bands, factor in ((axes[0], seconds, 1e3), (axes[1], memory, 1 / scale)):
            _stack(axis, bands, factor, colors)
        axes[0].set_ylabel("busy in a step [ms]")
        axes[1].set_ylabel(f"memory [{unit}]")
        limit = plan.settings.budget_bytes / scale
        axes[1].axhline(limit, color="black", ls=":", lw=1)
        at_right = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom", "fontsize": 8}
        axes[1].annotate("budget", (0.995, limit), **at_right)
        axes[1].set_xlabel("rank")
        tables = [*plan.pooled, *plan.tables]
        axes[0].set_title(literal(title_of(tables, plan.cluster, plan.settings.batch_size)))
        handles, labels = axes[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 6), fontsize=8, frameon=False)
        save(figure, path)


def _stack(axis: Any, bands: dict[str, FloatArray], factor: float, colors: dict[str, str]) -> None:
    bottom = np.zeros(len(next(iter(bands.values()))))
    for name, values in bands.items():
        axis.bar(
            np.arange(len(values)),
            values * factor,
            0.85,
            bottom,
            color=colors.get(name, _SHADES.get(name, GRAY)),
            edgecolor="white",
            lw=0.3,
            label=literal(name),
        )
        bottom += values * factor
    axis.margins(x=0.01)


def _bands(plan: Plan) -> tuple[dict[str, FloatArray], dict[str, FloatArray]]:
    """Seconds and bytes of every rank, by table: those that take most by name, the rest together."""
    world, pooled = plan.cluster.world_size, plan.pooled_predicted
    assert pooled is not None
    seconds: dict[str, FloatArray] = {}
    memory: dict[str, FloatArray] = {}
    for name, table in plan.pooled.items():
        ranks = [shard.rank for shard in table.shards]
        seconds[name] = np.bincount(ranks, [shard.seconds for shard in table.shards], world).astype(np.float64)
        memory[name] = np.bincount(ranks, [shard.memory_bytes for shard in table.shards], world).astype(np.float64)
    others = [np.zeros(world), np.zeros(world)]
    if plan.tables:
        whole, part = (step_seconds(one, world, StepWork(0.0)) for one in (plan.predicted, pooled))
        if plan.settings.objective == "communication":
            whole, part = plan.predicted.exposed_seconds, pooled.exposed_seconds
        others = [np.full(world, whole - part), np.full(world, plan.predicted.memory_bytes - pooled.memory_bytes)]
    total = sum(float(values.sum()) for values in seconds.values()) or 1.0
    held = sum(float(values.sum()) for values in memory.values()) or 1.0
    weight = {name: max(seconds[name].sum() / total, memory[name].sum() / held) for name in seconds}
    named = sorted(weight, key=lambda name: (-weight[name], name))[: len(COLORS)]
    found = []
    for values, rest in zip((seconds, memory), others, strict=True):
        bands: dict[str, FloatArray] = {"tiers of rows": rest} if plan.tables else {}
        bands |= {name: values[name] for name in named}
        left = [one for name, one in values.items() if name not in named]
        if left:
            bands[f"{len(left)} other table{'s' if len(left) > 1 else ''}"] = np.sum(left, axis=0)
        found.append(bands)
    received = pooled.memory_bytes - max(float(np.sum(list(memory.values()), axis=0).max()), 0.0)
    if received > 1:
        found[1]["received"] = np.full(world, received)
    return found[0], found[1]
