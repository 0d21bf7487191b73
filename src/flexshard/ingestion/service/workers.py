"""Who reads splits: threads of this process, or processes of this machine, which may die without harm."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import threading
import time
from typing import Protocol

from flexshard.ingestion.reader import SessionReader
from flexshard.ingestion.service.channel import Channel
from flexshard.ingestion.service.fork_server import ForkedProcess, ForkServer, shared_fork_server
from flexshard.ingestion.service.readings import Done, Failed, Item, Lost, Reading, read_items
from flexshard.ingestion.splits import Split

__all__ = ["ProcessPool", "ThreadPool", "WorkerPool"]


_START_SECONDS = 600.0  # of which a large dataset of many sessions takes some to send
_JOIN_SECONDS = 30.0
_PAUSE_SECONDS, _LONGEST_PAUSE = 0.1, 6  # before a worker starts again; doubled so often
_STARTS = 10  # a worker that ends so often before it can read never will


class WorkerPool(Protocol):
    """Workers, by number."""

    @property
    def workers(self) -> list[int]:
        """All that there are."""

    def start(self, worker: int, split: Split) -> Reading:
        """Let a worker read a split, after those that it was given before."""

    def quiet_seconds(self, worker: int) -> float:
        """For how long a worker that was given work has given nothing; 0 while it starts."""

    def restart(self, worker: int) -> None:
        """End a worker that does not answer, and start it again."""

    def add(self) -> int:
        """One worker more; its number."""

    def retire(self, worker: int) -> None:
        """A worker less, once it has read what it was given."""

    def close(self) -> None:
        """End all."""


class ThreadPool:
    """Threads of this process: nothing to start, and what they hold is held once; they share its interpreter."""

    def __init__(self, reader: SessionReader, workers: int) -> None:
        self._reader = pickle.dumps(reader)
        self._inboxes: dict[int, queue.SimpleQueue[tuple[Split, Reading] | None]] = {}
        self._heard: dict[int, float] = {}
        self._threads: list[threading.Thread] = []
        self._numbers = 0
        for _ in range(workers):
            self.add()

    @property
    def workers(self) -> list[int]:
        """See the protocol."""
        return list(self._inboxes)

    def start(self, worker: int, split: Split) -> Reading:
        """See the protocol."""
        reading = Reading()
        self._inboxes[worker].put((split, reading))
        return reading

    def quiet_seconds(self, worker: int) -> float:
        """See the protocol."""
        return time.monotonic() - self._heard[worker]

    def restart(self, worker: int) -> None:
        """A thread cannot be ended: its place is taken by another one, and what it may still read is not waited for."""
        if worker in self._inboxes:
            self._inboxes[worker].put(None)
            self._run(worker)

    def add(self) -> int:
        """See the protocol."""
        self._numbers += 1
        self._run(self._numbers - 1)
        return self._numbers - 1

    def retire(self, worker: int) -> None:
        """See the protocol."""
        self._inboxes.pop(worker).put(None)

    def close(self) -> None:
        """See the protocol."""
        for worker in list(self._inboxes):
            self.retire(worker)
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)  # what runs at the end of the interpreter would end it badly

    def _run(self, worker: int) -> None:
        inbox: queue.SimpleQueue[tuple[Split, Reading] | None] = queue.SimpleQueue()
        self._inboxes[worker], self._heard[worker] = inbox, time.monotonic()
        reader = pickle.loads(self._reader)

        def work() -> None:
            while (task := inbox.get()) is not None:
                if task[1].is_cancelled():
                    continue
                self._heard[worker] = time.monotonic()
                try:
                    for item in read_items(reader, task[0]):
                        self._heard[worker] = time.monotonic()
                        task[1].put(item)
                        if task[1].is_cancelled():
                            break
                except Exception as error:
                    task[1].put(Lost(f"worker {worker} failed: {type(error).__name__}: {error}"))

        thread = threading.Thread(target=work, name=f"flexshard-ingest-{worker}", daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        thread.start()


class _Process:
    """One process, and the thread that talks to it."""

    def __init__(self, worker: int, reader: bytes, server: ForkServer) -> None:
        self._worker, self._reader, self._server = worker, reader, server
        self._tasks: queue.SimpleQueue[tuple[Split, Reading] | None] = queue.SimpleQueue()
        self._waiting: list[Reading] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._broken: Failed | None = None
        self._starts = 0  # since it was last ready
        self._lost = 0  # since it last gave anything
        self.is_ready, self.heard = False, time.monotonic()
        self._process: ForkedProcess | None = None
        self._connection: Channel | None = None
        self._thread = threading.Thread(target=self._run, name=f"flexshard-ingest-{worker}", daemon=True)
        self._thread.start()

    def start(self, split: Split) -> Reading:
        reading = Reading()
        with self._lock:
            if self._broken is not None:
                reading.put(self._broken)
            self._waiting.append(reading)
            self._tasks.put((split, reading))
        return reading

    @property
    def pid(self) -> int:
        """Of one that is ready."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        with self._lock:
            if self._process is not None and self._connection is not None:
                self._process.kill()
                self._connection.end()  # a process that was forked from this one may hold the other end

    def retire(self) -> None:
        self._tasks.put(None)

    def close(self) -> None:
        with self._lock:  # one that is being started sees it
            self._closed.set()
        self._tasks.put(None)
        self.kill()

    def join(self) -> None:
        self._thread.join(_JOIN_SECONDS)  # what makes tensors at the end of the interpreter would end it badly

    def _launch(self) -> tuple[ForkedProcess, Channel] | None:
        """A process that was sent its reader, and the way to it; None where there can be none any more."""
        self.is_ready, self.heard = False, time.monotonic()
        self._starts += 1
        try:
            process, connected = self._server.fork(lambda: not self._closed.is_set())
        except OSError as error:
            self._end(f"worker {self._worker} cannot be started: {error}")
            return None
        connection = Channel(connected)
        with self._lock:
            self._process, self._connection = process, connection
            if self._closed.is_set():
                process.kill()
        with contextlib.suppress(OSError):  # if it is dead already, that shows with the first split
            connection.send(self._reader)
        return process, connection

    def _end(self, why: str) -> None:
        """Nothing more will be read here."""
        self._broken = Failed(why, changed=False)
        self._lose(why)

    def _run(self) -> None:
        try:
            launched = self._launch()
            while launched is not None:
                process, connection = launched
                with contextlib.closing(connection), contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
                    self._serve(connection)
                process.kill()  # if it has not ended
                code = process.wait()
                if self._closed.is_set():
                    return
                self._lose(f"worker {self._worker} (process {process.pid}) ended{_ending(code)}")
                self.is_ready = False
                # What ends one worker after another, such as a lack of memory, may pass.
                if self._closed.wait(_PAUSE_SECONDS * (2**self._lost - 1)):
                    return
                self._lost = min(self._lost + 1, _LONGEST_PAUSE)
                launched = self._launch()
        except Exception as error:  # who waits would wait for ever
            self._end(f"what worker {self._worker} sent cannot be taken: {type(error).__name__}: {error}")
            self.kill()

    def _serve(self, connection: Channel) -> None:
        """Let it read what comes, until nothing more will."""
        while (task := self._tasks.get()) is not None:
            if task[1].is_cancelled():
                with self._lock:
                    self._waiting.remove(task[1])
                continue
            if not self.is_ready:
                connection.receive()  # it has its reader
                self.is_ready, self._starts = True, 0
            self.heard = time.monotonic()
            connection.send(task[0])
            while True:
                item = connection.receive()
                self.heard, self._lost = time.monotonic(), 0
                if isinstance(item, Done | Failed):
                    break
                task[1].put(item)
            with self._lock:
                self._waiting.remove(task[1])
            task[1].put(item)
        self._closed.set()

    def _message(self, ending: str) -> Item:
        if self._starts < _STARTS:
            return Lost(ending, began=self.is_ready)
        return Failed(f"{ending}, {self._starts} times in a row before it had begun", changed=False)

    def _lose(self, ending: str) -> None:
        """All that it was given is lost, not only what it read."""
        with self._lock:
            while not self._tasks.empty():
                if self._tasks.get() is None:
                    self._closed.set()
            for place, reading in enumerate(self._waiting):
                reading.put(self._message(ending) if place == 0 else Lost(ending, began=False))
            self._waiting.clear()


