"""``flexshard replay``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flexshard import executors, planner, profiling, units
from flexshard._internal import name_and_value, new_grid
from flexshard.cli.app import AsJson, PlanFile, app
from flexshard.cli.job_options import table_and_file
from flexshard.cli.terminal import emit, working
from flexshard.costmodels import QUANTILE
from flexshard.errors import JobError

if TYPE_CHECKING:
    from flexshard._internal import Grid
    from flexshard.costmodels import Cost
    from flexshard.executors import Replay
    from flexshard.planner import Plan, TablePlan
    from flexshard.profiling import AccessProfile


@app.command("replay")
def replay_command(
    plan: PlanFile,
    data: Annotated[list[str], typer.Argument(help="Parquet files, globs, folders or URLs with the batches' ids.")],
    column: Annotated[
        list[str], typer.Option(help="COLUMN, or TABLE=COLUMN once for every table where the plan has several.")
    ],
    steps: Annotated[int, typer.Option(min=1, help="Most steps to replay.")] = 100,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples per rank; by default the plan's.")] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help="TABLE=FILE, or FILE: ranking of a table's rows; by default those named, from the plan's folder."
        ),
    ] = None,
    distinct: Annotated[
        bool, typer.Option("--distinct", help="Look each list up once per batch of a rank, in every table.")
    ] = False,
    unknown: Annotated[
        Literal["error", "drop"], typer.Option(help="What becomes of values that a profile's mapping has not.")
    ] = "error",
    as_json: AsJson = False,
) -> None:
    """Count what a plan would move for real batches, on any number of ranks, without running them.

    Data are read as each table's profile was: with its sample key, and its hash or mapping. Without a profile ids are
    rows of the table and samples rows of the files. A table that has a dedup_factor looks each list up once per batch
    of a rank, as does one that was profiled with --distinct-batch; with --distinct all do.

    Example: flexshard replay plan.json clicks.parquet --column item
    """
    loaded = planner.Plan.load(plan)
    columns = _by_table(loaded, column, "column")
    missing = [name for name in loaded.tables if name not in columns]
    if missing:
        raise JobError(f"which column holds the ids of table {missing[0]!r}? give --column {missing[0]}=COLUMN")
    rankings = {
        name: profiling.AccessProfile.load(path)
        for name, path in _ranking_files(loaded, plan.parent, profile or []).items()
    }
    if unknown != "error" and all(one.mapping is None for one in rankings.values()):
        raise JobError("--unknown is of values that a mapping has not, and no table was profiled with --mapping")
    with working("replaying"):
        size = loaded.settings.batch_size if batch_size is None else batch_size
        limit = steps * loaded.cluster.world_size * size
        samples = {
            name: profiling.read_samples(
                data, text, limit=limit, **_reading(loaded.table(name), rankings.get(name), unknown)
            )
            for name, text in columns.items()
        }
        result = executors.replay(
            loaded,
            executors.split_by_rank(
                samples,
                world_size=loaded.cluster.world_size,
                batch_size=size,
                deduplicated=[
                    name
                    for name, table in loaded.tables.items()
                    if distinct or table.dedup_factor > 1 or _counts_distinct(rankings.get(name))
                ],
            ),
            rankings,
        )
    # What the plan says holds for its own batch size.
    said = loaded.predicted if size == loaded.settings.batch_size else None
    grid = _grid(size, result, said)
    if any(table.cache is not None for table in loaded.tables.values()):
        grid.caption = f"{grid.caption}\nWhat caches fetch from the host and write back is not counted."
    emit(_document(result, said), as_json=as_json, text=grid)


def _reading(table: TablePlan, profile: AccessProfile | None, unknown: str) -> dict[str, Any]:
    """How a table's ids are read."""
    if profile is None:
        return {}
    how = {
        "sample_key": profile.sample_key,
        "hash": profile.hash,
        "num_rows": table.rows,
        "encoded_by": profile.encoded_by,
    }
    return how if profile.mapping is None else how | {"mapping": profile.mapping, "unknown": unknown}


def _counts_distinct(profile: AccessProfile | None) -> bool:
    return profile is not None and profile.distinct_batch is not None


