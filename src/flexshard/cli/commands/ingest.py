"""``flexshard ingest``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flexshard import ingestion, units
from flexshard._internal import expand, new_grid
from flexshard.cli.app import AsJson, app
from flexshard.cli.outputs import Force, check_output
from flexshard.cli.terminal import counting_progress, emit
from flexshard.errors import DataError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from flexshard.ingestion import IngestionClient, IngestionRun, IngestionSpec, SessionBatch


@app.command("ingest")
def ingest_command(
    job: Annotated[Path, typer.Argument(help="YAML file of an ingestion job, or a run that -o wrote: it is replayed.")],
    workers: Annotated[int, typer.Option(min=1, help="Workers to begin with.")] = 2,
    most_workers: Annotated[
        int | None, typer.Option(min=1, help="Up to which workers are added while the trainer waits for them.")
    ] = None,
    backend: Annotated[Literal["processes", "threads", "ray"], typer.Option(help="Where workers run.")] = "processes",
    rank: Annotated[int | None, typer.Option(help="Whose batches to take; 0 by default.")] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks that train; 1 by default.")] = None,
    step: Annotated[
        str | None, typer.Option(help="Time that a trainer takes for a batch, such as 5ms; none by default.")
    ] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="After which to stop.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="JSON file to keep the run in.")] = None,
    log: Annotated[
        Path | None, typer.Option(help="File to add the columns that the job reads to, for 'rewrite'.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Run an ingestion job without a trainer: what it gives, how fast, what waits for what.

    Of a run that was kept, the batches have to be the same again, to the bit.

    Example: flexshard ingest ingestion.yaml --workers 2
    """
    before: IngestionRun | None = None
    if job.suffix == ".json":
        given = {"--rank": rank, "--world-size": world_size, "--step": step, "--batches": batches}
        for name, value in given.items():
            if value is not None:
                raise DataError(f"{job} is a run, which is replayed as it was; leave {name} out")
        before = ingestion.IngestionRun.load(job)
        spec, rank, world_size, batches = before.spec, before.rank, before.world_size, before.stats.batches
    else:
        spec = ingestion.IngestionSpec.load(job)
    if output is not None:
        check_output(output, "flexshard.ingested", inputs=_files_of(job, spec), force=force)
    if log is not None:
        if output is not None and log.resolve() == output.resolve():
            raise DataError(f"{log}: the run and the log are two files; give two names")
        ingestion.ProjectionLog.check(log)
    with counting_progress("ingesting", "batches") as progress:
        done = 0

        def show(client: IngestionClient, _: SessionBatch) -> None:
            nonlocal done
            done += 1
            stats = client.stats
            note = (
                f"splits {stats.splits_taken}/{stats.splits}, {len(client.workers)} workers,"
                f" {stats.buffered} batches wait, stalled {stats.stall_seconds / max(stats.seconds, 1e-9):.0%},"
                f" {stats.restarts} restarts"
            )
            progress(done, batches or len(client) * spec.epochs, note)

        run = ingestion.run_job(
            spec,
            rank=rank or 0,
            world_size=world_size or 1,
            step_seconds=before.step_seconds if before is not None else units.parse_seconds(step or "0s"),
            most_batches=batches,
            on_batch=show,
            workers=workers,
            most_workers=most_workers,
            backend=backend,
        )
    if before is not None and run.digest != before.digest:
        raise DataError(f"{job}: the batches are others than then (digest {run.digest}, it was {before.digest})")
    if output is not None:
        run.save(output)
    if log is not None:
        ingestion.ProjectionLog.append(log, spec.stored_columns())
    document = run.document() | {"same_as_before": None if before is None else True}
    emit(document, as_json=as_json, text=_text(run, before, output))


def _files_of(job: Path, spec: IngestionSpec) -> Iterator[Path | str]:
    """What a job reads; its data are looked for if somebody asks for more than its own file."""
    yield job
    yield from (source.path for source in expand(spec.paths) if source.filesystem is None)


def _text(run: IngestionRun, before: IngestionRun | None, output: Path | None) -> RenderableType:
    from rich.console import Group

    stats, phases = run.stats, run.phases
    title = f"{stats.samples:,} samples in {stats.batches:,} batches of rank {run.rank} of {run.world_size}"
    grid = new_grid(title, ["", ""], [])
    spent = max(phases.seconds, 1e-9)
    rows: list[tuple[str, Any]] = [
        ("samples per second", f"{run.samples_per_second:,.0f}"),
        ("bytes of tensors per second", units.format_bytes(stats.bytes / max(stats.seconds, 1e-9))),
        ("stalled", f"{run.stalled:.1%} of {units.format_seconds(stats.seconds)}"),
        ("workers spent on reading", f"{phases.fill_seconds / spent:.0%}"),
        ("  on tensors", f"{phases.convert_seconds / spent:.0%}"),
        ("  on transforms", f"{phases.process_seconds / spent:.0%}"),
        ("read from storage", f"{units.format_bytes(phases.bytes_read)} in {phases.reads:,} reads"),
        ("  of it for nothing", units.format_bytes(phases.bytes_read - phases.bytes_wanted)),
        ("workers lost and replaced", f"{stats.restarts:,}"),
        ("batches that could not be read", f"{stats.skipped_batches:,}"),
        ("digest", run.digest),
    ]
    for name, value in rows:
        grid.add_row(name, value)
    lines: list[RenderableType] = [grid]
    if before is not None:
        ratio = run.samples_per_second / max(before.samples_per_second, 1e-9)
        lines.append(f"the same batches as then, at {ratio:.2f} times the rate")
    if output is not None:
        lines.append(f"written to {output}")
    return Group(*lines)
