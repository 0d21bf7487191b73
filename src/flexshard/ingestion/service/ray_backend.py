"""Workers and the master of an ingestion job as Ray actors, whose processes, restarts and transport are Ray's.

What a worker returns belongs to the client that asked for it, so that it outlives the worker. The master keeps the
ledger alone; where it dies, Ray starts it again, and every client says where it stands. Tried on one machine.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from flexshard.errors import ChangedDataError, DataError, MissingDependencyError
from flexshard.ingestion.service.ledger import Lease, SplitLedger
from flexshard.ingestion.service.readings import Item, Lost, Reading, read_items
from flexshard.ingestion.service.spec import IngestionSpec
from flexshard.ingestion.splits import Split

__all__ = ["Caller", "RayMaster", "RayPool", "connected"]

_NAMESPACE = "flexshard-ingestion"
_TOGETHER = 4  # batches that are sent as one: what Ray does for each object takes as long as making a batch
_MASTER_SECONDS = 120.0  # for which a master may be away


def connected(
    spec: IngestionSpec, client: Caller, job: str, workers: int, *, shared: bool
) -> tuple[RayPool, RayMaster]:
    """The job's workers and master: those that there are by its name, or new ones.

    Where the job's files are others than those of the clients before, these are over, and so are their workers.

    Raises:
        MissingDependencyError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError("workers on Ray need it; pip install 'flexshard[ray]'") from error
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    how: dict[str, Any] = {
        "namespace": _NAMESPACE,
        "get_if_exists": True,
        "lifetime": "detached",  # a client that dies is no reason to end what others use
        "max_restarts": -1,
    }
    # Small enough to be kept with the actor, so that it starts again whoever made it is gone.
    text = spec.model_dump_json(exclude_defaults=True)
    made = ray.remote(_Master).options(**how, name=f"{job}-master", num_cpus=0).remote(workers)
    master = RayMaster(ray, made, client)
    reader = ray.remote(_Worker)
    for files, numbers in master.come():
        for number in numbers:
            with suppress(ValueError):  # there is none of that name
                ray.kill(ray.get_actor(_worker_name(job, files, number), _NAMESPACE))

    def actor(worker: int) -> Any:
        return reader.options(**how, name=_worker_name(job, client.files, worker), num_cpus=1).remote(text)

    pool = RayPool(ray, actor, master, shared=shared)
    if len(pool.actors) != workers:
        warnings.warn(
            f"job {client.job!r} has {len(pool.actors)} workers for all of its clients; the {workers} asked for here"
            " count for the first client alone: give all the same, or call resize()",
            stacklevel=4,
        )
    return pool, master


@dataclass(frozen=True)
class Caller:
    """A client, as the master knows it.

    Attributes:
        rank, world_size: of those that train.
        token: that no other client has, of the same rank or not.
        files: fingerprint of the job's files, as it found them.
        job: by what name it asked for it.
    """

    rank: int
    world_size: int
    token: str
    files: str
    job: str


def _worker_name(job: str, files: str, number: int) -> str:
    return f"{job}-{files[:16]}-worker-{number}"


class _Worker:
    """An actor that reads splits."""

    def __init__(self, spec: str) -> None:
        import torch

        torch.set_num_threads(1)
        self._reader = IngestionSpec.of_json(spec).reader()

    def pid(self) -> int:
        return os.getpid()

    def read(self, split: Split) -> Iterator[list[Item]]:
        together: list[Item] = []
        for item in read_items(self._reader, split):
            together.append(item)
            if len(together) == _TOGETHER:
                yield together
                together = []
        yield together