def _by_table(plan: Plan, given: list[str], what: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for text in given:
        name, value = (table_and_file if what == "profile" else name_and_value)(text, plan.tables)
        if name is None:
            if len(plan.tables) > 1:
                raise JobError(f"--{what} {text}: the plan has {len(plan.tables)} tables; write TABLE={text}")
            name = next(iter(plan.tables))
        plan.table(name)
        if name in values:
            raise JobError(f"--{what}: table {name!r} is given {values[name]} and {value}; give it one")
        values[name] = value
    return values


def _ranking_files(plan: Plan, folder: Path, given: list[str]) -> dict[str, Path]:
    files = {name: Path(path) for name, path in _by_table(plan, given, "profile").items()}
    for name, table in plan.tables.items():
        if name not in files and table.profile_path is not None:
            path = folder / table.profile_path
            if len(table.tiers) > 1 or path.exists():  # a table of one tier is replayed without, by its ids
                files[name] = path
    return files


def _document(result: Replay, said: Cost | None) -> dict[str, Any]:
    return {
        "steps": result.steps,
        "world_size": result.world_size,
        "collectives": [
            {
                "kind": t.kind,
                "group_size": t.group_size,
                "content": t.content,
                "calls": t.calls,
                "bytes": t.mean_bytes,
                "imbalance": t.imbalance,
                "bytes_by_rank": t.sent.mean(axis=0).tolist(),
            }
            for t in result.traffic
        ],
        "all_to_all_scale_up_bytes_by_rank": result.all_to_all_scale_up_bytes.mean(axis=0).tolist(),
        "all_to_all_scale_out_bytes_by_rank": result.all_to_all_scale_out_bytes.mean(axis=0).tolist(),
        "static_memory_bytes": result.static_memory_bytes,
        "peak_memory_bytes": result.peak_memory_bytes,
        "fullest_memory_p999_bytes": result.fullest_quantile(QUANTILE),
        "predicted_p999_bytes": None if said is None else said.fullest_dynamic_bytes,
        "steps_above_predicted": _above(result, said),
    }


def _above(result: Replay, said: Cost | None) -> int | None:
    """Steps whose fullest rank has more than the plan says it has in one of a thousand."""
    if said is None or said.fullest_dynamic_bytes is None:
        return None
    return int((result.fullest_memory_bytes.max(axis=1) > said.fullest_dynamic_bytes).sum())


def _grid(batch_size: int, result: Replay, said: Cost | None) -> Grid:
    title = (
        f"Replayed: {result.steps} steps of {batch_size:,} samples on each of {result.world_size:,}"
        " ranks, per rank and step"
    )
    headings = ("calls", "mean", "fullest rank", "imbalance")
    grid = new_grid(title, ["collective", "content"], headings, ("imbalance",))
    for t in result.traffic:
        grid.add_row(
            f"{t.kind}@{t.group_size}",
            t.content,
            str(t.calls),
            units.format_bytes(t.mean_bytes),
            units.format_bytes(t.mean_bytes * t.imbalance),
            f"{t.imbalance:.3f}",
        )
    up, out = (a.mean(axis=0) for a in (result.all_to_all_scale_up_bytes, result.all_to_all_scale_out_bytes))
    nodes = out.reshape(-1, result.ranks_per_node).sum(axis=1)
    grid.caption = (
        f"All-to-all traffic but for counts, inside nodes: {units.format_bytes(float(up.max()))} per step out of the"
        f" busiest rank; between nodes: {units.format_bytes(float(nodes.max()))} out of the busiest node"
        f" ({nodes.max() / nodes.mean() if nodes.any() else 1.0:.3f} of the mean).\n"
        f"Memory: {units.format_bytes(result.static_memory_bytes)} static, at most"
        f" {units.format_bytes(result.peak_memory_bytes)} of the fullest rank in its fullest step.\n"
        "Beside static memory the fullest rank has at most"
        f" {units.format_bytes(result.fullest_quantile(QUANTILE))} in {QUANTILE:.1%} of these steps"
    )
    above = _above(result, said)
    if said is not None and above is not None:
        grid.caption += (
            f"; the plan says {units.format_bytes(said.fullest_dynamic_bytes or 0.0)}, which {above:,} of"
            f" {result.steps:,} exceed."
        )
    else:
        grid.caption += "."
    return grid
