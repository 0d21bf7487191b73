"""Rows of a tensor train: one product per distinct prefix, one per distinct id, and their gradients (EL-Rec paper,
sections III-A and III-B).

Legend: u distinct ids, ascending; core k of shape (p_k, r_{k-1}, q_k * r_k), the last transposed to (p_d, q_d,
r_{d-1}). A prefix of level k is the digits 1 to k of an id. Its product has shape (Q_k, r_k), Q_k = q_1 ... q_k.
Prefixes of a level are kept in order of their last digit, so that those which share a slice of core k are one matrix
product: a *run*. The last level of prefixes and the ids below it are worked off run by run, while they are in the
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np
import torch

from flexshard._internal import IntArray
from flexshard.embeddings.tensor_train.distinct import NO_ID, compacted, marked, prefixes_of
from flexshard.tables import TTShape

__all__ = ["Levels", "Step", "backward_rows", "forward_rows", "levels_of", "product_sizes", "suffix_products"]


Step = Callable[[int, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class Level:
    """Distinct prefixes of one level, in order of their last digit.

    Attributes:
        parent: index of each one's prefix in the level before; shape (n,).
        digit: its last digit; shape (n,).
        found_runs: where runs of a digit start, and where the last ends, and their digits, if these are known.
    """

    parent: torch.Tensor
    digit: torch.Tensor
    found_runs: tuple[IntArray, IntArray] | None = None

    @cached_property
    def run_arrays(self) -> tuple[IntArray, IntArray]:
        """Where each run starts, and where the last one ends, shape (runs + 1,), and its digit, shape (runs,)."""
        if self.found_runs is not None:
            return self.found_runs
        values, counts = torch.unique_consecutive(self.digit, return_counts=True)
        return np.concatenate([[0], np.cumsum(counts.cpu().numpy())]), values.cpu().numpy()

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """(digit, start, end) of those with equal last digits."""
        starts, digits = (array.tolist() for array in self.run_arrays)
        return tuple(zip(digits, starts[:-1], starts[1:], strict=True))


@dataclass(frozen=True)
class Levels:
    """What distinct ids have in common; ids in order of their prefix's index.

    Places of a level that no prefix has (and those that no id has) come last, below a prefix and with a digit that are
    one beyond all.

    Attributes:
        inner: levels 2 to d - 1.
        row_index: of each id among the distinct ones, ascending; shape (u,).
        parent: index of each id's prefix in the last inner level (the first digit itself with two cores); shape (u,).
        digit: last digit of each id; shape (u,).
    """

    inner: tuple[Level, ...]
    row_index: torch.Tensor
    parent: torch.Tensor
    digit: torch.Tensor

    def has_digit(self, k: int, count: int) -> torch.Tensor:
        """Which digits k, of so many from 0 on, any of the ids has; shape (count,), bool."""
        if k == len(self.inner) + 1:
            digits = self.digit
        elif k:
            digits = self.inner[k - 1].digit
        else:
            digits = self.inner[0].parent if self.inner else self.parent
        return marked(digits, count)

    @cached_property
    def blocks(self) -> list[tuple[int, int, int, slice]]:
        """Runs of the last inner level: digit, first and end of their prefixes, and the ids below them."""
        runs = self.inner[-1].runs
        last = torch.tensor([end for _, _, end in runs], dtype=torch.int64, device=self.parent.device)
        ends = torch.searchsorted(self.parent, last).tolist()
        slices = [slice(start, end) for start, end in pairwise([0, *ends])]
        return [(*run, ids) for run, ids in zip(runs, slices, strict=True)]


def levels_of(
    ids: torch.Tensor,
    shape: TTShape,
    prefixes_known: Sequence[int] | None = None,
    *,
    filled: bool = False,
    compiled: bool = False,
) -> Levels:
    """Prefixes of distinct ids, ascending, in exact integer arithmetic.

    Args:
        ids: shape (u,), int64.
        prefixes_known: how many distinct prefixes each inner level has, or at most; a device is asked where None.
        filled: whether ids and prefixes may be fewer: ids end in :data:`NO_ID` then.
        compiled: whether a compiled loop finds them, on the CPU.
    """
    if compiled:
        return _compiled_levels(ids, shape)

    def or_beyond(values: torch.Tensor, is_one: torch.Tensor, beyond: int) -> torch.Tensor:
        return torch.where(is_one, values, beyond) if filled else values

    def index_in(before: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        found = torch.searchsorted(before, above)
        return found.clamp(max=before.numel() - 1) if filled else found

    inner: list[Level] = []
    row_index: torch.Tensor | None = None  # of the distinct prefixes of the level before, in ascending order
    before, count = None, shape.row_factors[0]
    for k in range(1, shape.cores - 1):
        # Ids ascend, so prefixes do, and the distinct ones are where they change.
        number = None if prefixes_known is None else prefixes_known[k - 1]
        filler, factor = NO_ID // prod(shape.row_factors[k + 1 :]), shape.row_factors[k]
        prefixes = compacted(prefixes_of(ids, shape, k), number, filler=filler)
        is_one, above = prefixes != filler, prefixes.div(factor, rounding_mode="floor")
        parent = above if before is None or row_index is None else row_index[index_in(before, above)]
        digit = or_beyond(prefixes - above * factor, is_one, factor)
        order = torch.argsort(digit, stable=True)
        inner.append(Level(or_beyond(parent, is_one, count)[order], digit[order]))
        row_index = torch.empty_like(order)
        row_index[order] = torch.arange(order.numel(), device=order.device)
        before, count = prefixes, prefixes.numel()
    is_one, factor = ids != NO_ID, shape.row_factors[-1]
    above = ids.div(factor, rounding_mode="floor")
    parent = above if before is None or row_index is None else row_index[index_in(before, above)]
    parent, digit = or_beyond(parent, is_one, count), or_beyond(ids - above * factor, is_one, factor)
    order = torch.argsort(parent, stable=True)
    return Levels(tuple(inner), order, parent[order], digit[order])


def _compiled_levels(ids: torch.Tensor, shape: TTShape) -> Levels:
    from flexshard.embeddings.tensor_train.level_kernels import ids_level, prefix_level

    numbers = ids.numpy()
    inner: list[Level] = []
    before = place = np.empty(0, np.int64)
    for k in range(1, shape.cores - 1):
        below, factor = prod(shape.row_factors[k + 1 :]), shape.row_factors[k]
        before, place, parent, digit, *runs = prefix_level(numbers, below, factor, before, place)
        inner.append(Level(torch.from_numpy(parent), torch.from_numpy(digit), (runs[0], runs[1])))
    return Levels(tuple(inner), *map(torch.from_numpy, ids_level(numbers, shape.row_factors[-1], before, place)))


def product_sizes(levels: Levels, shape: TTShape) -> list[tuple[int, int, int]]:
    """Shapes of the products of each inner level's prefixes."""
    return [
        (level.parent.numel(), prod(shape.dim_factors[: k + 1]), shape.bounds[k + 1])
        for k, level in enumerate(levels.inner, start=1)
    ]


