"""A table's rows in another order: the ranking that plans deal rows by, and the way back."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard.errors import TableError

__all__ = ["IndexBijection"]

IntArray = npt.NDArray[np.int64]


class IndexBijection:
    """A one-to-one map of a table's row ids onto ranks 0 (hottest) to E-1.

    Rows that the ranking names come first, in its order; all others follow in order of id. Both directions cost four
    bytes a row, made when first asked for; the identity costs nothing.
    """

    def __init__(self, ranked_rows: npt.ArrayLike, num_rows: int) -> None:
        """Rank ``ranked_rows`` (ids, hottest first, each at most once; shape (K,)) ahead of the table's other rows.

        Raises:
            TableError: an id outside the table, or one that stands twice.
        """
        rows = np.asarray(ranked_rows)
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise TableError(f"a ranking is a list of whole row ids, found {rows.dtype} of shape {rows.shape}")
        rows = rows.astype(np.int64, copy=False)
        if rows.size and (rows.min() < 0 or rows.max() >= num_rows):
            outside = rows[(rows < 0) | (rows >= num_rows)][0]
            raise TableError(f"a ranking names row {outside}, but the table has rows 0 to {num_rows - 1}")
        self.num_rows = int(num_rows)
        self.num_ranked = int(rows.size)
        kind = np.int32 if num_rows < 1 << 31 else np.int64
        self._ranked: npt.NDArray[Any] = rows.astype(kind)
        self._ranked.setflags(write=False)
        twice = np.bincount(rows) > 1
        if twice.any():
            raise TableError(f"a ranking names row {np.flatnonzero(twice)[0]} twice")

    @classmethod
    def identity(cls, num_rows: int) -> IndexBijection:
        """Every row's rank is its id."""
        return cls(np.zeros(0, np.int64), num_rows)

    @property
    def is_identity(self) -> bool:
        """Whether no ranking was given."""
        return self.num_ranked == 0

    @property
    def ranked_rows(self) -> npt.NDArray[Any]:
        """Ids of the ranking, hottest first; shape (K,)."""
        return self._ranked

    @cached_property
    def rank_of(self) -> npt.NDArray[Any]:
        """Rank of every id; shape (E,)."""
        ranks = np.empty(self.num_rows, self._ranked.dtype)
        ranks[self.row_at] = np.arange(self.num_rows, dtype=ranks.dtype)
        return ranks

    @cached_property
    def row_at(self) -> npt.NDArray[Any]:
        """Id at every rank; shape (E,)."""
        other = np.ones(self.num_rows, bool)
        other[self._ranked] = False
        return np.concatenate([self._ranked, np.flatnonzero(other).astype(self._ranked.dtype)])

    def ranks(self, ids: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
        """Ranks of ids, of the ids' shape."""
        return ids if self.is_identity else self.rank_of[ids]

    def rows(self, ranks: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
        """Ids at ranks, of the ranks' shape."""
        return ranks if self.is_identity else self.row_at[ranks]
