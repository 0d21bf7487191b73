"""The page: sections from a plan, and from its job, profiles and observation where these are given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from flexshard import units
from flexshard._internal import PathLike, write_text
from flexshard.errors import PlanError
from flexshard.executors import Observation, compare_observed
from flexshard.planner import Plan, Problem, explain, options_beside, pareto
from flexshard.profiling import AccessProfile
from flexshard.report.charts import Bar, Line, bars, legend, lines
from flexshard.report.markup import paragraph, spoken, table
from flexshard.report.words import GLOSSARY, STYLE

__all__ = ["write_report"]

_MOST_TABLES, _MOST_CURVES, _MOST_RANKS = 200, 8, 64


def write_report(
    plan: Plan,
    path: PathLike,
    *,
    problem: Problem | None = None,
    job_text: str | None = None,
    observed: Observation | None = None,
    folder: PathLike = ".",
) -> None:
    """Write a plan as one HTML file that needs no network.

    Args:
        plan: what is told.
        path: of the page.
        problem: that was solved, for the frontier and the tables' skew.
        job_text: to reproduce it.
        observed: what ran under the plan.
        folder: that paths of profiles in the plan are relative to, where no problem is given.

    Raises:
        PlanError: the problem is not the one that the plan was made from.
        DataError: the observation is of another plan.
        OutputError: the page could not be written.
    """
    beside: list[str] = []
    if problem is not None:
        if {each.name for each in problem.tables} != {*plan.tables, *plan.pooled}:
            raise PlanError("the job is of other tables than the plan; give the job that the plan was made from")
        beside = options_beside(plan, problem)
    profiles = _profiles(plan, problem, Path(folder))
    sections = [
        ("What was decided", _decided(plan)),
        ("Time", _time(plan)),
        ("Memory", _memory(plan)),
        ("Tables", _tables(plan)),
        ("Ranks", _ranks(plan)),
        ("What a step calls", _calls(plan)),
        ("What memory buys", "" if problem is None else _frontier(problem, plan)),
        ("How skewed the tables are", _skew(profiles)),
        ("Predicted and observed", "" if observed is None else _observed(plan, observed)),
        ("Words", _glossary()),
        ("To reproduce it", _reproduce(plan, job_text, beside)),
    ]
    shown = [(title, body) for title, body in sections if body]
    contents = "".join(f'<a href="#s{number}">{title}</a>' for number, (title, _) in enumerate(shown))
    parts = [f'<section id="s{n}"><h2>{title}</h2>{text}</section>' for n, (title, text) in enumerate(shown)]
    head = f"<title>FlexShard plan {plan.fingerprint[:16]}</title><style>{STYLE}</style>"
    viewport = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    body = f"<main><h1>{escape(_heading(plan))}</h1><nav>{contents}</nav>{''.join(parts)}</main>"
    page = f'<!doctype html><html lang="en"><head>{viewport}{head}</head><body>{body}</body></html>'
    write_text(path, page + "\n")


def _heading(plan: Plan) -> str:
    number = len(plan.tables) + len(plan.pooled)
    settings, cluster = plan.settings, plan.cluster
    return (
        f"{number} table{'s' if number != 1 else ''} on {cluster.name}: {cluster.nodes} nodes of"
        f" {cluster.ranks_per_node} GPUs, {settings.batch_size:,} samples each"
    )


def _decided(plan: Plan) -> str:
    own, said = plan.objective_seconds(plan.predicted), []
    row_wise, bound = plan.baselines.get("row_wise"), plan.lower_bound_seconds
    what = "a step takes" if plan.settings.objective == "step" else "communication that nothing hides takes"
    said.append(f"Per step, <b>{what} {units.format_seconds(own)}</b> as predicted.")
    if row_wise is not None and own > 0:
        ratio = plan.objective_seconds(row_wise) / own
        said.append(f"Splitting every table row by row over all GPUs would take <b>{ratio:.3g} times</b> as long.")
    above = f"; this one is {plan.proven_gap:.3%} above that" if math.isfinite(plan.proven_gap) else ""
    said.append(
        f"No plan within the budget takes less than {units.format_seconds(bound)} under the same cost model{above}."
    )
    sizes = plan.bounded_bytes(plan.predicted), plan.settings.budget_bytes
    needed, allowed = (units.format_bytes(nbytes) for nbytes in sizes)
    most, when = ("at most ", " in 999 of 1,000 steps") if plan.settings.memory == "p99.9" else ("", "")
    said.append(
        f"A GPU needs {most}<b>{needed}</b>{when}; the budget ({escape(plan.settings.budget)}) allows {allowed}."
    )
    if plan.next_gib_seconds is not None:
        more = own - plan.next_gib_seconds
        saved = "nothing" if more <= 1e-9 * own else f"{units.format_seconds(more)} per step"
        said.append(f"One more GiB per GPU would save {saved}.")
    return paragraph(*said)


def _time(plan: Plan) -> str:
    given, over = [], []
    for name, cost in plan.costs.items():
        seconds = plan.objective_seconds(cost)
        given.append(Bar(spoken(name), ((seconds, name),), units.format_seconds(seconds)))
        if plan.bounded_bytes(cost) > plan.settings.budget_bytes * (1 + 1e-9):
            over.append(spoken(name))
    note = paragraph(f"Beyond the budget: {escape(', '.join(over))}.") if over else ""
    return bars(given, what="Time per step of this plan and of others") + note


def _memory(plan: Plan) -> str:
    rows = []
    for name, cost in plan.costs.items():
        static, dynamic = cost.static_memory_bytes, cost.dynamic_memory_bytes
        parts = ((static, f"static {units.format_bytes(static)}"), (dynamic, f"dynamic {units.format_bytes(dynamic)}"))
        rows.append(Bar(spoken(name), parts, units.format_bytes(static + dynamic)))
    free = plan.cluster.hbm_bytes - plan.cluster.reserve_bytes
    widest = max(sum(size for size, _ in row.parts) for row in rows)
    limit = (free, f"{units.format_bytes(free)} a GPU has for embeddings") if free < 4 * widest else None
    head = units.format_bytes(max(free - plan.bounded_bytes(plan.predicted), 0.0))
    when = " in 999 of 1,000 steps, beyond what is shown" if plan.settings.memory == "p99.9" else ""
    return (
        legend(["static: weights, copies' gradients, optimizer", "dynamic: rows of a batch"])
        + bars(rows, limit=limit, what="Memory per GPU")
        + paragraph(
            f"Headroom: {head} of the {units.format_bytes(free)} that a GPU has for embeddings{when}.{_on_host(plan)}"
        )
    )


def _on_host(plan: Plan) -> str:
    """What is in the host's memory, as a sentence."""
    held = plan.predicted.host_memory_bytes
    return f" Beside it {units.format_bytes(held)} per GPU are in its host's memory." if held else ""


