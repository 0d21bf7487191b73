"""How a table is laid out as a tensor train: factors of its rows and of its dimension, and TT ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from flexshard._internal import check_int, deprecated_attribute, renamed_parameters
from flexshard.errors import TableError

__all__ = ["KEPT_SHARE", "TTShape", "choose_dim_factors", "choose_row_factors"]

# Memory that a table keeps for products, over those of its last batch: batches differ.
KEPT_SHARE = 1.125


def choose_row_factors(num_embeddings: int, cores: int) -> tuple[int, ...]:
    """Factors of about equal size whose product is at least E, the least such that keeps them about equal.

    Args:
        num_embeddings: E.
        cores: d.
    """
    factors: list[int] = []
    rest = num_embeddings
    for left in range(cores, 0, -1):
        root = max(round(rest ** (1.0 / left)), 1)
        while root**left < rest:
            root += 1
        while root > 1 and (root - 1) ** left >= rest:
            root -= 1
        factors.append(root)
        rest = -(-rest // root)
    return tuple(sorted(factors))


def choose_dim_factors(embedding_dim: int, cores: int) -> tuple[int, ...]:
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
                factors = (*chosen, rest)
                if best is None or sum(factors) < sum(best):
                    best = factors
            return
        factor = least
        while factor**left <= rest:
            if rest % factor == 0:
                search(rest // factor, factor, left - 1, (*chosen, factor))
            factor += 1

    search(embedding_dim, 1, cores, ())
    assert best is not None
    # Largest in the middle: the first and last cores meet the ids one by one.
    order = sorted(range(cores), key=lambda core: (abs(2 * core - cores + 1), core))
    placed = [1] * cores
    for core, factor in zip(order, sorted(best, reverse=True), strict=True):
        placed[core] = factor
    return tuple(placed)


@renamed_parameters(rows="row_factors", dims="dim_factors", ranks="tt_ranks")
@dataclass(frozen=True)
class TTShape:
    """A table of E rows and dimension D as d cores (EL-Rec paper, section II-B).

    Core k has shape (p_k, r_{k-1}, q_k, r_k), r_0 = r_d = 1. Row i is the product of the slices at the digits of i in
    the mixed base p, the last digit being the least; the product of all p is at least E, that of all q is D.

    Attributes:
        num_embeddings: E.
        embedding_dim: D.
        row_factors: p; shape (d,).
        dim_factors: q; shape (d,).
        tt_ranks: r_1 to r_{d-1}; shape (d - 1,).
    """

    num_embeddings: int
    embedding_dim: int
    row_factors: tuple[int, ...]
    dim_factors: tuple[int, ...]
    tt_ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        where = f"a tensor train of {self.num_embeddings:,} rows of {self.embedding_dim}"
        p, q = self.row_factors, self.dim_factors
        if not 2 <= len(p) <= 4:
            raise TableError(f"{where} has 2, 3 or 4 cores, found {len(p)}")
        if len(q) != len(p) or len(self.tt_ranks) != len(p) - 1:
            raise TableError(
                f"{where} with {len(p)} cores has as many factors of its dimension and one TT rank fewer, found"
                f" {len(q)} and {len(self.tt_ranks)}"
            )
        for name in ("row_factors", "dim_factors", "tt_ranks"):
            values = tuple(check_int(v, f"{where}: one of {name}", TableError) for v in getattr(self, name))
            object.__setattr__(self, name, values)
        if prod(p) < self.num_embeddings:
            raise TableError(f"{where}: factors {tuple(p)} cover {prod(p):,} rows only")
        if prod(q) != self.embedding_dim:
            raise TableError(f"{where}: factors {tuple(q)} of the dimension multiply to {prod(q)}")
        sizes = [a * b for a, b in zip(p, q, strict=True)]
        for core, tt_rank in enumerate(self.tt_ranks, start=1):
            around = (self.bounds[core - 1] * sizes[core - 1], sizes[core] * self.bounds[core + 1])
            most = min(prod(sizes[:core]), prod(sizes[core:]), *around)
            if tt_rank > most:
                raise TableError(f"{where}: rank {tt_rank} between cores {core} and {core + 1} is above {most}")

    @classmethod
    @renamed_parameters(rows="row_factors", dims="dim_factors", ranks="tt_ranks")
    def choose(
        cls,
        num_embeddings: int,
        embedding_dim: int,
        tt_ranks: int | Sequence[int],
        *,
        cores: int = 3,
        row_factors: Sequence[int] | None = None,
        dim_factors: Sequence[int] | None = None,
    ) -> TTShape:
        """A shape with factors chosen where none are given; one TT rank stands for all, cut to what is possible.

        Raises:
            TableError: factors that do not cover the table, or given TT ranks above what is possible.
        """
        num_embeddings = check_int(num_embeddings, "num_embeddings", TableError)
        embedding_dim = check_int(embedding_dim, "embedding_dim", TableError)
        for name, factors in (("row_factors", row_factors), ("dim_factors", dim_factors)):
            if factors is not None and not isinstance(factors, Sequence):
                raise TableError(f"{name} are factors, such as (200, 200, 250); found {factors!r}")
            for value in factors or ():
                check_int(value, f"a factor ({name})", TableError)
        given = row_factors if row_factors is not None else dim_factors
        count = check_int(cores, "cores", TableError) if given is None else len(given)
        if not 2 <= count <= 4:
            raise TableError(f"a tensor train has 2, 3 or 4 cores, found {count}")
        p = choose_row_factors(num_embeddings, count) if row_factors is None else tuple(row_factors)
        q = choose_dim_factors(embedding_dim, count) if dim_factors is None else tuple(dim_factors)
        if not isinstance(tt_ranks, Sequence):
            most = check_int(tt_ranks, "TT ranks", TableError)
            sizes = [a * b for a, b in zip(p, q, strict=False)]
            each = tuple(min(most, prod(sizes[:k]), prod(sizes[k:])) for k in range(1, count))
        else:
            each = tuple(tt_ranks)
        return cls(num_embeddings, embedding_dim, p, q, each)

    @property
    def cores(self) -> int:
        """d, how many."""
        return len(self.row_factors)

    @property
    def bounds(self) -> tuple[int, ...]:
        """TT ranks with the ends: r_0 to r_d."""
        return (1, *self.tt_ranks, 1)

    @property
    def parameters(self) -> int:
        """Numbers in all cores."""
        r = self.bounds
        sizes = [p * q for p, q in zip(self.row_factors, self.dim_factors, strict=True)]
        return sum(size * r[k] * r[k + 1] for k, size in enumerate(sizes))

    @property
    def compression(self) -> float:
        """Numbers of the table per number of the cores."""
        return self.num_embeddings * self.embedding_dim / self.parameters

    def __str__(self) -> str:
        p, q = (" x ".join(map(str, factors)) for factors in (self.row_factors, self.dim_factors))
        return f"rows {p}, dims {q}, ranks {self.tt_ranks}"

    rows = deprecated_attribute("rows", "row_factors")
    dims = deprecated_attribute("dims", "dim_factors")
    ranks = deprecated_attribute("ranks", "tt_ranks")
