"""Rows of distinct ids as a step of autograd: which code computes them, what is kept for backward, who updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from flexshard._internal import has_numba, has_triton
from flexshard.embeddings.tensor_train import products as plain_products
from flexshard.embeddings.tensor_train.core_optimizer import CoreOptimizer, in_full
from flexshard.embeddings.tensor_train.products import Levels, Step, levels_of, product_sizes
from flexshard.errors import TableError
from flexshard.tables import KEPT_SHARE, TTShape

__all__ = ["BACKENDS", "ProductBuffer", "RowsContext", "TTRows", "chosen_backend", "laid_cores", "rows_of"]

BACKENDS = ("numba", "torch", "triton")
_TRITON_UPDATES = ("sgd", "adagrad", "rowwise_adagrad")


class ProductBuffer:
    """Memory of the products that a table used last: fresh pages for a hundred megabytes take as long as the products.

    A lookup takes it, and gives it back after its backward pass; copies of a table start without.

    Attributes:
        is_kept: whether what is given back is kept; set to False, nothing is.
    """

    def __init__(self) -> None:
        self._flat: torch.Tensor | None = None
        self._is_kept = True

    def __deepcopy__(self, memo: Any) -> ProductBuffer:
        other = ProductBuffer()
        other._is_kept = self._is_kept
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {"_flat": None, "_is_kept": self._is_kept}

    @property
    def is_kept(self) -> bool:
        """See the class."""
        return self._is_kept

    @is_kept.setter
    def is_kept(self, value: bool) -> None:
        self._is_kept = value
        if not value:
            self._flat = None

    @property
    def nbytes(self) -> int:
        """Of what is kept now."""
        return 0 if self._flat is None else self._flat.nbytes

    def take(self, sizes: Sequence[tuple[int, int, int]], like: torch.Tensor) -> list[torch.Tensor]:
        """Tensors of these sizes, of any content."""
        needed = sum(prod(size) for size in sizes)
        flat, self._flat = self._flat, None
        if flat is None or flat.numel() < needed or flat.device != like.device or flat.dtype != like.dtype:
            flat = like.new_empty(int(needed * KEPT_SHARE))
        parts = flat[:needed].split([prod(size) for size in sizes])
        return [part.view(size) for part, size in zip(parts, sizes, strict=True)]

    def give_back(self, products: Sequence[torch.Tensor]) -> None:
        """What :meth:`take` gave is not used any more."""
        if products and self._is_kept:
            self._flat = products[0]._base


@dataclass(frozen=True)
class RowsContext:
    """What a lookup depends on besides its ids.

    Attributes:
        shape: of the table.
        cores: parameters of shape (p_k, r_{k-1}, q_k, r_k).
        states: of the fused optimizer, for each core, by name.
        optimizer: fused one, or None for gradients.
        count_step: counts a step of a core, by its number, and returns how many there were.
        buffer: memory for products.
        backend: asked for, or None.
        trained: whether backward may come.
        prefixes: how many distinct prefixes of each inner level there are, or at most, if that is known.
        filled: whether ids and prefixes may be fewer, see :class:`DistinctIds`.
    """

    shape: TTShape
    cores: Sequence[torch.Tensor]
    states: Sequence[Mapping[str, torch.Tensor]]
    optimizer: CoreOptimizer | None
    count_step: Callable[[int], int]
    buffer: ProductBuffer
    backend: str | None
    trained: bool
    prefixes: tuple[int, ...] | None = None
    filled: bool = False

    def update(self, gradients: Sequence[torch.Tensor | None], levels: Levels, numbers: Sequence[int]) -> None:
        """The fused optimizer's step of the cores that have a gradient here.

        Args:
            gradients: of whole cores, or None.
            levels: whose slices alone are moved, by an optimizer that moves what has no gradient.
            numbers: of each core's step.
        """
        optimizer = self.optimizer
        assert optimizer is not None
        for k, (core, gradient, number) in enumerate(zip(self.cores, gradients, numbers, strict=True)):
            if gradient is None or not core.requires_grad:
                continue
            if optimizer.rule.moves_at_zero:
                optimizer.step_of_read(core, levels.has_digit(k, core.shape[0]), gradient, self.states[k], number)
            else:
                optimizer.step(core, gradient, self.states[k], number)

    def update_all(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The step by the gradients of all ranks, of the slices that any of them has one of."""
        optimizer = self.optimizer
        assert optimizer is not None
        whole = [in_full(gradient) for gradient in gradients if gradient is not None]
        for k, (core, gradient) in enumerate(zip(self.cores, optimizer.averaged(whole), strict=True)):
            number = self.count_step(k)
            if not core.requires_grad:
                continue
            if optimizer.rule.moves_at_zero:
                optimizer.step_of_read(core, gradient.flatten(1).any(1), gradient, self.states[k], number)
            else:
                optimizer.step(core, gradient, self.states[k], number)

    def slice_step(self, numbers: Sequence[int]) -> Step | None:
        """Its step of some slices of a core; None where gradients of whole cores are wanted."""
        optimizer = self.optimizer
        if optimizer is None or not numbers:
            return None

        def step(k: int, digits: torch.Tensor, gradients: torch.Tensor) -> None:
            core = self.cores[k]
            if core.requires_grad:
                each = gradients.view(-1, *core.shape[1:])
                optimizer.step_at(core, digits, each, self.states[k], numbers[k])

        return step


