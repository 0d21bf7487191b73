"""``flexshard rewrite``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexshard import ingestion, units
from flexshard._internal import new_grid
from flexshard.cli.app import AsJson, app
from flexshard.cli.outputs import check_folder
from flexshard.cli.terminal import counting_progress, emit
from flexshard.errors import DataError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from flexshard.ingestion import ReadCost, Rewritten

_SERVED = (0.5, 0.8, 0.9)
_SHOWN_UNKNOWN = 5


@app.command("rewrite")
def rewrite_command(
    data: Annotated[list[str], typer.Argument(help="Parquet files, globs, folders or URLs.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to make.")],
    log: Annotated[
        Path | None, typer.Option(help="What jobs read: a line of JSON for each, as 'ingest --log' writes them.")
    ] = None,
    maps: Annotated[
        str | None, typer.Option(help="Columns of maps to take apart, with commas; all by default.")
    ] = None,
    efficiency: Annotated[
        float | None, typer.Option(help="Share of the disk's time for what jobs want, up to which row groups get rows.")
    ] = None,
    gap: Annotated[
        str | None, typer.Option(help="Bytes that are read rather than skipped; by default those of a seek's time.")
    ] = None,
    memory: Annotated[str, typer.Option(help="That a row group may take unpacked.")] = "1GiB",
    seek: Annotated[str | None, typer.Option(help="Time before each read of the disk; 12 ms by default.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Rate of the disk; 200 MB/s by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Rewrite a dataset for reading: a column per feature of a map, in order of use, in row groups for large reads.

    Example: flexshard rewrite samples/ -o for_reading --log jobs.jsonl
    """
    check_folder(output, data)
    about_jobs = {"--efficiency": efficiency, "--gap": gap, "--seek": seek, "--bandwidth": bandwidth}
    idle = [name for name, value in about_jobs.items() if value is not None]
    if log is None and idle:
        raise DataError(f"{idle[0]} is about what jobs read; give --log too")
    disk = ingestion.Disk(
        **({} if seek is None else {"seek_seconds": units.parse_seconds(seek)}),
        **({} if bandwidth is None else {"bytes_per_s": units.parse_bandwidth(bandwidth)}),
    )
    projections = None if log is None else ingestion.ProjectionLog.load(log)
    with counting_progress("rewriting") as progress:
        done = ingestion.rewrite_dataset(
            data,
            output,
            log=projections,
            maps=None if maps is None else maps.split(","),
            **({} if efficiency is None else {"efficiency": efficiency}),
            gap=0.0 if gap == "0" else gap,
            memory=memory,
            disk=disk,
            progress=progress,
        )
    emit(_document(done), as_json=as_json, text=_text(done, disk))


def _document(done: Rewritten) -> dict[str, Any]:
    found = {name: value for name, value in asdict(done).items() if name != "popular"}
    served = {} if done.popular is None else {f"{share:g}": done.popular.bytes_for(share) for share in _SERVED}
    over = {} if done.after is None else {"over_read_before": _over(done.before), "over_read_after": _over(done.after)}
    return found | over | {"path": str(done.path), "share_of_bytes_that_serves": served}


def _over(cost: ReadCost | None) -> float:
    return 0.0 if cost is None else cost.over_read


def _text(done: Rewritten, disk: Any) -> RenderableType:
    from rich.console import Group

    lines: list[RenderableType] = []
    if done.before is not None and done.after is not None:
        per_run = ["reads", "bytes", "over-read", "time of the disk"]
        grid = new_grid("A run of a job in the log, on average, over the whole dataset", [""], per_run)
        for name, cost, seconds in (
            ("before", done.before, done.seconds_before),
            ("after", done.after, done.seconds_after),
        ):
            nbytes = units.format_bytes(cost.bytes_read)
            grid.add_row(name, f"{cost.reads:,}", nbytes, f"{cost.over_read:.0%}", units.format_seconds(seconds or 0.0))
        lines.append(grid)
        rate = units.format_bandwidth(disk.bytes_per_s)
        lines.append(
            f"computed for a disk of {units.format_seconds(disk.seek_seconds)} a read and {rate}; gaps of up to"
            f" {units.format_bytes(done.gap)} are read rather than skipped"
        )
    if done.popular is not None:
        parts = [f"{done.popular.bytes_for(share):.0%} of bytes serve {share:.0%}" for share in _SERVED]
        lines.append(f"of what is read, {', '.join(parts)}")
    if done.unknown:
        shown = ", ".join(done.unknown[:_SHOWN_UNKNOWN])
        more = len(done.unknown) - _SHOWN_UNKNOWN
        lines.append(f"the log names columns that there are not: {shown}{f' and {more} more' if more > 0 else ''}")
    files = f"{len(done.files)} file{'s' * (len(done.files) > 1)}"
    before, after = units.format_bytes(done.bytes_before), units.format_bytes(done.bytes_after)
    lines.append(
        f"{done.rows:,} rows, {len(done.columns):,} columns ({done.features:,} of them keys of maps before),"
        f" up to {done.group_rows:,} rows a row group; {before} before, {after} after"
    )
    lines.append(f"written to {done.path} ({files})")
    return Group(*lines)
