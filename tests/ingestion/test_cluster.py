"""Datasets by session: what is rewritten, what it costs, and what an interruption leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexshard._internal import draft_folder
from flexshard.errors import DataError, OutputError
from flexshard.ingestion import cluster_sessions
from tests.ingestion.data import log, written
from tests.slow import first


def rows_of(folder: Path) -> list[list[dict[str, object]]]:
    """Rows of each row group of each file, in order."""
    found = []
    for path in sorted(folder.glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            found += [file.read_row_group(number).to_pylist() for number in range(file.num_row_groups)]
    return found


def expected(table: pa.Table) -> list[dict[str, object]]:
    """In order of session, time, then place: Python's sort is stable."""
    return sorted(table.to_pylist(), key=lambda row: (row["session"], row["time"]))


def test_a_sessions_rows_are_adjacent_and_in_order_of_time(tmp_path: Path) -> None:
    table = log()
    paths = written(table, tmp_path / "in", 3)
    found = cluster_sessions(paths, tmp_path / "out", session="session", time="time", row_group_rows=40)
    groups = rows_of(tmp_path / "out")
    assert [row for group in groups for row in group] == expected(table)
    assert len(groups) > 5
    for group, after in pairwise(groups):
        assert len(group) <= 40
        assert group[-1]["session"] != after[0]["session"]  # no session is split
    assert (found.rows, found.sessions) == (table.num_rows, 60)
    assert found.samples_per_session == table.num_rows / 60
    assert found.bytes_after == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert found.storage_ratio == found.bytes_alike / found.bytes_after
    schema = pq.read_schema(tmp_path / "out" / found.files[0])
    assert schema.remove_metadata() == table.schema
    assert schema.metadata[b"flexshard.session"] == b"session"
    assert list(tmp_path.glob(".*")) == []  # no drafts


def test_what_folders_say_is_not_lost_without_a_word(tmp_path: Path) -> None:
    table = log()
    for day in ("1", "2"):
        (tmp_path / "in" / f"day={day}").mkdir(parents=True)
        pq.write_table(table, tmp_path / "in" / f"day={day}" / "a.parquet")
    with pytest.warns(UserWarning, match=r"a.parquet: what folders say of their rows \(day\) is not in the files, and"):
        cluster_sessions(tmp_path / "in", tmp_path / "out", session="session", time="time")
    assert pq.read_schema(next((tmp_path / "out").glob("*.parquet"))).remove_metadata() == table.schema
    for path in (tmp_path / "in").rglob("*.parquet"):
        pq.write_table(table.append_column("day", pa.array([1] * table.num_rows)), path)
    cluster_sessions(tmp_path / "in", tmp_path / "with", session="session", time="time")  # and no warning


