"""Commands on jobs and plans."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from flexshard import units
from flexshard._grids import new_grid
from flexshard._terminal import emit, say, working
from flexshard._values import first_repeated
from flexshard.cli._app import AsJson, JobFile, PlanFile, app, written
from flexshard.errors import DataError, JobError
from flexshard.executors import Observation, compare_observed
from flexshard.planner import (
    CompressionPlan,
    Job,
    Plan,
    compare,
    diff,
    explain,
    is_compression,
    load_job,
    marginal_curve,
    pareto,
    plan_document,
    plan_renderable,
    save_job,
)
from flexshard.planner import costs_grid as costs_grid_of


@app.command("job")
def job_command(
    profiles: Annotated[list[Path], typer.Argument(help="Profiles; one table for each.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Job file to write.")],
    cluster: Annotated[str, typer.Option(help="A preset, preset:nodes, or a cluster file.")],
    batch_size: Annotated[int, typer.Option(help="Samples per rank.")],
    dim: Annotated[int, typer.Option(help="Embedding dimension of all tables.")],
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or float64.")] = "float32",
    optimizer: Annotated[str, typer.Option(help="Optimizer of the tables.")] = "rowwise_adagrad",
    budget: Annotated[str, typer.Option(help="neutral, +2GiB, or a limit such as 40GiB.")] = "neutral",
    tiers: Annotated[int, typer.Option(help="Most group sizes of the plan.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Write a job file for some profiles, to plan as it is or to edit first."""
    save_job(
        output,
        profiles,
        cluster=cluster,
        batch_size=batch_size,
        dim=dim,
        dtype=dtype,
        optimizer=optimizer,
        budget=budget,
        tiers=tiers,
    )
    written(output, as_json)


Tiers = Annotated[int | None, typer.Option(help="Most group sizes of the plan, instead of the job's.")]
Budget = Annotated[str | None, typer.Option(help="neutral, +2GiB, or a limit such as 40GiB, instead of the job's.")]
Method = Annotated[str | None, typer.Option(help="optimal or paper, instead of the job's.")]


def _job(path: Path, tiers: int | None, budget: str | None, method: str | None) -> Job:
    job = load_job(path)
    given = {"tiers": tiers, "budget": budget, "method": method}
    return replace(job, **{field: value for field, value in given.items() if value is not None})  # type: ignore[arg-type]  # each value has its field's type


@app.command("plan")
def plan_command(
    job: JobFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="Plan file to write (JSON).")],
    tiers: Tiers = None,
    budget: Budget = None,
    method: Method = None,
    as_json: AsJson = False,
) -> None:
    """Decide where every row lives, and prove it."""
    with working("planning"):
        plan = _job(job, tiers, budget, method).solve()
    plan.save(output)
    emit(plan_document(plan), as_json=as_json, text=plan_renderable(plan))
    if not as_json:
        say(f"written to {output}, fingerprint {plan.fingerprint[:16]}")


@app.command("pareto")
def pareto_command(
    job: JobFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="Picture to write: .png, .svg or .pdf.")],
    tiers: Tiers = None,
    as_json: AsJson = False,
) -> None:
    """Draw the frontier of memory against communication, with the paper's points."""
    from flexshard.plots import plot_pareto

    spec = _job(job, tiers, None, None)
    with working("finding the frontier"):
        curve = pareto(
            spec.tables,
            spec.cluster,
            batch_size=spec.batch_size,
            tiers=spec.tiers,
            overlap=spec.overlap,
            index_dedup=spec.index_dedup,
        )
        plot_pareto(curve, output)
    headings = ("memory per rank", "exposed", *(f"rows, g = {size}" for size in curve.group_sizes))
    grid = new_grid("Points of the frontier, and beside it", ["point"], headings)
    for point in curve.marked:
        memory, seconds = units.format_bytes(point.memory_bytes), units.format_seconds(point.exposed_seconds)
        grid.add_row(point.name, memory, seconds, *(f"{rows:,}" for rows in point.rows))
    grid.caption = f"{len(curve.points):,} optimal plans drawn in {output}"
    emit(asdict(curve), as_json=as_json, text=grid)


