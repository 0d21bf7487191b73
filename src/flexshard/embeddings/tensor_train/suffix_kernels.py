"""Compiled suffix of a tensor train: products of prefixes with the last core, per distinct id, and back.

Four columns (or rows) at a time, so that what they share is loaded once. Legend: n ids; P prefixes of shape (Q, r);
the core of shape (p, q, r); rows and gradients of shape (u, Q, q), those of id n at ``row_index[n]``.
"""

from __future__ import annotations

import numba

__all__ = ["suffix_backward", "suffix_forward"]


@numba.njit(cache=True, fastmath=True)
def suffix_forward(prefixes, parent, core, digit, row_index, rows):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """``rows[row_index[n]] = prefixes[parent[n]] @ core[digit[n]].T``."""
    q, r, size = core.shape[1], core.shape[2], prefixes.shape[1]
    zero = prefixes.dtype.type(0)
    for n in range(parent.size):
        left, right, out = prefixes[parent[n]], core[digit[n]], rows[row_index[n]]
        for a in range(size):
            for c in range(0, q - q % 4, 4):
                t0, t1, t2, t3 = zero, zero, zero, zero
                for k in range(r):
                    x = left[a, k]
                    t0 += x * right[c, k]
                    t1 += x * right[c + 1, k]
                    t2 += x * right[c + 2, k]
                    t3 += x * right[c + 3, k]
                out[a, c], out[a, c + 1], out[a, c + 2], out[a, c + 3] = t0, t1, t2, t3
            for c in range(q - q % 4, q):
                total = zero
                for k in range(r):
                    total += left[a, k] * right[c, k]
                out[a, c] = total


@numba.njit(cache=True, fastmath=True)
def suffix_backward(prefixes, parent, core, digit, row_index, gradient, to_prefixes, to_core):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Adds the gradients of :func:`suffix_forward` to ``to_prefixes`` and ``to_core``, in order of n."""
    q, r, size = core.shape[1], core.shape[2], prefixes.shape[1]
    for n in range(parent.size):
        left, right, g = prefixes[parent[n]], core[digit[n]], gradient[row_index[n]]
        to_left, to_right = to_prefixes[parent[n]], to_core[digit[n]]
        for a in range(size):
            for c in range(0, q - q % 4, 4):
                g0, g1, g2, g3 = g[a, c], g[a, c + 1], g[a, c + 2], g[a, c + 3]
                for k in range(r):
                    to_left[a, k] += (
                        g0 * right[c, k] + g1 * right[c + 1, k] + g2 * right[c + 2, k] + g3 * right[c + 3, k]
                    )
            for c in range(q - q % 4, q):
                for k in range(r):
                    to_left[a, k] += g[a, c] * right[c, k]
        for c in range(q):
            for a in range(0, size - size % 4, 4):
                g0, g1, g2, g3 = g[a, c], g[a + 1, c], g[a + 2, c], g[a + 3, c]
                for k in range(r):
                    to_right[c, k] += g0 * left[a, k] + g1 * left[a + 1, k] + g2 * left[a + 2, k] + g3 * left[a + 3, k]
            for a in range(size - size % 4, size):
                for k in range(r):
                    to_right[c, k] += g[a, c] * left[a, k]
