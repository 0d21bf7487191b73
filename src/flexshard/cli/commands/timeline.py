"""``flexshard timeline``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexshard import executors, planner, units
from flexshard.cli.app import AsJson, PlanFile, app, written
from flexshard.cli.outputs import Force, check_output
from flexshard.cli.terminal import say
from flexshard.errors import DataError


@app.command("timeline")
def timeline_command(
    plan: PlanFile,
    observed: Annotated[Path | None, typer.Argument(help="Observation of the plan, as Observer saves it.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Trace to write (JSON), for ui.perfetto.dev.")] = Path(
        "step.trace.json"
    ),
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Draw a step as a trace: its phases per rank and link, predicted and as observed.

    Example: flexshard timeline step.json -o step.trace.json
    """
    check_output(output, "flexshard.timeline", inputs=[one for one in (plan, observed) if one is not None], force=force)
    loaded = planner.Plan.load(plan)
    seen = None if observed is None else executors.Observation.load(observed)
    if seen is not None and not seen.calls:
        raise DataError(f"{observed}: keeps no single step, as observations of earlier releases do not; observe again")
    executors.save_timeline(output, loaded, seen)
    if not as_json:
        for phase in loaded.phases:
            links = ", ".join(f"{link} {units.format_seconds(time)}" for link, time in phase.links.items())
            say(f"{phase.name}: {units.format_seconds(phase.seconds)} ({links})")
        total = sum(phase.seconds for phase in loaded.phases)
        known = "" if loaded.settings.dense_seconds is not None else " without dense work, which the plan does not know"
        say(f"step: {units.format_seconds(total)}{known}")
        if seen is not None:
            steps = sorted(seen.step_seconds)
            say(f"observed: {units.format_seconds(steps[len(steps) // 2])} (median)")
    written(output, as_json)
