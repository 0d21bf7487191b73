"""Figures of the FlexShard paper: costs of strategies, skew, marginal replication, and the frontier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from flexshard import units
from flexshard._internal import PathLike
from flexshard.costmodels import breakpoints, normalized_costs, overlap_of, strategy_name
from flexshard.planner import MarginalCurve, ParetoCurve, ParetoPoint
from flexshard.plots.style import DOTS, LINES, MARKERS, STYLE, literal, memory_unit, plain, save, sparse
from flexshard.profiling import AccessProfile
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["plot_marginal", "plot_normalized_costs", "plot_pareto", "plot_skew"]

_SHORT = {"data_parallel": "DP", "flex": "Flex", "row_wise": "RW"}


def plot_pareto(curve: ParetoCurve, path: PathLike) -> None:
    """Memory per rank against exposed communication: the frontier, the paper's points and its shardings.

    Raises:
        OutputError: the picture could not be written.
    """
    scale, unit = memory_unit(max(point.memory_bytes for point in (*curve.points, *curve.marked)))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 5.2), layout="constrained")
        axes = figure.add_subplot()
        x, y = np.array(_frontier_line(curve.points)).T
        bounds = [(p.memory_bytes, p.lower_bound_seconds) for p in curve.points if p.lower_bound_seconds is not None]
        label = "best plans found (frontier)" if bounds else "optimal plans (frontier)"
        axes.plot(x / scale, y * 1e3, "-", color="black", lw=1.4, label=label)
        if bounds:
            memory, seconds = np.array(bounds).T
            line = axes.plot(memory / scale, seconds * 1e3, "--", color="gray", lw=1, label="no plan is below")
            line[0].set_drawstyle("steps-pre")
        axes.axvline(curve.neutral_bytes / scale, color="gray", ls=":", lw=1)
        for point in curve.marked:
            axes.plot(
                point.memory_bytes / scale,
                point.exposed_seconds * 1e3,
                MARKERS[point.name],
                ms=8,
                mfc="none",  # several plans can be one point
                mec="black",
                ls="none",
                label=_pareto_label(point, curve),
            )
        times = [point.exposed_seconds for point in (*curve.points, *curve.marked)]
        if min(times) > 0 and max(times) > 20 * min(times):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(plain)
            axes.yaxis.set_minor_formatter(sparse)
        axes.set_xlabel(f"memory of embeddings per rank [{unit}]   (dotted: as much as row-wise needs)")
        axes.set_ylabel("exposed communication per iteration [ms]")
        axes.legend(loc="upper right", fontsize=8.5, framealpha=0.95)
        save(figure, path)


def _frontier_line(points: Sequence[ParetoPoint]) -> list[tuple[float, float]]:
    """Corners of the frontier: straight where rows move one by one, a step where a collective comes or goes or where
    whole tables move.
    """
    line: list[tuple[float, float]] = []
    before: tuple[bool, ...] = ()
    for point in points:
        used = tuple(rows > 0 for rows in point.rows)
        if line and (used != before or point.pooled):
            line.append((point.memory_bytes, line[-1][1]))
        line.append((point.memory_bytes, point.exposed_seconds))
        before = used
    return line


def _pareto_label(point: ParetoPoint, curve: ParetoCurve) -> str:
    total = sum(point.rows) or 1
    world = max(curve.group_sizes)
    shares = ", ".join(
        f"{_SHORT[strategy_name(size, world)]}{'' if size in (1, world) else size} {rows / total:.3g}"
        for size, rows in zip(curve.group_sizes, (100 * np.array(point.rows)).tolist(), strict=True)
        if rows
    )
    name = (
        point.name.replace("_", " ").replace("paper 2 tier", "paper's 2-tier").replace("paper 3 tier", "paper's 3-tier")
    )
    tables = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in point.pooled)
    parts = [*([f"{shares} % of rows"] if shares else []), *([f"tables: {tables}"] if tables else [])]
    held = f"  ({'; '.join(parts)})" if parts else ""
    return f"{name}: {point.exposed_seconds * 1e3:.3g} ms{held}"


def plot_normalized_costs(
    table: Table, cluster: Cluster, batch_size: int, path: PathLike, *, overlap: str | Mapping[str, float] | None = None
) -> None:
    """Figure 3: memory and communication of each strategy over row-wise's, by a row's probability, and breakpoints.

    Raises:
        OutputError: the picture could not be written.
    """
    inner = [size for size in cluster.group_sizes if size < cluster.world_size]
    hidden = overlap_of(overlap, cluster)
    marks = {size: breakpoints(table, cluster, size, batch_size, hidden) for size in inner}
    finite = [m for b in marks.values() for m in (b.memory, b.communication) if 0 < m < float("inf")] or [1e-3]
    p = np.geomspace(min(finite) / 100, max(max(finite) * 100, 1.0), 400)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 5.2), layout="constrained")
        axes = figure.add_subplot()
        for index, size in enumerate(inner):
            name = strategy_name(size, cluster.world_size) + (f" ({size})" if size > 1 else "")
            memory, comm = normalized_costs(table, cluster, size, batch_size, p, hidden)
            for ratio, kind, style, color, at in (
                (memory, "memory", "-", "black", marks[size].memory),
                (comm, "communication", "--", "tab:blue", marks[size].communication),
            ):
                dots: dict[str, Any] = {"marker": DOTS[index % len(DOTS)], "markevery": (10 * index, 50), "ms": 5}
                note = f", breakpoint p = {at:.3g}" if 0 < at < float("inf") else ", never below 1"
                axes.plot(p, ratio, style, color=color, lw=1.5, **dots, label=f"{kind} of {name}{note}")
                if 0 < at < float("inf"):
                    axes.plot(at, 1.0, "*", mfc="white", mec=color, ms=13, zorder=5)
        axes.axhline(1.0, color="gray", lw=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("p: expected appearances of a row in one sample (L/E of a whole table)")
        axes.set_ylabel("cost over row-wise's (below 1: cheaper)")
        axes.set_title(
            f"{literal(table.name)} on {literal(cluster.name)}, batch {batch_size:,}, D = {table.dim},"
            f" kappa = {table.kappa_replicated:.3g}",
            fontsize=10,
        )
        axes.legend(fontsize=8.5, framealpha=0.95)
        save(figure, path)


def plot_skew(profiles: Mapping[str, AccessProfile], path: PathLike) -> None:
    """Figure 4: share of accesses that the hottest rows cover, for each profile.

    Raises:
        OutputError: the picture could not be written.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 5.2), layout="constrained")
        axes = figure.add_subplot()
        for index, (name, profile) in enumerate(profiles.items()):
            ends = np.cumsum(profile.rows)
            rows = np.unique(np.concatenate([[1.0], np.geomspace(1, ends[-1], 300)]))
            share = [profile.covered(float(r)) for r in rows]
            line: dict[str, Any] = {
                "color": f"C{index % 10}",
                "ls": LINES[index % 4],
                "lw": 1.3,
                "label": literal(name),
            }
            if len(profiles) > 1:
                line |= {
                    "marker": DOTS[index % len(DOTS)],
                    "ms": 4,
                    "mfc": "white",
                    "markevery": (7 * index % 40, 40),
                }
            axes.plot(100 * rows / profile.num_rows, 100 * np.array(share), **line)
        axes.set_xscale("log")
        axes.set_xlabel("hottest rows [% of the table]")
        axes.set_ylabel("accesses that they cover [%]")
        axes.set_ylim(0, 102)
        axes.xaxis.set_major_formatter(plain)
        if len(profiles) == 1:
            axes.set_title(literal(next(iter(profiles))), fontsize=10)
        else:
            axes.legend(fontsize=7, ncols=1 + len(profiles) // 16, framealpha=0.95, handlelength=3.5)
        save(figure, path)


def plot_marginal(curve: MarginalCurve, path: PathLike) -> None:
    """Figure 5: memory and communication against row-wise, as ever more of the hottest rows are replicated.

    Raises:
        OutputError: the picture could not be written.
    """
    last = curve.marks["communication_neutral"]
    shown = slice(0, max(last, curve.marks["memory_neutral"], 1) + 1)
    total = int(curve.rows[-1])
    scale, unit = memory_unit(float(np.abs(curve.memory_bytes[shown]).max()))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 5.2), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(curve.seconds[shown] * 1e3, curve.memory_bytes[shown] / scale, "-", color="black", lw=1.4)
        axes.axhline(0, color="gray", lw=1)
        for name, index in curve.marks.items():
            where = (curve.seconds[index] * 1e3, curve.memory_bytes[index] / scale)
            share = f"{100 * curve.rows[index] / total:.3g} % of rows"
            memory = curve.memory_bytes[index]
            gained = f"{'-' if memory < 0 else '+'}{units.format_bytes(abs(memory))}"
            label = f"{name.replace('_', ' ')}: {share}, {where[0]:+.3g} ms, {gained}"
            if index < shown.stop:
                axes.plot(*where, MARKERS[name], ms=9, mfc="white", mec="black", ls="none", label=label)
            else:
                axes.plot([], [], MARKERS[name], ms=9, mfc="white", mec="black", ls="none", label=label + " (off)")
        axes.set_xlabel("communication per iteration, less that of row-wise [ms]")
        axes.set_ylabel(f"memory per rank, less that of row-wise [{unit}]")
        axes.legend(fontsize=8.5, framealpha=0.95)
        save(figure, path)
