"""Other ways to look up tensor-train tables on a CPU, each at its best: what ours is measured against.

Each takes a table's cores, gives pooled rows of bags (a sum), and takes a step of SGD by an upstream gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from flexshard.embeddings import TTEmbeddingBag, TTShape

__all__ = ["Chain", "FifteenLines", "TTRec", "TTRecDistinct", "products_alone"]

RATE = 1e-6


class TTRec:
    """The chain of every id by itself, in chunks of batched products, with buffers that are used again (TT-Rec)."""

    def __init__(self, table: TTEmbeddingBag) -> None:
        self.shape, self.device = table.shape, table.cores[0].device
        self.cores = [core.detach().flatten(1) for core in table.cores]
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def buffer(self, name: str, *size: int) -> Tensor:
        """Memory that has been written to before, so that nothing faults."""
        return self._buffers.setdefault((name, size), torch.empty(size, device=self.device))

    def chain(self, ids: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        """Digits of ids, the slices of the cores at them, and both products."""
        p, q, r, n = self.shape.row_factors, self.shape.dim_factors, self.shape.tt_ranks, ids.numel()
        digits = [ids // (p[1] * p[2]), ids // p[2] % p[1], ids % p[2]]
        slices = []
        for k, (core, digit) in enumerate(zip(self.cores, digits, strict=True)):
            slices.append(torch.index_select(core, 0, digit, out=self.buffer(f"slice {k}", n, core.shape[1])))
        a, b, c = slices[0].view(n, q[0], r[0]), slices[1].view(n, r[0], -1), slices[2].view(n, r[1], q[2])
        first = torch.bmm(a, b, out=self.buffer("first", n, q[0], b.shape[2])).view(n, -1, r[1])
        return digits, [a, b, c], first, torch.bmm(first, c, out=self.buffer("rows", n, first.shape[1], q[2]))

    def rows(self, ids: Tensor, chunk: int) -> Tensor:
        """Row of every id."""
        rows = torch.empty(ids.numel(), self.shape.embedding_dim, device=self.device)
        for part, own in zip(ids.split(chunk), rows.split(chunk), strict=True):
            own.copy_(self.chain(part)[3].view(own.shape))
        return rows

    def gradients(self, ids: Tensor, upstream: Tensor, chunk: int) -> list[Tensor]:
        """Gradients of the cores from those of the rows."""
        gradients = [torch.zeros_like(core) for core in self.cores]
        for part, own in zip(ids.split(chunk), upstream.split(chunk), strict=True):
            digits, (a, b, c), first, _ = self.chain(part)  # again, as TT-Rec does
            n = part.numel()
            last = own.reshape(n, -1, c.shape[2])
            to_c = torch.bmm(first.transpose(1, 2), last, out=self.buffer("to c", *c.shape))
            to_first = torch.bmm(last, c.transpose(1, 2), out=self.buffer("to first", *first.shape)).view(
                n, a.shape[1], -1
            )
            to_b = torch.bmm(a.transpose(1, 2), to_first, out=self.buffer("to b", *b.shape))
            to_a = torch.bmm(to_first, b.transpose(1, 2), out=self.buffer("to a", *a.shape))
            for gradient, digit, one in zip(gradients, digits, (to_a, to_b, to_c), strict=True):
                gradient.index_add_(0, digit, one.view(n, -1))
        return gradients

    def forward(self, ids: Tensor, offsets: Tensor, chunk: int = 64) -> Tensor:
        """Pooled rows."""
        return functional.embedding_bag(
            torch.arange(ids.numel(), device=ids.device), self.rows(ids, chunk), offsets, mode="sum"
        )

    def step(self, ids: Tensor, offsets: Tensor, upstream: Tensor, chunk: int = 64) -> None:
        """Forward, backward and SGD."""
        self.forward(ids, offsets, chunk)
        lengths = torch.diff(offsets, append=torch.full_like(offsets[:1], ids.numel()))
        self.take(self.gradients(ids, upstream.repeat_interleave(lengths, 0), chunk))

    def take(self, gradients: list[Tensor]) -> None:
        """A step of SGD."""
        for core, gradient in zip(self.cores, gradients, strict=True):
            core.sub_(gradient, alpha=RATE)


class TTRecDistinct(TTRec):
    """The same of distinct ids."""

    def forward(self, ids: Tensor, offsets: Tensor, chunk: int = 64) -> Tensor:
        """Pooled rows."""
        distinct, inverse = torch.unique(ids, return_inverse=True)
        return functional.embedding_bag(inverse, self.rows(distinct, chunk), offsets, mode="sum")

    def step(self, ids: Tensor, offsets: Tensor, upstream: Tensor, chunk: int = 64) -> None:
        """Forward, backward and SGD."""
        distinct, inverse = torch.unique(ids, return_inverse=True)
        rows = self.rows(distinct, chunk).requires_grad_()
        functional.embedding_bag(inverse, rows, offsets, mode="sum").backward(upstream)
        assert rows.grad is not None
        self.take(self.gradients(distinct, rows.grad, chunk))


@numba.njit(cache=True, fastmath=True)
def _chain(ids, below, middle, first, second, third, out):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    wide = np.empty((first.shape[1], second.shape[2]), np.float32)
    for n in range(ids.size):
        a, b, c = ids[n] // (below * middle), ids[n] // below % middle, ids[n] % below
        np.dot(first[a], second[b], wide)
        np.dot(wide.reshape(-1, third.shape[1]), third[c], out[n])


@numba.njit(cache=True, fastmath=True)
def _chain_back(ids, below, middle, first, second, third, upstream, to_first, to_second, to_third):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    q, r, s = first.shape[1], first.shape[2], third.shape[1]
    wide = np.empty((q, second.shape[2]), np.float32)
    to_wide = np.empty((q * second.shape[2] // s, s), np.float32)
    own_first, own_second = np.empty((q, r), np.float32), np.empty((r, second.shape[2]), np.float32)
    own_third = np.empty((s, third.shape[2]), np.float32)
    for n in range(ids.size):
        a, b, c = ids[n] // (below * middle), ids[n] // below % middle, ids[n] % below
        np.dot(first[a], second[b], wide)
        np.dot(wide.reshape(-1, s).T, upstream[n], own_third)
        to_third[c] += own_third
        np.dot(upstream[n], third[c].T, to_wide)
        above = to_wide.reshape(q, -1)
        np.dot(first[a].T, above, own_second)
        to_second[b] += own_second
        np.dot(above, second[b].T, own_first)
        to_first[a] += own_first


class Chain:
    """The chain of every distinct id in a compiled loop that calls BLAS on the slices where they lie."""

    def __init__(self, table: TTEmbeddingBag) -> None:
        p, q, r = table.shape.row_factors, table.shape.dim_factors, table.shape.tt_ranks
        self.factors = p[2], p[1]
        cores = [core.detach() for core in table.cores]
        self.first = cores[0].reshape(p[0], q[0], r[0]).contiguous()
        self.second = cores[1].reshape(p[1], r[0], q[1] * r[1]).contiguous()
        self.third = cores[2].reshape(p[2], r[1], q[2]).contiguous()
        self.shape: TTShape = table.shape

    def rows(self, distinct: Tensor) -> Tensor:
        """Of distinct ids."""
        out = torch.empty(distinct.numel(), self.shape.embedding_dim // self.third.shape[2], self.third.shape[2])
        cores = [core.numpy() for core in (self.first, self.second, self.third)]
        _chain(distinct.numpy(), *self.factors, *cores, out.numpy())
        return out.flatten(1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Pooled rows."""
        distinct, inverse = torch.unique(ids, return_inverse=True)
        return functional.embedding_bag(inverse, self.rows(distinct), offsets, mode="sum")

    def step(self, ids: Tensor, offsets: Tensor, upstream: Tensor) -> None:
        """Forward, backward and SGD."""
        distinct, inverse = torch.unique(ids, return_inverse=True)
        rows = self.rows(distinct).requires_grad_()
        functional.embedding_bag(inverse, rows, offsets, mode="sum").backward(upstream)
        assert rows.grad is not None
        above = rows.grad.view(distinct.numel(), -1, self.third.shape[2]).contiguous().numpy()
        cores = [self.first, self.second, self.third]
        gradients = [torch.zeros_like(core) for core in cores]
        arrays = [tensor.numpy() for tensor in (*cores, *gradients)]
        _chain_back(distinct.numpy(), *self.factors, *arrays[:3], above, *arrays[3:])
        for core, gradient in zip(cores, gradients, strict=True):
            core.sub_(gradient, alpha=RATE)


