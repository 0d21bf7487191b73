"""Distinct ids of a lookup, and all that the host has to know of them at once: on a device, each question is a wait."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from flexshard._internal import HostCopy, host_waits_for, run_numbers, run_starts, runs_of, to_device
from flexshard.errors import DataError, TableError
from flexshard.tables import TTShape

__all__ = [
    "NO_ID",
    "DistinctIds",
    "check_dtype",
    "check_ids",
    "compacted",
    "marked",
    "prefix_counts",
    "prefixes_of",
    "without_row",
]

NO_ID = int(np.iinfo(np.int64).max)  # sorts behind all ids


@dataclass(frozen=True)
class DistinctIds:
    """Distinct ids of a lookup.

    Attributes:
        ids: ascending; shape (u,), int64. Where they are ``filled``, :data:`NO_ID` follows.
        inverse: of each of the ids that were looked up among them; of their shape.
        least, most: of them; 0 and -1 where there are none, or nobody asked.
        padding: index of one id among them, if it is there, or of a place for it where they are ``filled``.
        prefixes: how many distinct prefixes of each inner level they have, where that is known already; at most, where
            they are ``filled``.
        filled: whether the host does not know how many there are.
    """

    ids: torch.Tensor
    inverse: torch.Tensor
    least: int
    most: int
    padding: int | None
    prefixes: tuple[int, ...] | None
    filled: bool = False

    @classmethod
    def at_most(cls, ids: torch.Tensor, shape: TTShape, padding_idx: int | None) -> DistinctIds:
        """Of some ids of any shape, int64, without a wait: as many places as there are ids, and one for padding.

        An id outside the table fails on the device, as ``nn.Embedding`` has it there.
        """
        flat = ids.reshape(-1)
        torch._assert_async(((flat >= 0) & (flat < shape.num_embeddings)).all(), "an id is outside its table")
        padding = None
        distinct, inverse = runs_of(flat, NO_ID)
        if padding_idx is not None:  # whose row stays among the others, for what moves slices that were read
            padding = flat.numel()
            distinct = torch.cat([distinct, distinct.new_full((1,), NO_ID)])
            inverse = torch.where(flat == padding_idx, padding, inverse)
        most, numbers = [], 1
        for factor in shape.row_factors[:-1]:
            numbers *= factor
            most.append(min(numbers, flat.numel()))
        return cls(distinct, inverse.view(ids.shape), 0, -1, padding, tuple(most[1:]), filled=True)

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
        distinct, inverse = runs_of(flat, NO_ID)
        real = distinct != NO_ID
        sought = NO_ID if padding_idx is None else padding_idx
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


def check_dtype(cores: torch.dtype) -> None:
    """Raises TableError for cores of a type that is not computed with."""
    if cores not in (torch.float32, torch.bfloat16, torch.float64):
        raise TableError(f"cores are float32, float64 or bfloat16, found {cores}; dtype= says which they are")


def check_ids(ids: torch.Tensor) -> None:
    """Raises DataError for what cannot be ids, whatever the numbers."""
    if not isinstance(ids, torch.Tensor):
        raise DataError(f"ids are a tensor, found {type(ids).__name__}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DataError(f"ids are whole numbers, found {ids.dtype}")


def prefixes_of(ids: torch.Tensor, shape: TTShape, level: int) -> torch.Tensor:
    """The digits up to those of a level (0 to d - 1), as one number."""
    return ids.div(prod(shape.row_factors[level + 1 :]), rounding_mode="floor")


def prefix_counts(ids: torch.Tensor, real: torch.Tensor, shape: TTShape) -> torch.Tensor:
    """Distinct prefixes of each inner level, of those ids that are ``real``, the first ones; shape (levels,), int64."""
    counts = [(run_starts(prefixes_of(ids, shape, k)) & real).sum().view(1) for k in range(1, shape.cores - 1)]
    return torch.cat(counts) if counts else torch.zeros(0, dtype=torch.int64, device=ids.device)


def compacted(ascending: torch.Tensor, number: int | None, *, filler: int = NO_ID) -> torch.Tensor:
    """The distinct ones; without a wait where it is known how many there are, or may be: ``filler``, which sorts behind
    all, in the places that are left.
    """
    if number is None:
        return torch.unique_consecutive(ascending)
    every = ascending.new_full((number + 1,), filler)
    return every.scatter_(0, run_numbers(ascending), ascending)[:number]


def marked(places: torch.Tensor, count: int) -> torch.Tensor:
    """Which of 0 to ``count - 1`` are among places, of which ``count`` stands for none; shape (count,), bool."""
    return torch.zeros(count + 1, dtype=torch.bool, device=places.device).index_fill_(0, places, True)[:count]


def without_row(rows: torch.Tensor, index: int | None) -> torch.Tensor:
    """Rows with zeros at one index, if any."""
    return rows if index is None else rows.index_fill(0, to_device(np.array([index]), rows.device), 0.0)
