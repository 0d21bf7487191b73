"""The service on Ray: actors that are killed, the master among them, and clients that come back."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytest.importorskip("torchrec")

from flexshard._internal import connect_to_ray
from flexshard.errors import ChangedDataError, DataError
from flexshard.ingestion import IngestionClient, batch_hash
from flexshard.ingestion.service import ray_backend
from flexshard.ingestion.service.ray_actors import Caller, Master
from tests.ingestion.test_service import expected, folder, spec_of

ray: Any = pytest.importorskip("ray")
from ray.util import list_named_actors  # noqa: E402 - where Ray is installed

__all__ = ["folder"]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a worker takes long to import torch, of which its users are told."""
    monkeypatch.setattr(ray_backend, "_WARN_SECONDS", 600.0)


def test_actors_give_the_readers_batches_to_every_rank(folder: Path) -> None:
    spec = spec_of(folder)
    clients = [
        IngestionClient(spec, rank=rank, world_size=2, workers=2, backend="ray", job="two-ranks") for rank in range(2)
    ]
    try:
        workers = [set(client._pool.actors.values()) for client in clients]  # type: ignore[attr-defined]
        assert workers[0] == workers[1]
        found: list[list[str]] = [[], []]
        for both in zip(*clients, strict=True):  # in step, as ranks train
            for rank, batch in enumerate(both):
                found[rank].append(batch_hash(batch))
        assert found == [expected(spec, rank, 2) for rank in range(2)]
    finally:
        for client in clients:
            client.close()


def test_clients_come_again_and_others_in_their_place() -> None:
    """The master's account, without Ray: by rank, of one client each, of the same files, of ranks that there are."""
    master = Master(2)
    first, second = (Caller(rank, 2, f"token {rank}", "files", "job") for rank in range(2))
    assert master.come(first) == master.come(second) == []
    assert master.attach(first, 5, 0) == "done"
    assert master.ask("lease", first, 0) == ["nobody"]  # there is work, and no worker to do it
    master.started("other files", 0)
    assert master.waiting() == [0, 1]
    master.started("files", 1)
    (lease,) = master.ask("lease", first, 0)
    assert lease.worker == 1
    master.started("files", 0)
    assert master.ask("lease", second, 1) == [None]  # it has begun nothing
    again = replace(first, token="started again")
    assert master.come(again) == []
    assert master.ask("finish", first, lease) is None
    assert master.attach(first, 5, 0) == "other client"
    assert master.ask("detach", first, 0) is None
    assert master.clients() == 2
    alone = replace(again, token="of one rank", world_size=1)
    assert master.come(alone) == []
    assert master.clients() == 1  # the second rank will not come again
    master.add_worker(2)
    assert master.waiting() == [2]
    newer = replace(alone, token="newer", files="other files")
    assert master.come(newer) == [("files", [0, 1, 2])]  # whose workers are over
    assert master.workers() == [0, 1]
    assert master.attach(alone, 5, 0) == "other files"
    assert master.ask("detach", newer, 0) == [None]
    assert master.clients() == 0
    restarted = Master(2, again=True)  # by Ray, which knows nothing of before
    assert restarted.ask("lease", newer, 0) is None
    assert restarted.attach(newer, 5, 3) == "done"
    assert restarted.ask("lease", newer, 0)[0].split == 3