class _Master:
    """An actor that gives out splits. Its ledger is gone when it dies, and clients attach again."""

    def __init__(self, workers: int) -> None:
        self._first_workers, self._files = workers, ""
        self._forget()

    def _forget(self) -> None:
        """Begin anew, without clients."""
        self._ledger, self._clients = SplitLedger(), dict[int, Caller]()
        for worker in range(self._first_workers):
            self._ledger.add_worker(worker)

    def pid(self) -> int:
        return os.getpid()

    def workers(self) -> list[int]:
        return self._ledger.workers

    def add_worker(self, worker: int) -> None:
        self._ledger.add_worker(worker)

    def retire_worker(self, worker: int) -> None:
        self._ledger.retire_worker(worker)

    def clients(self) -> int:
        return len(self._clients)

    def come(self, client: Caller) -> list[tuple[str, list[int]]]:
        """A client comes, in place of an earlier one of its rank; which workers, of which files, are over since."""
        over = []
        if self._files not in ("", client.files):
            over.append((self._files, self._ledger.workers))
            self._forget()
        if any(other.world_size != client.world_size for other in self._clients.values()):
            for rank in [rank for rank in self._clients if rank >= client.world_size]:  # which will not come again
                del self._clients[rank]
                self._ledger.detach(rank)
        self._files = client.files
        self._clients[client.rank] = client
        self._ledger.attach(client.rank, 0)
        return over

    def attach(self, client: Caller, splits: int, first: int) -> Literal["done", "other files", "other client"]:
        """It begins a pass; or why it may not any more."""
        if self._files not in ("", client.files):
            return "other files"
        if self._clients.get(client.rank, client) != client:
            return "other client"
        self._files = client.files
        self._clients[client.rank] = client
        self._ledger.attach(client.rank, splits, first=first)
        return "done"

    def ask(self, what: str, client: Caller, argument: Any) -> Any:
        """One of the ledger's methods, in a list; None where the client is not known, or no longer its rank's."""
        if self._clients.get(client.rank) != client:
            return None
        if what == "detach":
            del self._clients[client.rank]
        return [getattr(self._ledger, what)(argument)]


class RayMaster:
    """The master, as a client sees it; it attaches again to one that was started again."""

    def __init__(self, ray: Any, actor: Any, client: Caller) -> None:
        self._ray, self.actor, self._client = ray, actor, client
        self._splits = self._given = 0
        self.was_known = False  # when the client left

    def come(self) -> list[tuple[str, list[int]]]:
        """The client is there; workers of other files that are over, by fingerprint and number."""
        over: list[tuple[str, list[int]]] = self._call(self.actor.come, self._client)
        return over

    def attach(self, client: int, splits: int) -> None:  # noqa: ARG002 (the one that it is of)
        """See the ledger."""
        self._splits, self._given = splits, 0
        self._attach()

    def lease(self, client: int) -> Lease | None:
        """See the ledger."""
        lease: Lease | None = self._ask("lease", client)
        if lease is not None:
            self._given = max(self._given, lease.split + 1)
        return lease

    def again(self, lease: Lease) -> Lease:
        """See the ledger."""
        found: Lease = self._ask("again", lease)
        return found

    def finish(self, lease: Lease) -> None:
        """See the ledger."""
        self._ask("finish", lease)

    def detach(self, client: int) -> None:
        """See the ledger."""
        self.was_known = self._call(self.actor.ask, "detach", self._client, client) is not None

    def add_worker(self, worker: int) -> None:
        """See the ledger."""
        self._call(self.actor.add_worker, worker)

    def retire_worker(self, worker: int) -> None:
        """See the ledger."""
        self._call(self.actor.retire_worker, worker)

    def clients(self) -> int:
        """How many there are."""
        found: int = self._call(self.actor.clients)
        return found

    def workers(self) -> list[int]:
        """Those that are given work."""
        found: list[int] = self._call(self.actor.workers)
        return found

    def _ask(self, what: str, argument: Any) -> Any:
        while True:
            found = self._call(self.actor.ask, what, self._client, argument)
            if found is not None:
                return found[0]
            self._attach()

    def _attach(self) -> None:
        found = self._call(self.actor.attach, self._client, self._splits, self._given)
        where = f"job {self._client.job!r} on Ray"
        if found == "other files":
            raise ChangedDataError(f"{where}: the files have changed, and others have begun anew; start again")
        if found == "other client":
            raise DataError(
                f"{where}: another client of rank {self._client.rank} has come; give each its own rank=, or job="
            )

    def _call(self, method: Any, *arguments: Any) -> Any:
        """Call the actor, for as long as it takes Ray to start it again."""
        until = time.monotonic() + _MASTER_SECONDS
        while True:
            try:
                return self._ray.get(method.remote(*arguments))
            except self._ray.exceptions.RayActorError as error:
                if time.monotonic() > until:
                    raise DataError(f"the master of the ingestion job is gone for {_MASTER_SECONDS:g} s") from error
                time.sleep(0.1)


