"""Workers and the master of an ingestion job as Ray actors, whose processes, restarts and transport are Ray's.

What a worker returns belongs to the client that asked for it, so that it outlives the worker. The master keeps the
ledger alone; where it dies, Ray starts it again, and every client says where it stands. Tried on one machine.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from flexshard._internal import connect_to_ray, first_line
from flexshard.errors import ChangedDataError, DataError, MissingDependencyError
from flexshard.ingestion.service.ledger import Lease
from flexshard.ingestion.service.ray_actors import NAMESPACE, Caller, MasterActor, Worker
from flexshard.ingestion.service.readings import Item, Lost, Reading
from flexshard.ingestion.service.spec import IngestionSpec
from flexshard.ingestion.splits import Split

__all__ = ["RayMaster", "RayPool", "connected"]

_MASTER_SECONDS = 120.0  # for which a master may be away
# For which no worker may have started; after which those that have not are told of; and between two looks at them.
_START_SECONDS, _WARN_SECONDS, _POLL_SECONDS = 300.0, 60.0, 0.05


def connected(
    spec: IngestionSpec, client: Caller, job: str, workers: int, *, shared: bool
) -> tuple[RayPool, RayMaster]:
    """The job's workers and master: those that there are by its name, or new ones.

    Where the job's files are others than those of the clients before, these are over, and so are their workers.

    Raises:
        MissingDependencyError: Ray is not installed.
        DataError: it does not answer.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError("workers on Ray need it; pip install 'flexshard[ray]'") from error
    try:
        connect_to_ray()
    except (ConnectionError, ValueError) as error:
        raise DataError(f"workers on Ray could not be started: {first_line(error)}; is a Ray cluster there?") from error
    how: dict[str, Any] = {
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "lifetime": "detached" if shared else None,  # a client that dies is no reason to end what others use
        "max_restarts": -1,
    }
    # Small enough to be kept with the actor, so that it starts again whoever made it is gone.
    text = spec.model_dump_json(exclude_defaults=True)
    made = ray.remote(MasterActor).options(**how, name=f"{job}-master", num_cpus=0).remote(workers)
    master = RayMaster(ray, made, client)
    reader = ray.remote(Worker)
    for files, numbers in master.come():
        for number in numbers:
            with suppress(ValueError):  # there is none of that name
                ray.kill(ray.get_actor(_worker_name(job, files, number), NAMESPACE))

    def actor(worker: int) -> Any:
        named = reader.options(**how, name=_worker_name(job, client.files, worker), num_cpus=1)
        return named.remote(text, f"{job}-master", client.files, worker)

    pool = RayPool(ray, actor, master, shared=shared)
    if len(pool.actors) != workers:
        warnings.warn(
            f"job {client.job!r} has {len(pool.actors)} workers for all of its clients; the {workers} asked for here"
            " count for the first client alone: give all the same, or call resize()",
            stacklevel=4,
        )
    return pool, master


def _worker_name(job: str, files: str, number: int) -> str:
    return f"{job}-{files[:16]}-worker-{number}"


class RayMaster:
    """The master, as a client sees it; it attaches again to one that was started again."""

    def __init__(self, ray: Any, actor: Any, client: Caller) -> None:
        self._ray, self.actor, self._client = ray, actor, client
        self._splits = self._given = 0
        self._made, self._looked = time.monotonic(), False
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
        lease = self._granted("lease", client)
        if lease is not None:
            self._given = max(self._given, lease.split + 1)
        self._warn_of_waiting()
        return lease

    def _granted(self, what: str, argument: Any) -> Lease | None:
        """What the ledger gives, once a worker has started."""
        until = time.monotonic() + _START_SECONDS
        while True:
            lease: Lease | str | None = self._ask(what, argument)
            if not isinstance(lease, str):
                return lease
            if time.monotonic() > until:
                raise DataError(
                    f"job {self._client.job!r} on Ray: no worker has started within {_START_SECONDS:g} s;"
                    f" {self._free()}"
                )
            time.sleep(_POLL_SECONDS)

    def _warn_of_waiting(self) -> None:
        """Once, when workers have had time to start."""
        if not self._looked and time.monotonic() > self._made + _WARN_SECONDS:
            self._looked = True
            waiting, workers = self._call(self.actor.waiting), self.workers()
            if waiting:
                warnings.warn(
                    f"{len(waiting)} of {len(workers)} workers of job {self._client.job!r} have not started within"
                    f" {_WARN_SECONDS:g} s, and are given nothing until they do; {self._free()}",
                    stacklevel=6,
                )

    def _free(self) -> str:
        free, there = self._ray.available_resources(), self._ray.cluster_resources()
        cpus = f"{free.get('CPU', 0.0):g} of {there.get('CPU', 0.0):g}"
        return (
            f"each takes a CPU, of which the Ray cluster has {cpus} free, and imports torch first:"
            " take fewer workers, or make room"
        )

    def again(self, lease: Lease) -> Lease:
        """See the ledger."""
        found = self._granted("again", lease)
        assert found is not None
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
            check_up(self._ray)
            try:
                return self._ray.get(method.remote(*arguments))
            except self._ray.exceptions.RayActorError as error:
                if time.monotonic() > until:
                    raise DataError(f"the master of the ingestion job is gone for {_MASTER_SECONDS:g} s") from error
                time.sleep(0.1)


def check_up(ray: Any) -> None:
    """Before Ray is asked for what it has: it would begin anew, know nothing of that, and mostly end the process.

    Raises:
        DataError: it was shut down.
    """
    if not ray.is_initialized():
        raise DataError("Ray was shut down while an ingestion job ran there; make a new client of the job")


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
        check_up(self._ray)
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
        if not self._ray.is_initialized():
            return
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
        check_up(self._ray)
        return super().waits() or bool(self._ray.wait([self._refs], timeout=0)[0])

    def get(self, seconds: float) -> Item:
        if super().ready:
            return super().get(0)
        check_up(self._ray)
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
