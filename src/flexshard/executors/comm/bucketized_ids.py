"""A batch's locations, sorted by the ranks that they are sent to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from flexshard._internal import host_waits_for, runs_of, segment_of, to_device

__all__ = ["BucketizedIds", "Buckets", "bucketize"]


@dataclass(frozen=True)
class Buckets:
    """What locations are sorted into: bucket after bucket, as many locations each as a rank has slots.

    Attributes:
        number: of all levels.
        first_slots: first slot of each class; K of them.
        slots: of a rank.
        dtype: of locations.
        device: of these.
    """

    number: int
    first_slots: tuple[int, ...]
    slots: int
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def ends(self) -> torch.Tensor:
        """First location of each bucket and class, and the end of all; shape (buckets * K + 1,)."""
        buckets = np.arange(self.number).reshape(-1, 1) * self.slots
        first = (buckets + np.array(self.first_slots, np.int64)).ravel()
        ends = torch.from_numpy(np.append(first, self.number * self.slots)).to(self.dtype)
        return ends.to(self.device)


@dataclass
class BucketizedIds:
    """Lookups of a batch in the order in which they are sent: by level, by the local rank that holds the row, by class.

    Attributes:
        slots: of each row in its holder; shape (n,), or longer with no meaning behind those of all buckets.
        counts: how many of each class go to each bucket; shape (buckets, K).
        index: of each of the batch's lookups among ``slots``; shape (lookups,). With index deduplication several
            lookups share one. None where they were not sorted, on one rank.
        lookups: of each class; they stand one class after the other.
        shared: whether lookups may share an index.
    """

    slots: torch.Tensor
    counts: torch.Tensor
    index: torch.Tensor | None
    lookups: tuple[int, ...]
    shared: bool

    @classmethod
    def unsorted(cls, locations: torch.Tensor, lookups: Sequence[int]) -> BucketizedIds:
        """Of a batch that stays on one rank, every lookup by itself."""
        counts = to_device(np.array([lookups], np.int64), locations.device)
        return cls(locations, counts, None, tuple(lookups), False)


def bucketize(
    locations: torch.Tensor,
    lookups: Sequence[int],
    buckets: Buckets,
    *,
    index_dedup: bool | Sequence[tuple[int, bool]],
) -> BucketizedIds:
    """Sort a batch's locations into buckets.

    Args:
        locations: of the batch's lookups, those of one class after those of another; shape (lookups,).
        lookups: how many each class has; K of them.
        buckets: to sort them into.
        index_dedup: send each row at most once; or so of consecutive lookups, (how many, whether) each, no class or
            table of which is in two.
    """
    parts = [(len(locations), index_dedup)] if isinstance(index_dedup, bool) else index_dedup
    kinds = {once for number, once in parts if number}
    if kinds == {True}:
        slots, counts, index = _distinct(locations, buckets)
    elif len(kinds) == 2:
        slots, counts, index = _in_part(locations, lookups, buckets, parts)
    else:
        slots, counts, index = _each(locations, lookups, buckets)
    return BucketizedIds(slots, counts, index.long(), tuple(lookups), True in kinds)


Bucketized = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _each(locations: torch.Tensor, lookups: Sequence[int], buckets: Buckets) -> Bucketized:
    """Every lookup by itself. FBGEMM's kernel for GPUs takes one to five times as long as sorting."""
    how = _sorted if host_waits_for(locations.device) else _by_fbgemm
    return how(locations, lookups, buckets)