def test_what_order_spares_is_told_from_what_the_encoding_does(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    lists = pa.array([generator.integers(0, 1 << 40, 30).tolist() for _ in range(500)] * 4)
    table = pa.table({"s": np.tile(np.arange(500), 4), "t": np.arange(2000), "x": lists})
    found = []
    for codec in ("none", "zstd"):
        pq.write_table(table, tmp_path / f"{codec}.parquet", compression=codec, use_dictionary=codec == "none")
        found.append(cluster_sessions(tmp_path / f"{codec}.parquet", tmp_path / codec, session="s", time="t"))
    assert found[0].bytes_after == found[1].bytes_after
    assert found[0].bytes_before > 1.2 * found[1].bytes_before
    assert found[0].storage_ratio == pytest.approx(found[1].storage_ratio, rel=0.02)
    again = cluster_sessions(tmp_path / "zstd", tmp_path / "again", session="s", time="t")
    assert again.storage_ratio == pytest.approx(1, abs=0.02)  # the order is that already


def test_a_session_larger_than_a_row_group_is_split_and_only_it(tmp_path: Path) -> None:
    table = pa.table({"s": [1] * 25 + [2] * 3 + [3] * 9, "t": list(range(37))})
    written(table, tmp_path / "in")
    cluster_sessions(tmp_path / "in", tmp_path / "out", session="s", time="t", row_group_rows=10)
    assert [[row["s"] for row in group] for group in rows_of(tmp_path / "out")] == [
        [1] * 10,
        [1] * 10,
        [1] * 5 + [2] * 3,
        [3] * 9,
    ]


def test_shards_are_by_hash_of_the_session(tmp_path: Path) -> None:
    table = log()
    written(table, tmp_path / "in", 2)
    found = cluster_sessions(tmp_path / "in", tmp_path / "out", session="session", time="time", shards=4)
    seen: dict[str, int] = {}
    sizes = []
    for number, name in enumerate(found.files):
        rows = pq.read_table(tmp_path / "out" / name).to_pylist()
        assert rows == expected(pa.Table.from_pylist(rows, table.schema))
        sizes.append(len(rows))
        for row in rows:
            assert seen.setdefault(str(row["session"]), number) == number
    assert len(seen) == 60
    assert sum(sizes) == table.num_rows
    assert min(sizes) > 0


def test_a_shard_that_no_session_falls_into_is_an_empty_file(tmp_path: Path) -> None:
    written(pa.table({"s": [7, 7], "t": [2, 1], "x": [[1], None]}), tmp_path / "in")
    found = cluster_sessions(tmp_path / "in", tmp_path / "out", session="s", time="t", shards=3)
    tables = [pq.read_table(tmp_path / "out" / name) for name in found.files]
    assert sorted(table.num_rows for table in tables) == [0, 0, 2]
    assert [row for table in tables for row in table.to_pylist()] == [
        {"s": 7, "t": 1, "x": None},
        {"s": 7, "t": 2, "x": [1]},
    ]


def test_what_does_not_fit_memory_is_spilled(tmp_path: Path) -> None:
    rows = 400_000
    generator = np.random.default_rng(0)
    table = pa.table(
        {
            "s": generator.integers(0, 20_000, rows),
            "t": generator.permutation(rows),
            "x": pa.FixedSizeListArray.from_arrays(generator.integers(0, 1 << 40, rows * 32), 32).cast(
                pa.list_(pa.int64())
            ),
        }
    )
    assert table.nbytes > 100 << 20
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=10_000)
    cluster_sessions(tmp_path / "in.parquet", tmp_path / "out", session="s", time="t", memory="80MB")
    found = pq.read_table(tmp_path / "out")
    order = np.lexsort((table["t"].to_numpy(), table["s"].to_numpy()))
    assert found.equals(table.take(order))
    with pytest.raises(OutputError, match=r"sorting needs more memory than 3.81 MiB: .*; give it more with --memory"):
        cluster_sessions(tmp_path / "in.parquet", tmp_path / "no", session="s", time="t", memory="4MB")


@pytest.mark.parametrize("files", first(1, [300, 1, 3, 20, 2500]))
def test_many_files_take_no_more_memory_than_one(tmp_path: Path, files: int) -> None:
    rows = 250_000
    generator = np.random.default_rng(0)
    values = generator.integers(0, 1 << 40, rows * 32)
    table = pa.table(
        {
            "s": generator.integers(0, 20_000, rows),
            "t": generator.integers(0, 100, rows),
            "place": np.arange(rows),
            "x": pa.FixedSizeListArray.from_arrays(values, 32).cast(pa.list_(pa.int64())),
        }
    )
    (tmp_path / "in").mkdir()
    for number, (begin, end) in enumerate(pairwise(np.linspace(0, rows, files + 1).astype(int).tolist())):
        part = table.slice(begin, end - begin)
        part = part.select(part.column_names[::-1]) if number % 2 else part  # in another order of columns
        pq.write_table(part, tmp_path / "in" / f"{number:04d}.parquet", row_group_size=10_000, compression="none")
    cluster_sessions(tmp_path / "in", tmp_path / "out", session="s", time="t", memory="64MB")
    found = pq.read_table(tmp_path / "out")
    order = np.lexsort((table["place"], table["t"], table["s"]))
    assert found.equals(table.take(order))
    if files == 20:
        cluster_sessions(
            tmp_path / "in", tmp_path / "both", session="s", time="t", memory="64MB", partition=10, order="start"
        )
        found = pq.read_table(tmp_path / "both")
        part, key = table["t"].to_numpy() // 10, table["s"].to_numpy()
        pieces, piece = np.unique(part * 100_000 + key, return_inverse=True)
        start = np.full(pieces.size, 100)
        np.minimum.at(start, piece, table["t"].to_numpy())
        assert found.equals(table.take(np.lexsort((table["place"], table["t"], key, start[piece], part))))


