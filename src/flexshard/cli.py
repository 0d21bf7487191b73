"""The command line. Every command prints for people, or with ``--json`` for machines; bad input exits with 2."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table as Grid

from flexshard import __version__, units
from flexshard._files import make_folder, replacing
from flexshard._grids import new_grid
from flexshard._launch import process_group
from flexshard._terminal import counting_progress, emit, run, say, working
from flexshard.errors import DataError, JobError
from flexshard.planner import (
    Job,
    Plan,
    compare,
    diff,
    explain,
    load_job,
    marginal_curve,
    pareto,
    plan_document,
    plan_renderable,
    save_job,
)
from flexshard.planner import costs_grid as costs_grid_of
from flexshard.profiling import AccessProfile, write_power_law_sequences
from flexshard.topologies import Cluster, cluster_document, load_preset, measure_cluster, preset_names

__all__ = ["app", "main"]

app = typer.Typer(
    name="flexshard",
    help="Decide row by row where embedding tables live on a GPU cluster, and prove the plan optimal.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
JobFile = Annotated[Path, typer.Argument(help="Job file (YAML); write one with 'flexshard job'.")]
PlanFile = Annotated[Path, typer.Argument(help="Plan file (JSON) that 'flexshard plan' wrote.")]


def main() -> None:
    """Entry point of the ``flexshard`` command."""
    run(app)


def _written(path: Path, as_json: bool) -> None:
    emit({"path": str(path)}, as_json=as_json, text=f"written to {path}")


def _version(wanted: bool) -> None:
    if wanted:
        say(f"flexshard {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    del version


@app.command("profile")
def profile_command(
    data: Annotated[list[str], typer.Argument(help="Parquet files, globs, folders or URLs; or Meta's reuse text.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Profile to write; with --by, a folder for them.")],
    column: Annotated[str | None, typer.Option(help="Column of ids: integers, or lists of integers.")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of the table; by default one above the largest id.")] = None,
    hash_: Annotated[str | None, typer.Option("--hash", help="Fold raw ids into --rows: splitmix64.")] = None,
    sample_key: Annotated[
        str | None, typer.Option(help="Column whose distinct values are the samples; by default rows of the file.")
    ] = None,
    holdout: Annotated[float, typer.Option(help="Share of samples to keep unseen, such as 0.1.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the holdout.")] = 0,
    by: Annotated[str | None, typer.Option(help="Column that names the table; writes one profile for each.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the table; the column's by default.")] = None,
    reuse: Annotated[bool, typer.Option("--reuse", help="DATA is Meta's reuse statistics (text).")] = False,
    batch: Annotated[int, typer.Option(help="Which block of the reuse statistics, from 0.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Row groups decoded at once.")] = None,
    as_json: AsJson = False,
) -> None:
    """Count how often each row of a table is read."""
    if any(Path(name).exists() and output.exists() and output.samefile(name) for name in data if "://" not in name):
        raise DataError(f"{output} is the data itself; choose another path with -o")
    if reuse:
        if by or column or hash_ or sample_key or holdout:
            raise DataError("--reuse goes with --rows, --batch and --name alone")
        if len(data) != 1:
            raise DataError(f"--reuse takes one text file, found {len(data)}")
        profiles = [AccessProfile.from_reuse_histogram(data[0], num_rows=rows, batch=batch, table=name)]
    elif column is None:
        raise DataError("which column holds the ids? give --column")
    else:
        with counting_progress("reading") as progress:
            if by is not None:
                if hash_ or sample_key or holdout:
                    raise DataError("--by does not go with --hash, --sample-key or --holdout")
                tables = AccessProfile.from_parquet_by(
                    data, column=column, by=by, num_rows=rows, workers=workers, progress=progress
                )
                profiles = list(tables.values())
            else:
                one = AccessProfile.from_parquet(
                    data,
                    column=column,
                    num_rows=rows,
                    hash=hash_,
                    sample_key=sample_key,
                    holdout=holdout,
                    seed=seed,
                    workers=workers,
                    table=name,
                    progress=progress,
                )
                profiles = [one]
    if by is not None:
        make_folder(output)
        paths = [output / f"{quote(profile.table, safe=' ')}.profile.parquet" for profile in profiles]
    else:
        paths = [output]
    _save_all(profiles, paths)
    written = zip(profiles, paths, strict=True)
    emit([_profile_document(p, path) for p, path in written], as_json=as_json, text=_profile_grid(profiles, paths))


def _save_all(profiles: list[AccessProfile], paths: list[Path]) -> None:
    """Write all profiles or none."""
    with ExitStack() as stack:
        drafts = [stack.enter_context(replacing(path)) for path in paths]
        for profile, draft in zip(profiles, drafts, strict=True):
            profile.save(draft)


_CUTS = (0.001, 0.01, 0.1)


def _profile_document(profile: AccessProfile, path: Path) -> dict[str, Any]:
    return {
        "path": str(path),
        "table": profile.table,
        "num_rows": profile.num_rows,
        "rows_read": profile.rows_read,
        "num_samples": profile.num_samples,
        "num_accesses": profile.num_accesses,
        "avg_length": profile.avg_length,
        "distinct_counts": int(profile.counts.size),
        "covered": {str(cut): profile.covered(cut * profile.num_rows) for cut in _CUTS},
        "covered_held_out": {str(cut): profile.covered_held_out(cut * profile.num_rows) for cut in _CUTS},
    }


def _profile_grid(profiles: list[AccessProfile], paths: list[Path]) -> Grid:
    unseen = any(profile.holdout is not None for profile in profiles)
    title = "Access profiles: share of accesses by the hottest rows" + (" (in unseen samples)" if unseen else "")
    numbers = ["rows", "read", "samples", "accesses", "L", *(f"hottest {cut:.1%}" for cut in _CUTS)]
    grid = new_grid(title, ["table"], numbers)
    for profile in profiles:
        covered = [(profile.covered(k), profile.covered_held_out(k)) for k in (cut * profile.num_rows for cut in _CUTS)]
        cells = [f"{share:.1%}" + ("" if held is None else f" ({held:.1%})") for share, held in covered]
        grid.add_row(
            profile.table,
            f"{profile.num_rows:,}",
            f"{profile.rows_read:,}",
            f"{profile.num_samples:,}",
            f"{profile.num_accesses:,}",
            f"{profile.avg_length:.4g}",
            *cells,
        )
    grid.caption = (
        f"written to {paths[0]}" if len(paths) == 1 else f"written to {paths[0].parent}/ ({len(paths)} files)"
    )
    return grid


@app.command("clusters")
def clusters_command(
    name: Annotated[
        str | None, typer.Argument(help="A preset, preset:nodes, or a cluster file; none lists the presets.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write it as a cluster file.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the cluster presets, or show one with its sources."""
    if name is None:
        presets = [load_preset(preset) for preset in preset_names()]
        headings = ["name", "ranks", "memory per rank", "what it is"]
        grid = new_grid("Cluster presets (write NAME:NODES for another size)", headings)
        for preset in presets:
            c = preset.cluster()
            memory = units.format_bytes(c.hbm_bytes)
            grid.add_row(preset.name, f"{c.nodes} x {c.ranks_per_node}", memory, preset.title)
        emit([cluster_document(preset.cluster()) for preset in presets], as_json=as_json, text=grid)
        return
    cluster = Cluster.resolve(name)
    if output is not None:
        cluster.save(output)
    emit(cluster_document(cluster), as_json=as_json, text=_cluster_grid(cluster))
    preset_name = name.partition(":")[0]
    if preset_name in preset_names() and not as_json:
        sources = new_grid("Sources", ["figure", "value", "source", "date"])
        for row in load_preset(preset_name).figures():
            sources.add_row(*row)
        say(sources)


