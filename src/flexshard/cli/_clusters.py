"""Commands on clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as Grid

from flexshard import units
from flexshard._grids import new_grid
from flexshard._launch import process_group
from flexshard._terminal import emit, say
from flexshard.cli._app import AsJson, app
from flexshard.topologies import Cluster, cluster_document, load_preset, measure_cluster, preset_names


@app.command("clusters")
def clusters_command(
    name: Annotated[
        str | None, typer.Argument(help="A preset, preset:nodes, or a cluster file; none lists the presets.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write it as a cluster file.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the cluster presets, or show one with its sources."""
    if name is None:
        presets = [load_preset(preset) for preset in preset_names()]
        headings = ["name", "ranks", "memory per rank", "what it is"]
        grid = new_grid("Cluster presets (write NAME:NODES for another size)", headings)
        for preset in presets:
            c = preset.cluster()
            memory = units.format_bytes(c.hbm_bytes)
            grid.add_row(preset.name, f"{c.nodes} x {c.ranks_per_node}", memory, preset.title)
        emit([cluster_document(preset.cluster()) for preset in presets], as_json=as_json, text=grid)
        return
    cluster = Cluster.resolve(name)
    if output is not None:
        cluster.save(output)
    emit(cluster_document(cluster), as_json=as_json, text=_cluster_grid(cluster))
    preset_name = name.partition(":")[0]
    if preset_name in preset_names() and not as_json:
        sources = new_grid("Sources", ["figure", "value", "source", "date"])
        for row in load_preset(preset_name).figures():
            sources.add_row(*row)
        say(sources)


def _cluster_grid(cluster: Cluster) -> Grid:
    title = (
        f"{cluster.name}: {cluster.nodes} nodes x {cluster.ranks_per_node} ranks,"
        f" {units.format_bytes(cluster.hbm_bytes)} per rank, {units.format_bytes(cluster.reserve_bytes)} reserved"
    )
    grid = new_grid(title, ["group size", "all-to-all inside groups", "all-reduce across groups", "from"])
    for level in cluster.levels:
        rates = (level.all_to_all, level.all_reduce)
        cells = [
            "-" if r is None else f"{units.format_seconds(r.alpha_seconds)} + {units.format_bandwidth(r.bytes_per_s)}"
            for r in rates
        ]
        grid.add_row(str(level.group_size), *cells, ", ".join(dict.fromkeys(r.source for r in rates if r is not None)))
    return grid


@app.command("measure")
def measure_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="Cluster file to write.")],
    memory: Annotated[
        str | None, typer.Option(help="Memory of one rank, such as '80 GB'; the GPU's by default.")
    ] = None,
    reserve: Annotated[str, typer.Option(help="Of it, for everything but embeddings.")] = "0 B",
    name: Annotated[str, typer.Option(help="Name of the cluster.")] = "measured",
    ranks_per_node: Annotated[int | None, typer.Option(help="By default torchrun's, those of one machine.")] = None,
    sizes: Annotated[
        str, typer.Option(help="Buffers of one rank to time, separated by commas.")
    ] = "64 KiB,1 MiB,8 MiB,32 MiB",
    repeats: Annotated[int, typer.Option(min=1, help="Timings of each size; their median is used.")] = 7,
    as_json: AsJson = False,
) -> None:
    """Time the collectives of this cluster and fit alpha and beta; run it under torchrun."""
    with process_group() as place:
        cluster = measure_cluster(
            name=name,
            memory_bytes=units.parse_bytes(memory) if memory is not None else place.device_memory_bytes(),
            reserve_bytes=units.parse_bytes(reserve),
            ranks_per_node=place.ranks_per_node if ranks_per_node is None else ranks_per_node,
            sizes=[int(units.parse_bytes(size)) for size in sizes.split(",")],
            repeats=repeats,
        )
        if place.rank == 0:
            cluster.save(output)
            emit(cluster_document(cluster), as_json=as_json, text=_cluster_grid(cluster))
