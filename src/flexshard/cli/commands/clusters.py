"""``flexshard clusters``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexshard import topologies, units
from flexshard._internal import new_grid
from flexshard.cli.app import AsJson, app
from flexshard.cli.cluster_grid import cluster_grid
from flexshard.cli.outputs import Force, check_output
from flexshard.cli.terminal import emit, say
from flexshard.errors import ClusterError


@app.command("clusters")
def clusters_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A preset, preset:nodes, or a cluster file; none lists the presets.",
            autocompletion=topologies.preset_names,
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write it as a cluster file.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """List the cluster presets, or show one with its sources.

    Example: flexshard clusters dgx-h100:128
    """
    if name is None:
        if output is not None:
            raise ClusterError("which cluster is to be written? give a preset's name, or a cluster file")
        presets = [topologies.load_preset(preset) for preset in topologies.preset_names()]
        headings = ["name", "ranks", "memory per rank", "what it is"]
        grid = new_grid("Cluster presets (write NAME:NODES for another size)", headings)
        for preset in presets:
            c = preset.cluster()
            memory = units.format_bytes(c.hbm_bytes)
            grid.add_row(preset.name, f"{c.nodes} x {c.ranks_per_node}", memory, preset.title)
        emit([topologies.cluster_document(preset.cluster()) for preset in presets], as_json=as_json, text=grid)
        return
    if output is not None:
        check_output(output, "flexshard.cluster", force=force)
    cluster = topologies.Cluster.resolve(name)
    if output is not None:
        cluster.save(output)
    emit(topologies.cluster_document(cluster), as_json=as_json, text=cluster_grid(cluster))
    preset_name = name.partition(":")[0]
    if preset_name in topologies.preset_names() and not as_json:
        sources = new_grid("Sources", ["figure", "value", "source", "date"])
        for row in topologies.load_preset(preset_name).figures():
            sources.add_row(*row)
        say(sources)
