"""Rows of a tensor train and their gradients by compiled loops: as :mod:`products`, several runs to a call.

A *block* is some runs of a level one after the other: as many as leave their products, and the gradients of their
slices, in the cache. Products of blocks of one long run are left to torch, which divides them among threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flexshard.embeddings.tensor_train import matrix_kernels, suffix_kernels
from flexshard.embeddings.tensor_train.products import Level, Levels, Step, product_sizes
from flexshard.tables import TTShape

__all__ = ["backward_rows", "forward_rows"]

Array = npt.NDArray[Any]

_CACHED_NUMBERS = 1 << 17
_SLICE_NUMBERS = 1 << 18
_LONG = 512  # rows from which on a product is worth threads


@dataclass(frozen=True)
class _Block:
    """Runs of a level, one after the other.

    Attributes:
        runs, prefixes: which.
        starts: where each run's prefixes start, and where the last one's end; shape (runs + 1,).
        digits: of the runs; shape (runs,).
        parent: of the prefixes.
    """

    runs: slice
    prefixes: slice
    starts: Array
    digits: Array
    parent: Array


def _blocks(level: Level, height: int, core: torch.Tensor) -> Iterator[_Block]:
    """Blocks of a level whose prefixes have products of this height, with slices of this core."""
    (starts, digits), parent = level.run_arrays, level.parent.numpy()
    most_prefixes = max(1, _CACHED_NUMBERS // (height * core.shape[2]))
    most_runs = max(1, _SLICE_NUMBERS // core[0].numel())
    first = 0
    while first < digits.size:
        end = int(np.searchsorted(starts, starts[first] + most_prefixes, side="right")) - 1
        end = min(max(end, first + 1), first + most_runs, digits.size)
        prefixes = slice(int(starts[first]), int(starts[end]))
        yield _Block(slice(first, end), prefixes, starts[first : end + 1], digits[first:end], parent[prefixes])
        first = end


def forward_rows(
    levels: Levels, shape: TTShape, cores: Sequence[torch.Tensor], *, products: Sequence[torch.Tensor] | None
) -> torch.Tensor:
    """As :func:`flexshard.embeddings.tensor_train.products.forward_rows`."""
    sizes = product_sizes(levels, shape)
    before = cores[0].view(shape.row_factors[0], shape.dim_factors[0], -1).numpy()
    rows = cores[0].new_empty(levels.parent.numel(), prod(shape.dim_factors[:-1]), shape.dim_factors[-1])
    found, parent, row_index = rows.numpy(), levels.parent.numpy(), levels.row_index.numpy()
    if products is None and 2 * parent.size < shape.row_factors[-1]:  # a copy of few slices, not of the core
        last, digit = cores[-1][levels.digit].contiguous().numpy(), np.arange(parent.size)
    else:
        last, digit = cores[-1].contiguous().numpy(), levels.digit.numpy()
    for k, level in enumerate(levels.inner, start=1):
        is_last = k == len(levels.inner)
        blocks = list(_blocks(level, sizes[k - 1][1], cores[k]))
        count = sizes[k - 1][0]
        if products is None and is_last:
            count = max((block.parent.size for block in blocks), default=0)
        product = (cores[0].new_empty(count, *sizes[k - 1][1:]) if products is None else products[k - 1]).numpy()
        ends = np.searchsorted(parent, [block.prefixes.stop for block in blocks]) if is_last else ()
        for number, block in enumerate(blocks):
            out = product[: block.parent.size] if count < sizes[k - 1][0] else product[block.prefixes]
            _multiply(before, block, cores[k], out)
            if is_last:
                ids = slice(ends[number - 1] if number else 0, ends[number])
                own = parent[ids] - block.prefixes.start
                suffix_kernels.suffix_forward(out, own, last, digit[ids], row_index[ids], found)
        before = product
    if not levels.inner:
        suffix_kernels.suffix_forward(before, parent, last, digit, row_index, found)
    return rows.flatten(1)


def _multiply(before: Array, block: _Block, core: torch.Tensor, out: Array) -> None:
    height = before.shape[1]
    if block.digits.size == 1 and block.parent.size * height >= _LONG:
        left = torch.from_numpy(before)[torch.from_numpy(block.parent)].flatten(0, 1)
        torch.mm(left, core[int(block.digits[0])], out=torch.from_numpy(out).view(left.shape[0], -1))
        return
    width = core.shape[2]
    matrix_kernels.prefix_forward(
        before, block.parent, block.starts, block.digits, core.numpy(), out.reshape(-1, height, width)
    )


def backward_rows(
    gradient: torch.Tensor,
    levels: Levels,
    shape: TTShape,
    cores: Sequence[torch.Tensor],
    products: Sequence[torch.Tensor],
    *,
    step: Step | None = None,
) -> list[torch.Tensor | None]:
    """As :func:`flexshard.embeddings.tensor_train.products.backward_rows`."""
    first = cores[0].view(shape.row_factors[0], shape.dim_factors[0], -1)
    last = cores[-1].contiguous().numpy()
    upstream = gradient.reshape(-1, prod(shape.dim_factors[:-1]), shape.dim_factors[-1]).contiguous().numpy()
    to_last = torch.zeros(cores[-1].shape, dtype=cores[-1].dtype)
    to_cores: list[torch.Tensor | None] = [to_last]
    parent, digit, row_index = levels.parent.numpy(), levels.digit.numpy(), levels.row_index.numpy()
    if not levels.inner:
        to_first = torch.zeros_like(first)
        suffix_kernels.suffix_backward(
            first.numpy(), parent, last, digit, row_index, upstream, to_first.numpy(), to_last.numpy()
        )
        return [to_first.view(cores[0].shape), to_last]
    before = [first, *products[:-1]]
    to_own: torch.Tensor | None = None  # of the last inner level's products, block by block
    for k in range(len(levels.inner), 0, -1):
        level, product, core = levels.inner[k - 1], products[k - 1], cores[k]
        blocks = list(_blocks(level, product.shape[1], core))
        to_before = torch.zeros_like(before[k - 1])
        slices = _Slices(core, k, step, max((block.digits.size for block in blocks), default=0))
        block_size = max((block.parent.size for block in blocks), default=0)
        own_block = None if to_own is not None else product.new_empty(block_size, *product.shape[1:])
        ends = () if to_own is not None else np.searchsorted(parent, [block.prefixes.stop for block in blocks])
        for number, block in enumerate(blocks):
            if own_block is None:
                assert to_own is not None
                above = to_own[block.prefixes]
            else:
                above = own_block[: block.parent.size].zero_()
                ids = slice(ends[number - 1] if number else 0, ends[number])
                suffix_kernels.suffix_backward(
                    product[block.prefixes].numpy(), parent[ids] - block.prefixes.start, last, digit[ids],
                    row_index[ids], upstream, above.numpy(), to_last.numpy(),
                )  # fmt: skip
            _multiply_back(before[k - 1], block, core, above, to_before, slices)
            slices.done(block)
        to_cores.append(slices.gradient)
        to_own = to_before
    assert to_own is not None
    to_cores.append(to_own.view(cores[0].shape))
    return to_cores[::-1]


class _Slices:
    """Where gradients of the slices of an inner core go: to one of the core's size, or block by block to a step."""

    def __init__(self, core: torch.Tensor, k: int, step: Step | None, most: int) -> None:
        self._k, self._step = k, step
        self.gradient = torch.zeros_like(core) if step is None else None
        self.memory = core.new_empty(most, *core.shape[1:]) if self.gradient is None else self.gradient

    def slots(self, block: _Block) -> Array:
        """Which of the memory's slices are those of a block's runs."""
        return np.arange(block.digits.size) if self.gradient is None else block.digits

    def done(self, block: _Block) -> None:
        """They are whole."""
        if self._step is not None:
            self._step(self._k, torch.from_numpy(block.digits), self.memory[: block.digits.size])


def _multiply_back(
    before: torch.Tensor,
    block: _Block,
    core: torch.Tensor,
    upstream: torch.Tensor,
    to_before: torch.Tensor,
    slices: _Slices,
) -> None:
    height, width = before.shape[1], core.shape[2]
    slots = slices.slots(block)
    if block.digits.size == 1 and block.parent.size * height >= _LONG:
        parent = torch.from_numpy(block.parent)
        left = before[parent]
        to_product = upstream.view(left.shape[0] * height, width)
        torch.mm(left.flatten(0, 1).t(), to_product, out=slices.memory[int(slots[0])])
        back = torch.mm(to_product, core[int(block.digits[0])].t())
        to_before.index_add_(0, parent, back.view_as(left))
        return
    matrix_kernels.prefix_backward(
        before.numpy(), block.parent, block.starts, block.digits, core.numpy(),
        upstream.numpy().reshape(-1, height, width), to_before.numpy(), slices.memory.numpy(), slots,
    )  # fmt: skip
