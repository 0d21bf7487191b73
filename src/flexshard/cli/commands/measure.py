"""``flexshard measure``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexshard import calibration, topologies, units
from flexshard.cli.app import AsJson, app
from flexshard.cli.cluster_grid import cluster_grid
from flexshard.cli.outputs import Force, check_output, check_place
from flexshard.cli.terminal import emit


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
        str | None,
        typer.Option(
            help="Buffers of one rank to time, separated by commas; 64 KiB to 32 MiB by default, with NCCL 256 KiB to"
            " 512 MiB."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timings of each size; their median is used.")] = 7,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Time the collectives of this cluster and fit alpha and beta; run it under torchrun.

    Example: torchrun --nproc-per-node 8 --no-python flexshard measure -o cluster.yaml
    """
    check_output(output, "flexshard.cluster", force=force)
    check_place(output)
    held = None if memory is None else units.parse_bytes(memory)
    kept = units.parse_bytes(reserve)
    timed = None if sizes is None else [int(units.parse_bytes(size)) for size in sizes.split(",")]
    with calibration.process_group() as member:
        cluster = calibration.measure_cluster(
            name=name,
            memory_bytes=member.device_memory_bytes() if held is None else held,
            reserve_bytes=kept,
            ranks_per_node=member.ranks_per_node if ranks_per_node is None else ranks_per_node,
            sizes=timed,
            repeats=repeats,
        )
        if member.rank == 0:
            cluster.save(output)
            emit(topologies.cluster_document(cluster), as_json=as_json, text=cluster_grid(cluster))
