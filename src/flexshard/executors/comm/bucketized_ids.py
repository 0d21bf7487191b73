"""A batch's locations, sorted by the ranks that they are sent to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["BucketizedIds", "bucketize"]


@dataclass
class BucketizedIds:
    """Lookups of a batch in the order in which they are sent: by level, then by the local rank that holds the row.

    Attributes:
        slots: of each row in its holder's store; shape (n,).
        counts: how many go to each bucket; shape (buckets,).
        index: of each of the batch's lookups among ``slots``; shape (lookups,). With index deduplication several
            lookups share one.
        shared: whether they may.
    """

    slots: torch.Tensor
    counts: torch.Tensor
    index: torch.Tensor
    shared: bool


def bucketize(locations: torch.Tensor, first_location: torch.Tensor, *, index_dedup: bool) -> BucketizedIds:
    """Sort a batch's locations into buckets.

    Args:
        locations: of the batch's lookups; shape (lookups,).
        first_location: of each bucket, and the end; shape (buckets + 1,), of the same type.
        index_dedup: send each row at most once.
    """
    inverse = None
    if index_dedup:
        locations, inverse = torch.unique(locations, return_inverse=True)
    kind, device = locations.dtype, locations.device
    counts, slots, _, _, index = torch.ops.fbgemm.block_bucketize_sparse_features(
        lengths=torch.tensor([locations.numel()], dtype=kind, device=device),
        indices=locations,
        bucketize_pos=False,
        sequence=True,
        block_sizes=torch.ones(1, dtype=kind, device=device),
        my_size=first_location.numel() - 1,
        block_bucketize_pos=[first_location],
    )
    if inverse is not None:
        index = index.long()[inverse]
    return BucketizedIds(slots, counts.view(-1), index, index_dedup)