class RayPool:
    """The job's workers, by number; which there are, the master knows."""

    def __init__(self, ray: Any, actor: Callable[[int], Any], master: RayMaster, *, shared: bool) -> None:
        self._ray, self._actor, self.master, self._shared = ray, actor, master, shared
        self.actors = {worker: actor(worker) for worker in master.workers()}
        self._retired: dict[int, Any] = {}  # that read what they were given
        self._numbers = max(self.actors, default=-1) + 1

    @property
    def workers(self) -> list[int]:
        """All that this client knows of."""
        return list(self.actors)

    def start(self, worker: int, split: Split) -> Reading:
        """Let a worker read a split, after those that it was given before."""
        if worker not in self.actors:  # another client added it
            self.actors[worker] = self._actor(worker)
        items = self.actors[worker].read.options(num_returns="streaming").remote(split)
        return _RayReading(self._ray, items, worker)

    def quiet_seconds(self, worker: int) -> float:  # noqa: ARG002 (asked of every pool)
        """Ray does not say how an actor is doing: whoever waited has waited for that."""
        return float("inf")

    def restart(self, worker: int) -> None:
        """End a worker that does not answer; Ray starts it again, if it was not to go."""
        if worker in self._retired:
            self._ray.kill(self._retired.pop(worker))
        elif worker in self.actors:
            self._ray.kill(self.actors[worker], no_restart=False)

    def add(self) -> int:
        """One worker more; its number."""
        worker, self._numbers = self._numbers, self._numbers + 1  # never one that was there: its actor may be ending
        self.actors[worker] = self._actor(worker)
        return worker

    def retire(self, worker: int) -> None:
        """A worker less, once it has read what it was given."""
        self._retired[worker] = self.actors.pop(worker)
        self._retired[worker].__ray_terminate__.remote()

    def close(self) -> None:
        """End all, if no client is left."""
        try:
            # A master that was started again does not know who there is; then the actors are left to others.
            if self._shared and not (self.master.was_known and not self.master.clients()):
                return
            for actor in [*self._retired.values(), *self.actors.values(), self.master.actor]:
                self._ray.kill(actor)
        except (self._ray.exceptions.RayActorError, ValueError):  # somebody else did
            return


class _RayReading(Reading):
    """What an actor yields."""

    def __init__(self, ray: Any, items: Any, worker: int) -> None:
        super().__init__()
        self._ray, self._refs, self._worker = ray, items, worker

    def waits(self) -> bool:
        return super().waits() or bool(self._ray.wait([self._refs], timeout=0)[0])

    def get(self, seconds: float) -> Item:
        if super().ready:
            return super().get(0)
        if not self._ray.wait([self._refs], timeout=seconds)[0]:
            raise TimeoutError
        try:
            for item in self._ray.get(next(self._refs)):
                self.put(item)
        except (self._ray.exceptions.RayActorError, StopIteration) as error:
            is_starting = isinstance(error, self._ray.exceptions.ActorUnavailableError)
            if is_starting:
                time.sleep(0.2)
            why = (str(error).splitlines() or ["nothing came"])[0]
            self.put(Lost(f"worker {self._worker} ended: {why}", began=not is_starting))
        return self.get(seconds)
