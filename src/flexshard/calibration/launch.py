"""A process of a job that torchrun started."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flexshard._internal import first_line
from flexshard.errors import ClusterError, FlexShardError, MissingDependencyError

__all__ = ["Place", "process_group"]

_NUMBERS = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_PORT")
_ENDED = ("gloo", "nccl", "connection", "broken pipe")  # words of errors of ranks that are not there


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
        ClusterError: not started by torchrun; ranks that do not meet, or one that ends before the others.
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
    for name in (*_NUMBERS, "MASTER_ADDR"):
        if name not in os.environ:
            raise ClusterError(f"the environment has no {name}; {torchrun}")
        if name in _NUMBERS and not os.environ[name].isdecimal():
            raise ClusterError(f"the environment's {name} is {os.environ[name]!r}, not a number; {torchrun}")
    place, world = Place(*(int(os.environ[name]) for name in _NUMBERS[:3])), int(os.environ["WORLD_SIZE"])
    if place.rank >= world:
        raise ClusterError(f"the environment's RANK is {place.rank}, of a WORLD_SIZE of {world}; {torchrun}")
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank)
    try:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ClusterError(f"the {world} ranks did not meet at {where}: {first_line(error)}") from error
    try:
        yield place
    except RuntimeError as error:
        if isinstance(error, FlexShardError) or not any(word in str(error).lower() for word in _ENDED):
            raise
        raise ClusterError(
            f"another rank has ended, or cannot be reached any more: {first_line(error)}; start all of them again"
        ) from error
    finally:
        dist.destroy_process_group()
        gc.collect()  # gloo's threads end with their group, which models hold in cycles; later they may abort it all
