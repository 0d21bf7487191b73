"""How a table is laid out as a tensor train: factors of its rows and of its dimension, and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from flexshard._values import whole
from flexshard.errors import TableError

__all__ = ["TTShape", "dim_factors", "row_factors"]


def row_factors(num_embeddings: int, cores: int) -> tuple[int, ...]:
    """Factors of about equal size whose product is at least E, the least such that keeps them about equal.

    Args:
        num_embeddings: E.
        cores: d.
    """
    found: list[int] = []
    rest = num_embeddings
    for left in range(cores, 0, -1):
        root = max(round(rest ** (1.0 / left)), 1)
        while root**left < rest:
            root += 1
        while root > 1 and (root - 1) ** left >= rest:
            root -= 1
        found.append(root)
        rest = -(-rest // root)
    return tuple(sorted(found))


def dim_factors(embedding_dim: int, cores: int) -> tuple[int, ...]:
    """Factors of D as equal as they can be, the largest in the middle: (4, 8, 4) of 128.

    Args:
        embedding_dim: D.
        cores: d.
    """
    best: tuple[int, ...] | None = None

    def search(rest: int, least: int, left: int, chosen: tuple[int, ...]) -> None:
        nonlocal best
        if left == 1:
            if rest >= least:
                found = (*chosen, rest)
                if best is None or sum(found) < sum(best):
                    best = found
            return
        factor = least
        while factor**left <= rest:
            if rest % factor == 0:
                search(rest // factor, factor, left - 1, (*chosen, factor))
            factor += 1

    search(embedding_dim, 1, cores, ())
    assert best is not None
    # Largest in the middle: the first and last cores meet the ids one by one.
    order = sorted(range(cores), key=lambda place: (abs(2 * place - cores + 1), place))
    placed = [1] * cores
    for place, factor in zip(order, sorted(best, reverse=True), strict=True):
        placed[place] = factor
    return tuple(placed)


@dataclass(frozen=True)
class TTShape:
    """A table of E rows and dimension D as d cores (EL-Rec paper, section II-B).

    Core k has shape (p_k, r_{k-1}, q_k, r_k), r_0 = r_d = 1. Row i is the product of the slices at the digits of i in
    the mixed base p, the last digit being the least; the product of all p is at least E, that of all q is D.

    Attributes:
        num_embeddings: E.
        embedding_dim: D.
        rows: p; shape (d,).
        dims: q; shape (d,).
        ranks: r_1 to r_{d-1}; shape (d - 1,).
    """

    num_embeddings: int
    embedding_dim: int
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        where = f"a tensor train of {self.num_embeddings:,} rows of {self.embedding_dim}"
        if not 2 <= len(self.rows) <= 4:
            raise TableError(f"{where} has 2, 3 or 4 cores, found {len(self.rows)}")
        if len(self.dims) != len(self.rows) or len(self.ranks) != len(self.rows) - 1:
            raise TableError(
                f"{where} with {len(self.rows)} cores has as many factors of its dimension and one rank fewer, found"
                f" {len(self.dims)} and {len(self.ranks)}"
            )
        for name in ("rows", "dims", "ranks"):
            values = tuple(whole(v, f"{where}: a factor or rank ({name})", TableError) for v in getattr(self, name))
            object.__setattr__(self, name, values)
        if prod(self.rows) < self.num_embeddings:
            raise TableError(f"{where}: factors {self.rows} cover {prod(self.rows):,} rows only")
        if prod(self.dims) != self.embedding_dim:
            raise TableError(f"{where}: factors {self.dims} of the dimension multiply to {prod(self.dims)}")
        for place, rank in enumerate(self.ranks, start=1):
            sizes = [p * q for p, q in zip(self.rows, self.dims, strict=True)]
            around = (self.bounds[place - 1] * sizes[place - 1], sizes[place] * self.bounds[place + 1])
            most = min(prod(sizes[:place]), prod(sizes[place:]), *around)
            if rank > most:
                raise TableError(f"{where}: rank {rank} between cores {place} and {place + 1} is above {most}")

    @classmethod
    def choose(
        cls,
        num_embeddings: int,
        embedding_dim: int,
        ranks: int | Sequence[int],
        *,
        cores: int = 3,
        rows: Sequence[int] | None = None,
        dims: Sequence[int] | None = None,
    ) -> TTShape:
        """A shape with factors chosen where none are given; one rank stands for all, cut to what is possible.

        Raises:
            TableError: factors that do not cover the table, or given ranks above what is possible.
        """
        num_embeddings = whole(num_embeddings, "num_embeddings", TableError)
        embedding_dim = whole(embedding_dim, "embedding_dim", TableError)
        for name, given in (("rows", rows), ("dims", dims)):
            if given is not None and not isinstance(given, Sequence):
                raise TableError(f"{name} are factors, such as (200, 200, 250); found {given!r}")
            for value in given or ():
                whole(value, f"a factor ({name})", TableError)
        count = len(rows) if rows is not None else len(dims) if dims is not None else whole(cores, "cores", TableError)
        if not 2 <= count <= 4:
            raise TableError(f"a tensor train has 2, 3 or 4 cores, found {count}")
        p = tuple(rows) if rows is not None else row_factors(num_embeddings, count)
        q = tuple(dims) if dims is not None else dim_factors(embedding_dim, count)
        if not isinstance(ranks, Sequence):
            ranks = whole(ranks, "ranks", TableError)
            sizes = [a * b for a, b in zip(p, q, strict=False)]
            each = tuple(min(ranks, prod(sizes[:k]), prod(sizes[k:])) for k in range(1, count))
        else:
            each = tuple(ranks)
        return cls(num_embeddings, embedding_dim, p, q, each)

    @property
    def cores(self) -> int:
        """d, how many."""
        return len(self.rows)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Ranks with the ends: r_0 to r_d."""
        return (1, *self.ranks, 1)

    @property
    def parameters(self) -> int:
        """Numbers in all cores."""
        r = self.bounds
        return sum(p * q * r[k] * r[k + 1] for k, (p, q) in enumerate(zip(self.rows, self.dims, strict=True)))

    @property
    def compression(self) -> float:
        """Numbers of the table per number of the cores."""
        return self.num_embeddings * self.embedding_dim / self.parameters

    def __str__(self) -> str:
        return f"rows {' x '.join(map(str, self.rows))}, dims {' x '.join(map(str, self.dims))}, ranks {self.ranks}"
