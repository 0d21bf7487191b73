"""Rows of a tensor train: one product per distinct prefix, one per distinct id, and their gradients (EL-Rec paper,
sections III-A and III-B).

Legend: u distinct ids, ascending; core k of shape (p_k, r_{k-1}, q_k * r_k), the last transposed to (p_d, q_d,
r_{d-1}). A prefix of level k is the digits 1 to k of an id. Its product has shape (Q_k, r_k), Q_k = q_1 ... q_k.
Prefixes of a level are kept in order of their last digit, so that those which share a slice of core k are one matrix
product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from flexshard._tt_shape import TTShape

__all__ = ["Levels", "backward_rows", "forward_rows", "levels_of"]

_CHUNK = 256  # ids whose slices fit the cache, for the plain suffix


@dataclass(frozen=True)
class Level:
    """Distinct prefixes of one level, in order of their last digit.

    Attributes:
        parent: place of each one's prefix in the level before; shape (n,).
        digit: its last digit; shape (n,).
        ends: (digit, start, end) of the runs of equal last digits.
    """

    parent: torch.Tensor
    digit: torch.Tensor
    runs: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Levels:
    """What distinct ids have in common.

    Attributes:
        inner: levels 2 to d - 1.
        parent: place of each id's prefix in the last inner level (the first digit itself with two cores); shape (u,).
        digit: last digit of each id; shape (u,).
    """

    inner: tuple[Level, ...]
    parent: torch.Tensor
    digit: torch.Tensor


def levels_of(ids: torch.Tensor, shape: TTShape) -> Levels:
    """Prefixes of distinct ids, ascending, in exact integer arithmetic; shape (u,), int64."""
    below = [prod(shape.rows[k + 1 :]) for k in range(shape.cores)]
    inner: list[Level] = []
    place: torch.Tensor | None = None  # of the distinct prefixes of the level before, in ascending order
    before: torch.Tensor | None = None
    for k in range(1, shape.cores - 1):
        # Ids ascend, so prefixes do, and the distinct ones are where they change.
        prefixes = torch.unique_consecutive(ids.div(below[k], rounding_mode="floor"))
        above = prefixes.div(shape.rows[k], rounding_mode="floor")
        parent = above if before is None or place is None else place[torch.searchsorted(before, above)]
        digit = prefixes - above * shape.rows[k]
        order = torch.argsort(digit, stable=True)
        inner.append(Level(parent[order], digit[order], _runs(digit[order])))
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        before = prefixes
    above = ids.div(shape.rows[-1], rounding_mode="floor")
    parent = above if before is None or place is None else place[torch.searchsorted(before, above)]
    return Levels(tuple(inner), parent, ids - above * shape.rows[-1])


def _runs(digits: torch.Tensor) -> tuple[tuple[int, int, int], ...]:
    values, counts = torch.unique_consecutive(digits, return_counts=True)
    ends = torch.cumsum(counts, 0)
    return tuple(zip(values.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True))


def forward_rows(
    levels: Levels, shape: TTShape, cores: Sequence[torch.Tensor], *, compiled: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Rows of the distinct ids, shape (u, D), and the products of each level's prefixes, which backward uses again."""
    products = [cores[0].reshape(shape.rows[0], shape.dims[0], -1)]
    for k, level in enumerate(levels.inner, start=1):
        products.append(_next_level(products[-1], level, cores[k], shape, k))
    prefixes, last = products[-1], cores[-1]
    rows = prefixes.new_empty(levels.parent.numel(), prefixes.shape[1], shape.dims[-1])
    if compiled:
        from flexshard.embeddings import _tt_kernels

        _tt_kernels.suffix_forward(*_arrays(prefixes, levels.parent, last, levels.digit, rows))
    else:
        for start in range(0, levels.parent.numel(), _CHUNK):
            part = slice(start, start + _CHUNK)
            torch.bmm(prefixes[levels.parent[part]], last[levels.digit[part]].transpose(1, 2), out=rows[part])
    return rows.view(rows.shape[0], shape.embedding_dim), products


def _next_level(before: torch.Tensor, level: Level, core: torch.Tensor, shape: TTShape, k: int) -> torch.Tensor:
    size, rank = before.shape[1] * shape.dims[k], shape.bounds[k + 1]
    found = before.new_empty(level.parent.numel(), size, rank)
    left = before[level.parent].flatten(0, 1)
    height = before.shape[1]
    for digit, start, end in level.runs:
        out = found[start:end].view((end - start) * height, -1)
        torch.mm(left[start * height : end * height], core[digit], out=out)
    return found


def backward_rows(
    gradient: torch.Tensor,
    levels: Levels,
    shape: TTShape,
    cores: Sequence[torch.Tensor],
    products: Sequence[torch.Tensor],
    *,
    compiled: bool,
) -> list[torch.Tensor]:
    """Gradients of the cores from those of the distinct rows, shape (u, D): first summed per prefix, level by level."""
    prefixes, last = products[-1], cores[-1]
    upstream = gradient.reshape(gradient.shape[0], prefixes.shape[1], shape.dims[-1]).contiguous()
    to_prefixes, to_last = torch.zeros_like(prefixes), torch.zeros_like(last)
    if compiled:
        from flexshard.embeddings import _tt_kernels

        arrays = _arrays(prefixes, levels.parent, last, levels.digit, upstream, to_prefixes, to_last)
        _tt_kernels.suffix_backward(*arrays)
    else:
        for start in range(0, levels.parent.numel(), _CHUNK):
            part = slice(start, start + _CHUNK)
            parent, digit, own = levels.parent[part], levels.digit[part], upstream[part]
            to_prefixes.index_add_(0, parent, torch.bmm(own, last[digit]))
            to_last.index_add_(0, digit, torch.bmm(own.transpose(1, 2), prefixes[parent]))
    found = [to_last]
    for k in range(len(levels.inner), 0, -1):
        level, before = levels.inner[k - 1], products[k - 1]
        height, rank = before.shape[1], before.shape[2]
        left = before[level.parent].flatten(0, 1)
        to_left, to_core = torch.empty_like(left), torch.zeros_like(cores[k])
        for digit, start, end in level.runs:
            rows = slice(start * height, end * height)
            own = to_prefixes[start:end].view((end - start) * height, -1)
            torch.mm(left[rows].t(), own, out=to_core[digit])
            torch.mm(own, cores[k][digit].t(), out=to_left[rows])
        found.append(to_core)
        to_prefixes = torch.zeros_like(before).index_add_(
            0, level.parent, to_left.view(level.parent.numel(), height, rank)
        )
    found.append(to_prefixes.reshape(cores[0].shape))
    return found[::-1]


def _arrays(*tensors: torch.Tensor) -> list[Any]:
    return [tensor.detach().numpy() for tensor in tensors]
