"""A table's rows in order of popularity, or any other order, and the way back."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard._internal import PathLike, bound, check_int, deprecated_attribute, renamed_parameters
from flexshard.embeddings.ordering.communities import community_order, index_graph
from flexshard.errors import TableError

__all__ = ["IndexBijection"]

IntArray = npt.NDArray[np.int64]
_SHORT = 8


class IndexBijection:
    """A one-to-one map of a table's row ids onto positions 0 (hottest) to E-1.

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
        in_order = self._in_order
        twice = np.flatnonzero(in_order[1:] == in_order[:-1])
        if twice.size:
            raise TableError(f"a ranking names row {in_order[twice[0]]} twice")

    @classmethod
    def identity(cls, num_rows: int) -> IndexBijection:
        """Every row's position is its id."""
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
    def _order(self) -> npt.NDArray[Any]:
        """Positions of the ranking in order of id."""
        return np.argsort(self._ranked, kind="stable")

    @cached_property
    def _in_order(self) -> npt.NDArray[Any]:
        """Ids of the ranking, ascending."""
        return np.sort(self._ranked)

    @property
    def _is_short(self) -> bool:
        """Whether looking up in the ranking takes far less memory than a number for each row."""
        return self.num_ranked * _SHORT < self.num_rows

    @cached_property
    def position_of(self) -> npt.NDArray[Any]:
        """Position of every id; shape (E,)."""
        positions = np.empty(self.num_rows, self._ranked.dtype)
        positions[self.row_at] = np.arange(self.num_rows, dtype=positions.dtype)
        return positions

    @cached_property
    def row_at(self) -> npt.NDArray[Any]:
        """Id at every position; shape (E,)."""
        other = np.ones(self.num_rows, bool)
        other[self._ranked] = False
        return np.concatenate([self._ranked, np.flatnonzero(other).astype(self._ranked.dtype)])

    def positions(self, ids: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
        """Positions of ids, of the ids' shape.

        Raises:
            TableError: an id outside the table.
        """
        _checked(ids, self.num_rows)
        if self.is_identity or not self._is_short:
            return ids if self.is_identity else self.position_of[ids]
        order = self._order
        before = np.searchsorted(self._in_order, ids)
        at = np.minimum(before, self.num_ranked - 1)
        return np.where(self._in_order[at] == ids, order[at], self.num_ranked + ids - before)

    @renamed_parameters(ranks="positions")
    def rows(self, positions: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
        """Ids at positions, of the positions' shape; raises as :meth:`positions`."""
        _checked(positions, self.num_rows)
        if self.is_identity or not self._is_short:
            return positions if self.is_identity else self.row_at[positions]
        rest = np.asarray(positions) - self.num_ranked
        # The j-th of the other rows has as many ranked ones before it as have at most j others before them.
        before = np.searchsorted(self._in_order - np.arange(self.num_ranked), rest, side="right")
        return np.where(rest < 0, self._ranked[np.minimum(positions, self.num_ranked - 1)], rest + before)

    rank_of = deprecated_attribute("rank_of", "position_of")
    ranks = deprecated_attribute("ranks", "positions")

    @classmethod
    def by_community(
        cls,
        batches: Iterable[npt.NDArray[np.integer[Any]]],
        ranking: IndexBijection,
        *,
        hot_share: float = 0.01,
        pairs_per_batch: int = 20_000,
        max_pairs: int = 2_000_000,
        seed: int = 0,
    ) -> IndexBijection:
        """Hot rows by frequency, then cold rows that are read together next to each other (EL-Rec paper, section IV).

        Rows of one community share prefixes of a tensor train, so that a batch computes fewer of them.

        Args:
            batches: ids of each batch; read once.
            ranking: by frequency, such as ``IndexBijection(profile.ranked_rows, profile.num_rows)``.
            hot_share: of the table's rows, the hottest, which keep their positions.
            pairs_per_batch: of cold rows, drawn of each batch as edges of the graph.
            max_pairs: kept of all batches; 24 bytes each, and what the search for communities takes time for. A graph
                has a row for every 16 of them; rarer rows keep four companions each, 20 bytes a row.
            seed: of both.

        Raises:
            TableError: a share that is none, or an id outside the table.
            MissingDependencyError: igraph is not installed.
        """
        if not 0 <= hot_share <= 1:
            raise TableError(f"hot_share is a share of the rows, found {hot_share}")
        pairs_per_batch = check_int(pairs_per_batch, "pairs_per_batch", TableError)
        max_pairs, seed = check_int(max_pairs, "max_pairs", TableError), check_int(seed, "seed", TableError, least=0)
        rows = ranking.num_rows
        hot = min(round(hot_share * rows), rows)
        graph = index_graph(
            (_checked(batch, rows) for batch in batches),
            ranking.position_of,
            hot,
            pairs_per_batch=pairs_per_batch,
            max_pairs=max_pairs,
            seed=seed,
        )
        order = np.concatenate([np.arange(hot), hot + community_order(graph, rows - hot, seed=seed)])
        return cls(ranking.row_at[order], rows)

    def save(self, path: PathLike) -> None:
        """Write the ranking as Parquet: a column ``row``, hottest first; the number of rows in the metadata.

        Raises:
            OutputError: it could not be written.
        """
        bound("flexshard.embeddings", "IndexBijection.save")(self, path)

    @classmethod
    def load(cls, path: PathLike) -> IndexBijection:
        """Read what :meth:`save` wrote.

        Raises:
            TableError: missing, of another format or version, damaged, or no bijection.
        """
        bijection: IndexBijection = bound("flexshard.embeddings", "IndexBijection.load")(path)
        return bijection


def _checked(batch: npt.NDArray[np.integer[Any]], rows: int) -> npt.NDArray[np.integer[Any]]:
    ids = np.asarray(batch).reshape(-1)
    if ids.size and (ids.min() < 0 or ids.max() >= rows):
        wrong = ids[(ids < 0) | (ids >= rows)][0]
        raise TableError(f"there is an id (or position) {wrong}, but the table has rows 0 to {rows - 1}")
    return ids
