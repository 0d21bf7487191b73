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
from flexshard.planner import MarginalCurve, ParetoCurve, ParetoPoint, title_of
from flexshard.plots.labels import label_points
from flexshard.plots.style import COLORS, DOTS, GRAY, LINES, MARKERS, STYLE, literal, memory_unit, plain, save, sparse
from flexshard.profiling import AccessProfile
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["plot_marginal", "plot_normalized_costs", "plot_pareto", "plot_skew"]

_SHORT = {"data_parallel": "DP", "flex": "Flex", "row_wise": "RW"}  # see docs/glossary.md
_OTHERS = ("row_wise", "table_wise", "paper_2_tier", "paper_3_tier")  # points that need not lie on the frontier
_NAMES = {"paper_2_tier": "paper's 2 tiers", "paper_3_tier": "paper's 3 tiers", "row_wise": "row-wise"}


def plot_pareto(curve: ParetoCurve, path: PathLike) -> None:
    """Memory per rank against exposed communication: the frontier, the paper's points and its shardings.

    Raises:
        OutputError: the picture could not be written.
    """
    scale, unit = memory_unit(max(point.memory_bytes for point in (*curve.points, *curve.marked)))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 5.2), layout="constrained")
        axes = figure.add_subplot()
        line = np.array(curve.corners) / (scale, 1e-3)
        axes.plot(*line.T, "-", color=COLORS[0], lw=1.6)
        bounds = curve.bound_corners
        if bounds:
            axes.plot(*(np.array(bounds) / (scale, 1e-3)).T, "--", color="gray", lw=1)
        axes.axvline(curve.neutral_bytes / scale, color="gray", ls=":", lw=1)
        for number, point in enumerate(curve.marked):
            look: dict[str, Any] = {"mfc": "none", "mec": COLORS[1 if point.name in _OTHERS else 0], "mew": 1.4}
            where = (point.memory_bytes / scale, point.exposed_seconds * 1e3)
            axes.plot(*where, MARKERS[point.name], ms=_size(curve, number), ls="none", clip_on=False, zorder=5, **look)
        times = [point.exposed_seconds for point in (*curve.points, *curve.marked)]
        axes.set_xlim(0, None)
        is_log = min(times) > 0 and max(times) > 20 * min(times)
        if is_log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(plain)
            axes.yaxis.set_minor_formatter(sparse)
        else:
            axes.set_ylim(0, None)
        below_it = "; dashed: no plan is below" if bounds else ""
        axes.set_xlabel(f"memory of embeddings per rank [{unit}]   (dotted: as much as row-wise needs{below_it})")
        axes.set_ylabel("exposed communication per iteration [ms]" + (", logarithmic" if is_log else ""))
        plans = "best plans found" if bounds else "optimal plans"
        axes.set_title(f"{literal(curve.title)}{': ' if curve.title else ''}{plans} (line), and others")
        named = [
            (point.memory_bytes / scale, point.exposed_seconds * 1e3, _pareto_label(point, curve))
            for point in curve.marked
        ]
        label_points(axes, named, line)
        save(figure, path)


def _size(curve: ParetoCurve, number: int) -> float:
    """Of a point's marker: those that lie in one place are drawn around each other."""
    point, earlier = curve.marked[number], curve.marked[:number]
    same = [
        one
        for one in earlier
        if np.isclose(one.memory_bytes, point.memory_bytes, 1e-3)
        and np.isclose(one.exposed_seconds, point.exposed_seconds, 1e-3)
    ]
    return 7.0 + 5.0 * len(same)


