"""Ingestion as a service: the batches of a reader, whoever makes them and whatever dies."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torchrec")

from flexshard.errors import ChangedDataError, DataError
from flexshard.ingestion import IngestionClient, IngestionSpec, ProjectionLog, batch_hash
from flexshard.ingestion.service.fork_server import ForkServer, shared_fork_server
from flexshard.ingestion.service.packing import PackedBatch
from flexshard.ingestion.service.readings import Item, Reading
from flexshard.ingestion.service.workers import ProcessPool
from tests.executors.ranks import context
from tests.slow import crossed, first

ROWS = 4000


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[ForkServer]:
    """Stays from test to test, so that it imports once."""
    with shared_fork_server.used() as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log")
    generator = np.random.default_rng(1)
    for number in range(3):
        rows = ROWS // 4 * (1 + (number == 2))
        table = pa.table(
            {
                "row": np.arange(rows) + number * 1000,
                "session": np.repeat(np.arange(rows // 4), 4) + number * 10_000,
                "history": [generator.integers(0, 99, 5).tolist() for _ in range(rows // 4) for _ in range(4)],
                "item": generator.integers(0, 1 << 40, rows),
                "price": generator.random(rows),
            }
        )
        pq.write_table(table, path / f"part-{number}.parquet", row_group_size=300)
    return path


def spec_of(folder: Path, **how: Any) -> IngestionSpec:
    fields: dict[str, Any] = {
        "paths": str(folder),
        "batch_size": 32,
        "features": ["history", "item"],
        "groups": [["history"]],
        "dense": ["row", "price"],
        "session": "session",
        "shuffle": "sessions",
        "shuffle_window": 256,
        "seed": 3,
        "transforms": [
            {"op": "hash_ids", "features": ["item"], "num_rows": 1000},
            {"op": "cross", "features": ["history", "item"], "into": "both", "num_rows": 500},
            {"op": "normalize", "columns": ["price"], "mean": 0.5, "std": 0.3},
            {"op": "bucketize", "column": "price", "into": "price_bucket", "boundaries": [-1.0, 0.0, 1.0]},
        ],
    }
    return IngestionSpec(**(fields | how))


def expected(spec: IngestionSpec, rank: int = 0, world_size: int = 1, epoch: int = 0) -> list[str]:
    reader = spec.reader(rank, world_size)
    reader.set_epoch(epoch)
    return [batch_hash(batch) for batch in reader]


@pytest.mark.parametrize(
    ("how", "workers"),
    crossed([{}, {"lanes": 3}, {"shuffle": False}, {"shuffle": "samples", "pad_last": True}], [2, 4, 1]),
)
def test_threads_give_the_readers_batches(folder: Path, how: dict[str, Any], workers: int) -> None:
    spec = spec_of(folder, **how)
    for rank in range(2):
        with IngestionClient(spec, rank=rank, world_size=2, workers=workers, backend="threads") as client:
            assert len(client) == len(expected(spec, rank, 2))
            for epoch in range(2):
                client.set_epoch(epoch)
                assert [batch_hash(batch) for batch in client] == expected(spec, rank, 2, epoch)
            assert client.stats.splits_taken == client.stats.splits > 1
            assert client.stats.samples >= ROWS


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_reader_that_reads_splits_can_be_pickled(folder: Path, shuffle: bool) -> None:
    reader = spec_of(folder, shuffle=shuffle).reader()
    first, second = reader.splits(0, 0)[:2]
    seen = reader.read_split(first)
    next(seen)
    copy = pickle.loads(pickle.dumps(reader))
    for split in (first, second):
        found = [batch_hash(batch) for batch in copy.read_split(split)]
        assert found == [batch_hash(batch) for batch in reader.read_split(split)]


@pytest.mark.parametrize("workers", [1, 2])
def test_processes_give_the_readers_batches(folder: Path, workers: int) -> None:
    spec = spec_of(folder)
    with IngestionClient(spec, workers=workers) as client:
        assert [batch_hash(batch) for batch in client] == expected(spec)
        half = []
        for batch in client:  # one that is left in the middle does not disturb the next
            half.append(batch_hash(batch))
            if len(half) == 50:
                break
        assert half == expected(spec)[:50]
        assert [batch_hash(batch) for batch in client] == expected(spec)


@pytest.mark.parametrize("number", first(1, [5, 20]))
def test_killed_processes_change_nothing(folder: Path, number: int) -> None:
    """Kills at random times, over several epochs: the same batches, each once."""
    spec = spec_of(folder)
    generator, kills, stop = random.Random(0), 0, threading.Event()
    with IngestionClient(spec, workers=2) as client:
        pool = client._pool
        assert isinstance(pool, ProcessPool)

        def kill() -> None:
            nonlocal kills
            while kills < number and not stop.is_set():
                time.sleep(generator.uniform(0.2, 0.8))
                if pool.pids:
                    os.kill(generator.choice(pool.pids), signal.SIGKILL)
                    kills += 1

        killer = threading.Thread(target=kill)
        killer.start()
        epoch = 0
        try:
            while kills < number:
                client.set_epoch(epoch)
                assert [batch_hash(batch) for batch in client] == expected(spec, epoch=epoch)
                epoch += 1
        finally:
            stop.set()
            killer.join()
        assert client.stats.restarts > 0


def test_what_workers_come_from_may_die(folder: Path) -> None:
    """With all of them, such as where memory runs out: there is another process to fork from."""
    spec = spec_of(folder)
    with ForkServer().used() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("flexshard.ingestion.service.workers.shared_fork_server", server)
        with IngestionClient(spec, workers=2) as client:
            pool, found = client._pool, []
            assert isinstance(pool, ProcessPool)
            for batch in client:
                found.append(batch_hash(batch))
                if len(found) == 5:
                    first_of_all = server._server
                    assert first_of_all is not None
                    first_of_all.process.kill()
                    for pid in pool.pids:
                        os.kill(pid, signal.SIGKILL)
            assert found == expected(spec)
            assert client.stats.restarts > 0
            assert server._server is not first_of_all


def test_processes_that_are_forked_from_a_client_are_in_nobodys_way(folder: Path) -> None:
    """They hold what its connections end in, and may leave as if they were the client."""
    spec = spec_of(folder)
    with IngestionClient(spec, workers=1) as client:
        pool, found, held = client._pool, [], []
        assert isinstance(pool, ProcessPool)

        def fork() -> None:
            held.append(os.fork())
            if not held[-1]:
                client.close()
                time.sleep(100)
                os._exit(0)

        fork()  # while it starts
        try:
            for batch in client:
                found.append(batch_hash(batch))
                if len(found) == 5:
                    fork()
                if len(found) in (10, 20):
                    os.kill(pool.pids[0], signal.SIGKILL)
            assert found == expected(spec)
        finally:
            for pid in held:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def test_a_batch_that_cannot_be_taken_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = Reading.put

    def without_room(reading: Reading, item: Item) -> None:
        if isinstance(item, PackedBatch):
            raise RuntimeError("no room")
        put(reading, item)

    monkeypatch.setattr(Reading, "put", without_room)
    with (
        IngestionClient(spec_of(folder), workers=1) as client,
        pytest.raises(DataError, match="what worker 0 sent cannot be taken: RuntimeError: no room"),
    ):
        next(iter(client))


def test_a_state_is_the_readers_and_goes_on_anywhere(folder: Path) -> None:
    spec = spec_of(folder)
    whole = expected(spec, epoch=1)
    with IngestionClient(spec, workers=2, backend="threads") as client:
        client.set_epoch(1)
        for number, batch in enumerate(client):
            if number == 40:
                state = client.state_dict()
                assert client.state_dict(batch) == state
                break
    reader = spec.reader()
    reader.load_state_dict(state)
    assert [batch_hash(batch) for batch in reader] == whole[41:]
    with IngestionClient(spec, workers=3, backend="threads") as client:
        client.load_state_dict(state)
        assert [batch_hash(batch) for batch in client] == whole[41:]
    rows: list[int] = []
    for rank in range(3):
        with IngestionClient(spec, rank=rank, world_size=3, workers=1, backend="threads") as client:
            client.load_state_dict(state)
            for batch in client:
                rows += batch.dense["row"].tolist()[: batch.features.stride() - batch.position.repeated]
    reader = spec.reader()
    reader.load_state_dict(state)
    assert sorted(rows) == sorted(row for batch in reader for row in batch.dense["row"].tolist())


def test_batches_that_cannot_be_read_are_named_or_skipped_and_counted(folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    table = pq.read_table(folder / "part-0.parquet")
    prices = table["price"].to_pylist()
    prices[500] = None
    pq.write_table(table.set_column(4, "price", pa.array(prices)), bad / "a.parquet", row_group_size=100)
    how = {"shuffle": False, "batch_size": 50}
    for backend in ("threads", "processes"):
        with IngestionClient(spec_of(bad, **how), workers=1, backend=backend) as client:
            seen = []
            with pytest.raises(DataError, match=r"a\.parquet: column 'price' is null in row 500"):
                seen += [batch.position.number for batch in client]
    with IngestionClient(spec_of(bad, bad_batches="skip", **how), workers=2, backend="threads") as client:
        batches = list(client)
        assert client.stats.skipped_batches == 1
        assert len(batches) == len(client)
        assert [batch.position.repeated for batch in batches] == [50 * (number == 10) for number in range(20)]
        rows = [row for batch in batches if not batch.position.repeated for row in batch.dense["row"].tolist()]
        assert rows == [row for row in range(1000) if not 500 <= row < 550]
    prices[0], prices[500] = None, 0.5  # the first batch of all
    pq.write_table(table.set_column(4, "price", pa.array(prices)), bad / "a.parquet", row_group_size=100)
    with IngestionClient(spec_of(bad, bad_batches="skip", **how), workers=2, backend="threads") as client:
        assert [batch.position.repeated for batch in client][:3] == [50, 0, 0]


def test_damaged_and_changed_files_are_named(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.parquet"
    copy.write_bytes((folder / "part-0.parquet").read_bytes())
    data = bytearray(copy.read_bytes())
    place = pq.ParquetFile(copy).metadata.row_group(2).column(3).data_page_offset
    data[place : place + 40] = bytes(40)
    copy.write_bytes(bytes(data))
    how = {"paths": str(copy), "shuffle": False, "session": None}
    with (
        IngestionClient(spec_of(folder, **how), workers=1, backend="threads") as client,
        pytest.raises(DataError, match=r"copy\.parquet: row group 2 is broken at or after row 600: "),
    ):
        list(client)
    with IngestionClient(spec_of(folder, **how, bad_batches="skip"), workers=2, backend="threads") as client:
        good = [row for batch in client if not batch.position.repeated for row in batch.dense["row"].tolist()]
        assert good == [*range(576), *range(928, 1000)]  # whole batches of 32 beside the row group
    copy.write_bytes((folder / "part-0.parquet").read_bytes())
    with IngestionClient(spec_of(folder, **how, bad_batches="skip"), workers=1, backend="threads") as client:
        pq.write_table(pq.read_table(copy).slice(1), copy)
        with pytest.raises(ChangedDataError, match=r"copy\.parquet: has changed since reading began"):
            list(client)


def test_a_worker_that_hangs_is_started_again(folder: Path) -> None:
    spec = spec_of(folder)
    with IngestionClient(spec, workers=2, hang_seconds=3.0) as client:
        pool = client._pool
        assert isinstance(pool, ProcessPool)
        found, stopped = [], False
        for batch in client:
            found.append(batch_hash(batch))
            if len(found) == 3 and not stopped:
                for pid in pool.pids:
                    os.kill(pid, signal.SIGSTOP)
                stopped = True
        assert found == expected(spec)
        assert client.stats.restarts > 0


def test_states_and_memory_of_batches_that_stand_in(folder: Path, tmp_path: Path) -> None:
    """Ranks stay in step: a batch that could not be read counts as read, for whoever could not read it."""
    table = pq.read_table(folder / "part-0.parquet").slice(0, 320)
    for bad, steps in ((165, 3), (0, 1), (290, 5)):
        prices = table["price"].to_pylist()
        prices[bad] = None
        pq.write_table(table.set_column(4, "price", pa.array(prices)), tmp_path / "a.parquet", row_group_size=32)
        spec = spec_of(tmp_path, shuffle=False, bad_batches="skip")
        states: list[list[int]] = []
        for rank in range(2):
            with IngestionClient(spec, rank=rank, world_size=2, workers=1, backend="threads") as client:
                for _ in range(2):  # passes
                    states.append([])
                    for batch in client:
                        states[-1].append(client.state_dict()["batches"])
                        assert batch.dense["row"].max() < 1000
                        batch.dense["row"].add_(1000)
        assert states == [[2, 4, 6, 8, 10]] * 4, steps


def test_clients_that_are_misused(folder: Path) -> None:
    spec = spec_of(folder)
    with IngestionClient(spec, workers=1, backend="threads") as client:
        first, second = iter(client), iter(client)
        next(first)
        next(second)
        with pytest.raises(DataError, match="another pass over this client has begun"):
            next(first)
        next(second)
        other = iter(client)
    client.close()
    for iterator in (second, other, iter(client)):
        with pytest.raises(DataError, match="is closed; make another one"):
            next(iterator)
    for seconds in (0, -1, float("inf"), "3"):
        with pytest.raises(DataError, match="hang_seconds is a number above 0"):
            IngestionClient(spec, hang_seconds=seconds)  # type: ignore[arg-type]


def test_a_signal_without_a_name_and_a_worker_that_goes(folder: Path) -> None:
    spec = spec_of(folder)
    with IngestionClient(spec, workers=2, hang_seconds=2.0) as client:
        pool, found = client._pool, []
        assert isinstance(pool, ProcessPool)
        for batch in client:
            found.append(batch_hash(batch))
            if len(found) == 5:
                os.kill(pool.pids[0], 40)
            if len(found) == 30 and len(pool.pids) == 2:
                os.kill(pool.pids[1], signal.SIGSTOP)  # and it is to go, with what it holds
                client.resize(1)
        assert found == expected(spec)


def test_nothing_is_left_behind(folder: Path) -> None:
    """By programs that leave in the middle, of threads or of processes."""
    spec_of(folder).save(folder / "job.yaml")
    program = (
        "import threading, pathlib\n"
        "from flexshard.ingestion import *\n"
        "for backend in ('threads', 'processes'):\n"
        f"    spec = IngestionSpec.load({str(folder / 'job.yaml')!r})\n"
        "    with IngestionClient(spec, workers=2, backend=backend, hang_seconds=60) as client:\n"
        "        print(next(iter(client)).position.number)\n"
        "    print([thread.name for thread in threading.enumerate()])\n"  # others could end the interpreter badly
        "    print(*(path.read_text() for path in pathlib.Path('/proc/self/task').glob('*/children')), sep='')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n['MainThread']\n\n" * 2), done.stderr
    (folder / "job.yaml").unlink()


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_deleted_file_is_never_skipped(folder: Path, tmp_path: Path, backend: str) -> None:
    for path in folder.glob("*.parquet"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with IngestionClient(spec_of(tmp_path, bad_batches="skip"), workers=1, backend=backend) as client:
        found = iter(client)
        next(found)
        (tmp_path / "part-2.parquet").unlink()
        with pytest.raises(ChangedDataError, match=r"part-2\.parquet: is no longer there"):
            list(found)


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_workers_come_and_go_without_a_lost_batch(folder: Path, backend: str) -> None:
    spec = spec_of(folder)
    found = []
    with IngestionClient(spec, workers=1, backend=backend) as client:
        for number, batch in enumerate(client):
            found.append(batch_hash(batch))
            if number % 20 == 10:
                client.resize(1 + number // 20 % 3)
                assert len(client._pool.workers) == 1 + number // 20 % 3
        assert client.stats.restarts == 0
        with pytest.raises(DataError, match="workers must be at least 1"):
            client.resize(0)
    assert found == expected(spec)


def test_workers_are_added_where_the_trainer_waits_and_taken_away_where_it_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexshard.ingestion.service.client._ADJUST_SECONDS", 0.05)
    with IngestionClient(spec_of(folder), workers=1, most_workers=3, backend="threads") as client:
        for _ in client:
            pass
        assert len(client._pool.workers) == 3
        for _ in client:
            time.sleep(0.02)
        assert len(client._pool.workers) < 3


def test_a_spec_is_a_file_and_says_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    spec = spec_of(folder)
    spec.save(tmp_path / "job.yaml")
    assert IngestionSpec.load(tmp_path / "job.yaml") == spec
    text = (tmp_path / "job.yaml").read_text()
    for old, new, message in (
        ("num_rows: 1000", "num_rows: none", r"job\.yaml:\d+: transforms\[0\].*num_rows.*integer"),
        ("op: cross", "op: crossing", r"job\.yaml:\d+: transforms\[1\].*'crossing'"),
        ("batch_size: 32", "batch_sizes: 32", r"job\.yaml:\d+: batch_sizes: this field is unknown|batch_size"),
        ("std: 0.3", "std: 0.0", r"transforms\[2\]: std is above 0, found 0\.0"),
        ("seed: 3", "seed: -3", r"job\.yaml:\d+: seed: .*greater than or equal to 0"),
    ):
        assert old in text
        (tmp_path / "bad.yaml").write_text(text.replace(old, new))
        with pytest.raises(DataError, match=message.replace("job", "bad")):
            IngestionSpec.load(tmp_path / "bad.yaml")
    for how, message in (
        (
            {"transforms": [{"op": "hash_ids", "features": ["itme"], "num_rows": 3}]},
            r"transforms\[0\]: no feature 'itme'",
        ),
        ({"transforms": [{"op": "log", "columns": ["prise"]}]}, r"transforms\[0\]: no dense column 'prise'"),
        ({"transforms": [{"op": "map_ids", "mapping": {2**70: 1}}]}, "less than 9223372036854775808"),
        ({"transforms": [{"op": "normalize", "columns": ["price"], "mean": float("nan")}]}, "finite"),
        ({"drop_last": True, "pad_last": True}, "drop_last and pad_last are both true"),
        ({"session": None}, "name the session column"),
        (
            {"transforms": [{"op": "cross", "features": ["history", "item"], "into": "item", "num_rows": 5}]},
            "feature 'item' is there already",
        ),
    ):
        with pytest.raises(DataError, match=message):
            spec_of(folder, **how)  # type: ignore[arg-type]
    (tmp_path / "loop.yaml").write_text("format: flexshard.ingestion\nversion: 1\npaths: &a [*a]\n")
    with pytest.raises(DataError, match=r"loop\.yaml"):
        IngestionSpec.load(tmp_path / "loop.yaml")
    with pytest.raises(DataError, match=r"ingestion job: features: .*at least 1"):
        spec_of(folder, features=[])
    with pytest.raises(DataError, match="a data file has no name: the path is empty"):
        IngestionSpec(paths="", batch_size=4, features=["item"]).reader()
    with pytest.raises(DataError, match="column 'row' is named twice"):
        spec_of(folder, dense=["row", "row"])
    with pytest.raises(DataError, match="the backend is one of threads, processes, ray, found 'fibres'"):
        IngestionClient(spec, backend="fibres")
    for most in (0, 1, "8", 2.5):  # of which the last two would have come up in the middle of training
        with pytest.raises(DataError, match="most_workers must be"):
            IngestionClient(spec, workers=2, most_workers=most, backend="threads")  # type: ignore[arg-type]


@pytest.mark.parametrize("paths", [".", "day=*/*.parquet"])
def test_partitions(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: str) -> None:
    for number in range(3):
        part = tmp_path / f"day={number}"
        part.mkdir()
        (part / "a.parquet").write_bytes((folder / f"part-{number}.parquet").read_bytes())
    spec = spec_of(tmp_path, partitions={"day": ["0", "2"]}, shuffle=False)
    rows = [row for batch in spec.reader() for row in batch.dense["row"].tolist()]
    assert rows == [*range(1000), *range(2000, 4000)]
    monkeypatch.chdir(tmp_path)
    relative = spec_of(paths, partitions={"day": ["0", "2"]}, shuffle=False)  # type: ignore[arg-type]
    assert rows == [row for batch in relative.reader() for row in batch.dense["row"].tolist()]
    with pytest.raises(DataError, match="no file is in partition day=7"):
        spec_of(tmp_path, partitions={"day": ["7"]}).reader()


def test_a_run_is_kept_and_replayed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``flexshard ingest``: without a trainer, again from what it wrote, and where the data are others than then."""
    from flexshard.cli import main

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr("sys.argv", ["flexshard", "ingest", *arguments])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            monkeypatch.undo()
        out = capsys.readouterr()
        return code, out.out, out.err

    data = tmp_path / "data"
    data.mkdir()
    for path in folder.iterdir():
        (data / path.name).write_bytes(path.read_bytes())
    mapping = {"op": "map_ids", "features": ["history"], "mapping": {1: 2, 3: 4}, "into": "mapped"}
    spec = spec_of(data, epochs=2, transforms=[mapping])
    spec.save(tmp_path / "job.yaml")
    how = ["--backend", "threads"]
    code, out, _ = run(str(tmp_path / "job.yaml"), *how, "-o", str(tmp_path / "run.json"), "--json", "--step", "1ms")
    document = json.loads(out)
    assert (code, document["stats"]["samples"], document["stats"]["batches"]) == (0, 2 * ROWS, 2 * len(spec.reader()))
    assert document["stats"]["seconds"] > document["stats"]["batches"] * 0.001
    code, out, _ = run(str(tmp_path / "run.json"), *how, "--workers", "3")
    assert (code, "the same batches as then" in out) == (0, True)
    table = pq.read_table(data / "part-1.parquet")
    pq.write_table(table.set_column(3, "item", pa.array(np.arange(table.num_rows))), data / "part-1.parquet")
    code, _, err = run(str(tmp_path / "run.json"), *how)
    assert (code, "the batches are others than then" in err) == (2, True)
    (tmp_path / "other.json").write_text("{}")
    code, _, err = run(str(tmp_path / "other.json"))
    assert (code, err.count("\n"), "not a run of an ingestion job" in err) == (2, 1, True)
    for options in (["--rank", "0"], ["--world-size", "1"], ["--batches", "1"], ["--step", "0s"]):  # are the run's own
        code, _, err = run(str(tmp_path / "run.json"), *how, *options)
        assert (code, err.count("\n"), f"leave {options[0]} out" in err) == (2, 1, True)
    job, part = str(tmp_path / "job.yaml"), str(data / "part-1.parquet")
    before = [Path(path).read_bytes() for path in (job, part, str(tmp_path / "run.json"))]
    for options, message in (
        (["--log", part], f"{part} exists and is no log of what jobs read"),
        (["--log", job], "is no log of what jobs read"),
        (["--log", str(tmp_path / "run.json")], "is no log of what jobs read"),
        (["--log", str(tmp_path / "new"), "-o", str(tmp_path / "new")], "the run and the log are two files"),
        (["--log", str(tmp_path / "nowhere" / "log")], "its folder is not there"),
        (["-o", part, "--force"], "is what this command reads, and would be lost"),
        (["--step=-5s"], "step_seconds is the time of a step, at least 0"),
    ):
        code, out, err = run(job, *how, *options)
        assert (code, out, err.count("\n"), message in err) == (2, "", 1, True), err
    assert [Path(path).read_bytes() for path in (job, part, str(tmp_path / "run.json"))] == before
    for _ in range(2):
        assert run(job, *how, "--log", str(tmp_path / "log"), "--batches", "1")[0] == 0
    assert ProjectionLog.load(tmp_path / "log").runs == (1, 1)


