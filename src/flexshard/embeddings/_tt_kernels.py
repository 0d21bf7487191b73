"""Compiled suffix of a tensor train: products of prefixes with the last core, per distinct id, and back."""

from __future__ import annotations

import numba

__all__ = ["suffix_backward", "suffix_forward"]


@numba.njit(cache=True, fastmath=True)
def suffix_forward(prefixes, parent, core, digit, rows):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """``rows[n] = prefixes[parent[n]] @ core[digit[n]].T``; shapes (P, Q, r), (n,), (p, q, r), (n,), (n, Q, q)."""
    count, q, r = core.shape[0], core.shape[1], core.shape[2]
    size = prefixes.shape[1]
    for n in range(parent.size):
        left, right = prefixes[parent[n]], core[digit[n]]
        for a in range(size):
            for c in range(q):
                total = prefixes.dtype.type(0)
                for k in range(r):
                    total += left[a, k] * right[c, k]
                rows[n, a, c] = total
    return count


@numba.njit(cache=True, fastmath=True)
def suffix_backward(prefixes, parent, core, digit, gradient, to_prefixes, to_core):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Adds the gradients of :func:`suffix_forward` to ``to_prefixes`` and ``to_core``, in order of n."""
    q, r = core.shape[1], core.shape[2]
    size = prefixes.shape[1]
    for n in range(parent.size):
        left, right = prefixes[parent[n]], core[digit[n]]
        to_left, to_right = to_prefixes[parent[n]], to_core[digit[n]]
        for a in range(size):
            for c in range(q):
                g = gradient[n, a, c]
                for k in range(r):
                    to_left[a, k] += g * right[c, k]
                    to_right[c, k] += g * left[a, k]
