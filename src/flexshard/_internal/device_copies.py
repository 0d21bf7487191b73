"""Small arrays from the host to a device and back, with as few waits of the host as may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

__all__ = [
    "HostCopy",
    "host_waits_for",
    "run_numbers",
    "run_starts",
    "runs_of",
    "segment_of",
    "segment_within",
    "spread",
    "spread_on",
    "to_device",
]

IntArray = npt.NDArray[np.int64]


def host_waits_for(device: torch.device) -> bool:
    """Whether reading a number of a tensor makes the host wait until the device has come to it."""
    return bool(device.type != "cpu")


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array on a device, of its shape and type; the host does not wait for it, and must not write to it again."""
    import torch

    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def _shifts(first: IntArray, counts: IntArray) -> tuple[IntArray, IntArray, int]:
    """From places among all cells' numbers to the numbers, of each cell; how many it has; and all have."""
    flat = np.ravel(counts)
    return np.ravel(first) - (np.cumsum(flat) - flat), flat, int(flat.sum())


def spread(first: IntArray, counts: IntArray) -> IntArray:
    """``first, first + 1, ...`` of every cell, one cell after the other.

    Args:
        first, counts: of one shape.

    Returns:
        Shape (sum of counts,), int64.
    """
    shifts, flat, total = _shifts(first, counts)
    return np.repeat(shifts, flat).astype(np.int64, copy=False) + np.arange(total)


def spread_on(first: IntArray, counts: IntArray, device: torch.device) -> torch.Tensor:
    """The same on a device."""
    import torch

    if not host_waits_for(device):  # NumPy takes a fifth of the time of torch on the CPU
        return torch.from_numpy(spread(first, counts))
    shifts, flat, total = _shifts(first, counts)
    cells = to_device(np.stack([shifts, flat]).astype(np.int64), device)
    repeated = torch.repeat_interleave(cells[0], cells[1], output_size=total)
    return repeated.add_(torch.arange(total, device=device))


def segment_of(lengths: IntArray, device: torch.device) -> torch.Tensor:
    """Which of the segments, one behind the other, each item is in; shape (sum of lengths,), int64, on a device.

    (CUDA's ``repeat_interleave`` has one warp for a segment, however long.)
    """
    ends = np.cumsum(lengths)
    return segment_within(to_device(ends, device), int(ends[-1]) if len(ends) else 0)


def segment_within(ends: torch.Tensor, number: int) -> torch.Tensor:
    """The same of so many items, by where segments end; on the device of these."""
    import torch

    return torch.bucketize(torch.arange(number, device=ends.device), ends, right=True)


class HostCopy:
    """Numbers of a tensor on their way to the host, which only waits where it reads them before they have come."""

    def __init__(self, numbers: torch.Tensor) -> None:
        import torch

        self._event: torch.cuda.Event | None = None
        self._host = numbers
        if numbers.device.type == "cuda":
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def numbers(self) -> npt.NDArray[Any]:
        """On the host, of the tensor's shape and type."""
        if self._event is not None:
            self._event.synchronize()
        found: npt.NDArray[Any] = self._host.numpy()
        return found


def run_starts(ascending: torch.Tensor) -> torch.Tensor:
    """Where other numbers than those before begin; shape (n,), bool."""
    import torch

    starts = torch.ones_like(ascending, dtype=torch.bool)
    starts[1:] = ascending[1:] != ascending[:-1]
    return starts


def run_numbers(ascending: torch.Tensor) -> torch.Tensor:
    """Of each number its own among the distinct ones; shape (n,), int64."""
    import torch

    numbers = torch.zeros_like(ascending, dtype=torch.int64)
    torch.cumsum(ascending[1:] != ascending[:-1], 0, out=numbers[1:])
    return numbers


def runs_of(values: torch.Tensor, beyond: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct numbers without a wait for how many there are.

    Args:
        values: shape (n,), whole numbers below ``beyond``.
        beyond: what stands in the result behind the distinct ones.

    Returns:
        The distinct ones, ascending, then ``beyond``; shape (n,). And of each value its own among them; shape (n,).
    """
    import torch

    ordered, order = torch.sort(values, stable=True)
    run = run_numbers(ordered)
    distinct = torch.full_like(values, beyond).scatter_(0, run, ordered)
    return distinct, torch.empty_like(run).scatter_(0, order, run)
