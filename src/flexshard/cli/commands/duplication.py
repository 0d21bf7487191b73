"""``flexshard duplication``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexshard import ingestion, plots
from flexshard._internal import folder_for, new_grid, replacing_all
from flexshard.cli.app import AsJson, app
from flexshard.cli.outputs import check_folder
from flexshard.cli.terminal import emit, working

if TYPE_CHECKING:
    from rich.console import RenderableType

    from flexshard.ingestion import Duplication


@app.command("duplication")
def duplication_command(
    data: Annotated[list[str], typer.Argument(help="Parquet files, globs, folders or URLs.")],
    session: Annotated[str, typer.Option(help="Column whose distinct values are the sessions.")],
    feature: Annotated[list[str] | None, typer.Option(help="Column of a feature; by default all of lists.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows of a batch.")] = 4096,
    threshold: Annotated[float, typer.Option(help="DedupFactor above which a feature is proposed.")] = 1.5,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for sessions.png and duplication.png.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how much of a dataset its sessions repeat, and which features to deduplicate together.

    Example: flexshard duplication by_session --session session -o pictures
    """
    check_folder(output)
    with working("measuring"):
        duplication = ingestion.measure_duplication(data, session=session, features=feature, batch_size=batch_size)
        names = [one.feature for one in duplication.features]
        how: dict[str, Any] = {"batch_size": batch_size, "threshold": threshold}
        partial = {
            newest: ingestion.suggest_partial(data, features=those, newest=newest, **how)
            for newest in ("last", "first")
            if (those := [one.feature for one in duplication.features if one.newest == newest])
        }
        taken = {name for groups in partial.values() for group in groups for name in group}
        rest = [name for name in names if name not in taken]
        groups = ingestion.suggest_groups(data, features=rest, **how) if rest else []
    pictures = []
    if output is not None:
        pictures = [output / "sessions.png", output / "duplication.png"]
        with folder_for(output), replacing_all(pictures) as drafts:
            plots.plot_sessions(duplication, drafts[0])
            plots.plot_duplication(duplication, drafts[1])
    document = _duplication_document(duplication) | {"groups": groups, "partial": partial}
    document |= {"pictures": [str(path) for path in pictures]}
    emit(document, as_json=as_json, text=_duplication_text(duplication, groups, partial, pictures))


def _duplication_document(duplication: Duplication) -> dict[str, Any]:
    return {
        "rows": duplication.rows,
        "sessions": int(duplication.session_sizes.size),
        "batch_size": duplication.batch_size,
        "samples_per_session": duplication.samples_per_session,
        "samples_per_session_in_batch": duplication.samples_per_session_in_batch,
        "samples_per_row": duplication.samples_per_row,
        "features": [asdict(one) for one in duplication.features],
        "overall": {
            name: dict(zip(("exact", "partial"), duplication.overall(weighted=weighted), strict=True))
            for name, weighted in (("by_feature", False), ("by_length", True))
        },
    }


def _duplication_text(
    duplication: Duplication, groups: list[list[str]], partial: dict[str, list[list[str]]], pictures: list[Path]
) -> RenderableType:
    title = (
        f"{duplication.rows:,} rows of {duplication.session_sizes.size:,} sessions:"
        f" {duplication.samples_per_session:.2f} per session,"
        f" {duplication.samples_per_session_in_batch:.2f} in a batch of {duplication.batch_size:,}, where"
        f" {duplication.samples_per_row:.2f} have a row in common"
    )
    numbers = ["length", "exact", "partial", "d", "DedupFactor predicted", "measured", "per list", "runs", "per id"]
    grid = new_grid(title, ["feature"], numbers, ("d", "runs", "per list", "per id", "length"))
    for one in duplication.features:
        shares = (f"{share:.1%}" for share in (one.exact, one.partial, one.same))
        factors = (one.predicted, one.measured, one.lists, one.runs, one.ids)
        grid.add_row(one.feature, f"{one.avg_length:.1f}", *shares, *(f"{factor:.2f}" for factor in factors))
    for name, weighted in (("all features", False), ("all ids (by length)", True)):
        grid.add_row(name, "", *(f"{share:.1%}" for share in duplication.overall(weighted=weighted)), *[""] * 6)
    lines: list[RenderableType] = [grid, f"groups to deduplicate: {_listed(groups) or 'none is above the threshold'}"]
    for newest, grown in partial.items():
        if grown:
            lines.append(f"to deduplicate partially (newest {newest}): {_listed(grown)}")
    if pictures:
        lines.append(f"written to {', '.join(str(path) for path in pictures)}")
    from rich.console import Group

    return Group(*lines)


def _listed(groups: list[list[str]]) -> str:
    return ", ".join(f"[{', '.join(group)}]" for group in groups)
