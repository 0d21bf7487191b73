"""``flexshard export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flexshard import planner
from flexshard.cli.app import AsJson, PlanFile, app, written
from flexshard.cli.outputs import Force, check_output
from flexshard.cli.terminal import say
from flexshard.errors import PlanError


@app.command("export")
def export_command(
    plan: PlanFile,
    to: Annotated[Literal["torchrec", "torcheasyrec"], typer.Option(help="Whose file to write.")],
    module: Annotated[
        list[str],
        typer.Option(help="Path of the collection in the model, such as sparse.ebc; or TABLE=PATH, once for each."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")],
    device: Annotated[
        Literal["cuda", "cpu"] | None, typer.Option(help="Where TorchRec is to place shards; cuda by default.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a plan of whole tables as TorchRec's ShardingPlan (for torch.load), or as the plan file of a TorchEasyRec
    checkpoint. Tables in tiers are FlexShard's own, and refused.

    Example: flexshard export plan.json --to torchrec --module sparse.ebc -o sharding_plan.pt
    """
    if device is not None and to != "torchrec":
        raise PlanError("--device is about plans of TorchRec; TorchEasyRec places shards where it trains")
    check_output(output, to, inputs=[plan], force=force)
    loaded = planner.Plan.load(plan)
    modules = planner.modules_of(loaded, module)
    if to == "torchrec":
        planner.export_torchrec(loaded, modules, output, device=device or "cuda")
    else:
        planner.export_torcheasyrec(loaded, modules, output)
    written(output, as_json)
    types = {name: table.dtype for name, table in loaded.tables.items()}
    types |= {name: table.dtype for name, table in loaded.pooled.items()}
    other = [f"{name} {dtype}" for name, dtype in types.items() if dtype != "float32"]
    if other and not as_json:
        say(f"types are the model's own, which has to have these tables as they were planned: {', '.join(other)}")
