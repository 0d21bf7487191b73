"""How unevenly rows are read over time: distinct and hottest rows of stretches of consecutive samples."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_WINDOWS", "TOP_ROWS", "Bursts", "Windows"]

IntArray = npt.NDArray[np.int64]

MOST_WINDOWS = 256
TOP_ROWS = 16


@dataclass(frozen=True, eq=False)
class Windows:
    """Stretches of so many consecutive samples of one file, evenly spaced over the data; n of them.

    Attributes:
        size: samples of each.
        lengths: ids of each; shape (n,).
        rows: those that each reads most, and most beyond the one before; hottest first, -1 where it reads fewer; shape
            (n, TOP_ROWS).
        counts: how often it reads them; shape (n, TOP_ROWS).
        totals: how often all of the data read them; shape (n, TOP_ROWS).
        distinct: rows that each reads, within about 1 % where it has very many ids; shape (n,). None in profiles of
            earlier states.
    """

    size: int
    lengths: IntArray
    rows: IntArray
    counts: IntArray
    totals: IntArray
    distinct: IntArray | None = None

    def thinned(self) -> Windows:
        """Every second one, fourth one, and so on, until they are few enough."""
        kept = self
        while kept.lengths.size > MOST_WINDOWS:
            kept = replace(kept, **{name: getattr(kept, name)[::2] for name in kept.arrays})
        return kept

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of what is known of each."""
        return _ARRAYS if self.distinct is None else (*_ARRAYS, "distinct")

    def with_totals(self, counts: IntArray) -> Windows:
        """With the counts of all rows, shape (E,), of the data."""
        return replace(self, totals=np.where(self.rows >= 0, counts[self.rows], 0))


_ARRAYS = ("lengths", "rows", "counts", "totals")


@dataclass(frozen=True, eq=False)
class Bursts:
    """Windows of several sizes, ascending, as far as files are long enough for them."""

    windows: tuple[Windows, ...]

    def merged(self, other: Bursts, counts: IntArray) -> Bursts:
        """Those of both data, whose rows are read so often in all; ``counts`` of shape (E,)."""
        mine, theirs = ({one.size: one for one in bursts.windows} for bursts in (self, other))
        both = []
        for size in sorted(mine.keys() | theirs.keys()):
            parts = [of[size] for of in (mine, theirs) if size in of]
            known = min((part.arrays for part in parts), key=len)
            joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in known}
            both.append(Windows(size, **joined).thinned().with_totals(counts))
        return Bursts(tuple(both))

    def distinct_rows(self) -> tuple[IntArray, npt.NDArray[np.float64]]:
        """Sizes of windows, and the mean of the rows that they read, as far as that is known; shape (k,) each."""
        known = [one for one in self.windows if one.distinct is not None]
        means = [float(one.distinct.mean()) for one in known if one.distinct is not None]
        return np.array([one.size for one in known], np.int64), np.array(means)

    def encoded(self) -> list[list[Any]]:
        """As JSON holds it."""
        return [
            [one.size, one.lengths.size, _packed([getattr(one, name) for name in _ARRAYS])]
            + ([] if one.distinct is None else [_packed([one.distinct])])
            for one in self.windows
        ]

    @classmethod
    def decoded(cls, value: Any, num_rows: int) -> Bursts:
        """What :meth:`encoded` gave.

        Raises:
            ValueError: it did not give that, or not for a table of so many rows.
        """
        windows: list[Windows] = []
        for size, number, packed, *more in value:
            if type(size) is not int or type(number) is not int or not 0 < number <= MOST_WINDOWS:
                raise ValueError("sizes and numbers of windows must be whole numbers above 0")
            if not (windows[-1].size if windows else 0) < size < 1 << 62:
                raise ValueError("sizes of windows must ascend")
            shapes = [(number,), *[(number, TOP_ROWS)] * 3]
            if len(more) > 1:
                raise ValueError("more of a window than is known of one")
            distinct = [_unpacked(part, [(number,)])[0] for part in more]
            one = Windows(size, *_unpacked(packed, shapes), *distinct)
            read = one.rows >= 0
            if np.any(one.rows >= num_rows) or np.any((one.counts <= 0) & read) or np.any(one.totals < 0):
                raise ValueError("rows outside the table, or counts below 1")
            if np.any(one.counts > one.lengths[:, None]) or np.any(np.diff(one.counts, axis=1) > 0):
                raise ValueError("counts above a window's ids, or in another order")
            if one.distinct is not None and np.any((one.distinct < 0) | (one.distinct > num_rows)):
                raise ValueError("more distinct rows than the table has")
            windows.append(one)
        return cls(tuple(windows))


def _packed(arrays: Sequence[IntArray]) -> str:
    data = b"".join(np.ascontiguousarray(array, "<i8").tobytes() for array in arrays)
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _unpacked(text: str, shapes: Sequence[tuple[int, ...]]) -> list[IntArray]:
    sizes = [int(np.prod(shape)) for shape in shapes]
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(base64.b64decode(text, validate=True), 8 * sum(sizes) + 1)
    if len(data) != 8 * sum(sizes) or not unpacking.eof or unpacking.unused_data:
        raise ValueError(f"{len(data)} bytes where {8 * sum(sizes)} belong")
    parts = np.split(np.frombuffer(data, "<i8").astype(np.int64), np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