def forward_rows(
    levels: Levels,
    shape: TTShape,
    cores: Sequence[torch.Tensor],
    *,
    products: Sequence[torch.Tensor] | None,
) -> torch.Tensor:
    """Rows of the distinct ids, shape (u, D).

    Args:
        levels, shape, cores: see above.
        products: where to keep the products of each level's prefixes, which backward uses again; None if there is none.
    """
    sizes = product_sizes(levels, shape)
    before, last = cores[0].view(shape.row_factors[0], shape.dim_factors[0], -1), cores[-1]
    height = prod(shape.dim_factors[:-1])
    rows = before.new_empty(levels.parent.numel(), height, shape.dim_factors[-1])
    for k, level in enumerate(levels.inner[:-1], start=1):
        product = before.new_empty(sizes[k - 1]) if products is None else products[k - 1]
        for digit, start, end in level.runs:
            _product(before[level.parent[start:end]], cores[k][digit], product[start:end])
        before = product
    if not levels.inner:
        suffix_products(before, levels.parent, last, levels.digit, levels.row_index, rows)
        return rows.flatten(1)
    level, core = levels.inner[-1], cores[-2]
    most = max((end - start for _, start, end in level.runs), default=0)
    kept = products[-1] if products is not None else before.new_empty(most, *sizes[-1][1:])
    for digit, start, end, ids in levels.blocks:
        part = kept[start:end] if products is not None else kept[: end - start]
        _product(before[level.parent[start:end]], core[digit], part)
        parent = levels.parent[ids] - start
        suffix_products(part, parent, last, levels.digit[ids], levels.row_index[ids], rows)
    return rows.flatten(1)


