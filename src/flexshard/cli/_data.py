"""Commands on access data."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table as Grid

from flexshard._files import make_folder, replacing
from flexshard._grids import new_grid
from flexshard._terminal import counting_progress, emit, working
from flexshard.cli._app import AsJson, app, written
from flexshard.errors import DataError
from flexshard.profiling import AccessProfile, write_power_law_sequences


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
    distinct_batch: Annotated[
        int | None, typer.Option(help="Count each distinct list once per so many rows, as deduplicated batches do.")
    ] = None,
    reuse: Annotated[bool, typer.Option("--reuse", help="DATA is Meta's reuse statistics (text).")] = False,
    batch: Annotated[int, typer.Option(help="Which block of the reuse statistics, from 0.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Row groups decoded at once.")] = None,
    as_json: AsJson = False,
) -> None:
    """Count how often each row of a table is read."""
    if any(Path(name).exists() and output.exists() and output.samefile(name) for name in data if "://" not in name):
        raise DataError(f"{output} is the data itself; choose another path with -o")
    if reuse:
        if by or column or hash_ or sample_key or holdout or distinct_batch:
            raise DataError("--reuse goes with --rows, --batch and --name alone")
        if len(data) != 1:
            raise DataError(f"--reuse takes one text file, found {len(data)}")
        profiles = [AccessProfile.from_reuse_histogram(data[0], num_rows=rows, batch=batch, table=name)]
    elif column is None:
        raise DataError("which column holds the ids? give --column")
    else:
        with counting_progress("reading") as progress:
            if by is not None:
                if hash_ or sample_key or holdout or distinct_batch:
                    raise DataError("--by does not go with --hash, --sample-key, --holdout or --distinct-batch")
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
                    distinct_batch=distinct_batch,
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
    written(output, as_json)
