"""``flexshard compress``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexshard import costmodels, planner, units
from flexshard._internal import new_grid, replacing_all
from flexshard.cli.app import AsJson, JobFile, app
from flexshard.cli.outputs import Force, check_output, check_place
from flexshard.cli.terminal import emit, say, working
from flexshard.errors import JobError

if TYPE_CHECKING:
    from flexshard._internal import Grid
    from flexshard.planner import CompressionPlan


@app.command("compress")
def compress_command(
    job: JobFile,
    rates: Annotated[Path, typer.Option(help="What 'flexshard calibrate' wrote.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Decision to write (JSON).")],
    plan: Annotated[Path | None, typer.Option(help="Where to write the plan of the tables that stay.")] = None,
    budget: Annotated[str | None, typer.Option(help="neutral, +2GiB, or a limit such as 40GiB.")] = None,
    hashed: Annotated[bool, typer.Option("--hashed", help="Compressed tables keep ids in no order.")] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Decide which tables become tensor trains, so that a job fits its budget at the least step time.

    Example: flexshard compress job.yaml --rates rates.yaml -o compressed.json --budget=-2GiB
    """
    if plan is not None and plan.resolve() == output.resolve():
        raise JobError(f"{plan}: the decision and the plan are two files; give two names")
    check_output(output, "flexshard.compression", inputs=[job, rates], force=force)
    check_place(output)
    if plan is not None:
        check_output(plan, "flexshard.plan", inputs=[job, rates], force=force)
        check_place(plan)
    spec = planner.load_job(job)
    if budget is not None:
        spec = replace(spec, budget=planner.parse_budget(budget))
    with working("choosing tables"):
        decision = spec.compress(costmodels.TTRates.load(rates), hashed=hashed)
    if plan is not None and decision.plan is None:
        raise JobError(f"{plan}: every table is compressed, so there is no plan to write; leave --plan out")
    if plan is None or decision.plan is None:
        decision.save(output)
    else:
        with replacing_all([output, plan]) as (of_decision, of_plan):
            decision.save(of_decision)
            decision.plan.save(of_plan)
    emit(decision.document(), as_json=as_json, text=_grid(decision))
    if not as_json:
        say(f"written to {output}" + (f" and {plan}" if plan is not None else ""))


def _grid(decision: CompressionPlan) -> Grid:
    headings = ("memory", "lookups", "communication", "loss", "times smaller")
    grid = new_grid(
        "How tables are held, per rank and iteration", ["table", "as"], headings, ("communication", "lookups")
    )
    for table in decision.tables.values():
        option = table.option
        smaller = "" if option.shape is None else f"{option.shape.compression:.0f}"
        times = (units.format_seconds(option.compute_seconds), units.format_seconds(option.comm_seconds))
        loss = "" if option.shape is None else f"{option.loss:.4g}"
        grid.add_row(table.name, option.name, units.format_bytes(option.memory_bytes), *times, loss, smaller)
    gap = units.format_seconds(max(round(decision.step_seconds - decision.lower_bound_seconds, 12), 0.0))
    less = "less" if gap == "0 s" else f"{gap} less"
    grid.caption = (
        f"{units.format_bytes(decision.memory_bytes)} of {units.format_bytes(decision.budget_bytes)} per rank, with"
        " what it receives of sharded tables; a step of lookups, communication and the job's dense work takes"
        f" {units.format_seconds(decision.step_seconds)}, and no choice within the budget takes {less}.\nTimes of"
        " tables are an average rank's, without what calls take to start; a step waits for the busiest rank."
    )
    return grid
