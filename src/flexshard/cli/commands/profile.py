"""``flexshard profile``."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

import typer

from flexshard import profiling
from flexshard._internal import folder_for, new_grid, replacing_all
from flexshard.cli.app import AsJson, app
from flexshard.cli.outputs import Force, check_output
from flexshard.cli.terminal import counting_progress, emit
from flexshard.errors import DataError
from flexshard.tables import check_table_name

if TYPE_CHECKING:
    from flexshard._internal import Grid
    from flexshard.profiling import AccessProfile


@app.command("profile")
def profile_command(
    data: Annotated[list[str], typer.Argument(help="Parquet files, globs, folders or URLs; or Meta's reuse text.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Profile to write; with --by, a folder for them.")],
    column: Annotated[str | None, typer.Option(help="Column of ids: integers, or lists of integers.")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of the table; by default one above the largest id.")] = None,
    hash_: Annotated[str | None, typer.Option("--hash", help="Fold raw ids into --rows: splitmix64.")] = None,
    mapping: Annotated[
        str | None, typer.Option(help="What 'flexshard encode' saved: read DATA, of any values, through it.")
    ] = None,
    unknown: Annotated[
        Literal["error", "drop"], typer.Option(help="What becomes of values that the mapping has not.")
    ] = "error",
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
    batch: Annotated[
        int | None, typer.Option(min=0, help="Which block of the reuse statistics, from 0, the default.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Row groups decoded at once.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Count how often each row of a table is read.

    Example: flexshard profile clicks.parquet --column item --sample-key user -o item.profile.parquet
    """
    if unknown != "error" and mapping is None:
        raise DataError("--unknown is of values that a mapping has not; give --mapping, or leave it out")
    if seed and not holdout:
        raise DataError("--seed is that of the holdout; give --holdout, or leave it out")
    inputs = [*data, *([] if mapping is None else [mapping])]
    check_output(output, "flexshard.profile", inputs=inputs, force=force)
    if name is not None:
        check_table_name(name)
    if reuse:
        if by or column or hash_ or mapping or sample_key or holdout or distinct_batch:
            raise DataError("--reuse goes with --rows, --batch and --name alone")
        if len(data) != 1:
            raise DataError(f"--reuse takes one text file, found {len(data)}")
        profiles = [profiling.AccessProfile.from_reuse_histogram(data[0], num_rows=rows, batch=batch or 0, table=name)]
    elif batch is not None:
        raise DataError("--batch goes with --reuse")
    elif column is None:
        raise DataError("which column holds the ids? give --column")
    else:
        with counting_progress("reading") as progress:
            if by is not None:
                if mapping or distinct_batch or name is not None:
                    raise DataError("--by does not go with --mapping, --distinct-batch or --name")
                tables = profiling.AccessProfile.from_parquet_by(
                    data,
                    column=column,
                    by=by,
                    num_rows=rows,
                    hash=hash_,
                    sample_key=sample_key,
                    holdout=holdout,
                    seed=seed,
                    workers=workers,
                    progress=progress,
                )
                profiles = list(tables.values())
            else:
                one = profiling.AccessProfile.from_parquet(
                    data,
                    column=column,
                    num_rows=rows,
                    hash=hash_,
                    mapping=mapping,
                    unknown=unknown,
                    sample_key=sample_key,
                    holdout=holdout,
                    seed=seed,
                    workers=workers,
                    table=name,
                    distinct_batch=distinct_batch,
                    progress=progress,
                )
                profiles = [one]
                if one.lengths is not None and one.lengths.maximum == 1 and sample_key is None and mapping is None:
                    _note_single_reads(data)
    for profile in profiles:
        check_table_name(profile.table)
    if by is None:
        paths = [output]
        _save_all(profiles, paths)
    else:
        paths = [output / f"{_file_name(profile.table)}.profile.parquet" for profile in profiles]
        for path in paths:
            check_output(path, "flexshard.profile", inputs=inputs, force=force)
        with folder_for(output):
            _save_all(profiles, paths)
    written = zip(profiles, paths, strict=True)
    emit([_profile_document(p, path) for p, path in written], as_json=as_json, text=_profile_grid(profiles, paths))


def _file_name(table: str) -> str:
    """A name that patterns of files find, and that no command takes for an option."""
    name = quote(table, safe=" ")
    return f"%{ord(name[0]):02X}{name[1:]}" if name.startswith((".", "-")) else name


def _note_single_reads(data: list[str]) -> None:
    """Say that a row of one id was taken for a whole sample, and which columns may tell samples apart."""
    names = profiling.columns_of(data)
    likely = [name for name in names if _KEY.search(name.lower())]
    hint = f"; columns that may be: {', '.join(likely)}" if likely else ""
    said = f"every row is a sample of one id (L = 1); if sessions or users are the samples, give --sample-key{hint}"
    warnings.warn(said, stacklevel=1)


def _save_all(profiles: list[AccessProfile], paths: list[Path]) -> None:
    """Write all profiles or none."""
    with replacing_all(paths) as drafts:
        for profile, draft in zip(profiles, drafts, strict=True):
            profile.save(draft)


_KEY = re.compile(r"session|user|visit|member|customer|account|device|request|impression|basket|order|sample|uid|sid")
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
    grid = new_grid(title, ["table"], numbers, ("read", "samples", numbers[5], "L"))
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
