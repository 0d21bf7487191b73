"""Kernels of tensor-train rows in Triton.

Legend: items are prefixes of a level, in order of their last digit (their *group*); each has H rows of K numbers, and
becomes H rows of C. Q, q, r: see :mod:`flexshard.embeddings.tensor_train.products`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "grouped_mm",
    "grouped_outer",
    "rowwise_adagrad",
    "segment_sum",
    "suffix_forward",
    "suffix_to_core",
    "suffix_to_prefixes",
]


@triton.jit
def settle(acc, offset, valid, gradient, weight, state, rate, eps, MODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a gradient, or change what it is of."""
    if MODE == 0:
        tl.store(gradient + offset, acc, mask=valid)
    elif MODE == 1:
        tl.store(weight + offset, tl.load(weight + offset, mask=valid, other=0.0) - rate * acc, mask=valid)
    else:
        total = tl.load(state + offset, mask=valid, other=0.0) + acc * acc
        tl.store(state + offset, total, mask=valid)
        step = rate * acc / (tl.sqrt(total) + eps)
        tl.store(weight + offset, tl.load(weight + offset, mask=valid, other=0.0) - step, mask=valid)


@triton.jit
def grouped_mm(  # type: ignore[no-untyped-def]
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
            acc += tl.dot(a, b, input_precision="tf32x3")
        tl.store(out + (item * H + m % H)[:, None] * C + c[None, :], acc, mask=valid[:, None] & (c < C)[None, :])


@triton.jit
def grouped_outer(  # type: ignore[no-untyped-def]
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
        acc += tl.dot(a, b, input_precision="tf32x3")
    offset = group * K * C + k[:, None] * C + c[None, :]
    settle(acc, offset, (k < K)[:, None] & (c < C)[None, :], gradient, weight, state, rate, eps, MODE)


@triton.jit
def suffix_forward(  # type: ignore[no-untyped-def]
    prefixes, parent, core, digit, row_index, rows, count, r,
    Q: tl.constexpr, q: tl.constexpr, BQ: tl.constexpr, Bq: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``rows[row_index[n]] = prefixes[parent[n]] @ core[digit[n]].T``, 0 without a prefix; one program per id."""
    n = tl.program_id(0)
    above, last, to = tl.load(parent + n), tl.load(digit + n), tl.load(row_index + n)
    a, c = tl.arange(0, BQ), tl.arange(0, Bq)
    acc = tl.zeros((BQ, Bq), tl.float32)
    if above < count:
        for start in range(0, r, BK):
            k = start + tl.arange(0, BK)
            left = tl.load(
                prefixes + above * Q * r + a[:, None] * r + k[None, :],
                mask=(a < Q)[:, None] & (k < r)[None, :],
                other=0.0,
            )
            right = tl.load(
                core + last * q * r + c[:, None] * r + k[None, :], mask=(c < q)[:, None] & (k < r)[None, :], other=0.0
            )
            acc += tl.sum(left[:, None, :] * right[None, :, :], axis=2)
    tl.store(rows + to * Q * q + a[:, None] * q + c[None, :], acc, mask=(a < Q)[:, None] & (c < q)[None, :])


@triton.jit
def suffix_to_prefixes(  # type: ignore[no-untyped-def]
    upstream, starts, core, digit, row_index, to_prefixes, r,
    Q: tl.constexpr, q: tl.constexpr, BQ: tl.constexpr, Bq: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Gradients of prefixes; one program walks through the ids below one, which follow each other."""
    prefix = tl.program_id(0).to(tl.int64)
    a, c, k = tl.arange(0, BQ), tl.arange(0, Bq), tl.program_id(1) * BK + tl.arange(0, BK)
    acc = tl.zeros((BQ, BK), tl.float32)
    for n in range(tl.load(starts + prefix), tl.load(starts + prefix + 1)):
        last, of = tl.load(digit + n), tl.load(row_index + n)
        g = tl.load(
            upstream + of * Q * q + a[:, None] * q + c[None, :], mask=(a < Q)[:, None] & (c < q)[None, :], other=0.0
        )
        right = tl.load(
            core + last * q * r + c[:, None] * r + k[None, :], mask=(c < q)[:, None] & (k < r)[None, :], other=0.0
        )
        acc += tl.sum(g[:, :, None] * right[None, :, :], axis=1)
    tl.store(to_prefixes + prefix * Q * r + a[:, None] * r + k[None, :], acc, mask=(a < Q)[:, None] & (k < r)[None, :])


@triton.jit
def suffix_to_core(  # type: ignore[no-untyped-def]
    upstream, order, starts, prefixes, parent, row_index, gradient, weight, state, rate, eps, r,
    Q: tl.constexpr, q: tl.constexpr, BQ: tl.constexpr, Bq: tl.constexpr, BK: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Gradient of the last core, laid out as the parameter (p, r, q); one program per digit and part of r."""
    last = tl.program_id(0).to(tl.int64)
    a, c, k = tl.arange(0, BQ), tl.arange(0, Bq), tl.program_id(1) * BK + tl.arange(0, BK)
    acc = tl.zeros((Bq, BK), tl.float32)
    for j in range(tl.load(starts + last), tl.load(starts + last + 1)):
        n = tl.load(order + j)
        above, of = tl.load(parent + n), tl.load(row_index + n)
        g = tl.load(
            upstream + of * Q * q + a[:, None] * q + c[None, :], mask=(a < Q)[:, None] & (c < q)[None, :], other=0.0
        )
        left = tl.load(
            prefixes + above * Q * r + a[:, None] * r + k[None, :], mask=(a < Q)[:, None] & (k < r)[None, :], other=0.0
        )
        acc += tl.sum(g[:, :, None] * left[:, None, :], axis=0)
    here = last * q * r + k[None, :] * q + c[:, None]
    settle(acc, here, (c < q)[:, None] & (k < r)[None, :], gradient, weight, state, rate, eps, MODE)


@triton.jit
def segment_sum(  # type: ignore[no-untyped-def]
    values, order, starts, gradient, weight, state, rate, eps, size, BLOCK: tl.constexpr, MODE: tl.constexpr
):
    """``gradient[s]``: the sum of the rows of ``values`` that ``order`` lists from ``starts[s]`` on."""
    segment = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in range(tl.load(starts + segment), tl.load(starts + segment + 1)):
        acc += tl.load(values + tl.load(order + j) * size + e, mask=e < size, other=0.0)
    settle(acc, segment * size + e, e < size, gradient, weight, state, rate, eps, MODE)


@triton.jit
def rowwise_adagrad(gradient, weight, state, rate, eps, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
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
