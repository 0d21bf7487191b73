"""An optimizer's step over rows in one kernel of Triton: what :func:`apply_update` does in eight to ten."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from flexshard.tables import StepOptions

__all__ = ["KINDS", "update_rows"]

_SGD, _ADAGRAD, _ROWWISE_ADAGRAD, _ADAM, _PARTIAL_ROWWISE_ADAM, _LARS = range(6)
# By the name of the optimizer; others are updated by their own `change`.
KINDS = {
    "sgd": _SGD,
    "adagrad": _ADAGRAD,
    "rowwise_adagrad": _ROWWISE_ADAGRAD,
    "adam": _ADAM,
    "partial_rowwise_adam": _PARTIAL_ROWWISE_ADAM,
    "lars_sgd": _LARS,
}


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    weight, gradient, first_state, second_state, slots, read,
    by_gradient, by_read, dim, rate, eps, beta1, beta2, rest1, rest2, correction1, correction2, momentum, eta, decay,
    KIND: tl.constexpr, L2: tl.constexpr, DECAYS: tl.constexpr, INDEXED: tl.constexpr, SOME: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of ``dim`` numbers, by its gradient in row ``n``; weights and states of row ``slots[n]``, or ``n``."""
    n = tl.program_id(0).to(tl.int64)
    taken = tl.load(read + n * by_read) > 0 if SOME else True
    if taken:
        slot = tl.load(slots + n) if INDEXED else n
        e = tl.arange(0, BLOCK)
        inside = e < dim
        here = slot * dim + e
        g = tl.load(gradient + n * by_gradient + e, mask=inside, other=0.0)
        w = tl.load(weight + here, mask=inside, other=0.0).to(tl.float32)
        if KIND == 0:
            change = rate * g
        elif KIND == 1:
            total = tl.load(first_state + here, mask=inside, other=1.0) + g * g
            tl.store(first_state + here, total, mask=inside)
            root = tl.sqrt(total) + eps
            change = rate * g / tl.where(root == 0, 1.0, root)
        elif KIND == 2:
            if DECAYS and L2:
                g += decay * w
            mean = tl.load(first_state + slot) + tl.sum(g * g, axis=0) / dim
            tl.store(first_state + slot, mean)
            root = tl.sqrt(mean) + eps
            change = g / tl.where(root == 0, 1.0, root)
            if DECAYS and not L2:
                change += decay * w
            change = rate * change
        elif KIND == 5:
            size = tl.sqrt(tl.sum(w * w, axis=0))
            slope = tl.sqrt(tl.sum(g * g, axis=0)) + decay * size
            ratio = tl.where(slope > 0, rate * eta * size / tl.where(slope > 0, slope, 1.0), 0.0)
            change = momentum * tl.load(first_state + here, mask=inside, other=0.0) + ratio * (g + decay * w)
            tl.store(first_state + here, change, mask=inside)
        else:
            mean = beta1 * tl.load(first_state + here, mask=inside, other=0.0) + rest1 * g
            tl.store(first_state + here, mean, mask=inside)
            if KIND == 3:
                square = beta2 * tl.load(second_state + here, mask=inside, other=0.0) + rest2 * g * g
                tl.store(second_state + here, square, mask=inside)
                change = mean / correction1 / (tl.sqrt(square / correction2) + eps)
            else:
                average = beta2 * tl.load(second_state + slot) + rest2 * tl.sum(g * g, axis=0) / dim
                tl.store(second_state + slot, average)
                change = mean / correction1 / (tl.sqrt(average / correction2) + eps)
            if DECAYS:
                change += decay * w
            change = rate * change
        tl.store(weight + here, (w - change).to(weight.dtype.element_ty), mask=inside)


def update_rows(
    name: str,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    options: StepOptions,
    *,
    slots: torch.Tensor | None = None,
    read: torch.Tensor | None = None,
) -> None:
    """Update rows in place by their summed gradients.

    Args:
        name: of the optimizer; one of :data:`KINDS`.
        weight: of the store, or of a range of it; shape (slots, D), contiguous.
        gradient: shape (n, D), float32; rows may lie apart.
        state: of the same rows as ``weight``, contiguous.
        options: with learning rate and step.
        slots: distinct rows of ``weight`` that the gradients are of; shape (n,), int64. None: the first n.
        read: above 0 where a batch read the row, shape (n,); the others stay. None: all did.
    """
    number, dim = gradient.shape
    if not number:
        return
    first, second = [*state.values(), weight, weight][:2]  # where there is no state, nothing is read of it
    decay, betas = options.weight_decay, (options.beta1, options.beta2)
    rests, corrections = [1 - beta for beta in betas], [1 - beta**options.step for beta in betas]
    _step[(number,)](
        weight, gradient, first, second, slots, read,
        gradient.stride(0), 0 if read is None else read.stride(0), dim, options.learning_rate, options.eps,
        *betas, *rests, *corrections, options.momentum, options.eta, decay,
        KIND=KINDS[name], L2=options.decay_mode == "l2", DECAYS=bool(decay), INDEXED=slots is not None,
        SOME=read is not None, BLOCK=triton.next_power_of_2(dim),
    )  # fmt: skip
