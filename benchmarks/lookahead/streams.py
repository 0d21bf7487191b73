"""Batches of lookups to try caches on: Criteo's tables with power laws, and recorded ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

__all__ = ["CRITEO_ROWS", "Batch", "criteo", "ecommerce", "globo", "zipf", "zipf_probabilities"]

# One row per sample, one column per lookup: row ids, of all tables one after the other.
Batch = npt.NDArray[np.int64]

# The Kaggle set's 26 tables, as the DLRM benchmark counts them; 33.76 M rows.
CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306,
    10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


def zipf(rng: np.random.Generator, rows: int, exponent: float, size: int) -> npt.NDArray[np.int64]:
    """Positions drawn from a power law over ``rows``, by the inverse of its continuous form."""
    u = rng.random(size)
    rest = 1 - exponent
    drawn = (rows + 1) ** u if rest == 0 else (((rows + 1) ** rest - 1) * u + 1) ** (1 / rest)
    return np.minimum(drawn.astype(np.int64) - 1, rows - 1)


def zipf_probabilities(rows: int, exponent: float = 1.05) -> npt.NDArray[np.float64]:
    """What :func:`zipf` draws from; shape (rows,)."""
    rest = 1 - exponent
    drawn = np.diff((np.arange(1, rows + 2, dtype=np.float64) ** rest - 1) / ((rows + 1) ** rest - 1))
    return np.minimum.accumulate(drawn)  # differences of near numbers are not quite in order


def criteo(samples: int, *, exponent: float = 1.05, hashed: bool = True, seed: int = 0) -> Iterator[Batch]:
    """Batches without end; ``hashed`` permutes the rows of each table, as hashing raw ids does."""
    rng = np.random.default_rng(seed)
    first = np.concatenate([[0], np.cumsum(CRITEO_ROWS)])
    orders = [rng.permutation(rows) if hashed else np.arange(rows) for rows in CRITEO_ROWS]
    while True:
        columns = [
            order[zipf(rng, rows, exponent, samples)] + start
            for rows, order, start in zip(CRITEO_ROWS, orders, first[:-1], strict=True)
        ]
        yield np.stack(columns, axis=1)


def globo(path: Path, samples: int) -> Iterator[Batch]:
    """Clicks in order of time: item and user of each."""
    table = pq.read_table(path).sort_by("timestamp")
    items, users = (_dense(table[name].to_numpy()) for name in (_item_column(table.column_names), "user_id"))
    return _in_batches(np.stack([items, users + items.max() + 1], axis=1), samples)


def ecommerce(path: Path, samples: int) -> Iterator[Batch]:
    """Lookups of 30 tables in order of access, one per sample."""
    table = pq.read_table(path, columns=["table_id", "entity_id"])
    tables, rows = (table[name].to_numpy().astype(np.int64) for name in table.column_names)
    return _in_batches(_dense(tables * (rows.max() + 1) + rows)[:, None], samples)


def _item_column(names: list[str]) -> str:
    return next(name for name in names if "item" in name or "article" in name)


def _dense(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _in_batches(lookups: Batch, samples: int) -> Iterator[Batch]:
    for start in range(0, len(lookups) - samples + 1, samples):
        yield lookups[start : start + samples]
