"""With which rank each table's rows begin, so that the hottest rows of several tables lie with different ranks."""

from __future__ import annotations

from math import gcd

import numpy as np
import numpy.typing as npt

__all__ = ["apart", "by_rank", "first_holders"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_DIGITS = 9  # of a correlation that count, so that rounding decides nothing
_GOLDEN = 0.618
_AT_ONCE = 1 / 8  # of the tables that have been placed, so many more are with one correlation


def first_holders(loads: FloatArray) -> IntArray:
    """By how many ranks to turn each table's rows, for the fullest rank to have little more than the mean.

    Tables go in order of their fullest rank, and each where it adds least to the sum of the ranks' squared loads; of
    tables that go together, with no more of each other than where their fullest ranks are.

    Args:
        loads: of each rank, where a table's rows begin with the first; shape (T, g).

    Returns:
        From 0 to g - 1; shape (T,).
    """
    tables, ranks = loads.shape
    found, fullest, most = np.zeros(tables, np.int64), loads.argmax(axis=1), loads.max(axis=1)
    order = np.argsort(-most, kind="stable")
    together, placed = np.zeros(ranks), 0
    while placed < tables:
        part = order[placed : placed + 1 + int(placed * _AT_ONCE)]
        added = loads[part]
        # A correlation is the sum over ranks of what is there, times what would come there, at every turn.
        spectra = np.fft.rfft(together) * np.fft.rfft(added, axis=1).conj()
        overlap = np.fft.irfft(spectra, ranks, axis=1)
        overlap = np.round(overlap / max(float(overlap.max()), 1e-300), _DIGITS) * float(overlap.max())
        beside = np.zeros(2 * ranks)  # twice, so that every turn of it is a slice
        for row, table in enumerate(part.tolist()):
            at = int(fullest[table])
            turn = int((overlap[row] + most[table] * beside[at : at + ranks]).argmin())
            found[table] = turn
            beside[[(at + turn) % ranks, (at + turn) % ranks + ranks]] += most[table]
        turned = (np.arange(ranks) - found[part, None]) % ranks
        together += np.take_along_axis(added, turned, axis=1).sum(axis=0)
        placed += len(part)
    return found


def by_rank(values: FloatArray, holder: IntArray, ranks: int) -> FloatArray:
    """Sums of rows' values over those that each rank holds; of shape (T, k) both, the result of shape (T, g)."""
    tables = len(values)
    key = np.arange(tables)[:, None] * ranks + holder
    sums = np.bincount(key.ravel(), weights=values.ravel(), minlength=tables * ranks)
    return np.asarray(sums.reshape(tables, ranks), np.float64)


def apart(number: int, ranks: int) -> int:
    """A rank for the ``number``-th table, from 0, of those of which nothing is known: each another one until all have
    one, and those of neighbours far from one another where that may be.
    """
    middle = round(ranks * _GOLDEN)
    stride = next(step for away in range(ranks) for step in (middle + away, middle - away) if gcd(step, ranks) == 1)
    return number * stride % ranks