class FifteenLines:
    """Distinct ids, one product per middle slice, batched products after it; the rest is autograd's and torch's SGD."""

    def __init__(self, table: TTEmbeddingBag) -> None:
        self.shape = table.shape
        self.cores = [core.detach().clone().requires_grad_() for core in table.cores]
        self.optimizer = torch.optim.SGD(self.cores, lr=RATE)

    def forward(self, ids: Tensor, offsets: Tensor, chunk: int = 1 << 30) -> Tensor:
        """Pooled rows."""
        p, q, r = self.shape.row_factors, self.shape.dim_factors, self.shape.tt_ranks
        first, middle, last = self.cores[0].view(p[0], q[0], r[0]), self.cores[1].flatten(2), self.cores[2].squeeze(3)
        distinct, inverse = torch.unique(ids, return_inverse=True)
        prefix, of = torch.unique_consecutive(distinct // p[2], return_inverse=True)
        digit, order = torch.sort(prefix % p[1], stable=True)
        values, counts = torch.unique_consecutive(digit, return_counts=True)
        parts = first.index_select(0, prefix[order] // p[1]).split(counts.tolist())
        slices = middle.unbind(0)
        products = torch.cat([part.flatten(0, 1) @ slices[d] for part, d in zip(parts, values.tolist(), strict=True)])
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel())
        prefixes = products.view(-1, q[0] * q[1], r[1]).index_select(0, place[of])
        pairs = zip(prefixes.split(chunk), last.index_select(0, distinct % p[2]).split(chunk), strict=True)
        rows = torch.cat([torch.bmm(a, b) for a, b in pairs])
        return functional.embedding_bag(inverse, rows.flatten(1), offsets, mode="sum")

    def step(self, ids: Tensor, offsets: Tensor, upstream: Tensor, chunk: int = 1 << 30) -> None:
        """Forward, backward and SGD."""
        self.optimizer.zero_grad()
        self.forward(ids, offsets, chunk).backward(upstream)
        self.optimizer.step()


def products_alone(table: TTEmbeddingBag, distinct: Tensor) -> Callable[[], None]:
    """The least that a step does: one product per middle slice, forward, both ways back, and its update; operands are
    gathered beforehand, and results thrown away.
    """
    from flexshard.embeddings.tensor_train.products import levels_of

    level = levels_of(distinct, table.shape).inner[0]
    p, q = table.shape.row_factors, table.shape.dim_factors
    first, core = table.cores[0].detach().view(p[0], q[0], -1), table.cores[1].detach().flatten(2)
    lefts = [(d, first[level.parent[start:end]].flatten(0, 1).clone()) for d, start, end in level.runs]
    outs = [torch.empty(left.shape[0], core.shape[2]) for _, left in lefts]
    above = [torch.full_like(out, 1e-6) for out in outs]
    backs, gradient = [torch.empty_like(left) for _, left in lefts], torch.empty(core.shape[1:])

    def work() -> None:
        for (d, left), out in zip(lefts, outs, strict=True):
            torch.mm(left, core[d], out=out)
        for (d, left), up, back in zip(lefts, above, backs, strict=True):
            torch.mm(left.t(), up, out=gradient)
            torch.mm(up, core[d].t(), out=back)
            core[d].add_(gradient, alpha=-RATE)

    return work
