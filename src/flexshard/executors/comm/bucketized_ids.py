"""A batch's locations, sorted by the ranks that they are sent to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["BucketizedIds", "bucketize"]


@dataclass
class BucketizedIds:
    """Lookups of a batch in the order in which they are sent: by level, by the local rank that holds the row, by class.

    Attributes:
        slots: of each row in its holder; shape (n,).
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
    kind, device, classes = locations.dtype, locations.device, len(lookups)
    slots_per_rank = class_slots[-1:]
    if index_dedup:
        distinct, index = torch.unique(locations, return_inverse=True)
        buckets = torch.arange(num_buckets, dtype=kind, device=device) * slots_per_rank
        first = (buckets.view(-1, 1) + class_slots[:-1]).view(-1)
        ends = torch.searchsorted(distinct, first, right=False)
        counts = torch.diff(ends, append=ends.new_tensor([distinct.numel()]))
        slots = torch.remainder(distinct, slots_per_rank)
    else:
        counts, slots, _, _, index = torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths=torch.tensor(lookups, dtype=kind, device=device),
            indices=locations,
            bucketize_pos=False,
            sequence=True,
            block_sizes=slots_per_rank.expand(classes).contiguous(),
            my_size=num_buckets,
        )
    return BucketizedIds(slots, counts.view(num_buckets, classes), index.long(), tuple(lookups), index_dedup)
