"""``flexshard replan``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flexshard import planner, profiling, units
from flexshard._internal import new_grid
from flexshard.cli.app import AsJson, PlanFile, app
from flexshard.cli.job_options import table_and_file
from flexshard.cli.outputs import Force, check_output
from flexshard.cli.terminal import emit, say, working
from flexshard.errors import JobError

_SAME = 1e-3  # of a budget, less than anybody cares for


@app.command("replan")
def replan_command(
    plan: PlanFile,
    profiles: Annotated[list[str], typer.Argument(help="Newer profiles: FILE, or TABLE=FILE where there are several.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Plan file to write (JSON).")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Plan again with newer profiles: what moves, what that costs, what it saves per step.

    Example: flexshard replan plan.json tuesday.profile.parquet
    """
    loaded = planner.Plan.load(plan).refusing_sharded("planning again with newer profiles")
    files: dict[str, Path] = {}
    for text in profiles:
        name, file = table_and_file(text, loaded.tables)
        if name is None:
            if len(loaded.tables) > 1:
                raise JobError(f"{text}: the plan has {len(loaded.tables)} tables; write TABLE={text}")
            name = next(iter(loaded.tables))
        loaded.table(name)
        if name in files:
            raise JobError(f"{text}: table {name!r} has a newer profile already, {files[name]}; give it one")
        files[name] = Path(file)
    if output is not None:
        check_output(output, "flexshard.plan", inputs=[plan, *files.values()], force=force)
    with working("planning"):
        newer = {name: profiling.AccessProfile.load(path) for name, path in files.items()}
        found = planner.replan(loaded, newer, base=plan.parent)
    if output is not None:
        _with_paths_from(output.parent, found.after, files, plan.parent).save(output)
    grid = new_grid("Moves", ["table"], ["copies of rows that move", "that stay", "bytes"])
    for table in found.moves:
        grid.add_row(table.table, f"{table.moved:,}", f"{table.kept:,}", units.format_bytes(table.nbytes))
    show = units.format_seconds
    what = "a step" if loaded.settings.objective == "step" else "exposed communication"
    grid.caption = (
        f"With the newer profiles {what} takes {show(found.seconds_before)} under this plan,"
        f" {show(found.seconds_after)} under the new one.\n"
        f"Moving {units.format_bytes(found.nbytes)} takes {show(found.moving_seconds)} over"
        f" {loaded.cluster.name}'s links: {_advice(found)}{_memory(found)}"
    )
    emit(found.document(), as_json=as_json, text=grid)
    if output is not None and not as_json:
        say(f"written to {output}, fingerprint {found.after.fingerprint[:16]}")


def _with_paths_from(folder: Path, after: planner.Plan, newer: Mapping[str, Path], older: Path) -> planner.Plan:
    """The plan with its profiles named as they are found from the folder that it is written to."""

    def path_of(name: str, known: str | None) -> str | None:
        file = newer.get(name, None if known is None else older / known)
        return None if file is None else os.path.relpath(file, folder)

    tables = {name: replace(one, profile_path=path_of(name, one.profile_path)) for name, one in after.tables.items()}
    return replace(after, tables=tables)


def _memory(found: planner.Replan) -> str:
    """Budgets, where that of the newer profiles is another one."""
    before, after = (plan.settings.budget_bytes for plan in (found.before, found.after))
    if abs(after - before) < _SAME * before:
        return ""
    show, needed = units.format_bytes, found.before.bounded_bytes(found.cost_before)
    above = ", which is above it" if needed > after * (1 + _SAME) else ""
    return (
        f"\nThe budget ({found.after.settings.budget}) is {show(after)} a rank with the newer profiles, and was"
        f" {show(before)}. With them this plan needs {show(needed)}{above}, the new one"
        f" {show(found.after.bounded_bytes(found.cost_after))}."
    )


def _advice(found: planner.Replan) -> str:
    if found.saved_seconds <= 0:
        return "nothing is saved; stay with this plan."
    if not found.nbytes:
        return "nothing moves."
    steps = found.steps_to_pay
    return f"paid back after {max(steps, 1):,.0f} steps; do it if as many are still to come."
