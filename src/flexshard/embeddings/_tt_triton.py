"""Tensor-train rows on CUDA: prefixes, suffix, their gradients and the update of the cores, in Triton.

The same sums as :mod:`flexshard.embeddings._tt_rows`, without atomics: every number is summed by one program, in a
fixed order. Prefixes that share a slice of a core are tiles of one matrix product; the ids below a prefix, or of one
last digit, are a segment that one program walks through. With ``update`` a program changes the core where it would
write its gradient, after all that read the core have done so.

Legend: items are prefixes of a level, in order of their last digit (their *group*); each has H rows of K numbers, and
becomes H rows of C. Q, q, r: see :mod:`flexshard.embeddings._tt_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl

from flexshard._tt_shape import TTShape
from flexshard.embeddings._tt_rows import Level, Levels

__all__ = ["Update", "backward_rows", "forward_rows", "supports"]

_MOST_HEIGHT = 128  # rows of an item that one tile holds
_MOST_NUMBERS = 8192
_KEEP, _SGD, _ADAGRAD = 0, 1, 2


@dataclass(frozen=True)
class Update:
    """The optimizer's step, taken where gradients come to be.

    Attributes:
        optimizer: "sgd", "adagrad" or "rowwise_adagrad".
        cores: parameters to change, float32 and contiguous, of shape (p_k, r_{k-1}, q_k, r_k).
        sums: their sums of squares; shape as the cores, (p_k,) with "rowwise_adagrad", none with "sgd".
        learning_rate, eps: as usual.
    """

    optimizer: str
    cores: Sequence[torch.Tensor]
    sums: Sequence[torch.Tensor]
    learning_rate: float
    eps: float


def supports(shape: TTShape) -> bool:
    """Whether the kernels' tiles hold a table's products."""
    height, width = prod(shape.dims[:-1]), shape.dims[-1]
    return (
        height <= _MOST_HEIGHT and int(triton.next_power_of_2(height) * triton.next_power_of_2(width)) <= _MOST_NUMBERS
    )


@triton.jit
def _settle(acc, place, valid, gradient, weight, state, rate, eps, MODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a gradient, or change what it is of."""
    if MODE == 0:
        tl.store(gradient + place, acc, mask=valid)
    elif MODE == 1:
        tl.store(weight + place, tl.load(weight + place, mask=valid, other=0.0) - rate * acc, mask=valid)
    else:
        total = tl.load(state + place, mask=valid, other=0.0) + acc * acc
        tl.store(state + place, total, mask=valid)
        step = rate * acc / (tl.sqrt(total) + eps)
        tl.store(weight + place, tl.load(weight + place, mask=valid, other=0.0) - step, mask=valid)


