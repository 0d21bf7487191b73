"""``flexshard compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexshard import executors, planner, plots
from flexshard._internal import first_repeated
from flexshard.cli.app import AsJson, app
from flexshard.cli.outputs import Force, check_output, kind_of
from flexshard.cli.terminal import emit, say, working
from flexshard.errors import DataError, JobError


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
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Set a job's plan beside every baseline (the paper's, whole tables, TorchRec's), or a plan beside what ran.

    Example: flexshard compare job.yaml
    """
    if output is not None:
        read = [*files, *([] if row_wise is None else [row_wise])]
        check_output(output, "picture", inputs=read, force=force)
    _check_kinds(files)
    if len(files) > 1:
        _compare_observed(files, row_wise, output, as_json=as_json)
        return
    if row_wise is not None or output is not None:
        raise JobError("--row-wise and --output go with a plan and what was observed of it, not with a job")
    with working("asking the baselines"):
        plan = planner.compare(planner.load_job(files[0]), torchrec=torchrec, time_limit_seconds=time_limit)
    emit(planner.plan_document(plan), as_json=as_json, text=planner.costs_grid(plan))


def _check_kinds(files: list[Path]) -> None:
    """One job, or plans and observations in turn: files of other kinds are said as what they are."""
    wanted = ["flexshard.job"] if len(files) == 1 else ["flexshard.plan", "flexshard.observed"] * len(files)
    for file, kind in zip(files, wanted, strict=False):
        found = kind_of(file) if file.is_file() else ""
        if found.startswith("flexshard.") and found != kind:
            what = found.removeprefix("flexshard.")
            raise JobError(f"{file} is of the kind {what}; compare takes one job, or PLAN OBSERVED in turn")


def _compare_observed(files: list[Path], row_wise: Path | None, output: Path | None, *, as_json: bool) -> None:
    if len(files) % 2:
        raise JobError(f"{files[-1]}: every plan needs what was observed of it; give PLAN OBSERVED in turn")
    against = None if row_wise is None else executors.Observation.load(row_wise)
    pairs = list(zip(files[::2], files[1::2], strict=True))
    alike = first_repeated(plan.stem for plan, _ in pairs) is not None
    comparisons = {}
    for plan, observed in pairs:
        try:
            comparison = executors.compare_observed(
                planner.Plan.load(plan), executors.Observation.load(observed), against
            )
        except DataError as error:
            raise DataError(str(error) if str(observed) in str(error) else f"{observed}: {error}") from error
        comparisons[str(plan) if alike else plan.stem] = comparison
    if output is not None:
        plots.plot_reduction(
            {name: (c.reduction_predicted, c.reduction_observed) for name, c in comparisons.items()}, output
        )
    for name, comparison in comparisons.items():
        if not as_json:
            say(f"{name}:")
            say(comparison.grid())
    if as_json:
        emit({name: c.document() for name, c in comparisons.items()}, as_json=True, text="")
    elif output is not None:
        say(f"written to {output}")
