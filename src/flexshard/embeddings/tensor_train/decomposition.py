"""Tensor trains of given tables: TT-SVD by the short side of each unfolding (Oseledets 2011, algorithm 1)."""

from __future__ import annotations

import warnings
from math import prod

import torch

from flexshard.embeddings.tensor_train.core_optimizer import full_dtype
from flexshard.errors import TableError
from flexshard.tables import TTShape

__all__ = ["LARGE_ERROR", "decompose", "of_rank", "warn_of_error"]

LARGE_ERROR = 0.5  # a quarter of a table's squares

_CHUNK_NUMBERS = 1 << 22


def decompose(
    weight: torch.Tensor, shape: TTShape, *, chunk_numbers: int = _CHUNK_NUMBERS
) -> tuple[list[torch.Tensor], float]:
    """Cores whose product is the nearest that TT-SVD finds, and the relative error of that (Frobenius).

    Each unfolding is halved by the eigenvectors of its short side's Gram matrix, added up chunk by chunk in double
    precision. The first unfolding, which is as large as the table, is never formed.

    Args:
        weight: the table; shape (E, D).
        shape: its E and D; TT ranks beyond what the table has are filled with zeros.
        chunk_numbers: numbers of the table that are worked on at once.

    Returns:
        cores of shape (p_k, r_{k-1}, q_k, r_k), and the error, 0 to 1.

    Raises:
        TableError: a table of another shape, or with numbers that are not finite.
    """
    if not isinstance(weight, torch.Tensor):
        raise TableError(f"a table to decompose is a tensor, found {type(weight).__name__}")
    if tuple(weight.shape) != (shape.num_embeddings, shape.embedding_dim):
        expected = (shape.num_embeddings, shape.embedding_dim)
        raise TableError(f"a table to decompose has shape {expected}, found {tuple(weight.shape)}")
    if weight.is_complex() or weight.layout != torch.strided:
        raise TableError(f"a table to decompose is a dense one of real numbers, found {weight.dtype}, {weight.layout}")
    step = max(chunk_numbers // shape.embedding_dim, 1)
    for start in range(0, weight.shape[0], step):
        wrong = (~torch.isfinite(weight[start : start + step])).nonzero()
        if wrong.numel():
            row, column = start + int(wrong[0, 0]), int(wrong[0, 1])
            raise TableError(f"the table to decompose has {weight[row, column].item()} in row {row:,}, column {column}")
    first = _Unfolding(weight.detach(), shape, chunk_numbers)
    vectors, left, lost, total = first.halved(shape.tt_ranks[0])
    cores = [vectors.reshape(1, shape.row_factors[0], shape.dim_factors[0], -1).permute(1, 0, 2, 3).contiguous()]
    tt_rank = shape.tt_ranks[0]
    for k in range(1, shape.cores - 1):
        # From (tt_rank, p_k, p_k+1 ..., q_k, q_k+1 ...) to the unfolding with core k's indices in front.
        parts = (
            tt_rank,
            shape.row_factors[k],
            prod(shape.row_factors[k + 1 :]),
            shape.dim_factors[k],
            prod(shape.dim_factors[k + 1 :]),
        )
        matrix = (
            left.reshape(parts)
            .permute(0, 1, 3, 2, 4)
            .reshape(tt_rank * shape.row_factors[k] * shape.dim_factors[k], -1)
        )
        vectors, left, discarded = _halved(matrix, shape.tt_ranks[k], chunk_numbers)
        lost += discarded
        cores.append(
            vectors.reshape(tt_rank, shape.row_factors[k], shape.dim_factors[k], -1).permute(1, 0, 2, 3).contiguous()
        )
        tt_rank = shape.tt_ranks[k]
    cores.append(
        left.reshape(tt_rank, shape.row_factors[-1], shape.dim_factors[-1], 1).permute(1, 0, 2, 3).contiguous()
    )
    return cores, (max(lost, 0.0) / total) ** 0.5 if total else 0.0


class _Unfolding:
    """The first unfolding of a table, (p_1 q_1) x (all the rest), a block of rows or columns at a time.

    It is the table in another order, as large; it is never formed.
    """

    def __init__(self, weight: torch.Tensor, shape: TTShape, chunk_numbers: int) -> None:
        self._chunk_numbers = chunk_numbers
        self._kind = full_dtype(weight.dtype)
        self._weight, self._p, self._q = weight, shape.row_factors[0], shape.dim_factors[0]
        self._tail, self._rest = prod(shape.row_factors[1:]), prod(shape.dim_factors[1:])

    def _block(self, first: slice, others: slice) -> torch.Tensor:
        """Some first digits by some of the other digits; shape (digits · q_1, others · q_2 ...)."""
        digits, count = first.stop - first.start, others.stop - others.start
        block = self._weight.new_zeros(digits, count, self._weight.shape[1], dtype=self._kind)
        for index, digit in enumerate(range(first.start, first.stop)):
            start = min(digit * self._tail + others.start, self._weight.shape[0])
            rows = self._weight[start : min(digit * self._tail + others.stop, self._weight.shape[0])]
            block[index, : rows.shape[0]] = rows
        return block.view(digits, count, self._q, self._rest).transpose(1, 2).reshape(digits * self._q, -1)

    def halved(self, tt_rank: int) -> tuple[torch.Tensor, torch.Tensor, float, float]:
        """As :func:`_halved`, the rest of shape (tt_rank, p_2 ..., q_2 ...); and the squares of the table."""
        like = self._weight.new_zeros(0, dtype=self._kind)
        rows, columns = self._p * self._q, self._tail * self._rest
        every, all_digits = slice(0, self._tail), slice(0, self._p)
        if rows <= columns:
            step = max(self._chunk_numbers // (rows * self._rest), 1)
            parts = [slice(at, min(at + step, self._tail)) for at in range(0, self._tail, step)]
            gram = like.new_zeros(rows, rows, dtype=torch.float64)
            for part in parts:
                block = self._block(all_digits, part).double()
                gram += block @ block.t()
            values, vectors = _largest(gram, tt_rank)
            vectors = vectors.to(self._kind)
            rest = like.new_empty(tt_rank, self._tail, self._rest)
            for part in parts:
                rest[:, part] = (vectors.t() @ self._block(all_digits, part)).view(tt_rank, -1, self._rest)
        else:
            step = max(self._chunk_numbers // (columns * self._q), 1)
            parts = [slice(at, min(at + step, self._p)) for at in range(0, self._p, step)]
            gram = like.new_zeros(columns, columns, dtype=torch.float64)
            for part in parts:
                block = self._block(part, every).double()
                gram += block.t() @ block
            values, eigenvectors = _largest(gram, tt_rank)
            scale, inverse = _roots(values)
            vectors = torch.cat([self._block(part, every) @ (eigenvectors * inverse).to(self._kind) for part in parts])
            rest = (eigenvectors * scale).t().to(self._kind)
        total = float(gram.diagonal().sum())
        return vectors, rest, total - float(values.sum()), total


def _halved(matrix: torch.Tensor, tt_rank: int, chunk_numbers: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """``U`` with orthonormal columns and ``rest`` with ``U @ rest`` nearest to the matrix, and the squares left out."""
    rows, columns = matrix.shape
    if rows <= columns:
        gram = matrix.new_zeros(rows, rows, dtype=torch.float64)
        for part in matrix.split(max(chunk_numbers // rows, 1), dim=1):
            gram += part.double() @ part.double().t()
        values, vectors = _largest(gram, tt_rank)
        vectors = vectors.to(matrix.dtype)
        return vectors, vectors.t() @ matrix, float(gram.diagonal().sum() - values.sum())
    gram = matrix.new_zeros(columns, columns, dtype=torch.float64)
    for part in matrix.split(max(chunk_numbers // columns, 1), dim=0):
        gram += part.double().t() @ part.double()
    values, vectors = _largest(gram, tt_rank)
    scale, inverse = _roots(values)
    left = matrix @ (vectors * inverse).to(matrix.dtype)
    return left, (vectors * scale).t().to(matrix.dtype), float(gram.diagonal().sum() - values.sum())


def _roots(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Singular values, and one over each that is not next to nothing."""
    scale = values.clamp(min=0).sqrt()
    return scale, torch.where(scale > 1e-7 * scale.max().clamp(min=1e-300), 1 / scale.clamp(min=1e-300), 0.0)


def _largest(gram: torch.Tensor, tt_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not bool(gram.isfinite().all()):
        raise TableError(
            "the table's numbers are too large to decompose: their squares are not finite; scale them first"
        )
    values, vectors = torch.linalg.eigh(gram)
    return values[-tt_rank:].flip(0), vectors[:, -tt_rank:].flip(1)


def of_rank(shape: TTShape, rank: int) -> TTShape:
    """The same factors with one rank, cut to what is possible."""
    rows, dim = shape.num_embeddings, shape.embedding_dim
    return TTShape.choose(rows, dim, rank, row_factors=shape.row_factors, dim_factors=shape.dim_factors)


def warn_of_error(what: str, weight: torch.Tensor, shape: TTShape, error: float, *, stacklevel: int = 3) -> None:
    """Warn that a decomposition loses much, with the rank that would not; each rank tried is twice the one before."""
    remedy = "no rank that makes the table smaller has 0.5 or less; train it from the start instead (decompose=False)"
    rank, tried = max(shape.tt_ranks), shape
    while True:
        rank *= 2
        larger = of_rank(shape, rank)
        if larger == tried or larger.compression <= 1:
            break
        tried, found = larger, decompose(weight, larger)[1]
        if found <= LARGE_ERROR:
            remedy = f"with rank {rank} it is {found:.2g}, {larger.compression:.2g} times fewer numbers"
            break
    warnings.warn(
        f"{what}: a tensor train with ranks {shape.tt_ranks} of its weights has a relative error of {error:.2g};"
        f" {remedy}",
        stacklevel=stacklevel,
    )
