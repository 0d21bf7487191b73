"""Moments on the host or on a device, and the time between them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["Moment", "device_of_group", "moment", "seconds_between"]


@dataclass(frozen=True)
class Moment:
    """When the host was somewhere, or when a device will have come there.

    Attributes:
        host: by ``time.perf_counter``.
        event: on the device's current stream; None on the host.
    """

    host: float
    event: torch.cuda.Event | None = None


def moment(device: torch.device | None = None) -> Moment:
    """Now; on CUDA, when the current stream has come here, for which the host does not wait."""
    event: Any = None
    if device is not None and device.type == "cuda":
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
    return Moment(time.perf_counter(), event)


def seconds_between(first: Moment, last: Moment) -> float:
    """From one to another; waits until the device has come there."""
    if first.event is None or last.event is None:
        return last.host - first.host
    last.event.synchronize()
    return float(first.event.elapsed_time(last.event)) / 1e3


def device_of_group(process_group: dist.ProcessGroup | None = None) -> torch.device:
    """Where a group's tensors are: on this process's GPU where NCCL carries them, alone or beside another backend."""
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD if process_group is None else process_group
    if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
