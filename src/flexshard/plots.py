"""The paper's figures for any profile. Lines differ in style and marker, so that they read without colour."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from flexshard import units
from flexshard._files import replacing
from flexshard.costmodels import Table, breakpoints, normalized_costs, overlap_of, strategy_name
from flexshard.errors import OutputError
from flexshard.ingestion import Duplication
from flexshard.planner import MarginalCurve, ParetoCurve, ParetoPoint
from flexshard.profiling import AccessProfile
from flexshard.topologies import Cluster

__all__ = [
    "plot_duplication",
    "plot_marginal",
    "plot_normalized_costs",
    "plot_pareto",
    "plot_reduction",
    "plot_sessions",
    "plot_skew",
]

PathLike = str | os.PathLike[str]

_STYLE = {"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}
_LINES = ("-", "--", "-.", ":")
_DOTS = "osv^Dp<>h"  # nine, so that with four styles 36 lines differ
_MARKERS = {
    "greatest_memory_saving": "v",
    "memory_neutral": "D",
    "communication_neutral": "^",
    "full_replication": "s",
    "row_wise": "o",
    "paper_2_tier": "P",
    "paper_3_tier": "X",
}


def plot_pareto(curve: ParetoCurve, path: PathLike) -> None:
    """Memory per rank against exposed communication: the frontier, the paper's points and its shardings.

    Raises:
        OutputError: the picture could not be written.
    """
    scale, unit = _memory_unit(max(point.memory_bytes for point in (*curve.points, *curve.marked)))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.5, 5.2), layout="constrained")
        axes = figure.add_subplot()
        x, y = np.array(_frontier_line(curve.points)).T
        axes.plot(x / scale, y * 1e3, "-", color="black", lw=1.4, label="optimal plans (frontier)")
        axes.axvline(curve.neutral_bytes / scale, color="gray", ls=":", lw=1)
        for point in curve.marked:
            axes.plot(
                point.memory_bytes / scale,
                point.exposed_seconds * 1e3,
                _MARKERS[point.name],
                ms=8,
                mfc="none",  # several plans can be one point
                mec="black",
                ls="none",
                label=_pareto_label(point, curve),
            )
        times = [point.exposed_seconds for point in (*curve.points, *curve.marked)]
        if min(times) > 0 and max(times) > 20 * min(times):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(_plain)
            axes.yaxis.set_minor_formatter(_sparse)
        axes.set_xlabel(f"memory of embeddings per rank [{unit}]   (dotted: as much as row-wise needs)")
        axes.set_ylabel("exposed communication per iteration [ms]")
        axes.legend(loc="upper right", fontsize=8.5, framealpha=0.95)
        _save(figure, path)


def _frontier_line(points: Sequence[ParetoPoint]) -> list[tuple[float, float]]:
    """Corners of the frontier: straight where rows move one by one, a step where a collective comes or goes."""
    line: list[tuple[float, float]] = []
    before: tuple[bool, ...] = ()
    for point in points:
        used = tuple(rows > 0 for rows in point.rows)
        if line and used != before:
            line.append((point.memory_bytes, line[-1][1]))
        line.append((point.memory_bytes, point.exposed_seconds))
        before = used
    return line


def _pareto_label(point: ParetoPoint, curve: ParetoCurve) -> str:
    total = sum(point.rows)
    world = max(curve.group_sizes)
    shares = ", ".join(
        f"{_SHORT[strategy_name(size, world)]}{'' if size in (1, world) else size} {rows / total:.3g}"
        for size, rows in zip(curve.group_sizes, (100 * np.array(point.rows)).tolist(), strict=True)
        if rows
    )
    name = (
        point.name.replace("_", " ").replace("paper 2 tier", "paper's 2-tier").replace("paper 3 tier", "paper's 3-tier")
    )
    return f"{name}: {point.exposed_seconds * 1e3:.3g} ms  ({shares} % of rows)"


_SHORT = {"data_parallel": "DP", "flex": "Flex", "row_wise": "RW"}


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
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.5, 5.2), layout="constrained")
        axes = figure.add_subplot()
        for index, size in enumerate(inner):
            name = strategy_name(size, cluster.world_size) + (f" ({size})" if size > 1 else "")
            memory, comm = normalized_costs(table, cluster, size, batch_size, p, hidden)
            for ratio, kind, style, color, at in (
                (memory, "memory", "-", "black", marks[size].memory),
                (comm, "communication", "--", "tab:blue", marks[size].communication),
            ):
                dots: dict[str, Any] = {"marker": _DOTS[index % len(_DOTS)], "markevery": (10 * index, 50), "ms": 5}
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
            f"{_literal(table.name)} on {_literal(cluster.name)}, batch {batch_size:,}, D = {table.dim},"
            f" kappa = {table.kappa_replicated:.3g}",
            fontsize=10,
        )
        axes.legend(fontsize=8.5, framealpha=0.95)
        _save(figure, path)


def plot_skew(profiles: Mapping[str, AccessProfile], path: PathLike) -> None:
    """Figure 4: share of accesses that the hottest rows cover, for each profile.

    Raises:
        OutputError: the picture could not be written.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.5, 5.2), layout="constrained")
        axes = figure.add_subplot()
        for index, (name, profile) in enumerate(profiles.items()):
            ends = np.cumsum(profile.rows)
            rows = np.unique(np.concatenate([[1.0], np.geomspace(1, ends[-1], 300)]))
            share = [profile.covered(float(r)) for r in rows]
            line: dict[str, Any] = {
                "color": f"C{index % 10}",
                "ls": _LINES[index % 4],
                "lw": 1.3,
                "label": _literal(name),
            }
            if len(profiles) > 1:
                line |= {
                    "marker": _DOTS[index % len(_DOTS)],
                    "ms": 4,
                    "mfc": "white",
                    "markevery": (7 * index % 40, 40),
                }
            axes.plot(100 * rows / profile.num_rows, 100 * np.array(share), **line)
        axes.set_xscale("log")
        axes.set_xlabel("hottest rows [% of the table]")
        axes.set_ylabel("accesses that they cover [%]")
        axes.set_ylim(0, 102)
        axes.xaxis.set_major_formatter(_plain)
        if len(profiles) == 1:
            axes.set_title(_literal(next(iter(profiles))), fontsize=10)
        else:
            axes.legend(fontsize=7, ncols=1 + len(profiles) // 16, framealpha=0.95, handlelength=3.5)
        _save(figure, path)


def plot_marginal(curve: MarginalCurve, path: PathLike) -> None:
    """Figure 5: memory and communication against row-wise, as ever more of the hottest rows are replicated.

    Raises:
        OutputError: the picture could not be written.
    """
    last = curve.marks["communication_neutral"]
    shown = slice(0, max(last, curve.marks["memory_neutral"], 1) + 1)
    total = int(curve.rows[-1])
    scale, unit = _memory_unit(float(np.abs(curve.memory_bytes[shown]).max()))
    with mpl.rc_context(_STYLE):
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
                axes.plot(*where, _MARKERS[name], ms=9, mfc="white", mec="black", ls="none", label=label)
            else:
                axes.plot([], [], _MARKERS[name], ms=9, mfc="white", mec="black", ls="none", label=label + " (off)")
        axes.set_xlabel("communication per iteration, less that of row-wise [ms]")
        axes.set_ylabel(f"memory per rank, less that of row-wise [{unit}]")
        axes.legend(fontsize=8.5, framealpha=0.95)
        _save(figure, path)


def _memory_unit(most: float) -> tuple[float, str]:
    for scale, unit in ((units.GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if most >= scale:
            return float(scale), unit
    return 1.0, "B"


def _plain(value: float, _position: float | None = None) -> str:
    return f"{value:g}"


def _sparse(value: float, _position: float | None = None) -> str:
    """Labels of minor ticks on a logarithmic axis: only as many as have room."""
    lead = value / 10 ** np.floor(np.log10(value)) if value > 0 else 0
    return f"{value:g}" if round(float(lead), 6) in (2, 3, 5, 7) else ""


def _literal(name: str) -> str:
    """A user's name as a label: no mathematics, and shown even where it starts with an underscore."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def _save(figure: Any, path: PathLike) -> None:
    suffix = os.path.splitext(os.fspath(path))[1].lstrip(".").lower() or "png"  # noqa: PTH122 - works on any path type
    if suffix not in ("png", "svg", "pdf"):
        raise OutputError(f"cannot draw {path}: pictures are .png, .svg or .pdf")
    # Without a date and a version the same figure gives the same bytes.
    metadata = {"Software": None} if suffix == "png" else ({"Date": None} if suffix == "svg" else None)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format=suffix, metadata=metadata)


def plot_sessions(found: Duplication, path: PathLike) -> None:
    """Samples per session, in the dataset and in a batch: Figure 3 of the RecD paper.

    Raises:
        OutputError: the picture could not be written.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.5, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for axes, sizes, where in (
            (left, found.session_sizes, "the dataset"),
            (right, found.batch_session_sizes, f"a batch of {found.batch_size:,}"),
        ):
            largest = max(int(sizes.max(initial=1)), 1)
            edges = np.unique(np.round(np.geomspace(1, largest + 1, 40)))
            number, _ = np.histogram(sizes, edges)
            # Bins hold one size or several: per size, so that a wide one does not look like more.
            axes.stairs(number / np.diff(edges), edges, fill=True, facecolor="lightgray", edgecolor="black", lw=0.8)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter(_plain)
            axes.xaxis.set_minor_formatter(NullFormatter())
            mean = float(sizes.mean()) if sizes.size else 0.0
            axes.axvline(mean, color="black", ls="--", lw=1)
            axes.set_xlabel(f"samples per session in {where}")
            axes.set_ylabel("sessions of each size")
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_title(f"mean {mean:.2f} (dashed)", fontsize=10)
        _save(figure, path)


def plot_duplication(found: Duplication, path: PathLike) -> None:
    """Exact and partial duplication of each feature, the most first: Figure 4 of the RecD paper.

    Raises:
        OutputError: the picture could not be written.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.5, 3.8), layout="constrained")
        both = figure.subplots(1, 2, sharey=True)
        for axes, number, what in ((both[0], 0, "exact"), (both[1], 1, "partial")):
            features = sorted(found.features, key=lambda one: -getattr(one, what))
            shares = [100 * getattr(one, what) for one in features]
            few = len(features) <= 12
            axes.bar(range(len(shares)), shares, 0.8 if few else 1.0, color="lightgray", edgecolor="black", lw=0.6)
            for weighted, style in ((False, "--"), (True, ":")):
                mean = 100 * found.overall(weighted=weighted)[number]
                of = "ids (by length)" if weighted else "features"
                axes.axhline(mean, color="black", ls=style, lw=1.2, label=f"all {of}: {mean:.1f} %")
            if few:
                axes.set_xticks(range(len(shares)), [one.feature for one in features], rotation=30, ha="right")
            else:
                axes.set_xlabel("feature")
            axes.grid(axis="x", visible=False)
            axes.set_ylim(0, 100)
            where = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
            axes.legend(title=f"{what} duplicates", fontsize=8.5, title_fontsize=10, frameon=False, **where)
        both[0].set_ylabel("% of samples' lists (left), of ids (right)")
        _save(figure, path)


def plot_reduction(reductions: Mapping[str, tuple[float, float]], path: PathLike) -> None:
    """Predicted beside observed reduction of global all-to-all traffic against row-wise: Figure 6 of the paper.

    Args:
        reductions: (predicted, observed) share that each plan saves, by name.

    Raises:
        OutputError: the picture could not be written.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(max(4.0, 1.6 + 1.3 * len(reductions)), 4.2), layout="constrained")
        axes = figure.add_subplot()
        places = np.arange(len(reductions))
        for offset, (label, hatch) in enumerate((("predicted", ""), ("observed", "//"))):
            heights = [100 * pair[offset] for pair in reductions.values()]
            bars = axes.bar(
                places + 0.38 * offset, heights, 0.36, label=label, hatch=hatch, color="white", edgecolor="black"
            )
            axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        axes.set_xticks(places + 0.19, list(reductions))
        axes.set_ylabel("global all-to-all bytes saved\nagainst row-wise, %")
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.12)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.15), ncols=2, frameon=False)
        _save(figure, path)
