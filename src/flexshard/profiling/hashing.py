"""The named hash that folds raw 64-bit ids into a table, and spreads samples over a holdout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexshard.errors import DataError

__all__ = ["HASHES", "check_hash", "hash_to_rows", "splitmix64", "text_keys"]

HASHES = ("splitmix64",)

UInt64Array = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(values: npt.NDArray[np.generic], seed: int = 0) -> UInt64Array:
    """SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 4).

    Args:
        values: integers, shape (n,); signed ones are taken by their two's complement.
        seed: number of the stream; stream k of a value v is the finalizer of v + (k + 1) · 0x9E3779B97F4A7C15.

    Returns:
        64-bit hashes, shape (n,).
    """
    with np.errstate(over="ignore"):
        whole = values if values.dtype == np.uint64 else values.astype(np.int64, copy=False).view(np.uint64)
        z: UInt64Array = np.asarray(whole, np.uint64)
        z = z + np.uint64((seed + 1) & 0xFFFFFFFFFFFFFFFF) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)


def check_hash(hash: str | None, num_rows: int | None) -> None:
    """Whether ids can be folded so.

    Raises:
        DataError: no such hash, or no number of rows to fold ids into.
    """
    if hash is not None and hash not in HASHES:
        raise DataError(f"no hash is called {hash!r}; there are {', '.join(HASHES)}")
    if hash is not None and num_rows is None:
        raise DataError("hashing needs the number of rows to fold the ids into; give num_rows (--rows)")


def hash_to_rows(ids: npt.NDArray[np.generic], num_rows: int) -> npt.NDArray[np.int64]:
    """Row of each raw id: ``splitmix64(id) % num_rows``. Distinct ids may share a row."""
    return (splitmix64(ids) % np.uint64(num_rows)).astype(np.int64)


def text_keys(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> UInt64Array:
    """A 64-bit number for each text: its bytes as a polynomial in 0x9E3779B97F4A7C15, modulo 2^64.

    Args:
        data: the texts' bytes, one after the other.
        offsets: where each text starts, and the end; shape (n + 1,).
    """
    lengths = np.diff(offsets)
    data = data[offsets[0] : offsets[-1]]
    position = np.arange(data.size) - np.repeat(offsets[:-1] - offsets[0], lengths)
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(max(int(lengths.max(initial=0)), 1), _GOLDEN))
        terms = (data.astype(np.uint64) + np.uint64(1)) * powers[position]
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
        starts = offsets - offsets[0]
        return np.asarray(sums[starts[1:]] - sums[starts[:-1]], dtype=np.uint64)