@pytest.mark.parametrize("kind", ["numbers", "narrow", "single", "floats", "timestamps", "nanoseconds", "dates"])
@pytest.mark.parametrize("order", ["key", "start"])
def test_sessions_within_partitions_of_time(tmp_path: Path, kind: str, order: str) -> None:
    generator = np.random.default_rng(1)
    rows, days = 2000, generator.integers(-10, 10, 2000)
    times = {
        "numbers": (pa.array(days), 3),
        "narrow": (pa.array(days.astype(np.int8)), 1000),
        "single": (pa.array((days / 10).astype(np.float32)), 0.1),
        "floats": (pa.array(days + 0.5), 3.0),
        "timestamps": (pa.array(days * 86_400, pa.timestamp("s", tz="Asia/Tokyo")), "3d"),
        "nanoseconds": (pa.array(days * 86_400 * 10**9, pa.timestamp("ns")), "72h"),
        "dates": (pa.array(days.astype(np.int32), pa.date32()), "3d"),
    }
    column, width = times[kind]
    table = pa.table({"s": generator.integers(0, 40, rows), "t": column, "place": np.arange(rows)})
    written(table, tmp_path / "in", 3)
    how = {"session": "s", "time": "t", "shards": 2, "partition": width, "order": order}
    found = cluster_sessions(tmp_path / "in", tmp_path / "out", row_group_rows=100, **how)  # type: ignore[arg-type]
    assert found.rows == rows
    keys = table["s"].to_numpy()
    part = {"narrow": days // 1000, "single": np.floor((days / 10).astype(np.float32) / np.float64(0.1))}.get(
        kind, days // 3
    )
    start = {pair: days[(part == pair[0]) & (keys == pair[1])].min() for pair in set(zip(part, keys, strict=True))}
    first = [start[pair] if order == "start" else 0 for pair in zip(part, keys, strict=True)]
    place = np.lexsort((np.arange(rows), days, keys, first, part))
    pytest.importorskip("torchrec")
    from flexshard.ingestion import SessionReader

    seen = 0
    for name in found.files:
        shard = pq.read_table(tmp_path / "out" / name)
        mine = place[np.isin(keys[place], np.unique(shard["s"].to_numpy()))]
        assert shard["place"].to_pylist() == mine.tolist()
        seen += shard.num_rows
        reader = SessionReader(
            tmp_path / "out" / name, batch_size=64, features=["place"], session="s", time="t", whole_sessions=True
        )
        read = sum(batch.features.stride() for batch in reader)
        assert read == shard.num_rows  # its sessions are those of partitions
    assert seen == rows
    pq.write_table(pq.read_table(tmp_path / "out").replace_schema_metadata(None), tmp_path / "plain.parquet")
    with pytest.raises(DataError, match=r"session .* starts again in row .*; cluster the data"):
        SessionReader(tmp_path / "plain.parquet", batch_size=64, features=["place"], session="s")


@pytest.mark.parametrize("keep", [1.0, 0.9])
def test_numbers_of_partitions_beyond_what_floats_tell_apart(tmp_path: Path, keep: float) -> None:
    """Nanoseconds by tens: DuckDB wrote such numbers as floating point ones, and rows of neighbours came twice."""
    generator = np.random.default_rng(0)
    time = 1_764_000_000_000_000_000 + generator.integers(0, 10**6, 1000)
    table = pa.table({"s": generator.integers(0, 5, 1000), "t": time, "row": np.arange(1000)})
    pq.write_table(table, tmp_path / "in.parquet")
    how = {"session": "s", "time": "t", "partition": 10, "keep": keep}
    found = [
        cluster_sessions(tmp_path / "in.parquet", tmp_path / order, order=order, **how)  # type: ignore[arg-type]
        for order in ("key", "start")
    ]
    by_key, by_start = (pq.read_table(tmp_path / order)["row"].to_pylist() for order in ("key", "start"))
    assert found[0].rows == found[1].rows == len(by_key)
    assert sorted(by_start) == sorted(set(by_key))


