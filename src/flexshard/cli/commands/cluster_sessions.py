"""``flexshard cluster-sessions``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flexshard import ingestion, units
from flexshard._internal import new_grid
from flexshard.cli.app import AsJson, app
from flexshard.cli.outputs import check_folder
from flexshard.cli.terminal import emit, working
from flexshard.errors import DataError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from flexshard.ingestion import Clustered


@app.command("cluster-sessions")
def cluster_sessions_command(
    data: Annotated[list[str], typer.Argument(help="Parquet files, globs, folders or URLs.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to make.")],
    session: Annotated[str, typer.Option(help="Column whose distinct values are the sessions.")],
    time: Annotated[str, typer.Option(help="Column to order a session's rows by.")],
    shards: Annotated[int, typer.Option(help="Files to write, by hash of the session.")] = 1,
    keep: Annotated[float, typer.Option(help="Share of the data to keep, such as 0.1.")] = 1.0,
    keep_by: Annotated[Literal["session", "sample"], typer.Option(help="Keep whole sessions, or rows one by one.")] = (
        "session"
    ),
    seed: Annotated[int, typer.Option(help="Seed of what is kept.")] = 0,
    row_group_rows: Annotated[int, typer.Option(help="Most rows of a row group.")] = 1 << 16,
    partition: Annotated[
        str | None,
        typer.Option(help="Cluster within partitions of time: 1h, or a number in the unit of a column of numbers."),
    ] = None,
    order: Annotated[
        Literal["key", "start"], typer.Option(help="Of sessions: by key, or by the start of each.")
    ] = "key",
    memory: Annotated[str | None, typer.Option(help="Memory for sorting, such as 4GiB; more is spilled.")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Spread the work over a Ray cluster.")] = False,
    as_json: AsJson = False,
) -> None:
    """Rewrite a dataset so that a session's rows are adjacent and in order of time.

    Example: flexshard cluster-sessions log/*.parquet -o by_session --session session --time time
    """
    check_folder(output, data)
    if keep_by == "sample" and keep >= 1:
        raise DataError("--keep-by says what --keep keeps; give --keep a share too")
    with working("clustering"):
        clustered = ingestion.cluster_sessions(
            data,
            output,
            session=session,
            time=time,
            shards=shards,
            keep=keep,
            keep_by=keep_by,
            seed=seed,
            row_group_rows=row_group_rows,
            partition=_number_or_text(partition),
            order=order,
            memory=memory,
            ray=ray,
        )
    emit(_clustered_document(clustered), as_json=as_json, text=_clustered_text(clustered))


def _number_or_text(value: str | None) -> str | float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return value


def _clustered_document(clustered: Clustered) -> dict[str, Any]:
    return {**asdict(clustered), "path": str(clustered.path)} | {
        "samples_per_session": clustered.samples_per_session,
        "samples_per_session_read": clustered.samples_per_session_read,
        "storage_ratio": clustered.storage_ratio,
    }


def _clustered_text(clustered: Clustered) -> RenderableType:
    grid = new_grid("Clustered by session", [""], ["rows", "sessions", "samples per session", "bytes"])
    read = (clustered.rows_read, clustered.sessions_read, clustered.samples_per_session_read, clustered.bytes_before)
    kept = (clustered.rows, clustered.sessions, clustered.samples_per_session, clustered.bytes_after)
    for name, (rows, sessions, mean, nbytes) in (("before", read), ("after", kept)):
        grid.add_row(name, f"{rows:,}", f"{sessions:,}", f"{mean:.2f}", units.format_bytes(nbytes))
    lines = []
    if clustered.rows < clustered.rows_read:
        for by, (rows, sessions) in clustered.kept_by.items():
            mean = rows / sessions if sessions else 0.0
            lines.append(f"downsampling by {by} keeps {rows:,} rows and {mean:.2f} samples per session")
    files = f"{len(clustered.files)} file{'s' * (len(clustered.files) > 1)}"
    each = "a row " if clustered.rows < clustered.rows_read else ""
    last = (
        f"{each}{clustered.storage_ratio:.2f} times smaller than the input's order, encoded alike"
        f" ({units.format_bytes(clustered.bytes_alike)}); written to {clustered.path} ({files})"
    )
    from rich.console import Group

    return Group(grid, *lines, last)
