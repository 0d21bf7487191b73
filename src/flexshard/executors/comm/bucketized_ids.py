"""A batch's locations, sorted by the ranks that they are sent to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from flexshard._internal import host_waits_for, runs_of, to_device

__all__ = ["BucketizedIds", "bucketize"]

# FBGEMM's kernel on CUDA has one thread for each of its lengths.
_IDS_PER_THREAD = 64


@dataclass
class BucketizedIds:
    """Lookups of a batch in the order in which they are sent: by level, by the local rank that holds the row, by class.

    Attributes:
        slots: of each row in its holder; shape (n,), or longer with no meaning behind those of all buckets.
        counts: how many of each class go to each bucket; shape (buckets, K).
        index: of each of the batch's lookups among ``slots``; shape (lookups,). With index deduplication several
            lookups share one.
        lookups: of each class; they stand one class after the other.
        shared: whether lookups may share an index.
    """

    slots: torch.Tensor
    counts: torch.Tensor
    index: torch.Tensor
    lookups: tuple[int, ...]
    shared: bool


def bucketize(
    locations: torch.Tensor,
    lookups: Sequence[int],
    class_slots: torch.Tensor,
    num_buckets: int,
    *,
    index_dedup: bool,
) -> BucketizedIds:
    """Sort a batch's locations into buckets.

    Args:
        locations: of the batch's lookups, those of one class after those of another; shape (lookups,).
        lookups: how many each class has; K of them.
        class_slots: first slot of each class, and the number of a rank's slots; shape (K + 1,), the locations' type.
        num_buckets: of all levels.
        index_dedup: send each row at most once.
    """
    if index_dedup:
        slots, counts, index = _distinct(locations, class_slots, num_buckets)
    elif _has_kernel(locations.device.type):
        slots, counts, index = _by_fbgemm(locations, lookups, class_slots[-1:], num_buckets)
    else:
        slots, counts, index = _sorted(locations, lookups, class_slots[-1:], num_buckets)
    return BucketizedIds(slots, counts, index.long(), tuple(lookups), index_dedup)


@cache
def _has_kernel(device: str) -> bool:
    """Whether FBGEMM is there with kernels for a kind of device."""
    has: bool = torch._C._dispatch_has_kernel_for_dispatch_key(
        "fbgemm::block_bucketize_sparse_features", device.upper()
    )
    return has


Bucketized = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _by_fbgemm(locations: torch.Tensor, lookups: Sequence[int], slots: torch.Tensor, num_buckets: int) -> Bucketized:
    """Lookups in parts, each of one class, as many features to FBGEMM with a batch of one."""
    kind, classes = locations.dtype, len(lookups)
    if host_waits_for(locations.device):  # no more counts than there are lookups
        lengths, class_of = _parts(lookups, max(_IDS_PER_THREAD, num_buckets))
    else:
        lengths, class_of = np.array(lookups), np.arange(classes)
    parts = to_device(np.stack([lengths, class_of]), locations.device)
    counts, bucketized, _, _, index = torch.ops.fbgemm.block_bucketize_sparse_features(
        lengths=parts[0].to(kind),
        indices=locations,
        bucketize_pos=False,
        sequence=True,
        block_sizes=slots.expand(len(lengths)).contiguous(),
        my_size=num_buckets,
    )
    counts = counts.view(num_buckets, -1)
    if len(lengths) > classes:
        counts = counts.new_zeros(num_buckets, classes).index_add_(1, parts[1], counts)
    return bucketized, counts, index


def _parts(lookups: Sequence[int], size: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]:
    """Lookups in parts of at most so many: how many each has, and its class; shape (parts,) each."""
    number = np.maximum(-(-np.array(lookups, np.int64) // size), 1)
    class_of = np.repeat(np.arange(len(lookups)), number)
    lengths = np.full(len(class_of), size)
    last = np.cumsum(number) - 1
    lengths[last] = np.array(lookups) - (number - 1) * size
    return lengths, class_of


def _sorted(locations: torch.Tensor, lookups: Sequence[int], slots: torch.Tensor, num_buckets: int) -> Bucketized:
    """The same in torch alone."""
    device, classes = locations.device, len(lookups)
    buckets = torch.div(locations, slots, rounding_mode="floor")
    order = torch.sort(buckets, stable=True).indices
    index = torch.empty_like(order)
    index[order] = torch.arange(len(order), device=device)
    number = to_device(np.array(lookups), device)
    class_of = torch.repeat_interleave(torch.arange(classes, device=device), number, output_size=len(locations))
    counts = locations.new_zeros(num_buckets * classes)
    counts.index_add_(0, buckets.long() * classes + class_of, torch.ones_like(locations))
    return torch.remainder(locations, slots)[order], counts.view(num_buckets, classes), index


def _distinct(locations: torch.Tensor, class_slots: torch.Tensor, num_buckets: int) -> Bucketized:
    """Each location once, in ascending order."""
    kind, device, slots = locations.dtype, locations.device, class_slots[-1:]
    if host_waits_for(device):
        distinct, index = runs_of(locations, slots * num_buckets)
    else:
        distinct, index = torch.unique(locations, return_inverse=True)
    buckets = torch.arange(num_buckets, dtype=kind, device=device) * slots
    first = (buckets.view(-1, 1) + class_slots[:-1]).view(-1)
    ends = torch.searchsorted(distinct, torch.cat([first, slots * num_buckets]), right=False)
    return torch.remainder(distinct, slots), torch.diff(ends).view(num_buckets, -1), index