@pytest.mark.parametrize("order", ["key", "start"])
def test_times_of_zero_below_zero(tmp_path: Path, order: str) -> None:
    """-0.0 was in a partition of its own, and its session in two."""
    pq.write_table(pa.table({"s": ["A", "B", "A"], "t": [-0.0, 1.0, 5.0]}), tmp_path / "in.parquet")
    cluster_sessions(
        tmp_path / "in.parquet",
        tmp_path / "out",
        session="s",
        time="t",
        partition=10,
        order=order,  # type: ignore[arg-type]
    )
    assert pq.read_table(tmp_path / "out")["s"].to_pylist() == ["A", "A", "B"]


def test_data_without_rows(tmp_path: Path) -> None:
    pq.write_table(log().slice(0, 0), tmp_path / "in.parquet")
    found = cluster_sessions(tmp_path / "in.parquet", tmp_path / "out", session="session", time="time")
    assert (found.rows, found.storage_ratio) == (0, 1.0)


@pytest.mark.parametrize("by", first(1, ["sample", "session"]))
def test_downsampling(tmp_path: Path, by: str) -> None:
    table = log(400)
    written(table, tmp_path / "in")
    how = {"session": "session", "time": "time", "keep": 0.4, "keep_by": by}
    found = cluster_sessions(tmp_path / "in", tmp_path / "out", **how)  # type: ignore[arg-type]
    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert abs(found.rows / table.num_rows - 0.4) < 0.06
    assert found.rows == len(rows)
    assert found.rows_read == table.num_rows
    assert found.sessions_read == 400
    whole, left = Counter(table["session"].to_pylist()), Counter(row["session"] for row in rows)
    if by == "session":  # S stays
        assert all(whole[s] == number for s, number in left.items())
        assert abs(found.samples_per_session / found.samples_per_session_read - 1) < 0.1
    else:  # S falls
        assert found.samples_per_session < 0.6 * found.samples_per_session_read
    assert found.kept_by[by] == (found.rows, found.sessions)
    per_row = found.bytes_alike / found.rows_read, found.bytes_after / found.rows
    assert found.storage_ratio == pytest.approx(per_row[0] / per_row[1])  # what the order does, not downsampling
    means = {name: rows / sessions for name, (rows, sessions) in found.kept_by.items()}
    assert means["session"] > 1.5 * means["sample"]
    again = cluster_sessions(tmp_path / "in", tmp_path / "again", **how)  # type: ignore[arg-type]
    other = cluster_sessions(tmp_path / "in", tmp_path / "other", seed=1, **how)  # type: ignore[arg-type]
    assert pq.read_table(tmp_path / "again").equals(pq.read_table(tmp_path / "out"))
    assert again.rows == found.rows
    assert not pq.read_table(tmp_path / "other").equals(pq.read_table(tmp_path / "out"))
    assert other.rows


def test_ray_gives_the_same_files(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    written(log(), tmp_path / "in", 3)
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    try:
        how = {"session": "session", "time": "time", "shards": 3, "row_group_rows": 40, "keep": 0.7}
        a = cluster_sessions(tmp_path / "in", tmp_path / "here", **how)  # type: ignore[arg-type]
        b = cluster_sessions(tmp_path / "in", tmp_path / "ray", ray=True, **how)  # type: ignore[arg-type]
        written(log().set_column(0, "session", pa.nulls(log().num_rows, pa.string())), tmp_path / "bad")
        with pytest.raises(DataError, match="session column 'session' has"):
            cluster_sessions(tmp_path / "bad", tmp_path / "no", ray=True, **how)  # type: ignore[arg-type]
    finally:
        ray.shutdown()
    for name in a.files:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "ray" / name).read_bytes()
    assert (a.rows, a.sessions, a.rows_read) == (b.rows, b.sessions, b.rows_read)