def _tables(plan: Plan) -> str:
    parts = [_tiered(plan, name) for name in list(plan.tables)[:_MOST_TABLES]]
    for name, pooled in list(plan.pooled.items())[: max(_MOST_TABLES - len(parts), 0)]:
        shards = f"{len(pooled.shards)} shard{'s' if len(pooled.shards) > 1 else ''}"
        kind = "without pooling" if pooled.pooling == "none" else "pooled"
        said = (
            f"{pooled.rows:,} rows of {pooled.dim} numbers, {kind}: {escape(spoken(pooled.sharding_type))} in {shards}."
        )
        parts.append(f"<h3>{escape(name)}</h3>{paragraph(said)}{_why(plan, name)}")
    more = len(plan.tables) + len(plan.pooled) - len(parts)
    return "".join(parts) + (paragraph(f"And {more:,} tables more.") if more > 0 else "")


def _tiered(plan: Plan, name: str) -> str:
    own = plan.tables[name]
    rows = tuple((tier.rows, f"{tier.strategy}: {tier.rows:,} rows") for tier in own.tiers)
    reads = tuple((tier.covered * own.rows, f"{tier.strategy}: {tier.covered:.1%} of reads") for tier in own.tiers)
    said = f"{own.rows:,} rows of {own.dim} {own.dtype} numbers; {own.avg_length:.4g} reads per sample."
    if own.cache is not None:
        said += (
            " Rows without copies are in the host's memory, behind a cache with places for"
            f" {own.cache.load_factor:.2%} of them."
        )
    lines_of = [
        (
            spoken(tier.strategy),
            tier.group_size,
            f"{tier.rows:,}",
            f"{tier.rows / own.rows:.2%}",
            f"{tier.covered:.1%}",
        )
        for tier in own.tiers
    ]
    return (
        f"<h3>{escape(name)}</h3>{paragraph(said)}"
        + legend([spoken(tier.strategy) for tier in own.tiers])
        + bars([Bar("rows", rows, ""), Bar("reads", reads, "")], what=f"Rows and reads of {name} by strategy")
        + table(["strategy", "split over", "rows", "of table", "of reads"], lines_of)
        + _why(plan, name)
    )