def chosen_backend(asked: str | None, shape: TTShape, core: torch.Tensor) -> str:
    """What computes: "numba" or "torch" on the CPU, "triton" on CUDA where it can, else "torch"."""
    if asked is not None:
        return asked
    device = core.device.type
    if device == "cpu":
        return "numba" if has_numba() else "torch"
    if device == "cuda" and has_triton() and core.dtype != torch.float64:
        from flexshard.embeddings.tensor_train import triton_products

        return "triton" if triton_products.supports(shape) else "torch"
    return "torch"


class TTRows(torch.autograd.Function):
    """Rows of distinct ids, with the gradients summed per prefix."""

    @staticmethod
    def forward(ctx: Any, distinct: torch.Tensor, context: RowsContext, *cores: torch.Tensor) -> Any:
        """Rows of ``distinct``, in the cores' type; shape (n, dim)."""
        rows, products, levels, backend = _forward(distinct, context)
        # Saved as autograd saves tensors, so that it notices where cores were changed in between. Products are our own.
        ctx.save_for_backward(*cores)
        ctx.products = products
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
            if ctx.updates != optimizer.updates:
                raise TableError(
                    f"the table was updated by its {optimizer.name} optimizer between a lookup and its backward pass;"
                    " look up all ids of a step at once, or use optimizer=None"
                )
            optimizer.updates += 1
            if optimizer.is_skipping:
                return (None, None, *[None] * shape.cores)
        is_fused = optimizer is not None and not optimizer.is_distributed
        numbers = [context.count_step(k) for k in range(shape.cores)] if is_fused else []
        cores = ctx.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False), _on_device(gradient):
            laid = laid_cores(cores, copied=ctx.backend == "triton")
            # A graph that was kept comes here again, when the products' memory may serve another lookup.
            products = _products(context, levels, laid, ctx.backend) if ctx.products is None else ctx.products
            ctx.products = None
            if ctx.backend == "triton":
                shaped: list[torch.Tensor | None] = _backward_triton(
                    context, gradient.float(), levels, laid, products, is_fused=is_fused
                )
            else:
                gradients_of_cores = _on_cpu(ctx.backend).backward_rows(
                    in_full(gradient), levels, shape, laid, products, step=context.slice_step(numbers)
                )
                last = gradients_of_cores[-1]
                gradients_of_cores[-1] = None if last is None else last.transpose(1, 2)
                shaped = [
                    None if local is None else local.reshape(core.shape)
                    for local, core in zip(gradients_of_cores, context.cores, strict=True)
                ]
                context.buffer.give_back(products)
        if optimizer is not None:
            if is_fused and shaped:
                context.update(shaped, levels, numbers)
            elif not is_fused:
                context.update_all(shaped)
            return (None, None, *[None] * shape.cores)
        gradients = zip(shaped, context.cores, strict=True)
        return (None, None, *(None if local is None else local.to(core.dtype) for local, core in gradients))