def test_the_two_steps_of_a_cluster_give_the_same_files_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Ray would run, run here in turn."""

    class Turns:
        @staticmethod
        def remote(function: object) -> object:
            return type("Remote", (), {"remote": staticmethod(function)})

        @staticmethod
        def get(results: object) -> object:
            return results

    monkeypatch.setitem(sys.modules, "ray", Turns)  # type: ignore[arg-type]
    written(log(), tmp_path / "in", 3)
    how = {"session": "session", "time": "time", "shards": 3, "row_group_rows": 40, "keep": 0.7}
    a = cluster_sessions(tmp_path / "in", tmp_path / "here", **how)  # type: ignore[arg-type]
    b = cluster_sessions(tmp_path / "in", tmp_path / "steps", ray=True, **how)  # type: ignore[arg-type]
    for name in a.files:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "steps" / name).read_bytes()
    assert (a.rows, a.sessions, a.rows_read, a.sessions_read) == (b.rows, b.sessions, b.rows_read, b.sessions_read)


def test_an_interrupted_run_leaves_nothing_and_can_be_started_again(tmp_path: Path) -> None:
    table = log(20_000)
    written(table, tmp_path / "in", 2, row_group_size=5000)
    script = (
        "from flexshard.ingestion import cluster_sessions\n"
        f"cluster_sessions({str(tmp_path / 'in')!r}, {str(tmp_path / 'out')!r}, session='session', time='time')"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".out.draft-*/data/*.parquet")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.glob(".out.draft-*"))
    cluster_sessions(tmp_path / "in", tmp_path / "out", session="session", time="time")
    assert not list(tmp_path.glob(".out.draft-*"))
    assert pq.read_table(tmp_path / "out").num_rows == table.num_rows


def test_data_that_cannot_be_clustered(tmp_path: Path) -> None:
    table = log()
    written(table, tmp_path / "in", 2)

    def fails(message: str, folder: str = "in", **how: object) -> None:
        settings = {"session": "session", "time": "time"} | how
        with pytest.raises((DataError, OutputError), match=message):
            cluster_sessions(tmp_path / folder, tmp_path / "out", **settings)  # type: ignore[arg-type]
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".out*"))

    fails("log-0.parquet: no column 'user'; there are session, time", session="user")
    fails("log-0.parquet: no column 'when'", time="when")
    fails("session column 'history' holds list", session="history")
    fails("time column 'session' holds string; expected numbers or timestamps", time="session")
    fails("shards must be at least 1, found 0", shards=0)
    fails("keep is a share of the data, above 0 and at most 1; found 0", keep=0.0)
    fails(r"keep=1e-09 leaves none of [\d,]+ rows; nothing has been written", keep=1e-9)
    fails("keep_by is 'session' or 'sample', found 'user'", keep_by="user")
    fails("order is 'key' or 'start', found 'end'", order="end")
    fails("time column 'time' holds int64; give partitions as a number in its own unit", partition="1h")
    fails("partition is the width of partitions, a positive number as 'time' has; found 0.5", partition=0.5)
    nulls = table.set_column(0, "session", pa.array([None if n == 77 else "a" for n in range(table.num_rows)]))
    written(nulls, tmp_path / "nulls")
    fails(r"log-0.parquet: session column 'session' has 1 nulls, the first in row 77; drop or fill them", "nulls")
    written(table.set_column(1, "time", pa.array([None] * table.num_rows, pa.int64())), tmp_path / "times")
    fails("time column 'time' has .* nulls, the first in row 0", "times")
    for number, wrong in enumerate((float("inf"), float("-inf"), float("nan"))):
        odd = pa.array([wrong if row == 5 else 0.5 for row in range(table.num_rows)])
        written(table.set_column(1, "time", odd), tmp_path / f"odd{number}")
        fails("time column 'time' has 1 numbers that are not finite, the first in row 5", f"odd{number}")
    mixed = tmp_path / "mixed"
    written(table, mixed)
    (mixed / "log-0.parquet").rename(mixed / "a.parquet")
    written(table.set_column(2, "history", pa.array([["x"]] * table.num_rows)), mixed)
    fails(r"log-0.parquet: column 'history' holds list<.*string>, but list<.*int64> in .*a.parquet", "mixed")
    written(table.drop_columns(["liked"]), mixed)
    fails("column 'liked' is in this file or in .*a.parquet, but not in both", "mixed")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(OutputError, match="it exists and is not an empty folder"):
        cluster_sessions(tmp_path / "in", tmp_path / "out", session="session", time="time")
    assert (tmp_path / "out" / "mine").read_text() == "keep"


def clustered(folder: Path, output: Path, **how: object) -> list[dict[str, object]]:
    settings = {"session": "s", "time": "t"} | how
    found = cluster_sessions(folder, output, **settings)  # type: ignore[arg-type]
    return [row for name in found.files for row in pq.read_table(output / name).to_pylist()]


def test_names_of_files_and_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    """Brackets are no pattern, and a folder called day=1 is no column."""
    for folder, value in (("run1", 1), ("run[1]", 2)):
        written(pa.table({"s": [value], "t": [value]}), tmp_path / folder)
    assert clustered(tmp_path / "run[1]", tmp_path / "a") == [{"s": 2, "t": 2}]
    written(pa.table({"s": [3, 2], "t": [1, 1]}), tmp_path / "s=9" / "t=__HIVE_DEFAULT_PARTITION__")
    assert clustered(tmp_path / "s=9", tmp_path / "s=7" / "b") == [{"s": 2, "t": 1}, {"s": 3, "t": 1}]


def test_what_another_run_is_writing_stays(tmp_path: Path) -> None:
    """Not by the number of a process, which another machine, container or later process may have too."""
    written(pa.table({"s": [1], "t": [1]}), tmp_path / "in")
    other, elsewhere = tmp_path / ".oat.draft-1-c", tmp_path / f".o?t.draft-{'0' * 32}-a"
    for draft in (other, elsewhere):
        draft.mkdir()
        (draft / "lock").touch()
    with draft_folder(tmp_path / "o?t") as living:
        dead = living.with_name(living.name + "x")
        dead.mkdir()
        (dead / "lock").touch()
        begun = living.with_name(living.name + "y")  # whose lock is yet to come
        begun.mkdir()
        clustered(tmp_path / "in", tmp_path / "o?t")
        assert [path.exists() for path in (living, begun, other, elsewhere, dead)] == [True] * 4 + [False]
    assert not living.exists()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [1], "A": [2]}, "columns 'a' and 'A' differ by case at most"),
        ({"S": [1]}, "columns 's' and 'S' differ by case at most"),
        ({"x": pa.array([1], pa.decimal256(50, 2))}, "holds decimal256.*, which DuckDB changes; cast it before"),
        ({"x": pa.array([[1]], pa.list_(pa.decimal256(50, 2)))}, "which DuckDB changes"),
        ({"__flexshard_row": [1]}, "a column cannot be called '__flexshard_row' here"),
    ],
)
def test_columns_that_duckdb_would_change(tmp_path: Path, columns: dict[str, object], message: str) -> None:
    written(pa.table({"s": [1], "t": [1], **columns}), tmp_path / "in")
    with pytest.raises(DataError, match=message):
        clustered(tmp_path / "in", tmp_path / "out")
    for memory in (float("nan"), -5, "much"):
        with pytest.raises(DataError, match="memory"):
            cluster_sessions(tmp_path / "in", tmp_path / "out", session="s", time="t", memory=memory)


@pytest.mark.parametrize(
    "kind",
    [
        pa.struct([("a", pa.int64()), ("A", pa.int64())]),
        pa.struct([("a", pa.int64()), ("a", pa.int64())]),
        pa.list_(pa.struct([("x", pa.struct([("Name", pa.string()), ("name", pa.string())]))])),
    ],
)
def test_fields_that_duckdb_takes_for_one_are_refused(tmp_path: Path, kind: pa.DataType) -> None:
    schema = pa.schema([("s", pa.int64()), ("t", pa.int64()), ("x", kind)])
    with pq.ParquetWriter(tmp_path / "a.parquet", schema) as file:
        file.write_table(pa.table([pa.array([1]), pa.array([1]), pa.nulls(1, kind)], schema=schema))
    with pytest.raises(DataError, match=r"column 'x' has fields '\w+' and '\w+', which differ by case at most"):
        cluster_sessions(tmp_path / "a.parquet", tmp_path / "out", session="s", time="t")
    assert not (tmp_path / "out").exists()


def test_types_whose_values_arrow_compares_in_parts(tmp_path: Path) -> None:
    """Lists of dictionary values that every row group has other dictionaries of, and views with nulls."""
    for name, values in {
        "list": pa.array([["a", "b"], [], None, ["c"]], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
        "text": pa.array(["a", None, "c", "b"], pa.string_view()),
        "bytes": pa.array([b"a", None, b"c", b"b"], pa.binary_view()),
    }.items():
        table = pa.table({"s": [2, 1, 2, 1], "t": [1, 2, 3, 4], "c": values})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=2)
        cluster_sessions(tmp_path / f"{name}.parquet", tmp_path / name, session="s", time="t")
        found = pq.read_table(tmp_path / name).to_pylist()
        assert found == [table.to_pylist()[at] for at in (1, 3, 0, 2)], name


def test_every_value_is_compared_after_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were DuckDB, or whatever sorts, to change a value, nothing would be written."""
    from flexshard.ingestion.sessions import clustering

    written(log(), tmp_path / "in")
    kept = clustering.sort_here

    def changing(*arguments: object) -> object:
        counts = kept(*arguments)  # type: ignore[arg-type]
        (path,) = arguments[-1]  # type: ignore[misc]
        table = pq.read_table(path)
        column = table.schema.get_field_index("time")
        values = table.column("time").to_pylist()
        pq.write_table(
            table.set_column(column, table.schema.field("time"), pa.array([values[0] + 1, *values[1:]])), path
        )
        return counts

    monkeypatch.setattr(clustering, "sort_here", changing)
    with pytest.raises(DataError, match="column 'time' would not keep its values; nothing has been written"):
        cluster_sessions(tmp_path / "in", tmp_path / "out", session="session", time="time")
    assert not (tmp_path / "out").exists()