def _why(plan: Plan, name: str) -> str:
    return f"<details><summary>Why</summary><pre>{escape(explain(plan, name).text)}</pre></details>"


def _ranks(plan: Plan) -> str:
    world = plan.cluster.world_size
    if not plan.pooled:
        held = units.format_bytes(plan.predicted.static_memory_bytes)
        return paragraph(
            f"Every one of the {world:,} GPUs holds as many rows of every tier, to one row: a tier's rows are dealt in",
            f"turn to the GPUs that it is split over. So each has {held} of weights and state.{_on_host(plan)}",
        )
    largest = sorted(plan.pooled.values(), key=lambda each: -sum(shard.memory_bytes for shard in each.shards))[:7]
    labels = [*(each.name for each in largest), "others"]
    held_by = np.zeros((world, len(labels)))
    for each in plan.pooled.values():
        column = labels.index(each.name) if each in largest else len(labels) - 1
        for shard in each.shards:
            held_by[shard.rank, column] += shard.memory_bytes
    rows = [
        Bar(f"rank {rank}", tuple(zip(own.tolist(), labels, strict=True)), units.format_bytes(float(own.sum())))
        for rank, own in enumerate(held_by[:_MOST_RANKS])
    ]
    note = paragraph(f"The first {_MOST_RANKS} of {world:,} ranks.") if world > _MOST_RANKS else ""
    return legend(labels) + bars(rows, what="Memory of tables that TorchRec shards per rank") + note


def _calls(plan: Plan) -> str:
    rows = [
        (one.kind.replace("_", "-"), one.content, one.group_size, f"{one.calls:g}",
         units.format_bytes(one.calls * one.nbytes), units.format_seconds(one.seconds))
        for one in plan.predicted.collectives
    ]  # fmt: skip
    head = ["collective", "carries", "in groups of", "calls", "bytes", "time"]
    return table(head, rows, texts=2) if rows else ""