class ProcessPool:
    """Processes of this machine. One that dies is started again, and what it was reading is lost."""

    def __init__(self, reader: SessionReader, workers: int) -> None:
        self._reader = pickle.dumps(reader)
        self._processes: dict[int, _Process] = {}
        self._retired: dict[int, _Process] = {}
        self._numbers = 0
        self._server, self._acquired, self._owner = shared_fork_server, shared_fork_server.acquire(), os.getpid()
        for _ in range(workers):
            self.add()

    @property
    def workers(self) -> list[int]:
        """See the protocol."""
        return list(self._processes)

    @property
    def pids(self) -> list[int]:
        """Of the processes that have begun to read."""
        return [process.pid for process in self._processes.values() if process.is_ready]

    def start(self, worker: int, split: Split) -> Reading:
        """See the protocol."""
        return self._processes[worker].start(split)

    def quiet_seconds(self, worker: int) -> float:
        """See the protocol."""
        process = self._processes.get(worker) or self._retired[worker]
        quiet = time.monotonic() - process.heard
        return quiet if process.is_ready or quiet > _START_SECONDS else 0.0

    def restart(self, worker: int) -> None:
        """See the protocol."""
        (self._processes.get(worker) or self._retired[worker]).kill()

    def add(self) -> int:
        """See the protocol."""
        self._numbers += 1
        self._processes[self._numbers - 1] = _Process(self._numbers - 1, self._reader, self._server)
        return self._numbers - 1

    def retire(self, worker: int) -> None:
        """See the protocol."""
        self._retired[worker] = self._processes.pop(worker)
        self._retired[worker].retire()

    def close(self) -> None:
        """See the protocol."""
        if os.getpid() != self._owner:
            return  # workers are of the process that this one was forked from
        processes = [*self._processes.values(), *self._retired.values()]
        for process in processes:
            process.close()
        for process in processes:
            process.join()
        self._processes.clear()
        self._server.release(self._acquired)


def _ending(code: int | None) -> str:
    if code is None:
        return ""
    if code >= 0:
        return f" with status {code}"
    names = {one.value: one.name for one in signal.Signals}
    return f" with signal {names.get(-code, -code)}" + (", as where memory runs out" if code == -signal.SIGKILL else "")