@app.command("plot")
def plot_command(
    what: Annotated[str, typer.Argument(help="costs (Figure 3), skew (Figure 4) or marginal (Figure 5).")],
    job: JobFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="Picture to write: .png, .svg or .pdf.")],
    table: Annotated[str | None, typer.Option(help="One table of the job; all, or the first, by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw a figure of the FlexShard paper for the job's own profiles."""
    from flexshard import plots

    spec = load_job(job)
    tables = [t for t in spec.tables if table in (None, t.name)]
    if not tables:
        raise JobError(f"{job}: no table {table!r}; there are {', '.join(t.name for t in spec.tables)}")
    if what == "costs":
        if len(tables) > 1:
            raise JobError(f"{job}: has {len(tables)} tables; say which one to draw with --table")
        plots.plot_normalized_costs(tables[0], spec.cluster, spec.batch_size, output, overlap=spec.overlap)
    elif what == "skew":
        plots.plot_skew({t.name: t.profile for t in tables}, output)
    elif what == "marginal":
        curve = marginal_curve(
            tables, spec.cluster, batch_size=spec.batch_size, overlap=spec.overlap, index_dedup=spec.index_dedup
        )
        plots.plot_marginal(curve, output)
    else:
        raise JobError(f"there is no plot {what!r}; draw costs, skew or marginal")
    written(output, as_json)


@app.command("explain")
def explain_command(
    plan: PlanFile,
    table: Annotated[str | None, typer.Argument(help="A table of the plan; none shows the whole plan.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say why tiers end where they do, or a table is compressed, what else would cost, and what memory is worth."""
    if is_compression(plan):
        decision = CompressionPlan.load(plan)
        texts = {name: decision.explain(name) for name in (decision.tables if table is None else [table])}
        emit(texts, as_json=as_json, text="\n\n".join(texts.values()))
        return
    loaded = Plan.load(plan)
    if table is None and len(loaded.tables) > 1:
        emit(plan_document(loaded), as_json=as_json, text=plan_renderable(loaded))
        return
    explanation = explain(loaded, table)
    emit(explanation.document(), as_json=as_json, text=explanation.text)


@app.command("compare")
def compare_command(
    files: Annotated[
        list[Path], typer.Argument(help="A job file; or a plan and what was observed of it, as often as you like.")
    ],
    torchrec: Annotated[
        bool | None, typer.Option("--torchrec/--no-torchrec", help="Ask TorchRec's planner; by default if installed.")
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for the mixed-integer program.")] = 60.0,
    row_wise: Annotated[
        Path | None, typer.Option(help="Observed under row-wise sharding, to measure the reduction against.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Picture of predicted and observed reduction (Figure 6).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Set a job's plan beside every baseline (the paper's, whole tables, TorchRec's), or a plan beside what ran."""
    if len(files) > 1:
        _compare_observed(files, row_wise, output, as_json=as_json)
        return
    if row_wise is not None or output is not None:
        raise JobError("--row-wise and --output go with a plan and what was observed of it, not with a job")
    with working("asking the baselines"):
        plan = compare(load_job(files[0]), torchrec=torchrec, time_limit_seconds=time_limit)
    emit(plan_document(plan), as_json=as_json, text=costs_grid_of(plan))


def _compare_observed(files: list[Path], row_wise: Path | None, output: Path | None, *, as_json: bool) -> None:
    if len(files) % 2:
        raise JobError(f"{files[-1]}: every plan needs what was observed of it; give PLAN OBSERVED in turn")
    against = None if row_wise is None else Observation.load(row_wise)
    pairs = list(zip(files[::2], files[1::2], strict=True))
    alike = first_repeated(plan.stem for plan, _ in pairs) is not None
    found = {}
    for plan, observed in pairs:
        try:
            comparison = compare_observed(Plan.load(plan), Observation.load(observed), against)
        except DataError as error:
            raise DataError(str(error) if str(observed) in str(error) else f"{observed}: {error}") from error
        found[str(plan) if alike else plan.stem] = comparison
    if output is not None:
        from flexshard.plots import plot_reduction

        plot_reduction({name: (c.reduction_predicted, c.reduction_observed) for name, c in found.items()}, output)
    for name, comparison in found.items():
        if not as_json:
            say(f"{name}:")
            say(comparison.grid())
    if as_json:
        emit({name: c.document() for name, c in found.items()}, as_json=True, text="")
    elif output is not None:
        say(f"written to {output}")


@app.command("diff")
def diff_command(
    before: PlanFile,
    after: Annotated[Path, typer.Argument(help="Another plan file.")],
    as_json: AsJson = False,
) -> None:
    """Say which rows move between two plans, and how many bytes."""
    found = diff(Plan.load(before), Plan.load(after))
    grid = new_grid("Moves", ["table"], ["from group", "to group", "ranks", "rows", "weights"])
    for move in found.moves:
        ranks = f"{move.first_rank:,} to {move.first_rank + move.rows - 1:,}"
        ends = ["-" if size is None else str(size) for size in (move.source, move.target)]
        grid.add_row(move.table, *ends, ranks, f"{move.rows:,}", units.format_bytes(move.nbytes))
    note = "".join(
        f"\n{name}: the two plans rank rows by different profiles, so equal ranks may be other rows."
        for name in found.reranked
    )
    grid.caption = f"{found.rows:,} rows, {units.format_bytes(found.nbytes)} move{note}"
    emit(asdict(found) | {"rows": found.rows, "nbytes": found.nbytes}, as_json=as_json, text=grid)