def _cluster_grid(cluster: Cluster) -> Grid:
    title = (
        f"{cluster.name}: {cluster.nodes} nodes x {cluster.ranks_per_node} ranks,"
        f" {units.format_bytes(cluster.hbm_bytes)} per rank, {units.format_bytes(cluster.reserve_bytes)} reserved"
    )
    grid = new_grid(title, ["group size", "all-to-all inside groups", "all-reduce across groups", "from"])
    for level in cluster.levels:
        rates = (level.all_to_all, level.all_reduce)
        cells = [
            "-" if r is None else f"{units.format_seconds(r.alpha_seconds)} + {units.format_bandwidth(r.bytes_per_s)}"
            for r in rates
        ]
        grid.add_row(str(level.group_size), *cells, ", ".join(dict.fromkeys(r.source for r in rates if r is not None)))
    return grid


@app.command("measure")
def measure_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="Cluster file to write.")],
    memory: Annotated[
        str | None, typer.Option(help="Memory of one rank, such as '80 GB'; the GPU's by default.")
    ] = None,
    reserve: Annotated[str, typer.Option(help="Of it, for everything but embeddings.")] = "0 B",
    name: Annotated[str, typer.Option(help="Name of the cluster.")] = "measured",
    ranks_per_node: Annotated[int | None, typer.Option(help="By default torchrun's, those of one machine.")] = None,
    sizes: Annotated[
        str, typer.Option(help="Buffers of one rank to time, separated by commas.")
    ] = "64 KiB,1 MiB,8 MiB,32 MiB",
    repeats: Annotated[int, typer.Option(min=1, help="Timings of each size; their median is used.")] = 7,
    as_json: AsJson = False,
) -> None:
    """Time the collectives of this cluster and fit alpha and beta; run it under torchrun."""
    with process_group() as place:
        cluster = measure_cluster(
            name=name,
            memory_bytes=units.parse_bytes(memory) if memory is not None else place.device_memory_bytes(),
            reserve_bytes=units.parse_bytes(reserve),
            ranks_per_node=place.ranks_per_node if ranks_per_node is None else ranks_per_node,
            sizes=[int(units.parse_bytes(size)) for size in sizes.split(",")],
            repeats=repeats,
        )
        if place.rank == 0:
            cluster.save(output)
            emit(cluster_document(cluster), as_json=as_json, text=_cluster_grid(cluster))


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
    _written(output, as_json)


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
    _written(output, as_json)


