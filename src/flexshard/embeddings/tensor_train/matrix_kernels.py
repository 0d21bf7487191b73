"""Compiled products of small matrices: runs of prefixes of a tensor train with the slice of a core that they share.

Libraries of linear algebra are made for large matrices; those here have a few rows, and there are hundreds of them, so
that a call takes longer than the product. Four rows by four inner places at a time, in columns that stay in the cache.
Legend: m rows, r and w columns; prefixes of shape (Q, r), a core of shape (p, r, w), products of shape (Q, w).
"""

from __future__ import annotations

import numba
import numpy as np

__all__ = ["prefix_backward", "prefix_forward"]

_COLUMNS = 256


@numba.njit(cache=True, fastmath=True, nogil=True)
def prefix_forward(before, parent, starts, digits, core, out):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """``out[n] = before[parent[n]] @ core[digits[j]]``, for each run j and its n, which start at ``starts[j]``."""
    height, inner = before.shape[1], before.shape[2]
    gathered = np.empty((_longest(starts) * height, inner), before.dtype)
    for j in range(digits.size):
        first, end = starts[j] - starts[0], starts[j + 1] - starts[0]
        left = _gathered(before, parent[first:end], gathered)
        _times(left, core[digits[j]], out[first:end].reshape(left.shape[0], core.shape[2]))


@numba.njit(cache=True, fastmath=True, nogil=True)
def prefix_backward(before, parent, starts, digits, core, upstream, to_before, to_core, slots):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """The gradients of :func:`prefix_forward`: adds to ``to_before``, sets ``to_core[slots[j]]`` for each run j."""
    height, inner = before.shape[1], before.shape[2]
    gathered = np.empty((_longest(starts) * height, inner), before.dtype)
    back = np.empty_like(gathered)
    for j in range(digits.size):
        first, end = starts[j] - starts[0], starts[j + 1] - starts[0]
        left, to_left = _gathered(before, parent[first:end], gathered), back[: (end - first) * height]
        above = upstream[first:end].reshape(left.shape[0], core.shape[2])
        _transposed_times(left, above, to_core[slots[j]])
        _times_transposed(above, core[digits[j]], to_left)
        for n in range(first, end):
            own = to_before[parent[n]]
            for a in range(height):
                for k in range(inner):
                    own[a, k] += to_left[(n - first) * height + a, k]


