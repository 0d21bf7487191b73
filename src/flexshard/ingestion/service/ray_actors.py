"""What Ray runs of an ingestion job: workers that read splits, and the master that gives them out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from flexshard.ingestion.service.ledger import SplitLedger
from flexshard.ingestion.service.readings import Item, read_items
from flexshard.ingestion.service.spec import IngestionSpec
from flexshard.ingestion.splits import Split

__all__ = ["NAMESPACE", "NOBODY", "Caller", "Master", "MasterActor", "Worker"]

NAMESPACE = "flexshard-ingestion"
NOBODY = "nobody"  # instead of a lease, while no worker has started
_TOGETHER = 4  # batches that are sent as one: what Ray does for each object takes as long as making a batch


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


class Worker:
    """An actor that reads splits."""

    def __init__(self, spec: str, master: str, files: str, worker: int) -> None:
        import ray
        import torch

        torch.set_num_threads(1)
        self._reader = IngestionSpec.of_json(spec).reader()
        ray.get_actor(master, NAMESPACE).started.remote(files, worker)

    def pid(self) -> int:
        """Of the actor's process."""
        return os.getpid()

    def read(self, split: Split) -> Iterator[list[Item]]:
        """What comes of a split, some items at a time."""
        together: list[Item] = []
        for item in read_items(self._reader, split):
            together.append(item)
            if len(together) == _TOGETHER:
                yield together
                together = []
        yield together


class Master:
    """An actor that gives out splits, to workers that have started. Its ledger is gone when it dies, and clients attach
    again.
    """

    def __init__(self, workers: int, *, again: bool = False) -> None:
        self._first_workers, self._files, self._again = workers, "", again
        self._started: set[tuple[str, int]] = set()  # workers of a job of which files
        self._forget()

    def _forget(self) -> None:
        """Begin anew, without clients."""
        self._ledger, self._clients = SplitLedger(), dict[int, Caller]()
        self._workers = list(range(self._first_workers))

    def _is_of(self, files: str) -> None:
        """Of a job of these files."""
        self._files = files
        if self._again:  # started again by Ray: workers that have started will not say so once more
            self._started |= {(files, worker) for worker in self._workers}
            self._again = False
        self._admit()

    def _admit(self) -> None:
        """Let workers that have started be given splits."""
        for worker in self._workers:
            if (self._files, worker) in self._started:
                self._ledger.add_worker(worker)

    def pid(self) -> int:
        """Of the actor's process."""
        return os.getpid()

    def started(self, files: str, worker: int) -> None:
        """A worker of a job of these files is there."""
        self._started.add((files, worker))
        self._admit()

    def workers(self) -> list[int]:
        """All that there are to be."""
        return self._workers

    def waiting(self) -> list[int]:
        """Workers that have not started."""
        return [worker for worker in self._workers if (self._files, worker) not in self._started]

    def add_worker(self, worker: int) -> None:
        """One more, which is given splits once it has started."""
        if worker not in self._workers:
            self._workers.append(worker)
        self._admit()

    def retire_worker(self, worker: int) -> None:
        """See the ledger."""
        if worker in self._workers:
            self._workers.remove(worker)
        self._started.discard((self._files, worker))
        self._ledger.retire_worker(worker)

    def clients(self) -> int:
        """How many there are."""
        return len(self._clients)

    def come(self, client: Caller) -> list[tuple[str, list[int]]]:
        """A client comes, in place of an earlier one of its rank; which workers, of which files, are over since."""
        over = []
        if self._files not in ("", client.files):
            over.append((self._files, self._workers))
            self._forget()
        if any(other.world_size != client.world_size for other in self._clients.values()):
            for rank in [rank for rank in self._clients if rank >= client.world_size]:  # which will not come again
                del self._clients[rank]
                self._ledger.detach(rank)
        self._is_of(client.files)
        self._clients[client.rank] = client
        self._ledger.attach(client.rank, 0)
        return over

    def attach(self, client: Caller, splits: int, first: int) -> Literal["done", "other files", "other client"]:
        """It begins a pass; or why it may not any more."""
        if self._files not in ("", client.files):
            return "other files"
        if self._clients.get(client.rank, client) != client:
            return "other client"
        self._is_of(client.files)
        self._clients[client.rank] = client
        self._ledger.attach(client.rank, splits, first=first)
        return "done"

    def ask(self, what: str, client: Caller, argument: Any) -> Any:
        """One of the ledger's methods, in a list; None where the client is not known, or no longer its rank's."""
        if self._clients.get(client.rank) != client:
            return None
        if what == "detach":
            del self._clients[client.rank]
        if not self._ledger.workers and (what == "again" or (what == "lease" and self._ledger.has_work(client.rank))):
            return [NOBODY]
        return [getattr(self._ledger, what)(argument)]


class MasterActor(Master):
    """The same as Ray runs it."""

    def __init__(self, workers: int) -> None:
        import ray

        super().__init__(workers, again=ray.get_runtime_context().was_current_actor_reconstructed)