@torch.no_grad()
def rows_of(distinct: torch.Tensor, context: RowsContext) -> torch.Tensor:
    """Rows of ``distinct`` with no backward pass to come."""
    return _forward(distinct, context)[0].to(context.cores[0].dtype)


def _forward(
    distinct: torch.Tensor, context: RowsContext
) -> tuple[torch.Tensor, list[torch.Tensor] | None, Levels, str]:
    """Rows, products that are kept for backward, levels, and what computed them."""
    shape, trained = context.shape, context.trained
    backend = chosen_backend(context.backend, shape, context.cores[0])
    levels = levels_of(distinct, shape, context.prefixes, filled=context.filled, compiled=backend == "numba")
    with torch.autocast(distinct.device.type, enabled=False), _on_device(distinct):
        laid = laid_cores(context.cores, copied=backend == "triton")
        if backend == "triton":
            from flexshard.embeddings.tensor_train import triton_products

            kept = [laid[0].new_empty(size) for size in product_sizes(levels, shape)]
            return triton_products.forward_rows(levels, shape, laid, products=kept), kept, levels, backend
        products = context.buffer.take(product_sizes(levels, shape), laid[0]) if trained else None
        rows = _on_cpu(backend).forward_rows(levels, shape, laid, products=products)
    return rows, products, levels, backend


def _products(context: RowsContext, levels: Levels, laid: Sequence[torch.Tensor], backend: str) -> list[torch.Tensor]:
    """Products of prefixes once more."""
    products = context.buffer.take(product_sizes(levels, context.shape), laid[0])
    if backend == "triton":
        from flexshard.embeddings.tensor_train import triton_products

        triton_products.forward_rows(levels, context.shape, laid, products=products)
    else:
        _on_cpu(backend).forward_rows(levels, context.shape, laid, products=products)
    return products


def _backward_triton(
    context: RowsContext,
    gradient: torch.Tensor,
    levels: Levels,
    laid: Sequence[torch.Tensor],
    products: Sequence[torch.Tensor],
    *,
    is_fused: bool,
) -> list[torch.Tensor | None]:
    """Gradients of the cores; none where the kernels update cores of float32 by themselves."""
    from flexshard.embeddings.tensor_train import triton_products

    optimizer, cores, update = context.optimizer, [core.detach() for core in context.cores], None
    within = all(core.dtype == torch.float32 and core.is_contiguous() and core.requires_grad for core in context.cores)
    if is_fused and optimizer is not None and within and optimizer.name in _TRITON_UPDATES:
        rate, eps = optimizer.learning_rate, optimizer.eps
        sums = [state for states in context.states for state in states.values()]
        update = triton_products.Update(optimizer.name, cores, sums, rate, eps)
    gradients = triton_products.backward_rows(gradient, levels, context.shape, laid, products, update=update)
    if update is not None:
        for core in context.cores:
            torch.autograd.graph.increment_version(core)
    return list(gradients)


def _on_cpu(backend: str) -> Any:
    """The code that computes rows and gradients: compiled, or in torch."""
    if backend != "numba":
        return plain_products
    from flexshard.embeddings.tensor_train import compiled_products

    return compiled_products


def laid_cores(cores: Sequence[torch.Tensor], *, copied: bool) -> list[torch.Tensor]:
    """Cores as the products take them: slices as matrices, the last transposed (a view if not copied); in float32,
    or float64 where they are so.
    """
    laid = [in_full(core.detach()).contiguous().flatten(2) for core in cores[:-1]]
    last = in_full(cores[-1].detach()).squeeze(3).transpose(1, 2)
    return [*laid, last.contiguous() if copied else last]


def _on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton starts kernels on the current device, whatever their tensors are on."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
