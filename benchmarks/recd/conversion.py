"""Which rows of a batch are the same: ours against Arrow, polars, a Python dict and NumPy, all exact, one core.

Arrow's ``dictionary_encode`` and polars' ``group_by`` work on a binary view of the lists, which neither copies; several
features are groups of several columns to polars, and codes that are encoded again to Arrow (what ours does without
numba). "whole batch" is all of our conversion, from Arrow columns to tensors; the peers only number the rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import torch

from benchmarks.timing import on_one_core
from flexshard._internal import as_text, new_grid
from flexshard.embeddings import InverseKeyedJaggedTensor, JaggedArray, distinct_rows

__all__ = ["main"]

IntArray = npt.NDArray[np.int64]
ROUNDS = 9


def main(_: Path) -> None:
    on_one_core()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    numbers = ["ours", "whole batch", "Arrow", "polars", "Python dict", "NumPy", "ours / best peer"]
    grid = new_grid("Conversion: million rows per second and core, median of 9", ["rows", "order", "features"], numbers)
    for name, order, columns in shapes():
        table = pa.table(
            {
                f"f{n}": pa.LargeListArray.from_arrays(pa.array(c.offsets), pa.array(c.values))
                for n, c in enumerate(columns)
            }
        )
        names = table.schema.names
        works: dict[str, Callable[[], object]] = {
            "ours": lambda c=columns: distinct_rows(*c).inverse,
            "whole": lambda t=table, n=names: InverseKeyedJaggedTensor.from_arrow(t, [n]),
            "arrow": lambda c=columns: by_arrow(c),
            "polars": lambda c=columns: by_polars(c),
            "dict": lambda c=columns: by_dict(c),
            "numpy": lambda c=columns: by_numpy(c),
        }
        expected = by_dict(columns)
        for peer in ("ours", "arrow", "polars", "numpy"):
            assert np.array_equal(expected, works[peer]()), peer
        speeds = interleaved(works, len(columns[0]))
        best = max(speeds[peer] for peer in ("arrow", "polars", "dict", "numpy"))
        cells = [f"{speeds[work]:.2f}" for work in works]
        grid.add_row(name, order, str(len(columns)), *cells, f"{speeds['ours'] / best:.2f}x")
    print(as_text(grid, 150), flush=True)


def shapes() -> Iterator[tuple[str, str, list[JaggedArray]]]:
    """Rows and lengths of lists, their order, and the features of a batch."""
    for rows, length in ((4096, 50), (65_536, 5), (65_536, 50), (65_536, 200)):
        for order in ("clustered", "shuffled"):
            for features in (1, 3) if length == 50 else (1,):
                yield f"{rows:,} x {length}", order, batch(rows, length, features, shuffle=order == "shuffled")
    for rows, length, real in ((4096, 50, 20), (65_536, 50, 20), (4096, 100, 8)):
        (lists,) = batch(rows, real, 1, shuffle=False)
        for side in ("right", "left"):
            yield f"{rows:,} x {length}, {real} of them ids", f"{side} padded", [padded(lists, length, side)]


def padded(lists: JaggedArray, length: int, side: str) -> JaggedArray:
    """Lists of one length: a token, ids, then zeros; or all of that from the other end."""
    sizes = np.minimum(lists.lengths, length - 2)
    rows = np.zeros((len(lists), length), np.int64)
    rows[:, 0] = 1
    inside = np.arange(length - 1) < sizes[:, None]
    rows[:, 1:][inside] = lists.values[(lists.offsets[:-1, None] + np.arange(length - 1))[inside]]
    values = rows if side == "right" else rows[:, ::-1]
    return JaggedArray.of(np.ascontiguousarray(values).reshape(-1), np.full(len(lists), length))


def batch(rows: int, length: int, features: int, *, shuffle: bool) -> list[JaggedArray]:
    """Sessions of 16 samples of which one in five changes; features change together."""
    generator = np.random.default_rng(0)
    changed = generator.random(rows) < 0.2
    changed[::16] = True
    version = np.cumsum(changed) - 1
    if shuffle:
        version = generator.permutation(version)
    columns = []
    for _ in range(features):
        lengths = np.maximum(generator.poisson(length, int(changed.sum())), 1)
        columns.append(JaggedArray.of(generator.integers(0, 1 << 40, int(lengths.sum())), lengths).take(version))
    return columns


def interleaved(works: dict[str, Callable[[], object]], rows: int) -> dict[str, float]:
    """Million rows per second of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            start = time.process_time()
            work()
            times[name].append(time.process_time() - start)
    return {name: rows / statistics.median(found) / 1e6 for name, found in times.items()}


def by_arrow(columns: Sequence[JaggedArray]) -> IntArray:
    """Arrow's dictionaries of the rows' bytes."""
    return distinct_rows(*columns, compiled=False).inverse


def by_dict(columns: Sequence[JaggedArray]) -> IntArray:
    """A dictionary of the rows' bytes."""
    parts = []
    for column in columns:
        data, ends = column.values.tobytes(), (8 * column.offsets).tolist()
        parts.append([data[a:b] for a, b in pairwise(ends)])
    seen: dict[object, int] = {}
    keys = parts[0] if len(parts) == 1 else zip(*parts, strict=True)
    return np.array([seen.setdefault(key, len(seen)) for key in keys])


def by_numpy(columns: Sequence[JaggedArray]) -> IntArray:
    """Mixed ids, summed per row; rows of equal sums are compared with the first of them."""
    rows = len(columns[0])
    hashes = np.zeros(rows, np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            place = np.arange(column.values.size) - np.repeat(column.offsets[:-1], column.lengths)
            mixed = (column.values.view(np.uint64) ^ (place.astype(np.uint64) << np.uint64(44))) * np.uint64(
                0x9E3779B97F4A7C15
            )
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed)])
            sums = total[column.offsets[1:]] - total[column.offsets[:-1]]
            hashes = hashes * np.uint64(31) + sums + column.lengths.astype(np.uint64)
    return verified(columns, hashes)


def by_polars(columns: Sequence[JaggedArray]) -> IntArray:
    """Polars' groups of the rows' bytes."""
    views = {}
    for number, column in enumerate(columns):
        ends = pa.py_buffer(8 * column.offsets)
        view = pa.Array.from_buffers(pa.large_binary(), len(column), [None, ends, pa.py_buffer(column.values)])
        views[f"f{number}"] = pl.from_arrow(view)
    groups = pl.DataFrame(views).with_row_index("row").group_by(list(views), maintain_order=True).agg(pl.col("row"))
    rows = groups["row"]
    inverse = np.empty(len(columns[0]), np.int64)
    inverse[rows.explode().to_numpy()] = np.repeat(np.arange(len(rows)), rows.list.len().to_numpy())
    return inverse


def verified(columns: Sequence[JaggedArray], hashes: npt.NDArray[np.uint64]) -> IntArray:
    """Rows numbered by first appearance, equal hashes having been compared."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    representative = first[inverse]
    for column in columns:
        lengths = column.lengths
        assert np.array_equal(lengths, lengths[representative])
        shift = np.repeat(column.offsets[representative] - column.offsets[:-1], lengths)
        assert np.array_equal(column.values, column.values[np.arange(column.values.size) + shift])
    order = np.empty(first.size, np.int64)
    order[np.argsort(first)] = np.arange(first.size)
    return order[inverse]
