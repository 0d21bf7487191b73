"""How samples with thousands of features lie in files, and what a job that reads a tenth of them takes (DPP, 4.2).

One generated dataset of RM1's shape (Table 6), its features in maps; rewritten by ``rewrite_dataset`` without a log
(features in the order of their numbers, which says nothing of their use) and with one of 100 jobs. What is told is of
25 jobs that came later. Two kinds of log: jobs that pick each feature by itself, and jobs that take families of
features; which one a company has, only its own log says. Both are made so that a job reads as many features, and
bytes, as RM1's, and that popular bytes serve what Figure 7 says.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.ingestion.features import RM1, Features, family_jobs, independent_jobs, make_features, write_maps
from flexshard import units
from flexshard._internal import as_text, expand, new_grid
from flexshard.ingestion import (
    Disk,
    FillMissing,
    HashIds,
    OnFeatures,
    ProjectionLog,
    ReadCost,
    SessionReader,
    popular_bytes,
    rewrite_dataset,
    tiered_storage,
)
from flexshard.ingestion.batches import Rows, batches_in_order
from flexshard.ingestion.conversion import dense_tensor, features_of
from flexshard.ingestion.pieces import Piece
from flexshard.ingestion.storage.column_chunks import ColumnChunks
from flexshard.ingestion.storage.flat_maps import Projection, flat_columns
from flexshard.ingestion.storage.job_reads import job_reads
from flexshard.ingestion.storage.merged_file import MergedFile
from flexshard.ingestion.stored_rows import StoredRows

__all__ = ["flat_maps", "popular", "reads", "workers"]

ROWS, BATCH, ROUNDS = 8192, 512, 5
LOGGED, LATER = 100, 25
APART = -1.0  # a gap that nothing is within: every column by itself
LOGS: dict[str, Callable[[Features, int, int], ProjectionLog]] = {
    "one by one": independent_jobs,
    "families": family_jobs,
}


def datasets(folder: Path, rows: int) -> tuple[Features, dict[str, Path]]:
    """Maps, features in columns, and those in the order that each log asks for."""
    features = make_features(RM1)
    paths = {"maps": folder / "maps", "flat": folder / "flat"} | {name: folder / f"for {name}" for name in LOGS}
    if not paths["maps"].exists():
        paths["maps"].mkdir()
        write_maps(paths["maps"] / "samples.parquet", features, rows)
        rewrite_dataset(paths["maps"], paths["flat"])
        for name, made in LOGS.items():
            rewrite_dataset(paths["flat"], paths[name], log=made(features, LOGGED, 1))
    return features, paths


def _chunks(path: Path, columns: list[str]) -> tuple[ColumnChunks, np.ndarray[Any, Any]]:
    """Where the columns of a dataset of one file lie, or the maps that have them; and which stored one each is."""
    source = expand(path)[0]
    projection = Projection.of(source.schema, columns)
    place = {name: number for number, name in enumerate(projection.stored)}
    with source.open() as file:
        chunks = ColumnChunks.of(file.metadata, source.schema, projection.stored)
    return chunks, np.array([place[name or ""] for name in projection.owners()])


def _cost(path: Path, columns: list[str], log: ProjectionLog, gap: float) -> ReadCost:
    """What the jobs of a log ask of storage, added up."""
    source = expand(path)[0]
    return sum(job_reads([(source.schema, pq.read_metadata(source.path))], log, columns, gap)[0], ReadCost())


def reads(folder: Path, rows: int) -> None:
    """Bytes, over-read, reads and time: maps, columns, merged reads, order, each alone and together."""
    features, paths = datasets(folder, rows)
    columns, disk = ["label", *features.names], Disk()
    for kind, made in LOGS.items():
        later = made(features, LATER, 2)
        wanted = _cost(paths["flat"], columns, later, APART).bytes_wanted
        stored = _chunks(paths["flat"], columns)[0].sizes
        used = later.reads(columns)
        print(
            f"\nJobs that pick features {kind}: each reads {used.mean():.1%} of features and"
            f" {wanted / LATER / stored.sum():.1%} of bytes (Table 6: 11 and 37 %);"
            f" row groups of {expand(paths['flat'])[0].group_rows[0]:,} rows, a column of one is"
            f" {units.format_bytes(float(stored.mean()))} on average"
        )
        titles = ["reads", "bytes", "over-read", "disk, s", "times", "this one, s", "reads fewer"]
        grid = new_grid("A later job over the whole dataset, on average", ["layout", "gap"], titles)
        base: dict[float, ReadCost] = {}
        baseline = 0.0
        for name, path, gap in (
            ("maps", paths["maps"], 0.0),
            ("flattened", paths["flat"], APART),
            ("flattened, reordered", paths[kind], APART),
            *(
                (f"flattened, {how}", where, gap)
                for gap in (64e3, 256e3, 512e3, 1.25e6, disk.break_even_gap)
                for how, where in (("merged", paths["flat"]), ("merged, reordered", paths[kind]))
            ),
        ):
            cost = _cost(path, columns, later, gap)
            cost = ReadCost(cost.reads, wanted, cost.bytes_read)
            seconds = cost.seconds(disk) / LATER
            baseline = baseline or seconds
            fewer = f"{base[gap].reads / cost.reads:.2f}" if gap in base else "-"
            base.setdefault(gap, cost)
            grid.add_row(
                name,
                "-" if gap <= 0 else units.format_bytes(gap),
                f"{cost.reads / LATER:,.0f}",
                units.format_bytes(cost.bytes_read / LATER),
                f"{cost.over_read:.1%}",
                f"{seconds:.2f}",
                f"{baseline / seconds:.2f}",
                f"{_seconds_here(path, columns, later, gap):.3f}",
                fewer if "reordered" in name else "-",
            )
        print(as_text(grid))


def _seconds_here(path: Path, columns: list[str], log: ProjectionLog, gap: float) -> float:
    """That this machine's disk takes for a job's reads, its cache emptied of the file; median over jobs."""
    source = expand(path)[0]
    chunks, owner = _chunks(path, columns)
    taken = []
    for projection in log.reads(columns)[:ROUNDS]:
        chosen = np.isin(chunks.columns, owner[projection])
        handle = os.open(source.path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
        start = time.perf_counter()
        with MergedFile(source.path, None) as file:
            for starts, sizes in zip(chunks.starts, chunks.sizes, strict=True):
                file.load(starts[chosen], sizes[chosen], gap)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _job(features: Features, kind: str) -> tuple[list[str], list[str]]:
    """Lists of ids and floats that one later job reads."""
    columns = LOGS[kind](features, 1, 3).projections[0]
    sparse = [name for name in columns if name.startswith("sparse")]
    return sparse, [name for name in columns if not name.startswith("sparse")]


def workers(folder: Path, rows: int) -> None:
    """Samples per second of one worker on one thread: a job on maps, on columns, on columns in order (Table 7)."""
    features, paths = datasets(folder, rows)
    sparse, dense = _job(features, "families")
    readers = {
        name: SessionReader(
            paths[name],
            batch_size=BATCH,
            features=sparse,
            dense=dense,
            dense_nulls="nan",
            preprocess=[FillMissing(dense), OnFeatures(HashIds(100_000))],
        )
        for name in ("maps", "flat", "families")
    }
    rates: dict[str, list[float]] = {name: [] for name in readers}
    extracting: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, reader in readers.items():
            start = time.perf_counter()
            phases = [batch.phases for batch in reader]
            rates[name].append(rows / (time.perf_counter() - start))
            spent = sum(phase.seconds for phase in phases)
            extracting[name] = sum(phase.fill_seconds for phase in phases) / spent
    titles = ["samples/s", "ratio", "of it extracting"]
    grid = new_grid(f"A worker on one thread: {len(sparse)} lists, {len(dense):,} floats", ["layout"], titles)
    first = statistics.median(rates["maps"])
    names = {"maps": "maps", "flat": "flattened", "families": "flattened, reordered, merged"}
    for name, measured in rates.items():
        rate = statistics.median(measured)
        grid.add_row(names[name], f"{rate:,.0f}", f"{rate / first:.2f}", f"{extracting[name]:.0%}")
    print(as_text(grid))


def flat_maps(folder: Path, rows: int) -> None:
    """From columns in files to tensors, and the same by way of samples with maps in memory (Figure 9)."""
    features, paths = datasets(folder, rows)
    sparse, dense = _job(features, "families")
    stored = StoredRows(expand(paths["families"]), [*sparse, *dense])

    def tensors(rows_read: Rows) -> None:
        features_of(rows_read, sparse, [], {}, {})
        for name in dense:
            dense_tensor(rows_read, name, nulls_as_nan=True)

    def straight() -> None:
        for part in batches_in_order(stored, BATCH):
            tensors(part)

    def by_samples() -> None:
        for part in batches_in_order(stored, BATCH):
            tensors(_by_samples(part, sparse, dense))

    taken: dict[str, list[float]] = {"columns all the way": [], "samples with maps in between": []}
    for _ in range(ROUNDS):
        for name, work in zip(taken, (straight, by_samples), strict=True):
            start = time.perf_counter()
            work()
            taken[name].append(rows / (time.perf_counter() - start))
    grid = new_grid("From files to tensors, one thread", ["in memory"], ["samples/s", "ratio"])
    base = statistics.median(taken["samples with maps in between"])
    for name, measured in reversed(taken.items()):
        grid.add_row(name, f"{statistics.median(measured):,.0f}", f"{statistics.median(measured) / base:.2f}")
    print(as_text(grid))


def _by_samples(part: Rows, sparse: list[str], dense: list[str]) -> Rows:
    """The same rows, put together as samples with maps and taken apart again, without a loop over rows."""
    columns: dict[str, pa.Array] = {}
    for names in (sparse, dense):
        keys = pa.array(range(len(names)), pa.int32())
        maps = _maps([part.table.column(name) for name in names])
        columns |= dict(zip(names, flat_columns(maps, keys, "samples", 0), strict=True))
    table = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    return Rows([Piece.whole(table)], part.number, part.stored, part.cost, part.seconds)


def _maps(columns: list[pa.Array]) -> pa.MapArray:
    """A map per row, of the values that are there."""
    rows = [np.flatnonzero(pc.is_valid(column).to_numpy(zero_copy_only=False)) for column in columns]
    row = np.concatenate(rows)
    key = np.repeat(np.arange(len(columns), dtype=np.int32), [found.size for found in rows])
    order = np.argsort(row, kind="stable")
    values = pa.concat_arrays([column.drop_null() for column in columns]).take(pa.array(order))
    offsets = np.searchsorted(row[order], np.arange(len(columns[0]) + 1)).astype(np.int32)
    return pa.MapArray.from_arrays(pa.array(offsets), pa.array(key[order]), values)


def popular(folder: Path, rows: int) -> None:
    """Which bytes most reads are of (Figure 7), and what a faster tier for them saves (Table 8)."""
    features, paths = datasets(folder, rows)
    columns = ["label", *features.names]
    sizes = _chunks(paths["flat"], columns)[0].sizes.sum(0)
    found = {name: popular_bytes(sizes, made(features, LOGGED, 1).hit_rates(columns)) for name, made in LOGS.items()}
    grid = new_grid("Least share of bytes that serves a share of reads", ["reads"], [*LOGS, "Figure 7, RM1"])
    for share in (0.5, 0.8, 0.9, 0.99):
        cells = [f"{each.bytes_for(share):.0%}" for each in found.values()]
        grid.add_row(f"{share:.0%}", *cells, "39%" if share == 0.8 else "-")
    print(as_text(grid))
    grid = new_grid(
        "Power beside disks or flash alone, whichever is less (Table 8)",
        ["disks for reading, per disk for holding"],
        [f"{name}: {what}" for name in LOGS for what in ("on flash", "saved")],
    )
    for demand in (1.0, 2.0, 4.0, 8.0, 16.0):
        cells = []
        for each in found.values():
            tiers = tiered_storage(each, demand)
            cells += [f"{tiers.share:.0%}", f"{tiers.saved:.0%}"]
        grid.add_row(f"{demand:g}", *cells)
    print(as_text(grid))


def main(folder: Path, rows: int = ROWS) -> None:
    """All parts."""
    begun = time.perf_counter()
    _, paths = datasets(folder, rows)
    sizes = {name: sum(file.stat().st_size for file in path.rglob("*.parquet")) for name, path in paths.items()}
    footers = {name: pq.read_metadata(expand(path)[0].path).serialized_size for name, path in paths.items()}
    listed = ", ".join(
        f"{name} {units.format_bytes(size)} (footer {units.format_bytes(footers[name])})"
        for name, size in sizes.items()
    )
    print(
        f"{rows:,} samples of {RM1.floats:,} floats and {RM1.sparse:,} lists, generated and rewritten in"
        f" {time.perf_counter() - begun:.0f} s: {listed}"
    )
    for part in (reads, workers, flat_maps, popular):
        part(folder, rows)
