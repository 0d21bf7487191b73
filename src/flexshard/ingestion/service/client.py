"""A trainer's end of an ingestion job: batches in order, from workers that may die (DPP paper, sections 4.1.2, 4.3)."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol
from uuid import uuid4

import numpy as np

from flexshard._internal import check_int
from flexshard.errors import ChangedDataError, DataError
from flexshard.ingestion.batch import SessionBatch
from flexshard.ingestion.reader import SessionReader
from flexshard.ingestion.service.ledger import Lease, SplitLedger
from flexshard.ingestion.service.packing import PackedBatch
from flexshard.ingestion.service.readings import Failed, Item, Lost, Reading, Unreadable
from flexshard.ingestion.service.sizing import adjusted_workers
from flexshard.ingestion.service.spec import IngestionSpec
from flexshard.ingestion.service.workers import ProcessPool, ThreadPool, WorkerPool
from flexshard.ingestion.splits import Split

__all__ = ["BACKENDS", "IngestionClient", "IngestionStats"]

_ADJUST_SECONDS = 5.0  # longer than a worker takes to start
_ATTEMPTS = 20  # a split that ended so many workers, without a batch in between, is at fault itself


@dataclass
class IngestionStats:
    """What a client saw, of all passes.

    Attributes:
        batches, samples, bytes: that it returned.
        splits, splits_taken: of the pass.
        stall_seconds: that it waited for workers, and
        seconds: in all, between the first batch that was asked for and the last one returned.
        restarts: workers that were lost or did not answer.
        skipped_batches: that could not be read; others stood in for them.
        buffered: batches that waited here when the last one was returned.
    """

    batches: int = 0
    samples: int = 0
    bytes: int = 0
    splits: int = 0
    splits_taken: int = 0
    stall_seconds: float = 0.0
    seconds: float = 0.0
    restarts: int = 0
    skipped_batches: int = 0
    buffered: int = 0


class Master(Protocol):
    """Who gives out splits: :class:`SplitLedger`, here or in a process of its own."""

    def attach(self, client: int, splits: int) -> None: ...

    def lease(self, client: int) -> Lease | None: ...

    def finish(self, lease: Lease) -> None: ...

    def again(self, lease: Lease) -> Lease: ...

    def detach(self, client: int) -> None: ...

    def add_worker(self, worker: int) -> None: ...

    def retire_worker(self, worker: int) -> None: ...


@dataclass
class _Active:
    """A split that is being read: its lease, what comes of it, and how many of its batches were taken."""

    lease: Lease
    reading: Reading
    taken: int = 0
    attempts: int = 1
    kept: deque[Item] = field(default_factory=deque)  # of readings that were lost

    def get(self, seconds: float) -> Item:
        """What comes next; TimeoutError where nothing does for so long."""
        return self.kept.popleft() if self.kept else self.reading.get(seconds)

    @property
    def ready(self) -> int:
        """Batches that wait."""
        return len(self.kept) + self.reading.ready


class IngestionClient:
    """Batches of one rank of an ingestion job, in order, made by workers ahead of the trainer.

    The same batches as ``spec.reader(rank, world_size)`` gives, in the same order, whatever dies: a batch is a
    function of the dataset, the seed, the epoch and its number, workers keep nothing, and what one lost is read again.
    ``state_dict`` and ``load_state_dict`` are the reader's, and their states are each other's.

    Use it as a context manager, or call :meth:`close`: workers run until then.
    """

    def __init__(
        self,
        spec: IngestionSpec,
        *,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 2,
        backend: str = "processes",
        ahead: int = 2,
        most_workers: int | None = None,
        hang_seconds: float = 300.0,
        job: str | None = None,
    ) -> None:
        """Start workers, or with Ray find them.

        Args:
            spec: the job.
            rank, world_size: of the job that trains.
            workers: of this client; on Ray, of all clients of the job: the first one's number counts, with a warning
                to others that ask for another.
            backend: "processes" or "threads" of this machine, or "ray": actors on the cluster that Ray is connected to,
                or else on this machine.
            job: on Ray, the name by which ranks find the same workers; by default this client has its own.
            most_workers: up to which, ``workers`` or more, workers are added where the trainer waits for them, and
                taken away where it does not (:func:`adjusted_workers`); by default there are ``workers``, always.
            ahead: splits that are read, or wait, beyond one per worker and lane; bounds memory.
            hang_seconds: after which a worker that gives nothing is taken to hang, and started again.

        Raises:
            DataError: as :meth:`IngestionSpec.reader`; or another backend.
        """
        if backend not in BACKENDS:
            raise DataError(f"the backend is one of {', '.join(BACKENDS)}, found {backend!r}")
        self.spec = spec
        self.reader = spec.reader(rank, world_size)
        self.job, self.is_shared = job, job is not None
        digest = hashlib.blake2b(spec.model_dump_json().encode(), digest_size=8).hexdigest()
        self.job_name = f"{job or f'{os.getpid()}-{id(self)}'}-{digest}"  # of other jobs are other workers
        self.stats = IngestionStats()
        self.rank, self._ahead = rank, check_int(ahead, "ahead", DataError, least=0)
        if not (isinstance(hang_seconds, int | float) and 0 < hang_seconds <= threading.TIMEOUT_MAX):
            raise DataError(f"hang_seconds is a number above 0, found {hang_seconds!r}")
        self._hang_seconds, self._most_workers = hang_seconds, None
        check_int(workers, "workers", DataError)
        if most_workers is not None:
            self._most_workers = check_int(most_workers, "most_workers", DataError, least=workers)
        self._seen = (0.0, 0.0)  # seconds and stalls when workers were adjusted last
        self._last: SessionBatch | None = None
        self._counted, self._passes, self._closed = 0.0, 0, False
        self._pool, self._master = BACKENDS[backend](self, workers)
        self._active: dict[int, _Active] = {}

    def __enter__(self) -> IngestionClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        if not self._closed:
            self._closed = True
            self._forget()
            with suppress(DataError):  # who is gone has let go
                self._master.detach(self.rank)
            self._pool.close()

    @property
    def workers(self) -> list[int]:
        """Numbers of those that there are."""
        return self._pool.workers

    def resize(self, workers: int) -> None:
        """Run so many workers from now on; those that go read what they have begun.

        Raises:
            DataError: fewer than one.
        """
        check_int(workers, "workers", DataError)
        while len(self._pool.workers) < workers:
            self._master.add_worker(self._pool.add())
        for worker in self._pool.workers[workers:]:
            self._master.retire_worker(worker)
            self._pool.retire(worker)

    # As the reader's.

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        return len(self.reader)

    def set_epoch(self, epoch: int) -> None:
        """As :meth:`SessionReader.set_epoch`."""
        if epoch != self.reader.epoch:
            self._last = None
        self.reader.set_epoch(epoch)

    def state_dict(self, batch: SessionBatch | None = None) -> dict[str, Any]:
        """Where training is, after ``batch``, or after the last batch that was returned; see the reader's."""
        return self.reader.state_dict(self._last if batch is None else batch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there; see the reader's."""
        self._last = None
        self.reader.load_state_dict(state)

    def __iter__(self) -> Iterator[SessionBatch]:
        """Batches of the epoch.

        Raises:
            DataError: a batch that cannot be read, where the job does not skip those; a split that ends every worker
                that reads it; workers that do not answer.
            ChangedDataError: files that are not what they were.
        """
        self._check_open()
        epoch, consumed = self.reader.begin_pass()
        splits = self.reader.splits(epoch, consumed)
        steps = sum(len(split.steps) for split in splits)
        split_of: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(steps, np.int64)
        for number, split in enumerate(splits):
            split_of[split.steps.start : split.steps.stop : split.steps.step] = number
        self._forget()
        self._master.attach(self.rank, len(splits))
        self.stats.splits, self.stats.splits_taken = len(splits), 0
        self._passes += 1
        mine, began = self._passes, time.perf_counter()
        missing: list[Unreadable] = []  # before the first that can be read
        good: PackedBatch | None = None
        for number in split_of.tolist():
            self._check_open()
            if mine != self._passes:
                raise DataError("another pass over this client has begun; a client is iterated over once at a time")
            start = time.perf_counter()
            found = self._next_of(splits, number)
            self.stats.stall_seconds += time.perf_counter() - start
            if isinstance(found, PackedBatch):
                if self.spec.bad_batches == "skip":
                    good = replace(found, arrays=tuple(array.copy() for array in found.arrays))
                    for other in missing:
                        yield self._returned(_standing_in(good, other), began)
                    missing.clear()
                yield self._returned(found.batch, began)
            elif self.spec.bad_batches == "raise":
                raise DataError(found.message)
            else:
                self.stats.skipped_batches += 1
                if good is None:
                    missing.append(found)
                else:
                    yield self._returned(_standing_in(good, found), began)
        if missing:
            raise DataError(
                f"rank {self.rank}: none of its {len(missing)} batches up to the end of the epoch can be read, so"
                f" that there is none to come in their place: {missing[0].message}"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise DataError("this client of an ingestion job is closed; make another one")

    def _returned(self, batch: SessionBatch, began: float) -> SessionBatch:
        self._last = batch
        self.stats.batches += 1
        self.stats.samples += batch.phases.samples
        self.stats.bytes += batch.phases.bytes_sent
        self.stats.buffered = sum(active.ready for active in self._active.values())
        now = time.perf_counter()
        self.stats.seconds += now - max(began, self._counted)
        self._counted = now
        if self._most_workers is not None:
            self._adjust(self._most_workers)
        return batch

    def _adjust(self, most: int) -> None:
        """More or fewer workers, by what was seen since the last time."""
        seconds, stalls = self.stats.seconds - self._seen[0], self.stats.stall_seconds - self._seen[1]
        if seconds < _ADJUST_SECONDS:
            return
        self._seen = self.stats.seconds, self.stats.stall_seconds
        waiting = sum(1 for active in self._active.values() if active.kept or active.reading.waits())
        share = waiting / max(1, len(self._active))
        self.resize(adjusted_workers(len(self._pool.workers), stalls / seconds, share, most=most))

    def _forget(self) -> None:
        """Let go of what is being read."""
        for active in self._active.values():
            active.reading.cancel()
        self._active.clear()

    # Splits and who reads them.

    def _next_of(self, splits: list[Split], number: int) -> PackedBatch | Unreadable:
        """The next batch of a split; splits after it are begun."""
        while True:
            self._look_after(splits)
            active = self._active[number]
            try:
                item = active.get(self._hang_seconds)
            except TimeoutError:
                if self._pool.quiet_seconds(active.lease.worker) < self._hang_seconds:
                    continue  # it starts, or reads something else before
                self._pool.restart(active.lease.worker)
                active.reading.put(Lost(f"worker {active.lease.worker} gave nothing for {self._hang_seconds:g} s"))
                continue
            if isinstance(item, Failed):
                raise (ChangedDataError if item.changed else DataError)(item.message)
            if isinstance(item, PackedBatch | Unreadable):
                active.taken += 1
                active.attempts = 1
                if active.taken == len(splits[number].steps):
                    self._master.finish(active.lease)
                    self.stats.splits_taken += 1
                    del self._active[number]
                return item

    def _look_after(self, splits: list[Split]) -> None:
        """Begin splits, as many as there may be, and again those whose worker is lost."""
        for number, active in self._active.items():
            if active.reading.lost is not None:
                self._begin_again(splits[number], active, active.reading.lost)
        lanes = max(1, splits[0].steps.step) if splits else 1
        while len(self._active) < lanes + len(self._pool.workers) + self._ahead:
            lease = self._master.lease(self.rank)
            if lease is None:
                return
            self._active[lease.split] = _Active(lease, self._pool.start(lease.worker, splits[lease.split]))

    def _begin_again(self, split: Split, active: _Active, why: Lost) -> None:
        """Read what is left of a split once more; what came of it before is kept."""
        before = len(active.kept)
        while active.reading.ready:
            item = active.reading.get(0)
            if not isinstance(item, Lost):
                active.kept.append(item)
        came = active.taken + len(active.kept)
        if len(active.kept) > before:
            active.attempts = 1
        if active.attempts >= _ATTEMPTS:
            raise DataError(
                f"{why.message}; reading batches {_batches(split, came)} of epoch {split.epoch} has ended"
                f" {active.attempts} workers. Give workers more memory, or make batches and windows smaller"
            )
        active.attempts += why.began
        self.stats.restarts += why.began
        active.reading.cancel()
        active.lease = lease = self._master.again(active.lease)
        if came < len(split.steps):
            active.reading = self._pool.start(lease.worker, replace(split, steps=split.steps[came:]))
        else:
            active.reading = Reading()


def _here(pool: Callable[[SessionReader, int], WorkerPool], client: IngestionClient, workers: int) -> Made:
    """Workers of this client alone, and a master in its own process."""
    made, ledger = pool(client.reader, workers), SplitLedger()
    for worker in made.workers:
        ledger.add_worker(worker)
    return made, ledger


def _on_ray(client: IngestionClient, workers: int) -> Made:
    from flexshard.ingestion.service import ray_actors, ray_backend

    files = str(client.reader.state_dict()["dataset"])
    caller = ray_actors.Caller(client.rank, client.reader.world_size, uuid4().hex, files, client.job or client.job_name)
    return ray_backend.connected(client.spec, caller, client.job_name, workers, shared=client.is_shared)


Made = tuple[WorkerPool, Master]
BACKENDS: dict[str, Callable[[IngestionClient, int], Made]] = {
    "threads": partial(_here, ThreadPool),
    "processes": partial(_here, ProcessPool),
    "ray": _on_ray,
}


def _batches(split: Split, first: int) -> str:
    """Numbers of those from the split's batch ``first`` on."""
    numbers = [split.consumed + split.steps[place] * split.world_size + split.rank for place in (first, -1)]
    return f"{numbers[0]:,} to {numbers[1]:,}"


def _standing_in(good: PackedBatch, bad: Unreadable) -> SessionBatch:
    """A good batch in the place of one that cannot be read, all of it repeated."""
    batch = replace(good, arrays=tuple(array.copy() for array in good.arrays)).batch
    return replace(batch, position=replace(bad.position, repeated=int(batch.features.stride())))