def _pareto_label(point: ParetoPoint, curve: ParetoCurve) -> str:
    total = sum(point.rows) or 1
    world = max(curve.group_sizes)
    shares = ", ".join(
        f"{_SHORT[strategy_name(size, world)]}{'' if size in (1, world) else size} {rows / total:.3g} %"
        for size, rows in zip(curve.group_sizes, (100 * np.array(point.rows)).tolist(), strict=True)
        if rows
    )
    tables = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in point.pooled)
    held = "; ".join(part for part in (shares, tables) if part)
    return f"{_NAMES.get(point.name, point.name.replace('_', ' '))}: {point.exposed_seconds * 1e3:.3g} ms ({held})"


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
            for ratio, kind, style, at in (
                (memory, "memory", "-", marks[size].memory),
                (comm, "communication", "--", marks[size].communication),
            ):
                look: dict[str, Any] = {"color": COLORS[index % len(COLORS)], "lw": 1.5}
                dots: dict[str, Any] = {"marker": DOTS[index % len(DOTS)], "markevery": (10 * index, 50), "ms": 5}
                note = f", 1 at {at:.3g} reads" if 0 < at < float("inf") else ", never below 1"
                axes.plot(p, ratio, style, **look, **dots, label=f"{kind} of {name}{note}")
                if 0 < at < float("inf"):
                    axes.plot(at, 1.0, "*", mfc="white", mec=look["color"], ms=13, zorder=5)
        axes.axhline(1.0, color="gray", lw=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("reads of a row per sample (p; a whole table's mean is L/E), logarithmic")
        axes.set_ylabel("cost over row-wise's (below 1: cheaper), logarithmic")
        axes.set_title(
            f"{literal(title_of([table.name], cluster, batch_size))}, D = {table.dim},"
            f" κ = {table.kappa_replicated:.3g}; stars: breakpoints"
        )
        figure.legend(loc="outside lower center", ncols=2, fontsize=8.5, frameon=False)
        save(figure, path)


def plot_skew(profiles: Mapping[str, AccessProfile], path: PathLike) -> None:
    """Figure 4: share of accesses that the hottest rows cover, for each profile; of many those with most accesses have
    a colour of their own.

    Raises:
        OutputError: the picture could not be written.
    """
    named = sorted(profiles, key=lambda name: (-profiles[name].num_accesses, name))[: len(COLORS)]
    rest = [name for name in profiles if name not in named]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 5.2), layout="constrained")
        axes = figure.add_subplot()
        for number, name in enumerate([*rest, *named]):
            profile, place = profiles[name], number - len(rest)
            ends = np.cumsum(profile.rows)
            rows = np.unique(np.concatenate([[1.0], np.geomspace(1, ends[-1], 300)]))
            share = [profile.covered(float(r)) for r in rows]
            line: dict[str, Any] = {"color": GRAY, "lw": 0.9}
            if place >= 0:
                line = {"color": COLORS[place], "ls": LINES[place % 4], "lw": 1.6, "label": literal(name)}
            elif number == 0:
                line["label"] = f"{len(rest)} other table{'s' if len(rest) > 1 else ''}"
            if place >= 0 and len(profiles) > 1:
                line |= {"marker": DOTS[place], "ms": 4, "mfc": "white", "markevery": (7 * place % 40, 40)}
            axes.plot(100 * rows / profile.num_rows, 100 * np.array(share), **line)
        axes.set_xscale("log")
        axes.set_xlabel("hottest rows [% of the table], logarithmic")
        axes.set_ylabel("reads that they have [%]")
        axes.set_ylim(0, 102)
        axes.xaxis.set_major_formatter(plain)
        what = literal(next(iter(profiles))) if len(profiles) == 1 else f"{len(profiles):,} tables"
        most = "; those with most reads in colour" if rest else ""
        axes.set_title(f"{what}: how unevenly rows are read{most}")
        if len(profiles) > 1:
            figure.legend(loc="outside right upper", fontsize=8.5, frameon=False, handlelength=3)
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
        line = np.stack([curve.seconds[shown] * 1e3, curve.memory_bytes[shown] / scale], axis=1)
        axes.plot(*line.T, "-", color=COLORS[0], lw=1.6)
        axes.axhline(0, color="gray", lw=1)
        axes.axvline(0, color="gray", lw=1)
        named, outside = [], []
        for name, index in curve.marks.items():
            where = (curve.seconds[index] * 1e3, curve.memory_bytes[index] / scale)
            memory = curve.memory_bytes[index]
            gained = f"{'-' if memory < 0 else '+'}{units.format_bytes(abs(memory))}"
            share = f"{100 * curve.rows[index] / total:.3g} % of rows"
            label = f"{name.replace('_', ' ')}: {share}, {where[0]:+.3g} ms, {gained}"
            if index < shown.stop:
                axes.plot(*where, MARKERS[name], ms=8, mfc="white", mec=COLORS[0], mew=1.4, clip_on=False, zorder=5)
                named.append((*where, label))
            else:
                outside.append(label)
        axes.set_xlabel("\n".join(["communication per iteration, less that of row-wise [ms]", *_beyond(outside)]))
        axes.set_ylabel(f"memory per rank, less that of row-wise [{unit}]")
        what = f"{literal(curve.title)}: " if curve.title else ""
        axes.set_title(f"{what}the most read rows copied to every rank, ever more of them")
        axes.margins(y=0.12)  # room for texts
        label_points(axes, named, line)
        save(figure, path)


def _beyond(outside: Sequence[str]) -> list[str]:
    return [f"outside the picture: {'; '.join(outside)}"] if outside else []
