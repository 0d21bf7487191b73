"""Power-law sequences, for demonstrations and benchmarks where no real data is at hand."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from flexshard._internal import replacing
from flexshard.errors import DataError

__all__ = ["power_law_probabilities", "write_power_law_sequences"]

_BLOCK_SAMPLES = 1 << 16


def power_law_probabilities(
    rows: int, mean_length: float, exponent: float, *, shift: float = 0.0
) -> npt.NDArray[np.float64]:
    """Per-row probabilities p_k = L · (k + shift)^-a / Σ, hottest first (Zipf-Mandelbrot).

    Args:
        rows: E.
        mean_length: L, the sum of all p.
        exponent: a; 0 is uniform, 1 is Zipf's law.
        shift: flattens the head: row k is as hot as row k + shift of the pure law.

    Returns:
        shape (rows,).
    """
    weights = (np.arange(1, rows + 1, dtype=np.float64) + shift) ** -exponent
    return np.asarray(mean_length * weights / weights.sum())


def write_power_law_sequences(
    path: str | os.PathLike[str],
    *,
    rows: int,
    samples: int,
    mean_length: float,
    exponent: float = 1.05,
    column: str = "items",
    seed: int = 0,
) -> None:
    """Write a Parquet file of samples, each a list of row ids of a power-law popularity.

    Lengths are geometric with the mean asked for. Ids are drawn by inverting the continuous law
    ``P(rank ≤ x) ∝ x^(1-exponent)`` and scattered over the table by a fixed bijection (multiplication modulo
    ``rows``), so that hot rows are not the first ones.

    Args:
        path: file to write.
        rows: E, rows of the table.
        samples: rows of the file.
        mean_length: L, expected ids of a sample.
        exponent: of the power law; above 0.
        column: name of the list column.
        seed: of the random numbers; the same seed gives the same file.

    Raises:
        DataError: a number that is not above 0.
        OutputError: the file could not be written.
    """
    for name, value in (("rows", rows), ("samples", samples), ("mean_length", mean_length), ("exponent", exponent)):
        if not 0 < value < 1 << 40:
            raise DataError(f"{name} must be above 0 and below 2^40, found {value}")
    if not column or "\n" in column:
        raise DataError(f"a column's name is a text of one line, found {column!r}")
    if seed < 0:
        raise DataError(f"seed must be at least 0, found {seed}")
    # A block's ids are counted in 32 bits by Arrow's lists.
    most = max(1, min(_BLOCK_SAMPLES, int((1 << 26) / mean_length)))
    random = np.random.default_rng(seed)
    schema = pa.schema([(column, pa.list_(pa.int64()))])
    with replacing(path) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for start in range(0, samples, most):
            block = min(most, samples - start)
            lengths = random.geometric(1 / (1 + mean_length), block) - 1
            ranks = _ranks(random.random(int(lengths.sum())), rows, exponent)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            ids = pa.array(_scattered(ranks, rows))
            writer.write_table(pa.table({column: pa.ListArray.from_arrays(pa.array(offsets), ids)}, schema=schema))


def _ranks(uniform: npt.NDArray[np.float64], rows: int, exponent: float) -> npt.NDArray[np.int64]:
    """Ranks 0 ... rows-1 of the continuous power law on [1, rows + 1)."""
    if abs(exponent - 1) < 1e-9:
        x = np.exp(uniform * np.log(rows + 1))
    else:
        power = 1 - exponent
        x = (1 + uniform * ((rows + 1.0) ** power - 1)) ** (1 / power)
    return np.asarray(np.minimum(x.astype(np.int64) - 1, rows - 1))


def _scattered(ranks: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.int64]:
    """A bijection of [0, rows): multiply by a number that shares no factor with ``rows``."""
    factor = next(c for c in range(int(rows * 0.6180339887) | 1, 2 * rows + 2) if np.gcd(c, rows) == 1)
    return np.asarray((ranks.astype(object) * factor % rows if rows > 1 << 31 else ranks * factor % rows), np.int64)