VALUES = {
    "uint64": pa.array([2**63 + 5, 2**64 - 1, None], pa.uint64()),
    "lists": pa.array([[2**63 + 5, 1], [], None], pa.list_(pa.uint64())),
    "fixed lists": pa.array([[1, 2], [3, 4], None], pa.list_(pa.int32(), 2)),
    "struct": pa.array([{"a": 1, "b": "x"}, {"a": None, "b": ""}, None]),
    "map": pa.array([[("k", 1)], [("k", 2), ("l", 3)], []], pa.map_(pa.string(), pa.int64())),
    "float64": pa.array([1e300, 5e-324, float("nan")]),
    "half": pa.array(np.array([1, 2, 3], np.float16)),
    "decimal": pa.array([1, 2, None]).cast(pa.decimal128(21, 2)),
    "time": pa.array([1, 2, 3], pa.timestamp("ns", tz="UTC")),
    "date": pa.array([86_400_000, 0, None], pa.date64()),
    "text": pa.array(["aé", None, ""]),
    "binary": pa.array([b"\xff\x00", b"", None]),
    "category": pa.array(["a", "b", "a"]).dictionary_encode(),
    "bool": pa.array([True, None, False]),
    "nulls": pa.nulls(3),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_every_type_are_kept(tmp_path: Path, name: str) -> None:
    table = pa.table({"s": [2, 1, 2], "t": [0, 1, 2], "x": VALUES[name]})
    pq.write_table(table, tmp_path / "a.parquet")
    cluster_sessions(tmp_path / "a.parquet", tmp_path / "out", session="s", time="t")
    found = pq.read_table(tmp_path / "out").sort_by("t").column("x")
    kind = VALUES[name].type
    if name == "half":  # compared as float32: Arrow has no comparison of its own
        kind = pa.float32()
    elif name == "category":
        kind = pa.string()
    assert str(found.cast(kind).to_pylist() if name != "time" else found.cast(pa.int64())) == str(
        VALUES[name].cast(kind).to_pylist() if name != "time" else pa.chunked_array([VALUES[name].cast(pa.int64())])
    )
