"""A process of a job that torchrun started."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flexshard.errors import ClusterError, MissingDependencyError

__all__ = ["Place", "process_group"]

_NUMBERS = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")


@dataclass(frozen=True)
class Place:
    """Where a process stands in its job.

    Attributes:
        rank: of all ranks.
        local_rank: of those of its machine.
        ranks_per_node: how many its machine has.
    """

    rank: int
    local_rank: int
    ranks_per_node: int

    def device_memory_bytes(self) -> float:
        """Memory of the GPU of this rank.

        Raises:
            ClusterError: it has none.
        """
        import torch

        if not torch.cuda.is_available():
            raise ClusterError("there is no GPU to ask for its memory; say how much a rank has with --memory")
        return float(torch.cuda.get_device_properties(self.local_rank).total_memory)


@contextmanager
def process_group() -> Iterator[Place]:
    """Join the job's default process group (NCCL where there are GPUs, else gloo), and leave it at the end.

    Raises:
        ClusterError: not started by torchrun.
        MissingDependencyError: torch is not installed.
    """
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise MissingDependencyError(f"this needs torch; install the build for your machine ({error})") from error
    torchrun = (
        "start this under torchrun, such as 'torchrun --nproc-per-node 8 --no-python flexshard measure -o c.yaml'"
    )
    for name in (*_NUMBERS, "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ClusterError(f"the environment has no {name}; {torchrun}")
        if name in _NUMBERS and not os.environ[name].isdecimal():
            raise ClusterError(f"the environment's {name} is {os.environ[name]!r}, not a number; {torchrun}")
    place = Place(*(int(os.environ[name]) for name in _NUMBERS[:3]))
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield place
    finally:
        dist.destroy_process_group()
        gc.collect()  # gloo's threads end with their group, which models hold in cycles; later they may abort it all