def test_an_address_where_nobody_answers_is_said_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself tries it without end."""
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        with pytest.raises(ConnectionError, match=f"nobody answers at {address}"):
            connect_to_ray(address)
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(DataError, match=f"workers on Ray could not be started: nobody answers at {address} .*; is"):
            IngestionClient(spec_of(folder), workers=1, backend="ray")


@pytest.mark.slow
def test_workers_that_ray_has_no_room_for_are_given_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_backend, "_WARN_SECONDS", 0.0)
    spec = spec_of(folder)
    with IngestionClient(spec, workers=5, backend="ray", job="crowded") as client:
        told = r"[2-5] of 5 workers of job 'crowded' have not started .* cluster has \d of 2 free"
        with pytest.warns(UserWarning, match=told):
            found = [batch_hash(batch) for batch in client]
        assert found == expected(spec)
        assert client.stats.restarts == 0


@pytest.mark.slow
def test_a_client_that_is_killed_leaves_nobody(folder: Path, tmp_path: Path) -> None:
    """Where no other client is meant to find its workers."""
    (tmp_path / "job.json").write_text(spec_of(folder).model_dump_json())
    code = (
        "import sys; from flexshard.ingestion import IngestionClient, IngestionSpec\n"
        "client = IngestionClient(IngestionSpec.of_json(open(sys.argv[1]).read()), workers=1, backend='ray')\n"
        "next(iter(client)); print('begun', flush=True); import time; time.sleep(60)"
    )
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "job.json")], env=environment, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "begun\n"
        there = [one["name"] for one in list_named_actors(all_namespaces=True) if str(killed.pid) in one["name"]]
        assert len(there) == 2
        killed.kill()
    until = time.monotonic() + 60
    while any(one["name"] in there for one in list_named_actors(all_namespaces=True)):
        assert time.monotonic() < until
        time.sleep(0.2)


def test_workers_start_when_they_start() -> None:
    """The master's account of workers that start before it knows of what files, or with another's number."""
    client = Caller(0, 1, "token", "files", "job")
    master = Master(1, again=True)
    master.add_worker(1)
    master.started("files", 1)
    master.started("other files", 0)
    assert master.attach(client, 4, 0) == "done"
    assert master.waiting() == []
    master.retire_worker(1)
    master.add_worker(1)  # a new one, of the same number
    assert master.waiting() == [1]
    (lease,) = master.ask("lease", client, 0)
    assert lease.worker == 0
    master.retire_worker(0)
    assert master.ask("again", client, lease) == ["nobody"]
    master.started("files", 1)
    assert master.ask("again", client, lease)[0].worker == 1


@pytest.mark.slow
def test_two_clients_of_one_rank_are_told(folder: Path) -> None:
    spec = spec_of(folder)
    first = IngestionClient(spec, workers=1, backend="ray", job="twice")
    batches = iter(first)
    next(batches)
    with pytest.warns(UserWarning, match="job 'twice' has 1 workers for all of its clients; the 3 asked for here"):
        second = IngestionClient(spec, workers=3, backend="ray", job="twice")
    with second:
        with pytest.raises(DataError, match="job 'twice' on Ray: another client of rank 0 has come; give each its own"):
            list(batches)
        with pytest.raises(DataError, match="another client of rank 0 has come"):
            list(first)
        first.close()  # which ends nothing of the other's
        assert [batch_hash(batch) for batch in second] == expected(spec)


@pytest.mark.slow
def test_files_that_were_written_anew_after_a_kill(folder: Path, tmp_path: Path) -> None:
    """And fewer ranks than before: the workers of the killed ones are over, and end with the last client."""
    for path in folder.glob("*.parquet"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    spec = spec_of(tmp_path)
    killed = [IngestionClient(spec, rank=rank, world_size=2, workers=1, backend="ray", job="anew") for rank in range(2)]
    left = iter(killed[0])
    next(left)
    old = killed[0]._pool.actors[0]  # type: ignore[attr-defined]
    path = next(tmp_path.glob("*.parquet"))
    pq.write_table(pq.read_table(path).slice(100), path)
    with IngestionClient(spec, workers=1, backend="ray", job="anew") as again:
        assert [batch_hash(batch) for batch in again] == expected(spec)
        with pytest.raises(ChangedDataError, match="job 'anew' on Ray: the files have changed"):
            list(left)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(old.pid.remote())
        actor = again._pool.actors[0]  # type: ignore[attr-defined]
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.pid.remote())


@pytest.mark.slow
def test_an_actor_that_hangs_and_is_to_go(folder: Path) -> None:
    spec = spec_of(folder)
    with IngestionClient(spec, workers=2, backend="ray", hang_seconds=4.0) as client:
        pids = ray.get([actor.pid.remote() for actor in client._pool.actors.values()])  # type: ignore[attr-defined]
        found = []
        for batch in client:
            found.append(batch_hash(batch))
            if len(found) == 3:
                os.kill(pids[1], signal.SIGSTOP)
                client.resize(1)
        assert found == expected(spec)
        assert client.stats.restarts > 0


@pytest.mark.slow
def test_kills_of_workers_and_of_the_master_change_nothing(folder: Path) -> None:
    spec = spec_of(folder)
    generator, kills, stop = random.Random(1), 0, threading.Event()
    with IngestionClient(spec, workers=2, backend="ray") as client:
        actors = [*client._pool.actors.values(), client._pool.master.actor]  # type: ignore[attr-defined]

        def kill() -> None:
            nonlocal kills
            while kills < 3 and not stop.is_set():
                time.sleep(generator.uniform(0.1, 0.5))
                try:
                    os.kill(ray.get(actors[kills % 3].pid.remote()), signal.SIGKILL)
                except (ProcessLookupError, ray.exceptions.RayError):
                    continue
                kills += 1

        killer = threading.Thread(target=kill)
        killer.start()
        epoch = 0
        try:
            while kills < 3:
                client.set_epoch(epoch)
                assert [batch_hash(batch) for batch in client] == expected(spec, epoch=epoch)
                epoch += 1
        finally:
            stop.set()
            killer.join()


@pytest.mark.slow  # trainers that are killed are in test_service
def test_a_client_that_died_goes_on_with_the_same_workers(folder: Path) -> None:
    spec = spec_of(folder)
    first = IngestionClient(spec, workers=1, backend="ray", job="returns")
    seen = []
    for batch in first:
        seen.append(batch_hash(batch))
        if len(seen) == 30:
            state = first.state_dict(batch)
            break
    del first  # without a word: its account stays with the master
    with IngestionClient(spec, workers=1, backend="ray", job="returns") as again:
        again.load_state_dict(state)
        assert seen + [batch_hash(batch) for batch in again] == expected(spec)


@pytest.mark.slow  # processes that hang are in test_service
def test_an_actor_that_hangs_is_started_again(folder: Path) -> None:
    spec = spec_of(folder)
    with IngestionClient(spec, workers=1, backend="ray", hang_seconds=4.0) as client:
        found = []
        for batch in client:
            found.append(batch_hash(batch))
            if len(found) == 3:
                os.kill(ray.get(client._pool.actors[0].pid.remote()), signal.SIGSTOP)  # type: ignore[attr-defined]
        assert found == expected(spec)


@pytest.mark.slow
def test_workers_are_taken_away_where_the_trainer_does_not_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexshard.ingestion.service.client._ADJUST_SECONDS", 0.2)
    spec = spec_of(folder)
    with IngestionClient(spec, workers=2, most_workers=2, backend="ray") as client:
        found, workers = [], []
        for batch in client:
            found.append(batch_hash(batch))
            workers.append(len(client.workers))
            time.sleep(0.05)
        assert found == expected(spec)
        assert min(workers) == 1
        assert client.stats.restarts == 0  # a worker that goes reads what it was given


@pytest.mark.slow
def test_one_rank_that_leaves_does_not_end_the_others(folder: Path) -> None:
    spec = spec_of(folder)
    first, second = (
        IngestionClient(spec, rank=rank, world_size=2, workers=1, backend="ray", job="leaving") for rank in range(2)
    )
    assert [batch_hash(batch) for batch in first] == expected(spec, 0, 2)
    first.close()
    first.close()  # once more does nothing
    found = []
    for batch in second:
        found.append(batch_hash(batch))
        if len(found) == 10:
            second.resize(2)
        if len(found) == 20:
            second.resize(1)
            second.resize(2)
    assert found == expected(spec, 1, 2)
    assert len(second._pool.master.workers()) == 2  # type: ignore[attr-defined]
    second.close()


SHUT_DOWN = """
import sys
import ray
from flexshard.errors import DataError
from flexshard.ingestion import IngestionClient, IngestionSpec
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
try:
    with IngestionClient(IngestionSpec.load(sys.argv[1]), workers=1, backend="ray", ahead=0) as client:
        for number, _ in enumerate(client):
            if number == 2:
                ray.shutdown()
except DataError as error:
    print(error, flush=True)
"""


def test_ray_is_shut_down_in_a_pass(folder: Path, tmp_path: Path) -> None:
    """It began anew where it was asked next, and ended the process, or raised an error of no class of its own."""
    spec_of(folder).save(tmp_path / "job.yaml")
    command = [sys.executable, "-c", SHUT_DOWN, str(tmp_path / "job.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "Ray was shut down while an ingestion job ran there" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr
