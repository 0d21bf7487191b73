"""Rows of distinct ids as a step of autograd: which code computes them, what is kept for backward, who updates."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from flexshard._internal import has_numba, has_triton
from flexshard.embeddings.tensor_train.core_optimizer import CoreOptimizer
from flexshard.embeddings.tensor_train.products import (
    Levels,
    Step,
    backward_rows,
    forward_rows,
    levels_of,
    product_sizes,
)
from flexshard.errors import TableError
from flexshard.tables import TTShape

__all__ = ["BACKENDS", "ProductBuffer", "RowsContext", "TTRows", "laid_cores"]

BACKENDS = ("numba", "torch", "triton")


class ProductBuffer:
    """Memory of the products that a table used last: fresh pages for a hundred megabytes take as long as the products.

    A lookup takes it, and gives it back after its backward pass; copies of a table start without.
    """

    def __init__(self) -> None:
        self._flat: torch.Tensor | None = None

    def __deepcopy__(self, memo: Any) -> ProductBuffer:
        return ProductBuffer()

    def __getstate__(self) -> dict[str, Any]:
        return {"_flat": None}

    def take(self, sizes: Sequence[tuple[int, int, int]], like: torch.Tensor) -> list[torch.Tensor]:
        """Tensors of these sizes, of any content."""
        needed = sum(prod(size) for size in sizes)
        flat, self._flat = self._flat, None
        if flat is None or flat.numel() < needed or flat.device != like.device:
            flat = like.new_empty(needed + needed // 8)  # batches differ
        parts = flat[:needed].split([prod(size) for size in sizes])
        return [part.view(size) for part, size in zip(parts, sizes, strict=True)]

    def give_back(self, products: Sequence[torch.Tensor]) -> None:
        """What :meth:`take` gave is not used any more."""
        if products:
            self._flat = products[0]._base


@dataclass(frozen=True)
class RowsContext:
    """What a lookup depends on besides its ids.

    Attributes:
        shape: of the table.
        cores: parameters of shape (p_k, r_{k-1}, q_k, r_k).
        states: of the fused optimizer, for each core; empty if it has none.
        optimizer: fused one, or None for gradients.
        buffer: memory for products.
        backend: asked for, or None.
        trained: whether backward may come.
        prefixes: how many distinct prefixes of each inner level there are, if that is known.
    """

    shape: TTShape
    cores: Sequence[torch.Tensor]
    states: Sequence[torch.Tensor]
    optimizer: CoreOptimizer | None
    buffer: ProductBuffer
    backend: str | None
    trained: bool
    prefixes: tuple[int, ...] | None = None

    def chosen_backend(self) -> str:
        """What computes: "numba" or "torch" on the CPU, "triton" on CUDA where it can, else "torch"."""
        if self.backend is not None:
            return self.backend
        device = self.cores[0].device.type
        if device == "cpu":
            return "numba" if has_numba() else "torch"
        if device == "cuda" and has_triton():
            from flexshard.embeddings.tensor_train import triton_products

            return "triton" if triton_products.supports(self.shape) else "torch"
        return "torch"

    def update(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The fused optimizer's step of the cores that have a gradient here."""
        assert self.optimizer is not None
        for k, (core, gradient) in enumerate(zip(self.cores, gradients, strict=True)):
            if gradient is not None and core.requires_grad:
                self.optimizer.step(core, gradient, self.states[k] if self.states else None)

    def slice_step(self) -> Step | None:
        """Its step of one slice of a core, which is p_k times as small."""
        optimizer = self.optimizer
        if optimizer is None:
            return None

        def step(k: int, digit: int, gradient: torch.Tensor) -> None:
            core = self.cores[k]
            if core.requires_grad:
                one = slice(digit, digit + 1)
                state = self.states[k][one] if self.states else None
                optimizer.step(core[one], gradient.view(1, *core.shape[1:]), state)

        return step


class TTRows(torch.autograd.Function):
    """Rows of distinct ids, with the gradients summed per prefix."""

    @staticmethod
    def forward(ctx: Any, distinct: torch.Tensor, context: RowsContext, *cores: torch.Tensor) -> Any:
        """Rows of ``distinct``, in the cores' type; shape (n, dim)."""
        shape, backend, trained = context.shape, context.chosen_backend(), context.trained
        levels = levels_of(distinct, shape, context.prefixes)
        with torch.autocast(distinct.device.type, enabled=False), _on_device(distinct):
            laid = laid_cores(cores)
            if backend == "triton":
                from flexshard.embeddings.tensor_train import triton_products

                products = [laid[0].new_empty(size) for size in product_sizes(levels, shape)]
                rows = triton_products.forward_rows(levels, shape, laid, products=products)
            else:
                products = context.buffer.take(product_sizes(levels, shape), laid[0]) if trained else []
                kept = products if trained else None
                rows = forward_rows(levels, shape, laid, products=kept, compiled=backend == "numba")
        # Saved as autograd saves tensors, so that it notices where cores were changed in between. Products are our own.
        ctx.save_for_backward(*cores)
        ctx.products = products if trained else None
        ctx.context, ctx.levels, ctx.backend = context, levels, backend
        ctx.updates = None if context.optimizer is None else context.optimizer.updates
        return rows.to(cores[0].dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Gradients of the cores; none where an optimizer updates them here."""
        context, levels = ctx.context, ctx.levels
        shape, optimizer = context.shape, context.optimizer
        if optimizer is not None:
            optimizer.check_alone()
            if ctx.updates != optimizer.updates:
                raise TableError(
                    f"the table was updated by its {optimizer.name} optimizer between a lookup and its backward pass;"
                    " look up all ids of a step at once, or use optimizer=None"
                )
            optimizer.updates += 1
        cores = ctx.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False), _on_device(gradient):
            laid = laid_cores(cores)
            # A graph that was kept comes here again, when the products' memory may serve another lookup.
            products = _products(context, levels, laid, ctx.backend) if ctx.products is None else ctx.products
            ctx.products = None
            if ctx.backend == "triton":
                shaped: list[torch.Tensor | None] = _backward_triton(context, gradient.float(), levels, laid, products)
            else:
                compiled = ctx.backend == "numba"
                step = context.slice_step()
                gradients_of_cores = backward_rows(
                    gradient.float(), levels, shape, laid, products, compiled=compiled, step=step
                )
                last = gradients_of_cores[-1]
                gradients_of_cores[-1] = None if last is None else last.transpose(1, 2)
                shaped = [
                    None if local is None else local.reshape(core.shape)
                    for local, core in zip(gradients_of_cores, context.cores, strict=True)
                ]
                context.buffer.give_back(products)
        if optimizer is not None:
            if shaped:
                context.update(shaped)
            return (None, None, *[None] * shape.cores)
        gradients = zip(shaped, context.cores, strict=True)
        return (None, None, *(None if local is None else local.to(core.dtype) for local, core in gradients))


def _products(context: RowsContext, levels: Levels, laid: Sequence[torch.Tensor], backend: str) -> list[torch.Tensor]:
    """Products of prefixes once more."""
    products = context.buffer.take(product_sizes(levels, context.shape), laid[0])
    if backend == "triton":
        from flexshard.embeddings.tensor_train import triton_products

        triton_products.forward_rows(levels, context.shape, laid, products=products)
    else:
        forward_rows(levels, context.shape, laid, products=products, compiled=backend == "numba")
    return products


def _backward_triton(
    context: RowsContext,
    gradient: torch.Tensor,
    levels: Levels,
    laid: Sequence[torch.Tensor],
    products: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Gradients of the cores; none where the kernels update cores of float32 by themselves."""
    from flexshard.embeddings.tensor_train import triton_products

    optimizer, cores, update = context.optimizer, [core.detach() for core in context.cores], None
    within = all(core.dtype == torch.float32 and core.is_contiguous() and core.requires_grad for core in context.cores)
    if optimizer is not None and within:
        rate, eps = optimizer.learning_rate, optimizer.eps
        update = triton_products.Update(optimizer.name, cores, context.states, rate, eps)
    gradients = triton_products.backward_rows(gradient, levels, context.shape, laid, products, update=update)
    if update is not None:
        for core in context.cores:
            torch.autograd.graph.increment_version(core)
    return list(gradients)


def laid_cores(cores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cores as the products take them: slices as matrices, the last transposed; in float32."""
    laid = [core.detach().float().contiguous().flatten(2) for core in cores[:-1]]
    return [*laid, cores[-1].detach().float().squeeze(3).transpose(1, 2).contiguous()]


def _on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton starts kernels on the current device, whatever their tensors are on."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