@numba.njit(cache=True, nogil=True)
def _longest(starts):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Prefixes of the longest run."""
    most = 0
    for j in range(starts.size - 1):
        most = max(most, starts[j + 1] - starts[j])
    return most


@numba.njit(cache=True, nogil=True)
def _gathered(before, parent, memory):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """``before[parent]`` as one matrix, at the start of some memory."""
    height, inner = before.shape[1], before.shape[2]
    for n in range(parent.size):
        own = before[parent[n]]
        # Assigning one slice to another takes seconds to compile, for the message where it fails.
        for a in range(height):
            for k in range(inner):
                memory[n * height + a, k] = own[a, k]
    return memory[: parent.size * height]


@numba.njit(cache=True, fastmath=True, nogil=True)
def _times(left, right, out):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """``out = left @ right``; shapes (m, r), (r, w), (m, w)."""
    m, r, w = left.shape[0], left.shape[1], right.shape[1]
    for begin in range(0, w, _COLUMNS):
        end = min(begin + _COLUMNS, w)
        width = end - begin
        for i in range(0, m - m % 4, 4):
            o0, o1, o2, o3 = out[i, begin:end], out[i + 1, begin:end], out[i + 2, begin:end], out[i + 3, begin:end]
            o0[:], o1[:], o2[:], o3[:] = 0, 0, 0, 0
            for k in range(0, r - r % 4, 4):
                a0, a1, a2, a3 = (
                    left[i, k : k + 4],
                    left[i + 1, k : k + 4],
                    left[i + 2, k : k + 4],
                    left[i + 3, k : k + 4],
                )
                a00, a01, a02, a03 = a0[0], a0[1], a0[2], a0[3]
                a10, a11, a12, a13 = a1[0], a1[1], a1[2], a1[3]
                a20, a21, a22, a23 = a2[0], a2[1], a2[2], a2[3]
                a30, a31, a32, a33 = a3[0], a3[1], a3[2], a3[3]
                r0, r1 = right[k, begin:end], right[k + 1, begin:end]
                r2, r3 = right[k + 2, begin:end], right[k + 3, begin:end]
                for c in range(width):
                    x0, x1, x2, x3 = r0[c], r1[c], r2[c], r3[c]
                    o0[c] += a00 * x0 + a01 * x1 + a02 * x2 + a03 * x3
                    o1[c] += a10 * x0 + a11 * x1 + a12 * x2 + a13 * x3
                    o2[c] += a20 * x0 + a21 * x1 + a22 * x2 + a23 * x3
                    o3[c] += a30 * x0 + a31 * x1 + a32 * x2 + a33 * x3
            for k in range(r - r % 4, r):
                a00, a10, a20, a30, r0 = left[i, k], left[i + 1, k], left[i + 2, k], left[i + 3, k], right[k, begin:end]
                for c in range(width):
                    x0 = r0[c]
                    o0[c] += a00 * x0
                    o1[c] += a10 * x0
                    o2[c] += a20 * x0
                    o3[c] += a30 * x0
        for i in range(m - m % 4, m):
            o0 = out[i, begin:end]
            o0[:] = 0
            for k in range(0, r - r % 4, 4):
                a00, a01, a02, a03 = left[i, k], left[i, k + 1], left[i, k + 2], left[i, k + 3]
                r0, r1 = right[k, begin:end], right[k + 1, begin:end]
                r2, r3 = right[k + 2, begin:end], right[k + 3, begin:end]
                for c in range(width):
                    o0[c] += a00 * r0[c] + a01 * r1[c] + a02 * r2[c] + a03 * r3[c]
            for k in range(r - r % 4, r):
                a00, r0 = left[i, k], right[k, begin:end]
                for c in range(width):
                    o0[c] += a00 * r0[c]


@numba.njit(cache=True, fastmath=True, nogil=True)
def _transposed_times(left, above, out):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """``out = left.T @ above``; shapes (m, r), (m, w), (r, w)."""
    m, r, w = left.shape[0], left.shape[1], above.shape[1]
    out[:] = 0
    for begin in range(0, w, _COLUMNS):
        end = min(begin + _COLUMNS, w)
        width = end - begin
        for i in range(0, m - m % 4, 4):
            u0, u1, u2, u3 = (
                above[i, begin:end],
                above[i + 1, begin:end],
                above[i + 2, begin:end],
                above[i + 3, begin:end],
            )
            for k in range(0, r - r % 4, 4):
                a0, a1, a2, a3 = (
                    left[i, k : k + 4],
                    left[i + 1, k : k + 4],
                    left[i + 2, k : k + 4],
                    left[i + 3, k : k + 4],
                )
                a00, a01, a02, a03 = a0[0], a0[1], a0[2], a0[3]
                a10, a11, a12, a13 = a1[0], a1[1], a1[2], a1[3]
                a20, a21, a22, a23 = a2[0], a2[1], a2[2], a2[3]
                a30, a31, a32, a33 = a3[0], a3[1], a3[2], a3[3]
                o0, o1, o2, o3 = out[k, begin:end], out[k + 1, begin:end], out[k + 2, begin:end], out[k + 3, begin:end]
                for c in range(width):
                    x0, x1, x2, x3 = u0[c], u1[c], u2[c], u3[c]
                    o0[c] += a00 * x0 + a10 * x1 + a20 * x2 + a30 * x3
                    o1[c] += a01 * x0 + a11 * x1 + a21 * x2 + a31 * x3
                    o2[c] += a02 * x0 + a12 * x1 + a22 * x2 + a32 * x3
                    o3[c] += a03 * x0 + a13 * x1 + a23 * x2 + a33 * x3
            for k in range(r - r % 4, r):
                a00, a10, a20, a30, o0 = left[i, k], left[i + 1, k], left[i + 2, k], left[i + 3, k], out[k, begin:end]
                for c in range(width):
                    o0[c] += a00 * u0[c] + a10 * u1[c] + a20 * u2[c] + a30 * u3[c]
        for i in range(m - m % 4, m):
            u0 = above[i, begin:end]
            for k in range(r):
                a00, o0 = left[i, k], out[k, begin:end]
                for c in range(width):
                    o0[c] += a00 * u0[c]


@numba.njit(cache=True, fastmath=True, nogil=True)
def _times_transposed(above, right, out):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """``out = above @ right.T``; shapes (m, w), (r, w), (m, r)."""
    m, w, r = above.shape[0], above.shape[1], right.shape[0]
    zero = above.dtype.type(0)
    for i in range(0, m - m % 4, 4):
        u0, u1, u2, u3 = above[i], above[i + 1], above[i + 2], above[i + 3]
        for k in range(0, r - r % 4, 4):
            r0, r1, r2, r3 = right[k], right[k + 1], right[k + 2], right[k + 3]
            t00, t01, t02, t03 = zero, zero, zero, zero
            t10, t11, t12, t13 = zero, zero, zero, zero
            t20, t21, t22, t23 = zero, zero, zero, zero
            t30, t31, t32, t33 = zero, zero, zero, zero
            for c in range(w):
                x0, x1, x2, x3 = r0[c], r1[c], r2[c], r3[c]
                y0, y1, y2, y3 = u0[c], u1[c], u2[c], u3[c]
                t00, t01, t02, t03 = t00 + y0 * x0, t01 + y0 * x1, t02 + y0 * x2, t03 + y0 * x3
                t10, t11, t12, t13 = t10 + y1 * x0, t11 + y1 * x1, t12 + y1 * x2, t13 + y1 * x3
                t20, t21, t22, t23 = t20 + y2 * x0, t21 + y2 * x1, t22 + y2 * x2, t23 + y2 * x3
                t30, t31, t32, t33 = t30 + y3 * x0, t31 + y3 * x1, t32 + y3 * x2, t33 + y3 * x3
            out[i, k], out[i, k + 1], out[i, k + 2], out[i, k + 3] = t00, t01, t02, t03
            out[i + 1, k], out[i + 1, k + 1], out[i + 1, k + 2], out[i + 1, k + 3] = t10, t11, t12, t13
            out[i + 2, k], out[i + 2, k + 1], out[i + 2, k + 2], out[i + 2, k + 3] = t20, t21, t22, t23
            out[i + 3, k], out[i + 3, k + 1], out[i + 3, k + 2], out[i + 3, k + 3] = t30, t31, t32, t33
        for k in range(r - r % 4, r):
            r0 = right[k]
            t00, t10, t20, t30 = zero, zero, zero, zero
            for c in range(w):
                x0 = r0[c]
                t00, t10, t20, t30 = t00 + u0[c] * x0, t10 + u1[c] * x0, t20 + u2[c] * x0, t30 + u3[c] * x0
            out[i, k], out[i + 1, k], out[i + 2, k], out[i + 3, k] = t00, t10, t20, t30
    for i in range(m - m % 4, m):
        u0 = above[i]
        for k in range(r):
            r0, t00 = right[k], zero
            for c in range(w):
                t00 += u0[c] * r0[c]
            out[i, k] = t00