@triton.jit
def _grouped_mm(  # type: ignore[no-untyped-def]
    left, index, weight, out, tile_group, tile_first, ends, groups, K, C, by_k, by_c,
    H: tl.constexpr, ITEMS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """``out[n] = left[index[n]] @ weight[group of n]``."""
    tile = tl.program_id(0)
    group = tl.load(tile_group + tile)
    if group < groups:
        m = tl.arange(0, BM)
        item = tl.load(tile_first + tile) + m // H
        valid = (m < ITEMS * H) & (item < tl.load(ends + group))
        source = tl.load(index + item, mask=valid, other=0) if INDEXED else item
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        acc = tl.zeros((BM, BC), tl.float32)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            within = (k < K)[:, None] & (c < C)[None, :]
            a = tl.load(
                left + (source * H + m % H)[:, None] * K + k[None, :], mask=valid[:, None] & (k < K)[None, :], other=0.0
            )
            b = tl.load(weight + group * K * C + k[:, None] * by_k + c[None, :] * by_c, mask=within, other=0.0)
            acc += tl.dot(a, b, input_precision="ieee")
        tl.store(out + (item * H + m % H)[:, None] * C + c[None, :], acc, mask=valid[:, None] & (c < C)[None, :])


@triton.jit
def _grouped_outer(  # type: ignore[no-untyped-def]
    left, index, upstream, starts, gradient, weight, state, rate, eps, K, C,
    H: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """``gradient[g]``: the sum over the items of a group of ``left[index[n]].T @ upstream[n]``."""
    group = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    first, end = tl.load(starts + group) * H, tl.load(starts + group + 1) * H
    acc = tl.zeros((BK, BC), tl.float32)
    for start in range(first, end, BM):
        row = start + tl.arange(0, BM)
        valid = row < end
        source = tl.load(index + row // H, mask=valid, other=0)
        a = tl.load(
            left + (source * H + row % H)[None, :] * K + k[:, None], mask=valid[None, :] & (k < K)[:, None], other=0.0
        )
        b = tl.load(upstream + row[:, None] * C + c[None, :], mask=valid[:, None] & (c < C)[None, :], other=0.0)
        acc += tl.dot(a, b, input_precision="ieee")
    place = group * K * C + k[:, None] * C + c[None, :]
    _settle(acc, place, (k < K)[:, None] & (c < C)[None, :], gradient, weight, state, rate, eps, MODE)


@triton.jit
def _suffix_forward(  # type: ignore[no-untyped-def]
    prefixes, parent, core, digit, place, rows, r,
    Q: tl.constexpr, q: tl.constexpr, BQ: tl.constexpr, Bq: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``rows[place[n]] = prefixes[parent[n]] @ core[digit[n]].T``; one program per id."""
    n = tl.program_id(0)
    above, last, to = tl.load(parent + n), tl.load(digit + n), tl.load(place + n)
    a, c = tl.arange(0, BQ), tl.arange(0, Bq)
    acc = tl.zeros((BQ, Bq), tl.float32)
    for start in range(0, r, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(
            prefixes + above * Q * r + a[:, None] * r + k[None, :], mask=(a < Q)[:, None] & (k < r)[None, :], other=0.0
        )
        right = tl.load(
            core + last * q * r + c[:, None] * r + k[None, :], mask=(c < q)[:, None] & (k < r)[None, :], other=0.0
        )
        acc += tl.sum(left[:, None, :] * right[None, :, :], axis=2)
    tl.store(rows + to * Q * q + a[:, None] * q + c[None, :], acc, mask=(a < Q)[:, None] & (c < q)[None, :])


@triton.jit
def _suffix_to_prefixes(  # type: ignore[no-untyped-def]
    upstream, starts, core, digit, place, to_prefixes, r,
    Q: tl.constexpr, q: tl.constexpr, BQ: tl.constexpr, Bq: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Gradients of prefixes; one program walks through the ids below one, which follow each other."""
    prefix = tl.program_id(0).to(tl.int64)
    a, c, k = tl.arange(0, BQ), tl.arange(0, Bq), tl.program_id(1) * BK + tl.arange(0, BK)
    acc = tl.zeros((BQ, BK), tl.float32)
    for n in range(tl.load(starts + prefix), tl.load(starts + prefix + 1)):
        last, of = tl.load(digit + n), tl.load(place + n)
        g = tl.load(
            upstream + of * Q * q + a[:, None] * q + c[None, :], mask=(a < Q)[:, None] & (c < q)[None, :], other=0.0
        )
        right = tl.load(
            core + last * q * r + c[:, None] * r + k[None, :], mask=(c < q)[:, None] & (k < r)[None, :], other=0.0
        )
        acc += tl.sum(g[:, :, None] * right[None, :, :], axis=1)
    tl.store(to_prefixes + prefix * Q * r + a[:, None] * r + k[None, :], acc, mask=(a < Q)[:, None] & (k < r)[None, :])


@triton.jit
def _suffix_to_core(  # type: ignore[no-untyped-def]
    upstream, order, starts, prefixes, parent, place, gradient, weight, state, rate, eps, r,
    Q: tl.constexpr, q: tl.constexpr, BQ: tl.constexpr, Bq: tl.constexpr, BK: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Gradient of the last core, laid out as the parameter (p, r, q); one program per digit and part of r."""
    last = tl.program_id(0).to(tl.int64)
    a, c, k = tl.arange(0, BQ), tl.arange(0, Bq), tl.program_id(1) * BK + tl.arange(0, BK)
    acc = tl.zeros((Bq, BK), tl.float32)
    for j in range(tl.load(starts + last), tl.load(starts + last + 1)):
        n = tl.load(order + j)
        above, of = tl.load(parent + n), tl.load(place + n)
        g = tl.load(
            upstream + of * Q * q + a[:, None] * q + c[None, :], mask=(a < Q)[:, None] & (c < q)[None, :], other=0.0
        )
        left = tl.load(
            prefixes + above * Q * r + a[:, None] * r + k[None, :], mask=(a < Q)[:, None] & (k < r)[None, :], other=0.0
        )
        acc += tl.sum(g[:, :, None] * left[:, None, :], axis=0)
    here = last * q * r + k[None, :] * q + c[:, None]
    _settle(acc, here, (c < q)[:, None] & (k < r)[None, :], gradient, weight, state, rate, eps, MODE)


@triton.jit
def _segment_sum(  # type: ignore[no-untyped-def]
    values, order, starts, gradient, weight, state, rate, eps, size, BLOCK: tl.constexpr, MODE: tl.constexpr
):
    """``gradient[s]``: the sum of the rows of ``values`` that ``order`` lists from ``starts[s]`` on."""
    segment = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in range(tl.load(starts + segment), tl.load(starts + segment + 1)):
        acc += tl.load(values + tl.load(order + j) * size + e, mask=e < size, other=0.0)
    _settle(acc, segment * size + e, e < size, gradient, weight, state, rate, eps, MODE)


@triton.jit
def _rowwise_adagrad(gradient, weight, state, rate, eps, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One state per slice of a core: the mean of its squared gradient is added, then the slice takes its step."""
    part = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        e = start + tl.arange(0, BLOCK)
        g = tl.load(gradient + part * size + e, mask=e < size, other=0.0)
        squares += g * g
    total = tl.load(state + part) + tl.sum(squares, axis=0) / size
    tl.store(state + part, total)
    step = rate / (tl.sqrt(total) + eps)
    for start in range(0, size, BLOCK):
        e = start + tl.arange(0, BLOCK)
        here = part * size + e
        g = tl.load(gradient + here, mask=e < size, other=0.0)
        tl.store(weight + here, tl.load(weight + here, mask=e < size, other=0.0) - step * g, mask=e < size)


def forward_rows(
    levels: Levels, shape: TTShape, cores: Sequence[torch.Tensor], *, products: Sequence[torch.Tensor]
) -> torch.Tensor:
    """As :func:`flexshard.embeddings._tt_rows.forward_rows`; ``products`` are always kept."""
    before = cores[0].view(shape.rows[0], shape.dims[0], -1)
    for k, (level, found) in enumerate(zip(levels.inner, products, strict=True), start=1):
        _multiply(before, level.parent, cores[k], found, level, shape.rows[k], transposed=False)
        before = found
    height, width, rank = prod(shape.dims[:-1]), shape.dims[-1], shape.ranks[-1]
    rows = before.new_empty(levels.parent.numel(), height, width)
    if levels.parent.numel():
        _suffix_forward[(levels.parent.numel(),)](
            before, levels.parent, cores[-1], levels.digit, levels.place, rows, rank, height, width, **_tiles(shape)
        )
    return rows.flatten(1)


def backward_rows(
    gradient: torch.Tensor,
    levels: Levels,
    shape: TTShape,
    cores: Sequence[torch.Tensor],
    products: Sequence[torch.Tensor],
    *,
    update: Update | None,
) -> list[torch.Tensor]:
    """As :func:`flexshard.embeddings._tt_rows.backward_rows`, gradients in the shapes of the parameters; none with
    ``update``, which changes the parameters instead.
    """
    height, width, rank, last = prod(shape.dims[:-1]), shape.dims[-1], shape.ranks[-1], shape.cores - 1
    upstream = gradient.reshape(-1, height, width).contiguous()
    prefixes = products[-1] if products else cores[0].view(shape.rows[0], shape.dims[0], -1)
    own = prefixes.new_empty(prefixes.shape)
    tiles, sink = _tiles(shape), _Sink(shape, cores, update)
    count = prefixes.shape[0]
    if count:
        grid = (count, triton.cdiv(rank, tiles["BK"]))
        starts = _starts(levels.parent, count)
        _suffix_to_prefixes[grid](
            upstream, starts, cores[-1], levels.digit, levels.place, own, rank, height, width, **tiles
        )
    order = torch.argsort(levels.digit, stable=True)
    grid = (shape.rows[-1], triton.cdiv(rank, tiles["BK"]))
    starts = _starts(levels.digit[order], shape.rows[-1])
    _suffix_to_core[grid](
        upstream, order, starts, prefixes, levels.parent, levels.place, *sink.of(last), rank, height, width, **tiles,
        MODE=sink.mode,
    )  # fmt: skip
    sink.done(last)
    for k in range(len(levels.inner), 0, -1):
        level = levels.inner[k - 1]
        before = products[k - 2] if k > 1 else cores[0].view(shape.rows[0], shape.dims[0], -1)
        to_left = before.new_empty(level.parent.numel(), *before.shape[1:])
        _multiply(own, None, cores[k], to_left, level, shape.rows[k], transposed=True)
        h, inside, outside = before.shape[1], cores[k].shape[1], cores[k].shape[2]
        bk, bc = _block(inside, 32), _block(outside, 64)
        grid3 = (shape.rows[k], triton.cdiv(inside, bk), triton.cdiv(outside, bc))
        _grouped_outer[grid3](
            before, level.parent, own, _starts(level.digit, shape.rows[k]), *sink.of(k), inside, outside,
            H=h, BM=32, BK=bk, BC=bc, MODE=sink.mode,
        )  # fmt: skip
        sink.done(k)
        # Gradients of the level before: a sum over the prefixes that begin with each of its own.
        order = torch.argsort(level.parent, stable=True)
        starts = _starts(level.parent[order], before.shape[0])
        size = h * before.shape[2]
        block = _block(size, 256)
        own = before.new_empty(before.shape)
        first = k == 1
        arguments, mode = (sink.of(0), sink.mode) if first else ((own, own, own, 0.0, 0.0), _KEEP)
        if before.shape[0]:
            _segment_sum[(before.shape[0], triton.cdiv(size, block))](
                to_left, order, starts, *arguments, size, BLOCK=block, MODE=mode
            )
        if first:
            sink.done(0)
    if not levels.inner:
        sink.take(0, own)
    return sink.gradients


class _Sink:
    """Where gradients of cores go: to memory of their own, or into the parameters."""

    def __init__(self, shape: TTShape, cores: Sequence[torch.Tensor], update: Update | None) -> None:
        self._update, self._bounds, self._shape = update, shape.bounds, shape
        self._like = cores
        self.mode = _KEEP
        if update is not None and update.optimizer != "rowwise_adagrad":
            self.mode = _SGD if update.optimizer == "sgd" else _ADAGRAD
        self._found: dict[int, torch.Tensor] = {}

    def of(self, k: int) -> tuple[Any, ...]:
        """Arguments of a kernel for core k: gradient, weight, state, learning rate and eps."""
        update = self._update
        if self.mode == _KEEP or update is None:
            size = (self._shape.rows[k], self._bounds[k], self._shape.dims[k], self._bounds[k + 1])
            found = self._found[k] = self._like[k].new_empty(size)
            return found, found, found, 0.0, 0.0
        core = update.cores[k]
        state = update.sums[k] if self.mode == _ADAGRAD else core
        return core, core, state, update.learning_rate, update.eps

    def done(self, k: int) -> None:
        """Take the step that needs a whole slice's gradient."""
        update = self._update
        if update is None or update.optimizer != "rowwise_adagrad":
            return
        gradient = self._found.pop(k)
        size = gradient[0].numel()
        _rowwise_adagrad[(gradient.shape[0],)](
            gradient, update.cores[k], update.sums[k], update.learning_rate, update.eps, size, BLOCK=_block(size, 1024)
        )

    def take(self, k: int, gradient: torch.Tensor) -> None:
        """A gradient that is there already."""
        arguments = self.of(k)
        size = gradient[0].numel()
        order = torch.arange(gradient.shape[0], device=gradient.device)
        starts = torch.arange(gradient.shape[0] + 1, device=gradient.device)
        block = _block(size, 256)
        _segment_sum[(gradient.shape[0], triton.cdiv(size, block))](
            gradient, order, starts, *arguments, size, BLOCK=block, MODE=self.mode
        )
        self.done(k)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Of all cores, first to last; empty if they were used up."""
        return [self._found[k] for k in sorted(self._found)]


def _multiply(
    left: torch.Tensor,
    index: torch.Tensor | None,
    core: torch.Tensor,
    out: torch.Tensor,
    level: Level,
    groups: int,
    *,
    transposed: bool,
) -> None:
    """``out[n] = left[index[n]] @ core[digit of n]``, or by its transpose."""
    items = level.parent.numel()
    if not items:
        return
    height, inside, outside = left.shape[1], core.shape[1], core.shape[2]
    # Gradients have the product's layout, (H · q, r): as rows of the item before, they are (H, q · r).
    if transposed:
        height = out.shape[1]
        inside, outside, by_k, by_c = outside, inside, 1, outside
    else:
        by_k, by_c = outside, 1
    rows = max(64, triton.next_power_of_2(height))
    per_tile = rows // height
    starts = _starts(level.digit, groups)
    tiles = (starts[1:] - starts[:-1] + per_tile - 1) // per_tile
    ends = torch.cumsum(tiles, 0)
    most = items // per_tile + groups  # no more tiles than this, whatever the digits: nothing waits for the device
    tile = torch.arange(most, device=out.device)
    group = torch.searchsorted(ends, tile, right=True)
    inside_group = tile - torch.nn.functional.pad(ends, (1, 0))[group]
    first = torch.nn.functional.pad(starts[:-1], (0, 1))[group] + inside_group * per_tile
    bc = _block(outside, 64)
    _grouped_mm[(most, triton.cdiv(outside, bc))](
        left, level.parent if index is None else index, core, out, group, first, starts[1:], groups, inside, outside,
        by_k, by_c, H=height, ITEMS=per_tile, BM=rows, BK=_block(inside, 32), BC=bc, INDEXED=index is not None,
    )  # fmt: skip


def _starts(ascending: torch.Tensor, count: int) -> torch.Tensor:
    """Where each of 0 to count - 1 starts in an ascending array, and its end; shape (count + 1,)."""
    return torch.searchsorted(ascending, torch.arange(count + 1, device=ascending.device))


def _block(size: int, most: int) -> int:
    """Width of a tile: a power of two, at least what tensor cores take."""
    return int(max(16, min(most, triton.next_power_of_2(size))))


def _tiles(shape: TTShape) -> dict[str, int]:
    height, width = (int(triton.next_power_of_2(size)) for size in (prod(shape.dims[:-1]), shape.dims[-1]))
    # A program holds Q x q x part of r numbers at once.
    part = max(1, min(32, _MOST_NUMBERS // (height * width), triton.next_power_of_2(shape.ranks[-1])))
    return {"BQ": height, "Bq": width, "BK": part}
