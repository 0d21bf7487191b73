"""Distinct ids of a lookup, and all that the host has to know of them at once: on a device, each question is a wait."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from flexshard._internal import HostCopy, host_waits_for, run_starts, runs_of
from flexshard.tables import TTShape

__all__ = ["DistinctIds", "compacted", "prefix_counts", "prefixes_of"]


@dataclass(frozen=True)
class DistinctIds:
    """Distinct ids of a lookup.

    Attributes:
        ids: ascending; shape (u,), int64.
        inverse: of each of the ids that were looked up among them; of their shape.
        least, most: of them; 0 and -1 where there are none.
        padding: index of one id among them, if it is there.
        prefixes: how many distinct prefixes of each inner level they have, where that is known already.
    """

    ids: torch.Tensor
    inverse: torch.Tensor
    least: int
    most: int
    padding: int | None
    prefixes: tuple[int, ...] | None

    @classmethod
    def of(cls, ids: torch.Tensor, shape: TTShape, padding_idx: int | None) -> DistinctIds:
        """Of ids of any shape, int64; one wait."""
        flat = ids.reshape(-1)
        if not host_waits_for(ids.device):
            distinct, inverse = torch.unique(flat, return_inverse=True)
            least, most = (int(distinct[0]), int(distinct[-1])) if len(distinct) else (0, -1)
            place = None
            if padding_idx is not None:
                index = int(torch.searchsorted(distinct, padding_idx))
                place = index if index < len(distinct) and int(distinct[index]) == padding_idx else None
            return cls(distinct, inverse.view(ids.shape), least, most, place, None)
        if not flat.numel():
            return cls(flat, ids, 0, -1, None, (0,) * (shape.cores - 2))
        distinct, inverse = runs_of(flat, _BEYOND)
        real = distinct != _BEYOND
        sought = _BEYOND if padding_idx is None else padding_idx
        place_of = torch.searchsorted(distinct, torch.full_like(distinct[:1], sought)).clamp(max=len(distinct) - 1)
        numbers = [real.sum().view(1), distinct[:1], flat.max().view(1)]
        numbers += [torch.where(distinct[place_of] == sought, place_of, -1), prefix_counts(distinct, real, shape)]
        number, least, most, index, *prefixes = HostCopy(torch.cat(numbers)).numbers().tolist()
        return cls(
            distinct[:number],
            inverse.view(ids.shape),
            least,
            most,
            index if padding_idx is not None and index >= 0 else None,
            tuple(prefixes),
        )


_BEYOND = int(np.iinfo(np.int64).max)


def prefixes_of(ids: torch.Tensor, shape: TTShape, level: int) -> torch.Tensor:
    """The digits up to those of a level (0 to d - 1), as one number."""
    return ids.div(prod(shape.row_factors[level + 1 :]), rounding_mode="floor")


def prefix_counts(ids: torch.Tensor, real: torch.Tensor, shape: TTShape) -> torch.Tensor:
    """Distinct prefixes of each inner level, of those ids that are ``real``, the first ones; shape (levels,), int64."""
    counts = [(run_starts(prefixes_of(ids, shape, k)) & real).sum().view(1) for k in range(1, shape.cores - 1)]
    return torch.cat(counts) if counts else torch.zeros(0, dtype=torch.int64, device=ids.device)


def compacted(ascending: torch.Tensor, number: int | None) -> torch.Tensor:
    """The distinct ones; without a wait where it is known how many there are."""
    if number is None:
        return torch.unique_consecutive(ascending)
    run = torch.cumsum(run_starts(ascending), 0) - 1
    return ascending.new_empty(number).scatter_(0, run, ascending)
