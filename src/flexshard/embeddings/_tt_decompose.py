"""Tensor trains of given tables: TT-SVD by the short side of each unfolding (Oseledets 2011, algorithm 1)."""

from __future__ import annotations

from math import prod

import torch

from flexshard._tt_shape import TTShape
from flexshard.errors import TableError

__all__ = ["decompose"]

_CHUNK_NUMBERS = 1 << 22


def decompose(weight: torch.Tensor, shape: TTShape) -> tuple[list[torch.Tensor], float]:
    """Cores whose product is the nearest that TT-SVD finds, and the relative error of that (Frobenius).

    Each unfolding is halved by the eigenvectors of its short side's Gram matrix, added up chunk by chunk in double
    precision, so that nothing larger than the table itself (once permuted) is formed.

    Args:
        weight: the table; shape (E, D).
        shape: its E and D; ranks beyond what the table has are filled with zeros.

    Returns:
        cores of shape (p_k, r_{k-1}, q_k, r_k), and the error, 0 to 1.

    Raises:
        TableError: a table of another shape, or with numbers that are not finite.
    """
    if tuple(weight.shape) != (shape.num_embeddings, shape.embedding_dim):
        expected = (shape.num_embeddings, shape.embedding_dim)
        raise TableError(f"a table to decompose has shape {expected}, found {tuple(weight.shape)}")
    if not torch.isfinite(weight).all():
        row, column = (~torch.isfinite(weight)).nonzero()[0].tolist()
        raise TableError(f"the table to decompose has {weight[row, column].item()} in row {row:,}, column {column}")
    left = _by_digits(weight.detach().float(), shape)
    total = float(sum((part.double() ** 2).sum() for part in left.flatten().split(_CHUNK_NUMBERS)))
    cores, lost = [], 0.0
    sizes = [p * q for p, q in zip(shape.rows, shape.dims, strict=True)]
    rank = 1
    for k in range(shape.cores - 1):
        matrix = left.reshape(rank * sizes[k], -1)
        vectors, rest, discarded = _halved(matrix, shape.ranks[k])
        lost += discarded
        cores.append(vectors.reshape(rank, shape.rows[k], shape.dims[k], -1).permute(1, 0, 2, 3).contiguous())
        left, rank = rest, shape.ranks[k]
    cores.append(left.reshape(rank, shape.rows[-1], shape.dims[-1], 1).permute(1, 0, 2, 3).contiguous())
    return cores, (max(lost, 0.0) / total) ** 0.5 if total else 0.0


def _by_digits(weight: torch.Tensor, shape: TTShape) -> torch.Tensor:
    """The table as a tensor of (p_1, q_1, p_2, q_2, ...), rows beyond E being zeros."""
    padded = weight.new_zeros(prod(shape.rows), shape.embedding_dim)
    padded[: shape.num_embeddings] = weight
    d = shape.cores
    order = [axis for k in range(d) for axis in (k, d + k)]
    return padded.view(*shape.rows, *shape.dims).permute(order)


def _halved(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """``U`` with orthonormal columns and ``rest`` with ``U @ rest`` nearest to the matrix, and the squares left out."""
    rows, columns = matrix.shape
    if rows <= columns:
        gram = matrix.new_zeros(rows, rows, dtype=torch.float64)
        for part in matrix.split(max(_CHUNK_NUMBERS // rows, 1), dim=1):
            gram += part.double() @ part.double().t()
        values, vectors = _largest(gram, rank)
        vectors = vectors.float()
        return vectors, vectors.t() @ matrix, float(gram.diagonal().sum() - values.sum())
    gram = matrix.new_zeros(columns, columns, dtype=torch.float64)
    for part in matrix.split(max(_CHUNK_NUMBERS // columns, 1), dim=0):
        gram += part.double().t() @ part.double()
    values, vectors = _largest(gram, rank)
    scale = values.clamp(min=0).sqrt()
    inverse = torch.where(scale > 1e-7 * scale.max().clamp(min=1e-300), 1 / scale.clamp(min=1e-300), 0.0)
    left = matrix @ (vectors * inverse).float()
    return left, (vectors * scale).t().float(), float(gram.diagonal().sum() - values.sum())


def _largest(gram: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = torch.linalg.eigh(gram)
    return values[-rank:].flip(0), vectors[:, -rank:].flip(1)
