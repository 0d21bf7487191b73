"""``flexshard encode``."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flexshard import profiling
from flexshard._internal import new_grid
from flexshard.cli.app import AsJson, app
from flexshard.cli.outputs import Force, check_output
from flexshard.cli.terminal import emit, working
from flexshard.errors import DataError

if TYPE_CHECKING:
    from flexshard._internal import Grid
    from flexshard.profiling import EncodedColumn


@app.command("encode")
def encode_command(
    data: Annotated[list[str], typer.Argument(help="Parquet, CSV or JSON files, globs or folders.")],
    column: Annotated[
        list[str],
        typer.Option(help="Column to encode, once for each; event.item_id is a field."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Parquet file to write; mappings go beside it.")],
    separator: Annotated[str | None, typer.Option(help="Cut texts into lists at this, such as '|'.")] = None,
    nulls: Annotated[
        Literal["drop", "keep"] | None,
        typer.Option(help="Null ids: drop them, or keep them (a row of their own); by default an error."),
    ] = None,
    mapping: Annotated[
        list[str] | None, typer.Option(help="COLUMN=FILE, or FILE: use this mapping instead of a new one.")
    ] = None,
    unknown: Annotated[
        Literal["error", "drop"], typer.Option(help="What becomes of values that such a mapping has not.")
    ] = "error",
    memory: Annotated[str | None, typer.Option(help="That sorting may take, such as 4GiB.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Number any values by how often they occur, so that they are rows of a table; save the mapping.

    Example: flexshard encode clicks.csv --column item --column user -o clicks.parquet
    """
    given = dict(_mapping(text, column) for text in mapping or [])
    check_output(output, "parquet", inputs=[*data, *given.values()], force=force)
    for made in (profiling.mapping_path(output, name) for name in column if name not in given):
        check_output(made, "flexshard.mapping", inputs=data, force=force)
    with working("encoding"):
        found = profiling.encode(
            data,
            output,
            columns=column,
            mappings=dict(given),
            separator=separator,
            nulls=nulls,
            unknown=unknown,
            memory=memory,
        )
    document = {"path": str(output), "columns": [_document(each) for each in found]}
    emit(document, as_json=as_json, text=_grid(found, output))


def _mapping(text: str, columns: list[str]) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if equals and name in columns:
        return name, path
    if len(columns) > 1:
        raise DataError(f"--mapping {text}: {len(columns)} columns are encoded; write COLUMN={text}")
    return columns[0], text


def _document(found: EncodedColumn) -> dict[str, Any]:
    own = found.mapping
    return {
        "column": own.column,
        "rows": own.rows,
        "ids": found.ids,
        "dropped": found.dropped,
        "lists": found.is_list,
        "mapping": own.path,
    }


def _grid(found: list[EncodedColumn], output: Path) -> Grid:
    grid = new_grid(
        "Encoded columns, the most frequent value first", ["column", "mapping"], ["rows", "ids", "left out"]
    )
    for each in found:
        cells = (f"{each.mapping.rows:,}", f"{each.ids:,}", f"{each.dropped:,}")
        grid.add_row(each.mapping.column, each.mapping.path, *cells)
    first = found[0].mapping
    grid.caption = (
        f"written to {output}; next: flexshard profile {quote(str(output))} --column {quote(first.column)}"
        f" --rows {first.rows} -o {quote(first.column.replace('/', '_') + '.profile.parquet')}"
    )
    return grid