def _frontier(problem: Problem, plan: Plan) -> str:
    curve, own = pareto(problem), plan.predicted

    def said(name: str, memory: float, seconds: float) -> str:
        return f"{name}: {units.format_bytes(memory)} per GPU, {units.format_seconds(seconds)} per step"

    # Ticks are round in the unit that they are shown in.
    scale = units.GIB if max(point.memory_bytes for point in curve.points) >= units.GIB else 1 << 20
    points = [(point.memory_bytes, point.exposed_seconds) for point in curve.points]
    best = "best plan found" if curve.bound_corners else "best plan"
    marked = [("this plan", own.memory_bytes, own.exposed_seconds)]
    marked += [
        (spoken(point.name), point.memory_bytes, point.exposed_seconds)
        for point in curve.marked
        if point.name in ("row_wise", "full_replication")
    ]
    line = Line(
        "frontier",
        tuple((memory / scale, seconds, said(best, memory, seconds)) for memory, seconds in points),
        tuple((memory / scale, seconds, name, said(name, memory, seconds)) for name, memory, seconds in marked),
        tuple((memory / scale, seconds) for memory, seconds in curve.corners),
        tuple((memory / scale, seconds) for memory, seconds in curve.bound_corners),
    )
    return lines(
        [line],
        x_title="memory per GPU" + (" (dashed: no plan is below)" if line.bound else ""),
        y_title="exposed communication per step",
        show_x=lambda memory: units.format_bytes(memory * scale),
        show_y=units.format_seconds,
        what="Exposed communication by memory per GPU",
    )


def _profiles(plan: Plan, problem: Problem | None, folder: Path) -> dict[str, AccessProfile]:
    if problem is not None:
        return {each.name: each.profile for each in problem.tables}
    paths = {name: each.profile_path for name, each in plan.tables.items() if each.profile_path is not None}
    return {name: AccessProfile.load(folder / path) for name, path in paths.items() if (folder / path).exists()}


def _skew(profiles: dict[str, AccessProfile]) -> str:
    largest = sorted(profiles, key=lambda name: -profiles[name].num_accesses)
    shown = [_curve(name, profiles[name]) for name in largest[:_MOST_CURVES]]
    if not shown:
        return ""
    more = len(profiles) - len(shown)
    note = paragraph(f"The {len(shown)} tables that are read most; {more} more are not shown.") if more else ""
    chart = lines(
        shown,
        x_title="hottest share of a table's rows",
        y_title="share of its reads",
        show_x=lambda share: f"{100 * share:g} %",
        show_y=lambda share: f"{share:.0%}",
        log_x=True,
        what="Share of reads by share of rows",
    )
    return legend([line.label for line in shown]) + chart + note


def _curve(name: str, profile: AccessProfile) -> Line:
    points = []
    for share in np.geomspace(max(1e-6, 1 / profile.num_rows), 1.0, 25).tolist():
        covered = profile.covered(share * profile.num_rows)
        points.append((share, covered, f"{name}: the hottest {share:.3%} of rows take {covered:.1%} of reads"))
    return Line(name, tuple(points))


def _observed(plan: Plan, observed: Observation) -> str:
    rows = []
    for line in compare_observed(plan, observed).lines:
        show = units.format_bytes if line.unit == "bytes" else units.format_seconds
        cells = ["-" if value is None else show(value) for value in (line.predicted, line.observed)]
        rows.append((line.name, *cells, "-" if line.error is None else f"{line.error:+.1%}"))
    return table(["", "predicted", "observed", "error"], rows)


def _glossary() -> str:
    items = [f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in GLOSSARY.items()]
    return f"<dl>{''.join(items)}</dl>"


def _reproduce(plan: Plan, job_text: str | None, beside: Sequence[str]) -> str:
    """Settings and job; ``beside`` what the plan has otherwise than the job."""
    own = plan.settings
    rows = [
        ("fingerprint", plan.fingerprint),
        ("job digest", plan.job_digest),
        ("cluster", plan.cluster.name),
        ("batch size", own.batch_size),
        ("budget", own.budget),
        ("tiers", own.tiers),
        ("method", own.method),
        ("objective", own.objective),
    ]
    job = "" if job_text is None else paragraph("The job, for <code>flexshard plan job.yaml</code>:")
    if beside:
        job += paragraph(f"The plan was made with options beside it: {escape('; '.join(beside))}.")
    return table([], rows, texts=2) + job + ("" if job_text is None else f"<pre>{escape(job_text)}</pre>")
