"""Datasets rewritten for reading: maps to columns, order of columns, merged reads, and what they save."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from flexshard._internal import ParquetSource, expand
from flexshard.cli import main
from flexshard.errors import ChangedDataError, DataError, OutputError
from flexshard.ingestion import (
    Disk,
    PopularBytes,
    ProjectionLog,
    ReadCost,
    popular_bytes,
    rewrite_dataset,
    tiered_storage,
)
from flexshard.ingestion.storage.column_chunks import ColumnChunks
from flexshard.ingestion.storage.column_order import (
    ReadPattern,
    best_order,
    order_by_hit_rate,
    order_by_jobs,
    rows_per_group,
)
from flexshard.ingestion.storage.flat_maps import flat_columns
from flexshard.ingestion.storage.merged_reads import merged_reads, read_cost
from flexshard.ingestion.stored_rows import RowStreams, StoredRows

SPARSE, DENSE = pa.map_(pa.int32(), pa.list_(pa.int64())), pa.map_(pa.string(), pa.float32())


def samples(rows: int, seed: int = 0, keys: int = 12) -> pa.Table:
    """Maps of lists and of floats; some rows have none, some lists are empty or null."""
    rng = np.random.default_rng(seed)

    def lists() -> list[Any] | None:
        here = rng.permutation(np.flatnonzero(rng.random(keys) < 0.5)).tolist()
        return [
            (key, None if rng.random() < 0.05 else rng.integers(0, 1000, rng.integers(0, 5)).tolist()) for key in here
        ]

    sparse = [None if rng.random() < 0.1 else lists() for _ in range(rows)]
    dense = [[(f"f{key}", float(rng.random())) for key in np.flatnonzero(rng.random(keys) < 0.7)] for _ in range(rows)]
    return pa.table(
        {
            "session": np.arange(rows) // 3,
            "sparse": pa.array(sparse, SPARSE),
            "dense": pa.array(dense, DENSE),
            "label": rng.integers(0, 2, rows).astype("float32"),
        }
    )


def write(folder: Path, rows: int = 900, group: int = 128) -> pa.Table:
    table = samples(rows)
    for number, part in enumerate((table.slice(0, rows // 2), table.slice(rows // 2))):
        path = folder / f"day={number}" / "part.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(part, path, row_group_size=group)
    return table


def read_back(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(path, partitioning=None) for path in sorted(folder.rglob("*.parquet"))])


def expected(table: pa.Table, column: str, key: Any) -> list[Any]:
    return [None if row is None else dict(row).get(key) for row in table[column].to_pylist()]


# Reads.


def test_the_papers_merged_read_is_1_79_times_faster() -> None:
    """Section 4.2.3: features of 100 KB, A and D apart by B and C; 12 ms a seek, 200 MB/s."""
    starts, sizes = np.array([0, 300_000]), np.array([100_000, 100_000])
    disk = Disk()
    apart, merged = read_cost(starts, sizes, gap=0), read_cost(starts, sizes, gap=200_000)
    assert apart == ReadCost(2, 200_000, 200_000)
    assert merged == ReadCost(1, 200_000, 400_000)
    assert merged.over_read == 1.0
    assert apart.seconds(disk) == pytest.approx(0.025)
    assert apart.seconds(disk) / merged.seconds(disk) == pytest.approx(1.79, abs=0.005)
    assert disk.break_even_gap == 2_400_000
    # Reordered, A and D lie next to each other: one read, and nothing for nothing.
    assert read_cost(np.array([0, 100_000]), sizes, gap=0) == ReadCost(1, 200_000, 200_000)


stretches = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 60)), max_size=30)


@given(stretches, st.integers(0, 40), st.integers(1, 200))
def test_merged_reads_cover_what_is_wanted_and_no_gap_beyond_the_bound(
    steps: list[tuple[int, int]], gap: int, most: int
) -> None:
    starts, sizes, place = [], [], 0
    for skipped, size in steps:
        starts.append(place + skipped)
        sizes.append(size)
        place += skipped + size
    order = np.random.default_rng(len(steps)).permutation(len(steps))
    first, length = merged_reads(np.array(starts, np.int64)[order], np.array(sizes, np.int64)[order], gap, most=most)
    read = np.zeros(place + 1, bool)
    for begin, size in zip(first, length, strict=True):
        assert not read[begin : begin + size].any(), "read twice"
        read[begin : begin + size] = True
    wanted = np.zeros(place + 1, bool)
    for begin, size in zip(starts, sizes, strict=True):
        wanted[begin : begin + size] = True
        assert ((first <= begin) & (begin + size <= first + length)).any(), "a column in one read"
    assert not (wanted & ~read).any()
    idle = "".join("x" if is_read and not is_wanted else " " for is_read, is_wanted in zip(read, wanted, strict=True))
    widest = max((len(run) for run in idle.split()), default=0)
    assert widest <= gap
    _, unbounded = merged_reads(np.array(starts, np.int64), np.array(sizes, np.int64), gap)
    apart = [skipped > gap for skipped, _ in steps[1:]]
    assert unbounded.size == (1 + sum(apart) if steps else 0)
    assert (length <= max([most, *sizes])).all()


def counted(reads: list[int], wrong: Exception | None = None, after: int = 0) -> pafs.PyFileSystem:
    """A file system that is not taken for a local one, and notes the bytes of every read; some reads fail."""
    local = pytest.importorskip("fsspec.implementations.local")

    class Counting(local.LocalFileSystem):  # type: ignore[misc, name-defined]
        def _open(self, name: str, mode: str = "rb", **kwargs: Any) -> Any:
            file = super()._open(name, mode, **kwargs)
            read = file.f.read

            class Wrapped:
                def __getattr__(self, attribute: str) -> Any:
                    return getattr(file.f, attribute)

                def read(self, size: int = -1) -> bytes:
                    if wrong is not None and size > 8 and len(reads) > after:
                        raise wrong
                    found = read(size)
                    reads.append(len(found))
                    return bytes(found)

            return Wrapped()

    return pafs.PyFileSystem(pafs.FSSpecHandler(Counting(skip_instance_cache=True)))


def test_reads_that_are_reported_are_those_that_storage_saw(tmp_path: Path) -> None:
    path = tmp_path / "wide.parquet"
    table = pa.table({f"c{number}": np.random.default_rng(number).integers(0, 1 << 60, 2000) for number in range(20)})
    pq.write_table(table, path, row_group_size=500, compression="none", use_dictionary=False)
    for gap, per_group in ((0, 3), (5_000, 2), (1 << 20, 1)):
        reads: list[int] = []
        source = ParquetSource.probe(str(path), str(path), counted(reads))
        rows = StoredRows([source], ["c0", "c2", "c9"], gap=gap)
        reads.clear()
        streams = RowStreams(rows)
        pieces = streams.take(0, 2000, 2000)
        cost = streams.cost()
        opening = [size for size in reads if size <= 8]  # Arrow looks at the end of a file that it opens
        assert cost.reads == len(reads) - len(opening) == 4 * per_group, gap
        assert cost.bytes_read == sum(reads) - sum(opening)
        whole = pa.Table.from_batches([piece.table for piece in pieces])
        assert whole.equals(table.select(["c0", "c2", "c9"]))


def test_reading_a_long_file_holds_a_row_group_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "long.parquet"
    values = np.random.default_rng(0).integers(0, 1 << 60, 1 << 17)
    table = pa.table({"a": values, "b": values})
    with pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False) as writer:
        for _ in range(48):  # of 1 MiB each
            writer.write_table(table)
    stored = StoredRows(expand(path), ["a"])
    streams, least = RowStreams(stored), pa.total_allocated_bytes()
    most = 0
    for first in range(0, stored.num_rows, 1 << 14):
        streams.take(first, first + (1 << 14), stored.num_rows)
        most = max(most, pa.total_allocated_bytes() - least)
    assert 1 << 20 <= most <= 8 << 20  # 48 MiB are read


def test_a_row_group_that_decodes_short_is_an_error(tmp_path: Path) -> None:
    """Arrow reads this valid file of tiny pages as one of five rows; DuckDB has six."""
    table = pa.table({"ids": pa.array([[number] for number in range(6)], pa.list_(pa.int64()))})
    with pq.ParquetWriter(tmp_path / "tiny.parquet", table.schema, data_page_size=1) as writer:
        writer.write_table(table.slice(0, 1))
        writer.write_table(table.slice(1))
    if pq.ParquetFile(tmp_path / "tiny.parquet").read_row_group(0).num_rows == 1:
        pytest.skip("this Arrow reads it whole")
    streams = RowStreams(StoredRows(expand(tmp_path), ["ids"]))
    with pytest.raises(
        DataError, match=r"tiny\.parquet: row group 0 is broken at or after row 0: it decodes to 0 rows"
    ):
        streams.take(0, 2)


def test_files_that_differ_in_whether_nulls_may_be_are_read_as_one(tmp_path: Path) -> None:
    for number, nullable in enumerate((False, True)):
        put(tmp_path / f"{number}.parquet", [pa.field("n", pa.int64(), nullable=nullable)], [number, number])
    pieces = RowStreams(StoredRows(expand(tmp_path), ["n"])).take(0, 4)
    assert pa.concat_batches([piece.table for piece in pieces])["n"].to_pylist() == [0, 0, 1, 1]


@pytest.mark.parametrize("wrong", [RuntimeError("no connection"), OSError("no connection"), ValueError("odd")])
def test_what_a_file_system_raises_names_the_file(tmp_path: Path, wrong: Exception) -> None:
    pq.write_table(pa.table({"n": range(10)}), tmp_path / "a.parquet")
    reads: list[int] = []
    path = str(tmp_path / "a.parquet")
    rows = StoredRows([ParquetSource.probe(path, path, counted(reads, wrong, after=9))], ["n"])
    reads += [0] * 10  # from here on
    with pytest.raises(DataError, match=r"a\.parquet: row group 0 .*(no connection|odd)"):
        RowStreams(rows).take(0, 10)


def test_a_remote_file_that_is_replaced_by_one_alike_is_noticed(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    bodies = []
    for start in (0, 100):
        table = pa.table({"n": np.arange(start, start + 40)})
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=10, compression="none", use_dictionary=False)
        bodies.append((tmp_path / "a.parquet").read_bytes())
    memory.pipe_file("/alike/a.parquet", bodies[0])
    rows = StoredRows(expand("memory://alike/a.parquet"), ["n"])
    streams = RowStreams(rows)
    assert streams.take(0, 10, 40)[0].table["n"].to_pylist() == [*range(10)]
    memory.pipe_file("/alike/a.parquet", bodies[1])
    assert len(bodies[0]) == len(bodies[1])
    with pytest.raises(ChangedDataError, match="has changed since reading began"):
        streams.take(10, 40, 40)


# Maps.


@given(
    st.lists(
        st.none()
        | st.dictionaries(st.integers(-3, 6), st.none() | st.lists(st.integers(0, 9), max_size=3), max_size=5),
        max_size=20,
    ),
    st.integers(0, 5),
    st.sampled_from(["lists", "large lists", "numbers", "texts"]),
)
def test_keys_of_maps_become_columns(rows: list[dict[int, list[int] | None] | None], skipped: int, kind: str) -> None:
    values = {"lists": pa.list_(pa.int64()), "large lists": pa.large_list(pa.int16()), "numbers": pa.float64()}
    made: Any = {"numbers": lambda ids: None if ids is None else float(sum(ids)), "texts": lambda ids: str(ids)}
    change = made.get(kind, lambda ids: ids)
    entries = [None if row is None else [(key, change(ids)) for key, ids in row.items()] for row in rows]
    column = pa.array(entries, pa.map_(pa.int64(), values.get(kind, pa.string()))).slice(skipped)
    keys = pa.array([4, -3, 0, 99], pa.int64())
    found = flat_columns(column, keys, "maps", 0)
    for key, array in zip(keys.to_pylist(), found, strict=True):
        array.validate(full=True)
        assert array.type == column.type.item_type
        wanted = [None if row is None else dict(row).get(key) for row in entries[skipped:]]
        assert array.to_pylist() == wanted


def test_a_key_that_a_row_has_twice_is_an_error(tmp_path: Path) -> None:
    column = pa.array([[(1, [2])], [(3, [4]), (1, [5]), (3, [6])]], SPARSE)
    path = tmp_path / "twice.parquet"
    pq.write_table(pa.table({"m": column}), path)
    with pytest.raises(DataError, match=r"twice\.parquet: column 'm': row 1 has key 3 twice"):
        rewrite_dataset(path, tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["twice.parquet"], "nothing is left"
    assert flat_columns(column, pa.array([1], pa.int32()), "m", 0)[0].to_pylist() == [[2], [5]]


def test_rewriting_keeps_every_value(tmp_path: Path) -> None:
    table = write(tmp_path / "maps")
    log = ProjectionLog.of([["label", "sparse/3", "dense/f2"]] * 3 + [["sparse/7", "sparse/3", "label", "gone"]])
    done = rewrite_dataset(tmp_path / "maps", tmp_path / "flat", log=log)
    assert done.files == ("day=0/part.parquet", "day=1/part.parquet")
    assert done.columns[:4] == ("sparse/3", "label", "dense/f2", "sparse/7") or done.columns[:4] == (
        "label",
        "sparse/3",
        "dense/f2",
        "sparse/7",
    )
    assert done.unknown == ("gone",)
    assert done.rows == 900
    assert done.features == 24
    found = read_back(tmp_path / "flat")
    assert tuple(found.column_names) == done.columns
    assert sorted(done.columns) == sorted(
        ["session", "label", *(f"sparse/{key}" for key in range(12)), *(f"dense/f{key}" for key in range(12))]
    )
    for name in ("session", "label"):
        assert found[name].equals(table[name])
    for key in range(12):
        assert found[f"sparse/{key}"].to_pylist() == expected(table, "sparse", key)
        assert found[f"dense/f{key}"].to_pylist() == expected(table, "dense", f"f{key}")
    assert done.before is not None
    assert done.after is not None
    assert done.before.bytes_wanted == done.after.bytes_wanted
    assert done.after.bytes_read < done.before.bytes_read
    again = rewrite_dataset(tmp_path / "maps", tmp_path / "again", log=log)
    for name in done.files:
        assert (tmp_path / "flat" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert again.columns == done.columns


def test_what_a_rewritten_dataset_costs_is_in_its_files(tmp_path: Path) -> None:
    write(tmp_path / "maps")
    jobs = [["sparse/1", "dense/f3"], ["label"]]
    done = rewrite_dataset(tmp_path / "maps", tmp_path / "flat", log=ProjectionLog.of(jobs), gap=0)
    wanted = [0, 0]
    for path in (tmp_path / "flat").rglob("*.parquet"):
        metadata = pq.read_metadata(path)
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(number)
                for job, columns in enumerate(jobs):
                    wanted[job] += (chunk.path_in_schema.split(".")[0] in columns) * chunk.total_compressed_size
    assert done.after is not None
    assert done.after.bytes_wanted == done.after.bytes_read == round(np.mean(wanted))
    assert done.popular is not None
    assert done.popular.bytes_for(1.0) == pytest.approx(sum(wanted) / _chunk_bytes(tmp_path / "flat"))


def _chunk_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*.parquet"):
        with pq.ParquetFile(path) as file:
            total += int(ColumnChunks.of(file.metadata, file.schema_arrow, file.schema_arrow.names).sizes.sum())
    return total


def test_without_a_log_columns_stay_in_their_order(tmp_path: Path) -> None:
    table = write(tmp_path / "maps")
    done = rewrite_dataset(tmp_path / "maps", tmp_path / "flat", maps=["sparse"], memory="16KiB")
    assert done.columns == ("session", "dense", "label", *(f"sparse/{key}" for key in range(12)))
    assert done.after is None
    assert done.popular is None
    assert done.group_rows < 450
    found = read_back(tmp_path / "flat")
    assert found["dense"].to_pylist() == table["dense"].to_pylist()
    metadata = pq.read_metadata(tmp_path / "flat" / "day=0" / "part.parquet")
    groups = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    assert set(groups[:-1]) == {done.group_rows}
    assert done.group_rows - len(groups) < groups[-1] <= done.group_rows, "no small one is left"
    assert sum(groups) == 450


# Order and row groups.


def test_popular_columns_come_first_and_those_of_the_same_jobs_together() -> None:
    reads = np.array([[1, 0, 1, 0, 1, 0], [1, 0, 0, 1, 0, 1], [1, 0, 1, 0, 1, 0], [1, 0, 0, 1, 0, 1]], bool)
    runs = np.ones(4, np.int64)
    assert order_by_hit_rate(reads, runs).tolist() == [0, 2, 3, 4, 5, 1]
    together = order_by_jobs(reads, runs).tolist()
    assert together[0] == 0
    assert together[-1] == 1
    assert {frozenset(together[1:3]), frozenset(together[3:5])} == {frozenset({2, 4}), frozenset({3, 5})}
    pattern = ReadPattern(reads, runs, np.full(6, 1000.0), gap=0, disk=Disk())
    assert best_order(pattern, 100).tolist() == together  # two reads of one stretch each
    cost = read_cost(np.arange(3) * 100_000, np.full(3, 100_000), 0)
    assert pattern.seconds(np.array(together), 100) == pytest.approx(
        (cost.seconds(Disk()) * 2 + 0.012 * 2) / 2, rel=0.5
    )


def test_jobs_that_ran_more_often_count_more() -> None:
    reads = np.array([[1, 0, 0], [0, 1, 0]], bool)
    assert order_by_hit_rate(reads, np.array([1, 5])).tolist() == [1, 0, 2]
    log = ProjectionLog((("a",), ("b",)), (1, 3))
    assert log.hit_rates(["a", "b", "c"]).tolist() == [0.25, 0.75, 0.0]


def test_chance_in_a_log_does_not_decide_the_order() -> None:
    """Jobs that pick by themselves: what the same jobs read is chance, and the last jobs of the log show it."""
    rng = np.random.default_rng(0)
    rate = np.linspace(0.98, 0.02, 400)
    reads = rng.random((60, 400)) < rate
    pattern = ReadPattern(reads, np.ones(60, np.int64), np.full(400, 100.0), gap=200_000, disk=Disk())
    later = rng.random((200, 400)) < rate
    judge = ReadPattern(later, np.ones(200, np.int64), pattern.row_bytes, pattern.gap, pattern.disk)
    chosen = best_order(pattern, 1000)
    other = order_by_jobs(reads, pattern.runs)
    assert judge.seconds(chosen, 1000) <= 1.02 * judge.seconds(other, 1000)
    assert judge.seconds(chosen, 1000) < 0.9 * judge.seconds(rng.permutation(400), 1000)


def test_row_groups_grow_until_the_disk_is_busy_with_what_jobs_want() -> None:
    reads = np.array([[1, 0, 1, 1, 0]], bool)
    pattern = ReadPattern(reads, np.array([1]), np.full(5, 1000.0), gap=0, disk=Disk())
    order = np.arange(5)  # 3,000 bytes a row, two seeks of 12 ms a row group: 1,024 rows take 15.4 ms and 24 ms
    assert rows_per_group(pattern, order, 0.39, 1 << 20) == 1024
    assert rows_per_group(pattern, order, 0.40, 1 << 20) == 2048
    assert rows_per_group(pattern, order, 0.9, 1 << 20) == 16384  # 246 ms of 270
    assert rows_per_group(pattern, order, 1.0, 5000) == 5000
    assert rows_per_group(pattern, order, 1.0, 10) == 10


# What popular bytes would save.


def test_popular_bytes_by_hand() -> None:
    """Three columns of 10, 30 and 60 bytes, read by 90, 30 and 10 % of jobs: 9, 9 and 6 bytes of 24."""
    popular = popular_bytes([60, 10, 30], [0.1, 0.9, 0.3])
    assert popular.of_bytes.tolist() == [0, 0.1, 0.4, 1]
    assert popular.of_reads.tolist() == pytest.approx([0, 9 / 24, 18 / 24, 1])
    assert popular.bytes_for(0.75) == pytest.approx(0.4)
    assert popular.reads_of(0.1) == pytest.approx(0.375)
    with pytest.raises(DataError, match="no bytes of these columns are read"):
        popular_bytes([1, 2], [0, 0])


def test_tiers_by_hand() -> None:
    """Table 8: flash holds 0.09 and reads 3.26 times as much per watt as disks."""
    popular = PopularBytes(np.array([0, 0.1, 1]), np.array([0, 0.8, 1]))
    idle = tiered_storage(popular, 0.5)  # bound by capacity: disks alone
    assert (idle.share, idle.power, idle.slower_alone, idle.saved) == (0, 1, 1, 0)
    busy = tiered_storage(popular, 8)
    assert busy.slower_alone == 8
    assert busy.faster_alone == pytest.approx(1 / 0.09)
    # Flash is filled until holding takes what reading does: x / 0.09 = 8 (0.8 + 2/9 (x - 0.1)) / 3.26, x = 0.1806.
    assert busy.share == pytest.approx(0.1806, abs=1e-3)
    assert busy.power == pytest.approx(0.1806 / 0.09 + 8 * (1 - 0.8 - 2 / 9 * 0.0806), rel=1e-2)
    assert busy.saved == pytest.approx(1 - busy.power / 8)
    with pytest.raises(DataError, match="demand is reads over capacity"):
        tiered_storage(popular, 0)


# Logs.


def test_logs_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    ProjectionLog.append(path, ["a", "m/1"])
    with path.open("a") as file:
        file.write('\n{"columns": ["b"], "runs": 4, "team": "ads"}\n')
    log = ProjectionLog.load(path)
    assert log == ProjectionLog((("a", "m/1"), ("b",)), (1, 4))
    assert log.reads(["m/1", "b"]).tolist() == [[True, False], [False, True]]
    other = tmp_path / "other"
    for content in (b"PAR1\x00\xff", b"format: flexshard.job\n", b'{\n "a": 1\n}\n', b"\n\n[1]\n"):
        other.write_bytes(content)
        with pytest.raises(OutputError, match="other exists and is no log of what jobs read"):
            ProjectionLog.append(other, ["a"])
        assert other.read_bytes() == content


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"log\.jsonl, line 2: not JSON"),
        ("[1]", r"log\.jsonl, line 2: a projection is"),
        ('{"columns": [1]}', "line 2: columns are texts"),
        ('{"columns": ["a"], "runs": 0}', "line 2: runs must be at least 1"),
    ],
)
def test_lines_that_are_no_projections_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"columns": []}}\n{line}\n')
    with pytest.raises(DataError, match=message):
        ProjectionLog.load(path)
    path.write_bytes('\ufeff{"columns": ["a\u2028b"]}'.encode())  # without an end of line
    ProjectionLog.append(path, ["c\u0085d"])
    assert ProjectionLog.load(path).projections == (("a\u2028b",), ("c\u0085d",))
    path.write_text("\n")
    with pytest.raises(DataError, match="no projections"):
        ProjectionLog.load(path)
    with pytest.raises(OutputError, match="cannot write"):
        ProjectionLog.append(tmp_path / "no" / "log", ["a"])


# Bad input.


def test_what_cannot_be_rewritten_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "maps")
    there = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"column 'label' holds no maps from numbers or texts; such are: sparse, dense"):
        rewrite_dataset(tmp_path / "maps", tmp_path / "out", maps=["label"])
    with pytest.raises(DataError, match="memory: 'much' is not a size"):
        rewrite_dataset(tmp_path / "maps", tmp_path / "out", memory="much")
    with pytest.raises(OutputError, match="exists and is not an empty folder"):
        rewrite_dataset(tmp_path / "maps", tmp_path / "maps")
    odd = tmp_path / "maps" / "day=1" / "other.parquet"
    pq.write_table(samples(10).append_column("more", pa.array(range(10))), odd)
    with pytest.raises(DataError, match=r"other\.parquet: column 'more' is in this file, but not in"):
        rewrite_dataset(tmp_path / "maps", tmp_path / "out")
    odd.unlink()
    clash = samples(10).append_column("sparse/3", pa.array(range(10)))
    pq.write_table(clash, tmp_path / "clash.parquet")
    with pytest.raises(DataError, match="key 'sparse/3' of a map would be a second column of that name"):
        rewrite_dataset(tmp_path / "clash.parquet", tmp_path / "out")
    (tmp_path / "clash.parquet").unlink()
    # A broken page in the last file: what was written of the others goes too.
    path = tmp_path / "maps" / "day=1" / "part.parquet"
    metadata = pq.read_metadata(path)
    label = next(n for n in range(metadata.num_columns) if metadata.row_group(2).column(n).path_in_schema == "label")
    place = metadata.row_group(2).column(label).data_page_offset
    data = bytearray(path.read_bytes())
    data[place : place + 40] = b"\xff" * 40
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"day=1/part\.parquet: row group 2 is broken at or after row 256"):
        rewrite_dataset(tmp_path / "maps", tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == there


def put(path: Path, fields: list[Any], *columns: list[Any], metadata: dict[str, str] | None = None) -> Path:
    schema = pa.schema(fields, metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), path)
    return path


IDS = pa.map_(pa.string(), pa.int64())


def test_files_go_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = [("n", pa.int64())]
    one, two = put(tmp_path / "w/q/r/b.parquet", number, [1]), put(tmp_path / "w/x/a.parquet", number, [2])
    other = put(tmp_path / "x/a.parquet", number, [99])
    monkeypatch.chdir(one.parent)
    done = rewrite_dataset(["../../x/a.parquet", str(one)], tmp_path / "out")  # relative, and not
    assert done.files == ("x/a.parquet", "q/r/b.parquet")
    assert pq.read_table(other)["n"].to_pylist() == [99]
    assert pq.read_table(two)["n"].to_pylist() == [2]
    alone = put(tmp_path / "s/day=1/a.parquet", number, [1])
    assert rewrite_dataset(tmp_path / "s", tmp_path / "part").files == ("day=1/a.parquet",)
    hidden = put(tmp_path / "s/day=1/_b.parquet", number, [1])
    with pytest.raises(DataError, match=r"_b\.parquet: in a folder, '_b\.parquet' is not read as data; rename it"):
        rewrite_dataset([alone, hidden], tmp_path / "hidden")
    bare = put(tmp_path / "s/a", number, [1])
    with pytest.raises(DataError, match=r"two files would be called a\.parquet"):
        rewrite_dataset([bare, put(tmp_path / "s/a.parquet", number, [1])], tmp_path / "twice")
    with pytest.raises(OutputError, match="datasets are made on this machine"):
        rewrite_dataset(alone, "s3://bucket/out")
    monkeypatch.chdir(tmp_path)
    rewrite_dataset(alone, "a:b")
    assert pq.read_metadata(tmp_path / "a:b" / "day=1" / "a.parquet").num_rows == 1


def test_names_that_begin_alike(tmp_path: Path) -> None:
    dotted = put(tmp_path / "a.parquet", [("m.x", IDS), ("m", IDS)], [[("other", 5)], []], [[("x", 1)], [("x", 2)]])
    rewrite_dataset(dotted, tmp_path / "a")
    found = pq.read_table(tmp_path / "a" / "a.parquet")
    assert found["m/x"].to_pylist() == [1, 2]
    assert found["m.x/other"].to_pylist() == [5, None]
    plain = put(tmp_path / "b.parquet", [("m.x", pa.int64()), ("m", IDS)], [5, 6], [[("x", 1)], []])
    rewrite_dataset(plain, tmp_path / "b")
    assert pq.read_table(tmp_path / "b" / "b.parquet").to_pydict() == {"m.x": [5, 6], "m/x": [1, None]}
    slashed = put(tmp_path / "c.parquet", [("a/b", IDS)], [[("x", 1)], [("y/z", 2)]])
    rewrite_dataset(slashed, tmp_path / "c")
    assert pq.read_table(tmp_path / "c" / "c.parquet").to_pydict() == {"a/b/x": [1, None], "a/b/y/z": [None, 2]}
    both = put(tmp_path / "d.parquet", [("a", IDS), ("a/b", IDS)], [[("q", 7)]], [[("x", 1)]])
    with pytest.raises(DataError, match="keys of the maps 'a' and 'a/b' would not be told apart"):
        rewrite_dataset(both, tmp_path / "d")
    struct = put(tmp_path / "e.parquet", [("a", pa.struct([("b", pa.int64())])), ("a.b", pa.int64())], [{"b": 1}], [2])
    done = rewrite_dataset(struct, tmp_path / "e", log=ProjectionLog.of([["a.b"]]))
    assert done.columns == ("a.b", "a")
    assert pq.ParquetFile(tmp_path / "e" / "e.parquet").read_row_group(0).to_pydict()["a"] == [{"b": 1}]


def test_types_are_kept(tmp_path: Path) -> None:
    held = pa.struct([pa.field("z", pa.int64(), nullable=False)])
    fields = [pa.field("n", pa.int64(), nullable=False), ("m", pa.map_(pa.string(), held)), ("k", IDS)]
    data = put(tmp_path / "a.parquet", fields, [1, 2], [[("a", {"z": 1})], []], [[], None])
    done = rewrite_dataset(data, tmp_path / "a")
    found = pq.read_table(tmp_path / "a" / "a.parquet")
    assert found["m/a"].to_pylist() == [{"z": 1}, None]
    assert not found.schema.field("n").nullable
    assert done.columns == ("n", "k", "m/a")  # a map without keys stays one
    kind = pa.dictionary(pa.int8(), pa.string())
    with pq.ParquetWriter(tmp_path / "b.parquet", pa.schema([("c", kind)])) as writer:
        for part in range(3):
            texts = pa.array([f"v{part}_{number}" for number in range(100)])
            writer.write_table(pa.table({"c": texts.dictionary_encode().cast(kind)}))
    rewrite_dataset(tmp_path / "b.parquet", tmp_path / "b")
    texts = pq.read_table(tmp_path / "b" / "b.parquet")["c"].to_pylist()
    assert texts == [f"v{part}_{number}" for part in range(3) for number in range(100)]
    notes = [{"flexshard.session": "n", "kept": "yes"}, {"kept": "yes"}]
    for number, note in enumerate(notes):
        put(tmp_path / "s" / f"{number}.parquet", [("n", pa.int64())], [1], metadata=note)
    rewrite_dataset(tmp_path / "s", tmp_path / "t")
    assert pq.read_schema(tmp_path / "t" / "0.parquet").metadata == {b"kept": b"yes"}


def test_keys_that_no_row_has_are_null_also_afterwards(tmp_path: Path) -> None:
    """Days that are rewritten one by one have other keys."""
    for day, key in enumerate("ab"):
        path = put(tmp_path / f"s/day={day}/x.parquet", [("m", IDS)], [[(key, day)], []])
        rewrite_dataset(path.parent, tmp_path / f"o/day={day}")
    (file,) = expand(tmp_path / "o/day=0")
    assert file.schema.names == ["m/a"]
    rows = StoredRows(expand(tmp_path / "o"), ["m/a", "m/b"])
    table = pa.Table.from_batches([piece.table for part in (0, 2) for piece in RowStreams(rows).take(part, part + 2)])
    assert table.to_pydict() == {"m/a": [0, None, None, None], "m/b": [None, None, 1, None]}
    (piece,) = RowStreams(StoredRows([file], ["m/b"])).take(0, 2)
    assert piece.table.to_pydict() == {"m/b": [None, None]}


def test_a_file_that_changes_while_it_is_rewritten_is_not_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flexshard.ingestion.storage import rewriting

    path = put(tmp_path / "a.parquet", [("m", IDS)], [[("x", 1)], [("x", 2)]])
    for late in ("keys_of", "_sampled"):
        found = getattr(rewriting, late)

        def changed(*given: Any, found: Any = found) -> Any:
            answer = found(*given)
            put(path, [("m", IDS)], [[("x", 1)], [("yy", 2)]])
            return answer

        with monkeypatch.context() as patched:
            patched.setattr(rewriting, late, changed)
            with pytest.raises(DataError, match=r"a\.parquet: has changed since reading began"):
                rewrite_dataset(path, tmp_path / "out")
        put(path, [("m", IDS)], [[("x", 1)], [("x", 2)]])
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.parquet"]


def test_memory_bounds_row_groups(tmp_path: Path) -> None:
    """Also where columns take more than the maps they were in, and where texts repeat."""
    sparse = put(
        tmp_path / "a.parquet", [("m", pa.map_(pa.int32(), pa.int64()))], [[(row % 500, 1)] for row in range(5000)]
    )
    texts = put(tmp_path / "b.parquet", [("s", pa.string())], ["x" * 2000 + str(row % 2) for row in range(5000)])
    for path in (sparse, texts):
        done = rewrite_dataset(path, tmp_path / path.stem, memory="1MiB")
        groups = pq.ParquetFile(done.path / path.name)
        assert 0.5 * (1 << 20) < groups.read_row_group(0).nbytes < 1.2 * (1 << 20)


def test_jobs_are_taken_for_what_they_read(tmp_path: Path) -> None:
    rows = range(20_000)
    path = put(
        tmp_path / "a.parquet",
        [("n", pa.int64()), ("a", IDS), ("b", IDS)],
        list(rows),
        [[("1", row)] for row in rows],
        [[("1", row)] for row in rows],
    )
    kept = rewrite_dataset(path, tmp_path / "kept", maps=["a"], log=ProjectionLog.of([["b/1"]]))
    assert kept.columns[0] == "b"
    assert kept.unknown == ()
    assert kept.after is not None
    assert kept.after.bytes_read > 0
    whole = rewrite_dataset(path, tmp_path / "whole", log=ProjectionLog.of([["a"]]))
    assert whole.columns[0] == "a/1"
    nothing = rewrite_dataset(path, tmp_path / "nothing", log=ProjectionLog.of([["gone"]]))
    assert (nothing.group_rows, nothing.unknown) == (20_000, ("gone",))
    often = rewrite_dataset(path, tmp_path / "often", log=ProjectionLog((("n",), ("a",)), (4 * 10**18, 1)))
    assert often.columns[0] == "n"
    assert often.before is not None
    assert often.before.bytes_wanted > 0
    with pytest.raises(DataError, match="the log has no projections"):
        rewrite_dataset(path, tmp_path / "none", log=ProjectionLog.of([]))


def test_a_short_first_row_group_does_not_decide(tmp_path: Path) -> None:
    data = {f"c{number}": np.random.default_rng(number).integers(0, 100, 200_000).astype("int8") for number in range(8)}
    table = pa.table(data)
    (tmp_path / "s").mkdir()
    pq.write_table(table.slice(0, 3), tmp_path / "s" / "a.parquet")
    pq.write_table(table, tmp_path / "s" / "b.parquet")
    log = ProjectionLog.of([table.column_names])
    done = rewrite_dataset(tmp_path / "s", tmp_path / "out", log=log, disk=Disk(1e-4, 200e6))
    assert done.after is not None
    assert done.seconds_after is not None
    assert done.after.bytes_wanted / 200e6 / done.seconds_after > 0.85


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "maps")
    log = tmp_path / "log.jsonl"
    log.write_text('{"columns": ["sparse/3", "label"], "runs": 2}\n{"columns": ["dense/f1", "gone"]}\n')

    def flexshard(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flexshard", "rewrite", *arguments])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    maps = str(tmp_path / "maps")
    code, text, wrong = flexshard(maps, "-o", str(tmp_path / "one"), "--log", str(log))
    assert (code, wrong) == (0, "")
    assert "a run of a job" in text.lower()
    assert "of bytes serve 80%" in text
    assert "the log names columns that there are not: gone" in text
    code, text, _ = flexshard(maps, "-o", str(tmp_path / "two"), "--log", str(log), "--gap", "0B", "--json")
    found = json.loads(text)
    assert code == 0
    assert found["over_read_after"] == 0
    assert found["after"]["reads"] >= 2
    assert found["columns"][0] in ("label", "sparse/3")
    code, _, wrong = flexshard(maps, "-o", str(tmp_path / "three"), "--gap", "1MiB")
    assert code == 2
    assert "give --log too" in wrong
    code, _, wrong = flexshard(maps, "-o", str(tmp_path / "one"))
    assert code == 2
    assert "exists and is not an empty folder" in wrong


# Readers.


@settings(deadline=None, max_examples=5)
@given(st.integers(1, 64), st.integers(0, 3))
def test_readers_find_keys_of_maps_before_and_after(
    tmp_path_factory: pytest.TempPathFactory, batch_size: int, seed: int
) -> None:
    pytest.importorskip("torchrec")
    import torch

    from flexshard.ingestion import FillMissing, SessionReader

    folder = tmp_path_factory.mktemp("data")
    table = write(folder / "maps", rows=150, group=40)
    rewrite_dataset(folder / "maps", folder / "flat", log=ProjectionLog.of([["sparse/3"], ["sparse/1", "sparse/3"]]))
    features = np.random.default_rng(seed).permutation(["sparse/1", "sparse/3", "sparse/77"][: 2 + seed % 2]).tolist()
    known = [name for name in features if name != "sparse/77"]

    def batches(path: Path, names: list[str]) -> list[Any]:
        return list(
            SessionReader(
                path,
                batch_size=batch_size,
                features=names,
                groups=[["sparse/3"]],
                dense=["label", "dense/f2"],
                preprocess=[FillMissing(["dense/f2"], value=-1.0)],
                dense_nulls="nan",
            )
        )

    before, after = batches(folder / "maps", known), batches(folder / "flat", known)
    assert len(before) == len(after) == -(-150 // batch_size)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.sparse_features.values(), other.sparse_features.values())
        assert torch.equal(one.sparse_features.lengths(), other.sparse_features.lengths())
        assert all(torch.equal(one.dense[name], other.dense[name]) for name in ("label", "dense/f2"))
    lists = expected(table, "sparse", 3)
    values = torch.cat([batch.sparse_features["sparse/3"].values() for batch in after])
    assert values.tolist() == [value for row in lists for value in row or []]
    filled = [-1.0 if value is None else value for value in expected(table, "dense", "f2")]
    assert torch.cat([batch.dense["dense/f2"] for batch in after]).tolist() == pytest.approx(filled)
    if "sparse/77" in features:  # a key that no row has: nothing
        for path in ("maps", "flat"):
            found = [batch.sparse_features["sparse/77"] for batch in batches(folder / path, features)]
            assert sum(jagged.values().numel() for jagged in found) == 0


def test_nulls_among_dense_columns_raise_unless_they_are_to_be_nan(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    from flexshard.ingestion import SessionReader

    write(tmp_path / "maps")
    what: dict[str, Any] = {"batch_size": 64, "features": ["sparse/1"]}
    with pytest.raises(DataError, match=r"column 'dense/f2' is null in row"):
        list(SessionReader(tmp_path / "maps", dense=["dense/f2"], **what))
    with pytest.raises(DataError, match="dense_nulls is 'raise' or 'nan', found 'zero'"):
        SessionReader(tmp_path / "maps", dense_nulls="zero", **what)
    pq.write_table(pa.table({"a": [[1], [2]], "n": pa.array([None, 3], pa.int64())}), tmp_path / "ints.parquet")
    with pytest.raises(DataError, match="column 'n' is null in row 0"):  # numbers without a NaN
        list(SessionReader(tmp_path / "ints.parquet", batch_size=2, features=["a"], dense=["n"], dense_nulls="nan"))
    with pytest.raises(DataError, match=r"keys of column 'sparse' are int32; 'sparse/01' names none"):
        SessionReader(tmp_path / "maps", batch_size=2, features=["sparse/01"])
    with pytest.raises(DataError, match="'sparse/1' is no column of its own, as sessions and times are"):
        SessionReader(tmp_path / "maps", batch_size=2, features=["sparse/2"], session="sparse/1")


def test_a_job_gives_the_same_batches_before_and_after(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    from flexshard.ingestion import IngestionSpec, run_job

    write(tmp_path / "maps")
    rewrite_dataset(tmp_path / "maps", tmp_path / "flat")
    digests = []
    for folder in ("maps", "flat"):
        job = IngestionSpec(
            paths=str(tmp_path / folder),
            batch_size=32,
            features=["sparse/1", "sparse/3"],
            dense=["dense/f2", "label"],
            dense_nulls="nan",
            read_gap="64KiB",
            transforms=[{"op": "fill_missing", "columns": ["dense/f2"]}],
        )
        assert job.stored_columns() == ["sparse/1", "sparse/3", "dense/f2", "label"]
        run = run_job(job, workers=2, backend="threads")
        assert run.phases.bytes_read >= run.phases.bytes_wanted > 0
        assert run.phases.reads > 0
        digests.append(run.digest)
    assert digests[0] == digests[1]
    assert IngestionSpec(paths="x", batch_size=1, features=["a"], read_gap=0).read_gap == 0
    with pytest.raises(DataError, match="read_gap"):
        IngestionSpec(paths="x", batch_size=1, features=["a"], read_gap="wide")