@pytest.mark.parametrize("share", [True, False])
def test_objects_go_through_a_channel_as_they_are(share: bool) -> None:
    import socket

    from flexshard.ingestion.service.channel import Channel

    ours, theirs = socket.socketpair()
    left, right = Channel(ours, share=share), Channel(theirs, share=share)
    items: list[Any] = [
        None,
        {"small": np.arange(3), "empty": np.zeros((0, 4), np.float32)},
        [np.arange(100_001), np.zeros(0), np.arange(7, dtype=np.int8), np.random.default_rng(0).random((300, 70))],
        (np.arange(50_000, dtype=np.int32), "text"),
    ]
    sender = threading.Thread(target=lambda: [left.send(item) for item in items], daemon=True)
    sender.start()
    for item in items:
        found = right.receive()
        if item is None:
            assert found is None
            continue
        both = [list(each.values()) if isinstance(each, dict) else each for each in (item, found)]
        for one, other in zip(*both, strict=True):
            np.testing.assert_array_equal(one, other)
            if isinstance(one, np.ndarray):
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                other[...] = 0  # may be written to, and is nobody else's
    np.testing.assert_array_equal(items[3][0], np.arange(50_000))
    sender.join()
    held = right
    left.send([np.arange(200_000)])
    array = held.receive()[0]
    left.close()
    with pytest.raises(EOFError):
        held.receive()
    held.close()
    assert int(array.sum()) == 199_999 * 100_000  # outlives who sent it


