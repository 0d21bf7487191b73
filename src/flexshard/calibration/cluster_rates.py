"""Measuring a cluster: time the collectives of every level on live process groups, and fit α and β.

Runs in every rank at once (under torchrun). All groups of a level work at the same time, as they do in training, and a
call takes as long as its slowest rank. Each collective is timed at several sizes; α and β are fitted to the medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flexshard import units
from flexshard._internal import device_of_group, level_groups, moment, seconds_between
from flexshard.errors import ClusterError, MissingDependencyError
from flexshard.topologies import Cluster, CollectiveRate, Level

if TYPE_CHECKING:
    import torch

__all__ = ["Fit", "fit_rate", "measure_cluster"]

_SIZES = (1 << 16, 1 << 20, 1 << 23, 1 << 25)
_SIZES_ON_CUDA = (1 << 18, 1 << 22, 1 << 25, 1 << 29)
_ATTEMPTS = 6
_TOO_FEW = "a fit of alpha and beta needs times of at least two sizes; give more --sizes"

Timer = Callable[[str, int, int], float]


@dataclass(frozen=True)
class Fit:
    """A line through timed sizes: ``alpha_seconds + bytes / bytes_per_s``.

    Attributes:
        alpha_seconds, bytes_per_s: of one call.
        error: largest relative distance of a timed size from the line.
    """

    alpha_seconds: float
    bytes_per_s: float
    error: float


def fit_rate(nbytes: npt.ArrayLike, seconds: npt.ArrayLike) -> Fit:
    """Least squares of *relative* errors, so that small sizes count as much as large ones; α is at least 0.

    Args:
        nbytes: buffer sizes of one rank, at least two different ones; shape (n,).
        seconds: time of one call at each; shape (n,).

    Raises:
        ClusterError: fewer than two sizes, or times that do not grow with them.
    """
    n, t = np.asarray(nbytes, np.float64), np.asarray(seconds, np.float64)
    if np.unique(n).size < 2 or np.any(t <= 0):
        raise ClusterError(_TOO_FEW)
    scale = n.max()  # keeps the two columns comparable
    columns = np.stack([1 / t, n / scale / t], axis=1)
    (alpha, at_scale), *_ = np.linalg.lstsq(columns, np.ones(n.size), rcond=None)
    per_byte = float(at_scale / scale)
    if alpha < 0:
        alpha, per_byte = np.float64(0.0), float((n / t).sum() / np.square(n / t).sum())
    if per_byte <= 0:
        raise ClusterError("times do not grow with sizes, so there is no bandwidth to fit; use larger --sizes")
    error = float(np.abs((alpha + per_byte * n) / t - 1).max())
    return Fit(float(alpha), float(1 / per_byte), error)


def _fit(sizes: Sequence[int], timer: Callable[[int], float]) -> tuple[Fit, int]:
    """``fit_rate`` of timed calls, and how often all were timed.

    Where a larger message took no longer than a smaller one, as beside other processes that take a processor for a
    moment, they are timed again, and each size keeps its shortest time: what disturbs makes calls longer only.
    """
    sizes = sorted(set(sizes))
    shortest, attempts = np.array([timer(size) for size in sizes]), 1
    while np.any(np.diff(shortest) <= 0) and attempts < _ATTEMPTS:
        shortest, attempts = np.minimum(shortest, [timer(size) for size in sizes]), attempts + 1
    return fit_rate(sizes, shortest), attempts


def measure_cluster(
    *,
    name: str,
    memory_bytes: float,
    reserve_bytes: float,
    ranks_per_node: int,
    group_sizes: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    repeats: int = 7,
) -> Cluster:
    """Measure the cluster that the default process group spans; every rank must call it.

    Args:
        name: of the cluster.
        memory_bytes, reserve_bytes: of one rank. Under NCCL, what its communicators took is added to the reserve.
        ranks_per_node: W.
        group_sizes: levels to measure, 1 and all ranks included; by default 1, W and all.
        sizes: buffer of one rank, in bytes, of each timing; by default 64 KiB to 32 MiB, under NCCL 256 KiB to 512 MiB,
            since NVLink is not busy below.
        repeats: timings of each size, after two that are not counted; their median is used.

    Raises:
        MissingDependencyError: torch is not installed.
        ClusterError: sizes or levels that do not fit together, no name, or more reserve than memory; times that do
            not grow with sizes, however often they are taken.
    """
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise MissingDependencyError(f"measuring needs torch; install the build for your machine ({error})") from error
    from flexshard._internal import runs_gloo

    device, world = device_of_group(), dist.get_world_size()
    if sizes is None:
        sizes = _SIZES_ON_CUDA if device.type == "cuda" else _SIZES
    levels = sorted({1, ranks_per_node, world} if group_sizes is None else set(group_sizes))
    uneven = [size for size in levels if size < 1 or world % size]
    if uneven or min(sizes, default=0) < 1:
        what = f"group size {uneven[0]} does not divide the {world} ranks" if uneven else "sizes must be above 0 bytes"
        raise ClusterError(f"{what}; nothing was measured")
    if len(set(sizes)) < 2:
        raise ClusterError(_TOO_FEW)
    Cluster(name, 1, 1, memory_bytes, reserve_bytes, (Level(1),))  # what cannot be is said before anything is timed
    free = _free_bytes(device)
    timer = _timer(device, levels, repeats)
    nodes = world // ranks_per_node
    what = f"{dist.get_backend()} over {nodes} nodes x {ranks_per_node} ranks, {time.strftime('%Y-%m-%d')}"

    def rate(kind: str, group_size: int) -> CollectiveRate:
        fit, attempts = _fit(sizes, lambda size: timer(kind, group_size, size))
        medians = f"medians of {repeats}" + (f" (shortest of {attempts})" if attempts > 1 else "")
        span = f"{len(sizes)} sizes of {units.format_bytes(min(sizes))} to {units.format_bytes(max(sizes))}"
        note = f"{span}, {medians}, fitted within {fit.error:.0%}; {what}"
        return CollectiveRate(fit.alpha_seconds, fit.bytes_per_s, "measured", note)

    def level(size: int) -> Level:
        inside, across, gloo = size > 1, size < world, runs_gloo(device)
        return Level(
            size,
            all_to_all=rate("all_to_all", size) if inside else None,
            all_reduce=rate("all_reduce", size) if across else None,
            own_all_gather=rate("all_gather", size) if across else None,
            own_reduce_scatter=rate("reduce_scatter", size) if across else None,
            torchrec_all_to_all=rate("torchrec_all_to_all", size) if inside and gloo else None,
        )

    measured = tuple(level(size) for size in levels)
    taken = _largest(max(free - _free_bytes(device), 0), device)
    return Cluster(name, nodes, ranks_per_node, memory_bytes, reserve_bytes + taken, measured)


def _free_bytes(device: torch.device) -> int:
    """Memory of the device that nothing holds; 0 on CPUs, whose groups hold next to none."""
    import torch

    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def _largest(number: float, device: torch.device) -> float:
    """Of all ranks."""
    import torch
    import torch.distributed as dist

    largest = torch.tensor(float(number), dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def _timer(device: torch.device, levels: Sequence[int], repeats: int) -> Timer:
    """A function of (kind, group size, bytes) that every rank calls alike and that gives all the same seconds."""
    import torch
    import torch.distributed as dist

    from flexshard._internal import all_to_all

    groups = level_groups(levels)

    def synchronise() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def seconds(kind: str, group_size: int, nbytes: int) -> float:
        group = groups[group_size].inside if kind.endswith("all_to_all") else groups[group_size].across
        members = dist.get_world_size(group)
        elements = max(nbytes // 4 // members, 1) * members
        even = [elements // members] * members
        try:
            sent = torch.zeros(elements, dtype=torch.float32, device=device)
            received, part = torch.empty_like(sent), torch.empty(elements // members, dtype=sent.dtype, device=device)
        except (MemoryError, RuntimeError) as error:
            size = units.format_bytes(nbytes)
            raise ClusterError(f"buffers of {size} do not fit a rank's memory; time smaller sizes") from error
        calls: dict[str, Callable[[], object]] = {
            "all_to_all": lambda: all_to_all(received, sent, even, even, group).wait(),
            "torchrec_all_to_all": lambda: dist.all_to_all_single(received, sent, group=group),
            "all_reduce": lambda: dist.all_reduce(sent, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(received, part, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, sent, group=group),
        }
        times = []
        for _ in range(repeats + 2):
            dist.barrier()
            synchronise()
            start = moment(device)
            calls[kind]()
            times.append(seconds_between(start, moment(device)))
        # A collective is over when its slowest rank is; the same figure on all ranks gives the same cluster.
        slowest = torch.tensor(times[2:], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest.median())

    return seconds
