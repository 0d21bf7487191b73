"""Logs of sessions: samples of many users interleaved in time, most features staying as they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def log(sessions: int = 60, mean: float = 6.0, seed: int = 0, *, same: float = 0.8) -> pa.Table:
    """Rows in order of time: a key, a time, two lists that change together, one that changes alone, a label."""
    generator = np.random.default_rng(seed)
    rows = []
    for session in range(sessions):
        start = generator.integers(0, 1000)
        history = generator.integers(0, 500, 20).tolist()
        liked = generator.integers(0, 500, 5).tolist()
        for sample in range(1 + generator.poisson(mean - 1)):
            if sample and generator.random() > same:
                history = [*history[1:], int(generator.integers(0, 500))]
            if sample and generator.random() > same:
                liked = generator.integers(0, 500, 5).tolist()
            rows.append(
                {
                    "session": f"s{session}",
                    "time": int(start + 7 * sample),
                    "history": history,
                    "shops": [item // 10 for item in history],
                    "liked": liked,
                    "item": int(generator.integers(0, 1 << 30)),
                    "label": int(generator.integers(0, 2)),
                }
            )
    rows.sort(key=lambda row: row["time"])
    schema = pa.schema(
        {
            "session": pa.string(),
            "time": pa.int64(),
            "history": pa.list_(pa.int64()),
            "shops": pa.list_(pa.int32()),
            "liked": pa.large_list(pa.int64()),
            "item": pa.int32(),
            "label": pa.int8(),
        }
    )
    return pa.Table.from_pylist(rows, schema)


def written(table: pa.Table, folder: Path, files: int = 1, *, row_group_size: int = 50) -> list[Path]:
    """The rows as some files, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    size = -(-table.num_rows // files)
    paths = [folder / f"log-{number}.parquet" for number in range(files)]
    for number, path in enumerate(paths):
        pq.write_table(table.slice(number * size, size), path, row_group_size=row_group_size, compression="zstd")
    return paths
