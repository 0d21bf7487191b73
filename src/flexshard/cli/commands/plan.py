"""``flexshard plan``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flexshard import costmodels, executors, planner, units
from flexshard.cli.app import AsJson, JobFile, app
from flexshard.cli.job_options import Budget, Method, Tiers, job_with
from flexshard.cli.outputs import Force, check_output
from flexshard.cli.terminal import emit, say, working
from flexshard.errors import JobError


@app.command("plan")
def plan_command(
    job: JobFile,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Plan file to write (JSON); by default it is printed alone.")
    ] = None,
    tiers: Tiers = None,
    budget: Budget = None,
    method: Method = None,
    objective: Annotated[Literal["communication", "step"] | None, typer.Option(help="Instead of the job's.")] = None,
    dense: Annotated[
        str | None,
        typer.Option(help="Time of a step besides its embeddings, such as '120 ms'; then the objective is step."),
    ] = None,
    observed: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            help="PLAN OBSERVED: a plan that ran and what was observed of it, to take that time from, and what it hides"
            " of collectives, unless the job says ('overlap')."
        ),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Decide where every row lives, and prove it.

    Example: flexshard plan job.yaml -o plan.json --budget 40GiB
    """
    if output is not None:
        check_output(output, "flexshard.plan", inputs=[job, *(observed or ())], force=force)
    if dense is not None and observed is not None:
        raise JobError("--dense and --observed both say what a step does besides its embeddings; give one of them")
    asked = job_with(job, tiers=tiers, budget=budget, method=method)
    step, rates = asked.step, None if asked.step is None else asked.step.rates
    if dense is not None:
        step = costmodels.StepWork(units.parse_seconds(dense), rates)
    elif observed is not None:
        ran, seen = planner.Plan.load(observed[0]), executors.Observation.load(observed[1])
        step = costmodels.StepWork(seen.step_work(ran).dense_seconds, rates)
        asked = _overlapping(asked, ran, seen)
    elif objective == "communication":
        step = None  # instead of the job's
    changes: dict[str, Any] = {"step": step}
    if objective is not None or step is not asked.step:
        changes["objective"] = objective or "step"
    asked = replace(asked, **changes)
    with working("planning"):
        plan = asked.solve()
    if output is not None:
        plan.save(output)
    emit(planner.plan_document(plan), as_json=as_json, text=planner.plan_renderable(plan))
    if output is not None and not as_json:
        say(f"written to {output}, fingerprint {plan.fingerprint[:16]}")


def _overlapping(job: planner.Job, ran: planner.Plan, observed: executors.Observation) -> planner.Job:
    """A job that says what other work hides: what was observed, if it does not say, and if that is of such a cluster;
    with pooled tables nothing, since TorchRec's modules run their collectives otherwise.
    """
    here, there = job.cluster, ran.cluster
    alike = (here.nodes, here.ranks_per_node) == (there.nodes, there.ranks_per_node)
    if job.overlap is not None or job.is_whole_model or not alike:
        return job
    known, seen = costmodels.overlap_names(here), observed.overlap(ran)
    return replace(job, overlap={name: share for name, share in seen.items() if name in known})
