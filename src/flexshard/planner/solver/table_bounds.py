"""Which choices of tables may be better than what is known, by bounds of all choices at once.

At a price of memory a bound is a sum over tables, of what each costs as it is chosen, or the less of both where that is
open. So tables are settled one by one, and what is above what is known at any of several prices is left out with all
that follows from it (branch and bound, in whole arrays).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["Choices", "TableCosts", "below"]

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

_MOST_OPEN = 1_000  # choices of some tables that are looked at beside each other


@dataclass(frozen=True, eq=False)
class TableCosts:
    """What tables cost at K prices of memory where their rows may be at some levels.

    Attributes:
        sides: of each table with all its lookups sent, and with distinct ids alone: seconds, and memory at its price;
            shape (2, K, T).
        rest: what does not depend on tables, less the budget at its price; shape (K,).
    """

    sides: FloatArray
    rest: FloatArray

    @cached_property
    def least(self) -> FloatArray:
        """Bound of all choices at each price; shape (K,)."""
        return np.asarray(self.sides.min(axis=0).sum(axis=1) + self.rest)

    @property
    def bound(self) -> float:
        """No choice takes less."""
        return float(self.least.max())


@dataclass(frozen=True, eq=False)
class Choices:
    """Choices of tables whose bounds are below what is known, lowest first, and what bounds those that are left out.

    Attributes:
        masks: which tables send distinct ids; shape (N, T).
        bounds: of each; shape (N,), ascending.
        others: no other choice takes less than this, or than what is known.
    """

    masks: BoolArray
    bounds: FloatArray
    others: float


def below(costs: Sequence[TableCosts], known: float, tables: int) -> Choices:
    """Choices of so many tables that may take less than ``known`` seconds, with rows at any of some choices of levels.

    Of very many choices those with the lowest bounds are looked into.
    """
    lowest: dict[bytes, float] = {}
    others = np.inf
    for one in costs:
        masks, bounds, left = _below(one, known)
        others = min(others, left)
        for row, bound in zip(np.packbits(masks, axis=1), bounds.tolist(), strict=True):
            key = row.tobytes()
            lowest[key] = min(bound, lowest.get(key, np.inf))
    keys = sorted(lowest, key=lambda key: (lowest[key], key))
    rows = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), (tables + 7) // 8)
    return Choices(
        np.unpackbits(rows, axis=1, count=tables).astype(np.bool_), np.array([lowest[key] for key in keys]), others
    )


def _below(costs: TableCosts, known: float) -> tuple[BoolArray, FloatArray, float]:
    """The same at one choice of levels: which, their bounds, and what bounds those that were not looked into."""
    more = costs.sides - costs.sides.min(axis=0)  # by a table's taking a side; shape (2, K, T)
    tightest = int(costs.least.argmax())
    start, side_of = _settled(costs.least, more, known)
    open_tables = np.flatnonzero(side_of < 0)
    bounds, masks, others = start[None, :], (side_of == 1)[None, :], np.inf
    # Tables that tell most come first, so that much is left out early.
    for table in open_tables[np.argsort(-more[:, tightest, open_tables].max(axis=0), kind="stable")].tolist():
        children = bounds[None, :, :] + more[:, None, :, table]
        highest = children.max(axis=2)
        side, parent = np.nonzero(highest < known)
        if side.size > _MOST_OPEN:
            order = np.argsort(highest[side, parent], kind="stable")
            others = min(others, float(highest[side, parent][order[_MOST_OPEN]]))
            side, parent = side[order[:_MOST_OPEN]], parent[order[:_MOST_OPEN]]
        bounds, masks = children[side, parent], masks[parent]
        masks[:, table] = side.astype(np.bool_)
    left = bounds.max(axis=1) < known
    return masks[left], bounds[left].max(axis=1), others


def _settled(least: FloatArray, more: FloatArray, known: float) -> tuple[FloatArray, npt.NDArray[np.int64]]:
    """Bounds at each price, shape (K,), and the sides of tables whose other side is not below what is known, -1 where
    both may be; shape (T,).
    """
    side_of = np.full(more.shape[2], -1)
    while True:
        too_much = (least[:, None] + more).max(axis=1) >= known  # (2, T)
        new = np.flatnonzero((side_of < 0) & too_much.any(axis=0))
        if not new.size:
            return least, side_of
        side_of[new] = too_much[0, new]  # where it is both, what follows is too much as well
        least = least + more[side_of[new], :, new].sum(axis=0)