def _in_part(
    locations: torch.Tensor,
    lookups: Sequence[int],
    buckets: Buckets,
    parts: Sequence[tuple[int, bool]],
) -> Bucketized:
    """Distinct locations of some parts of the lookups, every one of the others; in each bucket and class the latter go
    first.
    """
    sizes = [number for number, _ in parts]
    pieces = torch.split(locations, sizes)
    inside = np.concatenate([[0], np.cumsum(lookups)])
    ends = np.cumsum(sizes)
    found = []
    for once in (False, True):
        chosen = [which is once for _, which in parts]
        # How many of them each class has, whose lookups stand together.
        own = np.concatenate([[0], np.cumsum(np.where(chosen, sizes, 0))])
        per_class = np.diff(np.interp(inside, np.concatenate([[0], ends]), own)).round().astype(np.int64)
        part = torch.cat([piece for piece, take in zip(pieces, chosen, strict=True) if take])
        found.append(_distinct(part, buckets) if once else _each(part, per_class.tolist(), buckets))
    plain, distinct = found
    places = _interleaved(plain[1], distinct[1], len(plain[0]), len(distinct[0]))
    slots = torch.empty(len(plain[0]) + len(distinct[0]), dtype=plain[0].dtype, device=locations.device)
    for place, one in zip(places, found, strict=True):
        slots[place] = one[0].to(slots.dtype)
    lengths = [[number for number, which in parts if which is once] for once in (False, True)]
    by_kind = [
        iter(torch.split(place[one[2].long()], own)) for place, one, own in zip(places, found, lengths, strict=True)
    ]
    index = torch.cat([next(by_kind[once]) for _, once in parts])
    return slots, plain[1] + distinct[1].to(plain[1].dtype), index


def _interleaved(first: torch.Tensor, second: torch.Tensor, first_size: int, second_size: int) -> list[torch.Tensor]:
    """Where the items of two sequences stand, those of each segment of the second behind those of the first.

    Args:
        first, second: items of each segment, shape (buckets, K); what the second has behind its last stays at the end.
    """
    counts = torch.stack([first.reshape(-1), second.reshape(-1)]).long()
    ends = torch.cumsum(counts, dim=1)
    starts = ends - counts
    total = counts.sum(dim=0)
    start = torch.cumsum(total, dim=0) - total
    places = []
    for which, size in enumerate((first_size, second_size)):
        item = torch.arange(size, device=first.device)
        segment = torch.searchsorted(ends[which], item, right=True)
        shift = start - starts[which] + (counts[0] if which else 0)
        behind = shift.new_full((1,), first_size if which else 0)
        places.append(item + torch.cat([shift, behind])[segment])
    return places


def _by_fbgemm(locations: torch.Tensor, lookups: Sequence[int], buckets: Buckets) -> Bucketized:
    """Each class a feature to FBGEMM, with a batch of one."""
    counts, bucketized, _, _, index = torch.ops.fbgemm.block_bucketize_sparse_features(
        lengths=torch.tensor(lookups, dtype=locations.dtype),
        indices=locations,
        bucketize_pos=False,
        sequence=True,
        block_sizes=locations.new_full((len(lookups),), buckets.slots),
        my_size=buckets.number,
    )
    return bucketized, counts.view(buckets.number, -1), index


def _sorted(locations: torch.Tensor, lookups: Sequence[int], buckets: Buckets) -> Bucketized:
    """The same by sorting."""
    device, kind, classes = locations.device, locations.dtype, len(lookups)
    keys = torch.div(locations, buckets.slots, rounding_mode="floor")
    if classes > 1:
        keys = keys * classes + segment_of(np.array(lookups), device).to(kind)
    ordered, order = torch.sort(keys, stable=True)
    index = torch.empty_like(order)
    index[order] = torch.arange(len(order), device=device)
    ends = torch.searchsorted(ordered, torch.arange(buckets.number * classes + 1, dtype=kind, device=device))
    counts = torch.diff(ends).to(kind)
    return torch.remainder(locations, buckets.slots)[order], counts.view(buckets.number, classes), index


def _distinct(locations: torch.Tensor, buckets: Buckets) -> Bucketized:
    """Each location once, in ascending order."""
    if host_waits_for(locations.device):
        distinct, index = runs_of(locations, buckets.slots * buckets.number)
    else:
        distinct, index = torch.unique(locations, return_inverse=True)
    ends = torch.searchsorted(distinct, buckets.ends, out_int32=True)
    return torch.remainder(distinct, buckets.slots), torch.diff(ends).view(buckets.number, -1), index
