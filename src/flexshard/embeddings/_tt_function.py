"""Rows of distinct ids as a step of autograd: which code computes them, what is kept for backward, who updates."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from flexshard._tt_shape import TTShape
from flexshard._values import has_numba, has_triton
from flexshard.embeddings._tt_rows import Levels, backward_rows, forward_rows, levels_of, product_sizes
from flexshard.errors import TableError

if TYPE_CHECKING:
    from flexshard.embeddings._tt_table import TTTable

__all__ = ["TTRows"]


class TTRows(torch.autograd.Function):
    """Rows of distinct ids, with the gradients summed per prefix."""

    @staticmethod
    def forward(ctx: Any, distinct: torch.Tensor, table: TTTable, trained: bool, *cores: torch.Tensor) -> Any:
        shape, backend = table.shape, _backend(cores[0], table.shape)
        levels = levels_of(distinct, shape)
        with torch.autocast(distinct.device.type, enabled=False), _on_device(distinct):
            laid = _laid(cores)
            if backend == "triton":
                from flexshard.embeddings import _tt_triton

                products = [laid[0].new_empty(size) for size in product_sizes(levels, shape)]
                rows = _tt_triton.forward_rows(levels, shape, laid, products=products)
            else:
                products = _kept(table, levels, laid[0]) if trained else []
                kept = products if trained else None
                rows = forward_rows(levels, shape, laid, products=kept, compiled=backend == "numba")
        # Saved as autograd saves tensors, so that it notices where cores were changed in between. Products are our own.
        ctx.save_for_backward(*cores)
        ctx.products = products if trained else None
        ctx.table, ctx.levels, ctx.backend, ctx.updates = table, levels, backend, table._updates
        return rows.to(cores[0].dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        table, levels, shape = ctx.table, ctx.levels, ctx.table.shape
        if table.optimizer is not None:
            table._check_alone()
            if ctx.updates != table._updates:
                raise TableError(
                    f"the table was updated by its {table.optimizer} optimizer between a lookup and its backward pass;"
                    " look up all ids of a step at once, or use optimizer=None"
                )
            table._updates += 1
        cores = ctx.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False), _on_device(gradient):
            laid = _laid(cores)
            # A graph that was kept comes here again, when the products' memory may serve another lookup.
            products = _products(table, levels, laid, ctx.backend) if ctx.products is None else ctx.products
            ctx.products = None
            if ctx.backend == "triton":
                shaped: list[torch.Tensor | None] = _backward_triton(table, gradient.float(), levels, laid, products)
            else:
                compiled = ctx.backend == "numba"
                step = None if table.optimizer is None else table._slice_step()
                found = backward_rows(gradient.float(), levels, shape, laid, products, compiled=compiled, step=step)
                last = found[-1]
                found[-1] = None if last is None else last.transpose(1, 2)
                shaped = [
                    None if own is None else own.reshape(core.shape)
                    for own, core in zip(found, table.cores, strict=True)
                ]
                if products:
                    _SPARE[table] = products[0]._base
        if table.optimizer is not None:
            if shaped:
                table._update(shaped)
            return (None, None, None, *[None] * shape.cores)
        return (
            None, None, None,
            *(None if own is None else own.to(core.dtype) for own, core in zip(shaped, table.cores, strict=True)),
        )  # fmt: skip


def _products(table: TTTable, levels: Levels, laid: Sequence[torch.Tensor], backend: str) -> list[torch.Tensor]:
    """Products of prefixes once more."""
    found = _kept(table, levels, laid[0])
    if backend == "triton":
        from flexshard.embeddings import _tt_triton

        _tt_triton.forward_rows(levels, table.shape, laid, products=found)
    else:
        forward_rows(levels, table.shape, laid, products=found, compiled=backend == "numba")
    return found


def _backward_triton(
    table: TTTable,
    gradient: torch.Tensor,
    levels: Levels,
    laid: Sequence[torch.Tensor],
    products: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Gradients of the cores; none where the kernels update cores of float32 by themselves."""
    from flexshard.embeddings import _tt_triton

    cores, update = [core.detach() for core in table.cores], None
    within = all(core.dtype == torch.float32 and core.is_contiguous() and core.requires_grad for core in table.cores)
    if table.optimizer is not None and within:
        update = _tt_triton.Update(table.optimizer, cores, table._sums(), table.learning_rate, table.eps)
    found = _tt_triton.backward_rows(gradient, levels, table.shape, laid, products, update=update)
    if update is not None:
        for core in table.cores:
            torch.autograd.graph.increment_version(core)
    return list(found)


# Memory of products that were used last, by table: fresh pages for a hundred megabytes take as long as the products.
_SPARE: WeakKeyDictionary[TTTable, torch.Tensor] = WeakKeyDictionary()


def _kept(table: TTTable, levels: Levels, like: torch.Tensor) -> list[torch.Tensor]:
    """Where to keep the products of a lookup."""
    sizes = product_sizes(levels, table.shape)
    needed = sum(prod(size) for size in sizes)
    flat = _SPARE.pop(table, None)
    if flat is None or flat.numel() < needed or flat.device != like.device:
        flat = like.new_empty(needed + needed // 8)  # batches differ
    parts = flat[:needed].split([prod(size) for size in sizes])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


def _laid(cores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cores as the products take them: slices as matrices, the last transposed; in float32."""
    laid = [core.detach().float().contiguous().flatten(2) for core in cores[:-1]]
    return [*laid, cores[-1].detach().float().squeeze(3).transpose(1, 2).contiguous()]


def _on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton starts kernels on the current device, whatever their tensors are on."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def _backend(core: torch.Tensor, shape: TTShape) -> str:
    """What computes: "numba" or "torch" on the CPU, "triton" on CUDA where it can, else "torch"."""
    if core.device.type == "cpu":
        return "numba" if has_numba() else "torch"
    if core.device.type == "cuda" and has_triton():
        from flexshard.embeddings import _tt_triton

        return "triton" if _tt_triton.supports(shape) else "torch"
    return "torch"
