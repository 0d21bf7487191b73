"""Commands on datasets of sessions."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType

from flexshard import units
from flexshard._files import make_folder
from flexshard._grids import new_grid
from flexshard._terminal import emit, working
from flexshard.cli._app import AsJson, app
from flexshard.errors import DataError
from flexshard.ingestion import Clustered, Duplication, cluster_sessions, measure_duplication, suggest_groups

Paths = Annotated[list[str], typer.Argument(help="Parquet files, globs, folders or URLs.")]


@app.command("cluster-sessions")
def cluster_sessions_command(
    data: Paths,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to make.")],
    session: Annotated[str, typer.Option(help="Column whose distinct values are the sessions.")],
    time: Annotated[str, typer.Option(help="Column to order a session's rows by.")],
    shards: Annotated[int, typer.Option(help="Files to write, by hash of the session.")] = 1,
    keep: Annotated[float, typer.Option(help="Share of the data to keep, such as 0.1.")] = 1.0,
    keep_by: Annotated[str, typer.Option(help="Keep whole sessions ('session') or rows one by one ('sample').")] = (
        "session"
    ),
    seed: Annotated[int, typer.Option(help="Seed of what is kept.")] = 0,
    row_group_rows: Annotated[int, typer.Option(help="Most rows of a row group.")] = 1 << 16,
    memory: Annotated[str | None, typer.Option(help="Memory for sorting, such as 4GiB; more is spilled.")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Spread the work over a Ray cluster.")] = False,
    as_json: AsJson = False,
) -> None:
    """Rewrite a dataset so that a session's rows are adjacent and in order of time."""
    if keep_by not in ("session", "sample"):
        raise DataError(f"--keep-by is 'session' or 'sample', found {keep_by!r}")
    if keep_by == "sample" and keep >= 1:
        raise DataError("--keep-by says what --keep keeps; give --keep a share too")
    with working("clustering"):
        found = cluster_sessions(
            data,
            output,
            session=session,
            time=time,
            shards=shards,
            keep=keep,
            keep_by="session" if keep_by == "session" else "sample",
            seed=seed,
            row_group_rows=row_group_rows,
            memory=memory,
            ray=ray,
        )
    emit(_clustered_document(found), as_json=as_json, text=_clustered_text(found))


def _clustered_document(found: Clustered) -> dict[str, Any]:
    return {**asdict(found), "path": str(found.path)} | {
        "samples_per_session": found.samples_per_session,
        "samples_per_session_read": found.samples_per_session_read,
        "storage_ratio": found.storage_ratio,
    }


def _clustered_text(found: Clustered) -> Group:
    grid = new_grid("Clustered by session", [""], ["rows", "sessions", "samples per session", "bytes"])
    read = (found.rows_read, found.sessions_read, found.samples_per_session_read, found.bytes_before)
    kept = (found.rows, found.sessions, found.samples_per_session, found.bytes_after)
    for name, (rows, sessions, mean, nbytes) in (("before", read), ("after", kept)):
        grid.add_row(name, f"{rows:,}", f"{sessions:,}", f"{mean:.2f}", units.format_bytes(nbytes))
    lines = []
    if found.rows < found.rows_read:
        for by, (rows, sessions) in found.kept_by.items():
            mean = rows / sessions if sessions else 0.0
            lines.append(f"downsampling by {by} keeps {rows:,} rows and {mean:.2f} samples per session")
    files = f"{len(found.files)} file{'s' * (len(found.files) > 1)}"
    last = f"storage {found.storage_ratio:.2f} times smaller; written to {found.path} ({files})"
    return Group(grid, *lines, last)


@app.command("duplication")
def duplication_command(
    data: Paths,
    session: Annotated[str, typer.Option(help="Column whose distinct values are the sessions.")],
    feature: Annotated[list[str] | None, typer.Option(help="Column of a feature; by default all of lists.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows of a batch.")] = 4096,
    threshold: Annotated[float, typer.Option(help="DedupFactor above which a feature is proposed.")] = 1.5,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for sessions.png and duplication.png.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how much of a dataset its sessions repeat, and which features to deduplicate together."""
    with working("measuring"):
        found = measure_duplication(data, session=session, features=feature, batch_size=batch_size)
        names = [one.feature for one in found.features]
        groups = suggest_groups(data, features=names, batch_size=batch_size, threshold=threshold)
    pictures = []
    if output is not None:
        from flexshard.plots import plot_duplication, plot_sessions

        folder = make_folder(output)
        pictures = [folder / "sessions.png", folder / "duplication.png"]
        plot_sessions(found, pictures[0])
        plot_duplication(found, pictures[1])
    document = _duplication_document(found) | {"groups": groups, "pictures": [str(path) for path in pictures]}
    emit(document, as_json=as_json, text=_duplication_text(found, groups, pictures))


def _duplication_document(found: Duplication) -> dict[str, Any]:
    return {
        "rows": found.rows,
        "sessions": int(found.session_sizes.size),
        "batch_size": found.batch_size,
        "samples_per_session": found.samples_per_session,
        "samples_per_session_in_batch": found.samples_per_session_in_batch,
        "features": [asdict(one) for one in found.features],
        "overall": {
            name: dict(zip(("exact", "partial"), found.overall(weighted=weighted), strict=True))
            for name, weighted in (("by_feature", False), ("by_length", True))
        },
    }


def _duplication_text(found: Duplication, groups: list[list[str]], pictures: list[Path]) -> Group:
    title = (
        f"{found.rows:,} rows of {found.session_sizes.size:,} sessions: {found.samples_per_session:.2f} per session,"
        f" {found.samples_per_session_in_batch:.2f} in a batch of {found.batch_size:,}"
    )
    numbers = ["length", "exact", "partial", "d", "DedupFactor predicted", "measured"]
    grid = new_grid(title, ["feature"], numbers)
    for one in found.features:
        shares = (f"{share:.1%}" for share in (one.exact, one.partial, one.same))
        grid.add_row(one.feature, f"{one.avg_length:.1f}", *shares, f"{one.predicted:.2f}", f"{one.measured:.2f}")
    for name, weighted in (("all features", False), ("all ids (by length)", True)):
        grid.add_row(name, "", *(f"{share:.1%}" for share in found.overall(weighted=weighted)), "", "", "")
    listed = ", ".join(f"[{', '.join(group)}]" for group in groups) or "none is above the threshold"
    lines: list[RenderableType] = [grid, f"groups to deduplicate: {listed}"]
    if pictures:
        lines.append(f"written to {', '.join(str(path) for path in pictures)}")
    return Group(*lines)