def _product(left: torch.Tensor, core: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(left.flatten(0, 1), core, out=out.view(left.shape[0] * left.shape[1], -1))


def suffix_products(
    prefixes: torch.Tensor,
    parent: torch.Tensor,
    last: torch.Tensor,
    digit: torch.Tensor,
    row_index: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """``rows[row_index[n]] = prefixes[parent[n]] @ last[digit[n]].T`` for every distinct id n."""
    for chosen in _chunks(parent):
        rows[row_index[chosen]] = torch.bmm(prefixes[parent[chosen]], last[digit[chosen]].transpose(1, 2))


def backward_rows(
    gradient: torch.Tensor,
    levels: Levels,
    shape: TTShape,
    cores: Sequence[torch.Tensor],
    products: Sequence[torch.Tensor],
    *,
    step: Step | None = None,
) -> list[torch.Tensor | None]:
    """Gradients of the cores from those of the distinct rows, shape (u, D): first summed per prefix, level by level.

    Args:
        gradient, levels, shape, cores: see above.
        products: those that :func:`forward_rows` kept.
        step: takes core, digits and gradients of slices of an inner core once they are whole, when nothing reads the
            slices any more; these cores, by far the largest, have no gradient in what is returned then.
    """
    first, last = cores[0].view(shape.row_factors[0], shape.dim_factors[0], -1), cores[-1]
    upstream = gradient.reshape(-1, prod(shape.dim_factors[:-1]), shape.dim_factors[-1]).contiguous()
    to_last = torch.zeros_like(last)
    to_cores: list[torch.Tensor | None] = [to_last]
    if not levels.inner:
        to_before = torch.zeros_like(first)
        _suffix_back(first, levels.parent, last, levels.digit, levels.row_index, upstream, to_before, to_last)
        return [to_before.view(cores[0].shape), to_last]
    before = [first, *products[:-1]]
    level, product = levels.inner[-1], products[-1]
    to_before, slices = torch.zeros_like(before[-1]), _Slices(cores[-2], len(cores) - 2, step)
    most = max((end - start for _, start, end in level.runs), default=0)
    block = product.new_empty(most, *product.shape[1:])
    for digit, start, end, ids in levels.blocks:
        to_own = block[: end - start].zero_()
        parent = levels.parent[ids] - start
        _suffix_back(
            product[start:end], parent, last, levels.digit[ids], levels.row_index[ids], upstream, to_own, to_last
        )
        _product_back(before[-1], level.parent[start:end], cores[-2][digit], to_own, to_before, slices.of(digit))
        slices.done(digit)
    to_cores.append(slices.gradient)
    for k in range(len(levels.inner) - 1, 0, -1):
        level, to_own = levels.inner[k - 1], to_before
        to_before, slices = torch.zeros_like(before[k - 1]), _Slices(cores[k], k, step)
        for digit, start, end in level.runs:
            parent = level.parent[start:end]
            _product_back(before[k - 1], parent, cores[k][digit], to_own[start:end], to_before, slices.of(digit))
            slices.done(digit)
        to_cores.append(slices.gradient)
    to_cores.append(to_before.view(cores[0].shape))
    return to_cores[::-1]


class _Slices:
    """Where gradients of the slices of an inner core go: to one of the core's size, or one by one to a step."""

    def __init__(self, core: torch.Tensor, k: int, step: Step | None) -> None:
        self._k, self._step = k, step
        self.gradient = torch.zeros_like(core) if step is None else None
        self._own = torch.empty_like(core[0])

    def of(self, digit: int) -> torch.Tensor:
        """Memory for the gradient of one slice."""
        return self._own if self.gradient is None else self.gradient[digit]

    def done(self, digit: int) -> None:
        """It is whole."""
        if self._step is not None:
            self._step(self._k, torch.tensor([digit], device=self._own.device), self._own.unsqueeze(0))


def _product_back(
    before: torch.Tensor,
    parent: torch.Tensor,
    core: torch.Tensor,
    upstream: torch.Tensor,
    to_before: torch.Tensor,
    to_core: torch.Tensor,
) -> None:
    left = before[parent]
    to_product = upstream.view(left.shape[0] * left.shape[1], -1)
    torch.mm(left.flatten(0, 1).t(), to_product, out=to_core)
    to_before.index_add_(0, parent, torch.mm(to_product, core.t()).view_as(left))


def _suffix_back(
    prefixes: torch.Tensor,
    parent: torch.Tensor,
    last: torch.Tensor,
    digit: torch.Tensor,
    row_index: torch.Tensor,
    upstream: torch.Tensor,
    to_prefixes: torch.Tensor,
    to_last: torch.Tensor,
) -> None:
    for chosen in _chunks(parent):
        above, gradients = digit[chosen], upstream[row_index[chosen]]
        to_prefixes.index_add_(0, parent[chosen], torch.bmm(gradients, last[above]))
        to_last.index_add_(0, above, torch.bmm(gradients.transpose(1, 2), prefixes[parent[chosen]]))


def _chunks(ids: torch.Tensor, size: int = 256) -> Iterator[slice]:
    """Ids whose slices fit the cache together."""
    return (slice(start, start + size) for start in range(0, ids.numel(), size))