@app.command("explain")
def explain_command(
    plan: PlanFile,
    table: Annotated[str | None, typer.Argument(help="A table of the plan; none shows the whole plan.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say why a table's tiers end where they do, what the next best choice costs, and what memory is worth."""
    loaded = Plan.load(plan)
    if table is None and len(loaded.tables) > 1:
        emit(plan_document(loaded), as_json=as_json, text=plan_renderable(loaded))
        return
    explanation = explain(loaded, table)
    emit(explanation.document(), as_json=as_json, text=explanation.text)


@app.command("compare")
def compare_command(
    job: JobFile,
    torchrec: Annotated[
        bool | None, typer.Option("--torchrec/--no-torchrec", help="Ask TorchRec's planner; by default if installed.")
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for the mixed-integer program.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Set the plan beside every baseline: the paper's, whole tables (MILP), TorchRec's own planner."""
    with working("asking the baselines"):
        plan = compare(load_job(job), torchrec=torchrec, time_limit_seconds=time_limit)
    emit(plan_document(plan), as_json=as_json, text=costs_grid_of(plan))


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


@app.command("drift")
def drift_command(
    before: Annotated[Path, typer.Argument(help="An earlier profile.")],
    now: Annotated[Path, typer.Argument(help="A later profile of the same table.")],
    as_json: AsJson = False,
) -> None:
    """Say how much of later data an earlier profile's hottest rows still cover."""
    points = AccessProfile.load(before).drift(AccessProfile.load(now))
    headings = ("hottest", "rows", "covered then", "covered now", "best now", "rows kept")
    grid = new_grid("Drift", [], headings)
    for p in points:
        shares = (p.covered_before, p.covered_now, p.best_now, p.kept)
        grid.add_row(f"{p.cut:.2%}", f"{p.rows:,}", *(f"{share:.1%}" for share in shares))
    emit([asdict(point) for point in points], as_json=as_json, text=grid)


@app.command("generate")
def generate_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="Parquet file to write.")],
    rows: Annotated[int, typer.Option(help="Rows of the table.")] = 1_000_000,
    samples: Annotated[int, typer.Option(help="Samples, one list of ids each.")] = 100_000,
    length: Annotated[float, typer.Option(help="Mean ids per sample.")] = 100.0,
    exponent: Annotated[float, typer.Option(help="Of the power law of popularity.")] = 1.05,
    column: Annotated[str, typer.Option(help="Name of the column.")] = "items",
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write power-law sequences, to try FlexShard without data."""
    with working("generating"):
        write_power_law_sequences(
            output, rows=rows, samples=samples, mean_length=length, exponent=exponent, column=column, seed=seed
        )
    _written(output, as_json)


if __name__ == "__main__":
    main()
