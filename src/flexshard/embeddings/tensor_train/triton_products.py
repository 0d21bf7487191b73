"""Tensor-train rows on CUDA: prefixes, suffix, their gradients and the update of the cores, in Triton.

The same sums as :mod:`flexshard.embeddings.tensor_train.products`, without atomics: every number is summed by one
program, in a fixed order. Prefixes that share a slice of a core are tiles of one matrix product; the ids below a
prefix, or of one
last digit, are a segment that one program walks through. With ``update`` a program changes the core where it would
write its gradient, after all that read the core have done so. Long segments go in pieces, which are then added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import triton

from flexshard.embeddings.tensor_train import triton_kernels as kernels
from flexshard.embeddings.tensor_train.products import Level, Levels
from flexshard.tables import TTShape

__all__ = ["Update", "backward_rows", "forward_rows", "supports"]

_MOST_HEIGHT = 128  # rows of an item that one tile holds
_MOST_NUMBERS = 8192
_PIECE = 128
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
    height, width = prod(shape.dim_factors[:-1]), shape.dim_factors[-1]
    return (
        height <= _MOST_HEIGHT and int(triton.next_power_of_2(height) * triton.next_power_of_2(width)) <= _MOST_NUMBERS
    )


def forward_rows(
    levels: Levels, shape: TTShape, cores: Sequence[torch.Tensor], *, products: Sequence[torch.Tensor]
) -> torch.Tensor:
    """As :func:`flexshard.embeddings.tensor_train.products.forward_rows`; ``products`` are always kept."""
    before = cores[0].view(shape.row_factors[0], shape.dim_factors[0], -1)
    for k, (level, product) in enumerate(zip(levels.inner, products, strict=True), start=1):
        _multiply(before, level.parent, cores[k], product, level, shape.row_factors[k], transposed=False)
        before = product
    height, width, tt_rank = prod(shape.dim_factors[:-1]), shape.dim_factors[-1], shape.tt_ranks[-1]
    rows = before.new_empty(levels.parent.numel(), height, width)
    if levels.parent.numel():
        kernels.suffix_forward[(levels.parent.numel(),)](
            before,
            levels.parent,
            cores[-1],
            levels.digit,
            levels.row_index,
            rows,
            before.shape[0],
            tt_rank,
            height,
            width,
            **_tiles(shape),
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
    """As :func:`flexshard.embeddings.tensor_train.products.backward_rows`, gradients in the shapes of the parameters;
    none with ``update``, which changes the parameters instead.
    """
    height, width, tt_rank, last = (
        prod(shape.dim_factors[:-1]),
        shape.dim_factors[-1],
        shape.tt_ranks[-1],
        shape.cores - 1,
    )
    upstream = gradient.reshape(-1, height, width).contiguous()
    prefixes = products[-1] if products else cores[0].view(shape.row_factors[0], shape.dim_factors[0], -1)
    to_product = prefixes.new_empty(prefixes.shape)
    tiles, sink = _tiles(shape), _Sink(shape, cores, update)
    count = prefixes.shape[0]
    if count:
        grid = (count, triton.cdiv(tt_rank, tiles["BK"]))
        starts = _starts(levels.parent, count)
        kernels.suffix_to_prefixes[grid](
            upstream, starts, cores[-1], levels.digit, levels.row_index, to_product, tt_rank, height, width, **tiles
        )
    order = torch.argsort(levels.digit, stable=True)
    starts = _starts(levels.digit[order], shape.row_factors[-1])
    pieces = _Pieces.of(starts, order.numel())
    to_last, mode = (sink.of(last), sink.mode) if pieces is None else (_kept(upstream, pieces, width * tt_rank), _KEEP)
    starts = starts if pieces is None else pieces.starts
    kernels.suffix_to_core[starts.numel() - 1, triton.cdiv(tt_rank, tiles["BK"])](
        upstream, order, starts, prefixes, levels.parent, levels.row_index, *to_last, tt_rank, height, width,
        **tiles, MODE=mode,
    )  # fmt: skip
    if pieces is not None:
        pieces.add_up(to_last[0], sink.of(last), width * tt_rank, sink.mode)
    sink.done(last)
    for k in range(len(levels.inner), 0, -1):
        level = levels.inner[k - 1]
        before = products[k - 2] if k > 1 else cores[0].view(shape.row_factors[0], shape.dim_factors[0], -1)
        to_left = before.new_empty(level.parent.numel(), *before.shape[1:])
        _multiply(to_product, None, cores[k], to_left, level, shape.row_factors[k], transposed=True)
        h, inside, outside = before.shape[1], cores[k].shape[1], cores[k].shape[2]
        bk, bc = _block(inside, 32), _block(outside, 64)
        grid3 = (shape.row_factors[k], triton.cdiv(inside, bk), triton.cdiv(outside, bc))
        kernels.grouped_outer[grid3](
            before, level.parent, to_product, _starts(level.digit, shape.row_factors[k]), *sink.of(k), inside, outside,
            H=h, BM=32, BK=bk, BC=bc, MODE=sink.mode,
        )  # fmt: skip
        sink.done(k)
        # Gradients of the level before: a sum over the prefixes that begin with each of its own.
        order = torch.argsort(level.parent, stable=True)
        starts = _starts(level.parent[order], before.shape[0])
        size = h * before.shape[2]
        to_product = before.new_empty(before.shape)
        first = k == 1
        arguments, mode = (sink.of(0), sink.mode) if first else ((to_product, to_product, to_product, 0.0, 0.0), _KEEP)
        pieces = _Pieces.of(starts, order.numel())
        if pieces is None:
            _add_up(to_left, order, starts, arguments, size, mode)
        else:
            parts = _kept(to_left, pieces, size)
            _add_up(to_left, order, pieces.starts, parts, size, _KEEP)
            pieces.add_up(parts[0], arguments, size, mode)
        if first:
            sink.done(0)
    if not levels.inner:
        sink.take(0, to_product)
    return sink.gradients


@dataclass(frozen=True)
class _Pieces:
    """Segments in pieces of at most :data:`_PIECE` items, so that no program walks through many.

    Attributes:
        starts: of each piece, and the end; those behind the last one have none. Shape (pieces + 1,).
        of_segments: first piece of each segment, and the end; shape (segments + 1,).
    """

    starts: torch.Tensor
    of_segments: torch.Tensor

    @classmethod
    def of(cls, starts: torch.Tensor, items: int) -> _Pieces | None:
        """Of segments that start there; None where there are few items in all."""
        if items < 4 * _PIECE:
            return None
        number = (torch.diff(starts) + _PIECE - 1) // _PIECE
        ends = torch.cumsum(number, 0)
        most = items // _PIECE + number.numel()  # no more than this, whatever the segments: nothing waits
        piece = torch.arange(most, device=starts.device)
        segment = torch.searchsorted(ends, piece, right=True).clamp(max=number.numel() - 1)
        start = starts[segment] + (piece - (ends - number)[segment]) * _PIECE
        own = torch.where(piece < ends[-1], start, starts[-1])
        return cls(torch.cat([own, starts[-1:]]), torch.nn.functional.pad(ends, (1, 0)))

    def add_up(self, parts: torch.Tensor, arguments: tuple[Any, ...], size: int, mode: int) -> None:
        """The sums of the pieces of each segment, in their order."""
        order = torch.arange(self.starts.numel() - 1, device=parts.device)
        _add_up(parts, order, self.of_segments, arguments, size, mode)


def _kept(like: torch.Tensor, pieces: _Pieces, size: int) -> tuple[Any, ...]:
    """Where the sums of pieces go, as arguments of a kernel."""
    parts = like.new_empty(pieces.starts.numel() - 1, size)
    return parts, parts, parts, 0.0, 0.0


def _add_up(
    values: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, arguments: tuple[Any, ...], size: int, mode: int
) -> None:
    """Sums of the rows of each segment, in a fixed order."""
    if starts.numel() > 1:
        block = _block(size, 256)
        kernels.segment_sum[(starts.numel() - 1, triton.cdiv(size, block))](
            values, order, starts, *arguments, size, BLOCK=block, MODE=mode
        )


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
            size = (self._shape.row_factors[k], self._bounds[k], self._shape.dim_factors[k], self._bounds[k + 1])
            buffer = self._found[k] = self._like[k].new_empty(size)
            return buffer, buffer, buffer, 0.0, 0.0
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
        kernels.rowwise_adagrad[(gradient.shape[0],)](
            gradient, update.cores[k], update.sums[k], update.learning_rate, update.eps, size, BLOCK=_block(size, 1024)
        )

    def take(self, k: int, gradient: torch.Tensor) -> None:
        """A gradient that is there already."""
        arguments = self.of(k)
        size = gradient[0].numel()
        order = torch.arange(gradient.shape[0], device=gradient.device)
        starts = torch.arange(gradient.shape[0] + 1, device=gradient.device)
        _add_up(gradient, order, starts, arguments, size, self.mode)
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
    kernels.grouped_mm[(most, triton.cdiv(outside, bc))](
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
    height, width = (
        int(triton.next_power_of_2(size)) for size in (prod(shape.dim_factors[:-1]), shape.dim_factors[-1])
    )
    # A program holds Q x q x part of r numbers at once.
    part = max(1, min(32, _MOST_NUMBERS // (height * width), triton.next_power_of_2(shape.tt_ranks[-1])))
    return {"BQ": height, "Bq": width, "BK": part}
