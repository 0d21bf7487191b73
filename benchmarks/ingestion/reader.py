"""The plain reader against a loop over pyarrow's own batches, on one thread: rows per second of CPU time.

The loop is what one writes without a reader: ``iter_batches``, values and offsets to torch, a KeyedJaggedTensor. It
checks nothing, cannot shuffle, and cannot stop and go on. Ratios above 1 are ours. Also: shuffled epochs, what a
scan of sessions takes, and how long it takes to go on in the middle of an epoch.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.timing import on_one_core
from flexshard._internal import as_text, new_grid
from flexshard.ingestion import SessionReader

__all__ = ["data_sets", "main"]

BATCH, ROUNDS = 4096, 9
CLICKS = ["user_id", "item_id", "click_environment", "click_deviceGroup", "click_os", "click_country", "click_region"]


def main(folder: Path, clicks: Path | None) -> None:
    on_one_core()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    title = f"Reader and ten-line loop over pyarrow, batches of {BATCH:,}, one thread, {ROUNDS} rounds in turn"
    grid = new_grid(title, ["data"], ["rows", "loop, rows/s", "ours", "ratio", "shuffled", "scan, s", "go on, s"])
    for name, (path, features, dense, session) in data_sets(folder, clicks).items():
        how: dict[str, Any] = {"batch_size": BATCH, "features": features, "dense": dense}
        cases: dict[str, Callable[[], Iterable[object]]] = {
            "loop": lambda path=path, features=features, dense=dense: loop(path, features, dense),
            "ours": lambda path=path, how=how: SessionReader(path, **how),
            "shuffled": lambda path=path, how=how: SessionReader(path, **how, shuffle="samples"),
        }
        times: dict[str, list[float]] = {case: [] for case in cases}
        for _ in range(ROUNDS):
            for case, make in cases.items():
                times[case].append(cpu_seconds(make))
        rows = pq.ParquetFile(path).metadata.num_rows
        ratio = statistics.median(a / b for a, b in zip(times["loop"], times["ours"], strict=True))
        rates = {case: f"{rows / statistics.median(found):,.0f}" for case, found in times.items()}
        scan = "-" if session is None else f"{wall_seconds(partial(SessionReader, path, **how, session=session)):.2f}"
        again = f"{going_on(path, how):.2f}"
        grid.add_row(name, f"{rows:,}", rates["loop"], rates["ours"], f"{ratio:.2f}", rates["shuffled"], scan, again)
    print(as_text(grid, 150), flush=True)


def data_sets(folder: Path, clicks: Path | None) -> dict[str, tuple[Path, list[str], list[str], str | None]]:
    """Files with their features, dense columns and session: generated ones, and clicks if they are here."""
    generator, rows = np.random.default_rng(0), 400_000
    columns: dict[str, Any] = {}
    for number in range(6):
        offsets = np.concatenate([[0], np.cumsum(generator.poisson(5, rows))]).astype(np.int32)
        columns[f"s{number}"] = pa.ListArray.from_arrays(offsets, generator.integers(0, 1 << 20, offsets[-1]))
    for number in range(4):
        columns[f"d{number}"] = generator.random(rows).astype(np.float32)
    pq.write_table(pa.table(columns), folder / "lists.parquet", row_group_size=50_000, compression="zstd")
    scalars = {f"s{number}": generator.zipf(1.3, 1_000_000) % (1 << 20) for number in range(26)}
    dense = {f"d{number}": generator.random(1_000_000).astype(np.float32) for number in range(13)}
    pq.write_table(pa.table(scalars | dense), folder / "criteo.parquet", row_group_size=100_000, compression="zstd")
    lists = [f"s{number}" for number in range(6)], [f"d{number}" for number in range(4)]
    found: dict[str, tuple[Path, list[str], list[str], str | None]] = {
        "6 lists of 5, 4 dense": (folder / "lists.parquet", *lists, None),
        "26 ids, 13 dense": (folder / "criteo.parquet", list(scalars), list(dense), None),
    }
    if clicks is not None:
        found["Globo.com, one row group"] = (clicks, CLICKS, ["timestamp"], "session_id")
        small = folder / "clicks.parquet"
        pq.write_table(pq.read_table(clicks), small, row_group_size=100_000, compression="zstd")
        found["Globo.com, 30 row groups"] = (small, CLICKS, ["timestamp"], "session_id")
    return found


def loop(path: Path, features: list[str], dense: list[str]) -> Iterator[tuple[KeyedJaggedTensor, dict[str, Any]]]:
    """The ten lines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # arrays of Arrow may not be written to
        file = pq.ParquetFile(path)
        for batch in file.iter_batches(BATCH, columns=features + dense, use_threads=False):
            values, lengths = [], []
            for name in features:
                column = batch.column(name)
                if pa.types.is_list(column.type):
                    values.append(torch.from_numpy(column.flatten().to_numpy()))
                    lengths.append(torch.from_numpy(np.diff(column.offsets.to_numpy())))
                else:
                    values.append(torch.from_numpy(column.to_numpy()))
                    lengths.append(torch.ones(len(column), dtype=torch.int32))
            sparse = KeyedJaggedTensor(features, torch.cat(values), lengths=torch.cat(lengths))
            yield sparse, {name: torch.from_numpy(batch.column(name).to_numpy()) for name in dense}


def cpu_seconds(make: Callable[[], Iterable[object]]) -> float:
    start = time.process_time()
    for _ in make():
        pass
    return time.process_time() - start


def wall_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def going_on(path: Path, how: dict[str, Any]) -> float:
    """From a state in the middle of a shuffled epoch to its next batch; the reader is there."""
    reader = SessionReader(path, **how, shuffle="samples")
    state = reader.state_dict() | {"batches": len(reader) // 2}
    reader.load_state_dict(state)
    return wall_seconds(lambda: next(iter(reader)))