def _train(job: Path, checkpoint: Path) -> None:
    """A program that goes on from where the last one came to."""
    held = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"state": None, "hashes": []}
    with IngestionClient(IngestionSpec.load(job), workers=2, backend="threads") as client:
        if held["state"] is not None:
            client.load_state_dict(held["state"])
        client.set_epoch(0)  # of which nothing is left where the last program had come to its end
        for batch in client:
            held = {"state": client.state_dict(batch), "hashes": [*held["hashes"], batch_hash(batch)]}
            fresh = checkpoint.with_suffix(".new")
            fresh.write_text(json.dumps(held))
            fresh.replace(checkpoint)


@pytest.mark.parametrize("kills", first(1, [1, 4]))
def test_a_trainer_that_is_killed_trains_every_batch_once(folder: Path, tmp_path: Path, kills: int) -> None:
    """Kill -9 of the client's process at random times; each time another one goes on from the last checkpoint."""
    spec = spec_of(folder)
    spec.save(tmp_path / "job.yaml")
    checkpoint, generator = tmp_path / "checkpoint.json", random.Random(2)

    def start() -> multiprocessing.process.BaseProcess:
        process = context.Process(target=_train, args=(tmp_path / "job.yaml", checkpoint))
        process.start()
        return process

    for _ in range(kills):
        process = start()
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        while process.is_alive() and (not checkpoint.exists() or checkpoint.stat().st_mtime_ns == before):
            time.sleep(0.01)
        time.sleep(generator.uniform(0.0, 0.15))
        process.kill()
        process.join()
    last = start()
    last.join()
    assert last.exitcode == 0
    assert json.loads(checkpoint.read_text())["hashes"] == expected(spec)
