"""Where workers come from: a process that has imported what they need, and is forked for each.

A worker starts at once instead of after seconds of imports, and has in common with the others what was imported.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flexshard.ingestion.service.channel import Channel

__all__ = ["ForkServer", "ForkedProcess", "Surroundings", "shared_fork_server"]

_TRIES = 3
_IMPORT_SECONDS = 600.0
_POLL_SECONDS, _READY_SECONDS = 0.01, 0.05

Surroundings = tuple[dict[str, str], list[str], set[int]]  # environment, where modules are found, processors

_PROGRAM = """
import signal
before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks decides
from flexshard.ingestion.service.worker_process import main
main({}, before)
"""


class _Server:
    """One such process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        self._socket, self._channel = ours, Channel(ours, share=False)
        self._lock = threading.Lock()
        self._is_ready = self._is_closed = False
        self._deadline = time.monotonic() + _IMPORT_SECONDS

    def fork(self) -> tuple[int, socket.socket]:
        """The number of a process that was forked, and a connection to it; once all is imported.

        Raises:
            EOFError, OSError: this process is no more.
            BlockingIOError: the system has no room for one more.
        """
        surroundings: Surroundings = dict(os.environ), list(sys.path), os.sched_getaffinity(0)
        try:
            folder = os.open(".", os.O_PATH)
        except OSError as error:
            raise BlockingIOError(*error.args) from error
        try:
            with self._lock:
                self._check_open()
                self._channel.send(surroundings)
                socket.send_fds(self._socket, [b"f"], [folder])
                answer = self._channel.receive()
                if isinstance(answer, OSError):
                    raise BlockingIOError(*answer.args)
                # Made over there: a process that is forked from this one meanwhile has not the worker's end, too, which
                # would hide that the worker has ended.
                _, handles, _, _ = socket.recv_fds(self._socket, 1, 1)
                if not handles:
                    raise EOFError
                os.set_inheritable(handles[0], False)
        finally:
            os.close(folder)
        return int(answer), socket.socket(fileno=handles[0])

    def ending(self, pid: int) -> int | None:
        """How a process that was forked here has ended, as ``subprocess`` tells it; None while it has not.

        Raises:
            EOFError, OSError: this process is no more.
        """
        with self._lock:
            self._check_open()
            self._channel.send(pid)
            answer: int | None = self._channel.receive()
        return answer

    def imported(self) -> bool:
        """Whether all is imported.

        Raises:
            EOFError, OSError: this process is no more.
        """
        with self._lock:
            self._check_open()
            if not self._is_ready:
                if self.process.poll() is not None or time.monotonic() > self._deadline:
                    raise EOFError
                poll = select.poll()
                poll.register(self._socket, select.POLLIN)
                if poll.poll(0):
                    self._channel.receive()
                    self._is_ready = True
            return self._is_ready

    def _check_open(self) -> None:
        if self._is_closed:
            raise EOFError

    def close(self) -> None:
        """End it; what was forked from it goes on."""
        self.process.kill()
        self.process.wait()
        self._channel.end()  # whoever waits for an answer waits no more
        with self._lock:
            self._is_closed = True
            self._channel.close()

    def abandon(self) -> None:
        """In a process that was forked from its client: leave it to that."""
        self._channel.close()


class ForkedProcess:
    """A process that was forked from a server."""

    def __init__(self, pid: int, server: _Server) -> None:
        self.pid, self._server = pid, server
        self._began = _beginning(pid)  # its number may be another's once it has ended

    def kill(self) -> None:
        """End it."""
        if self._is_there():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int | None:
        """How it ended, once it has; None where who could tell is no more."""
        while True:
            try:
                code = self._server.ending(self.pid)
            except (EOFError, OSError):
                if not self._is_there():
                    return None
            else:
                if code is not None:
                    return code
            time.sleep(_POLL_SECONDS)

    def _is_there(self) -> bool:
        return self._began is not None and _beginning(self.pid) == self._began


def _beginning(pid: int) -> str | None:
    """When a process began, by the system's clock; None where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "XZ" else fields[19]


class ForkServer:
    """The process that workers of this process are forked from, while anybody uses it; another one where it died."""

    def __init__(self) -> None:
        self._server: _Server | None = None
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._users, self._process = 0, os.getpid()
        self._server = None

    def forked(self) -> None:
        """In a process that was forked from this one: the server is the other one's."""
        if self._server is not None:
            self._server.abandon()
        self._forget()

    def acquire(self) -> int:
        """Keep it from now on, until what is returned is given to :meth:`release`."""
        with self._lock:
            self._users += 1
        return self._process

    def release(self, acquired: int) -> None:
        """When the last user has gone, it ends."""
        if acquired != self._process:
            return  # of the process that this one was forked from
        with self._lock:
            self._users -= 1
            server = None if self._users else self._server
            if server is not None:
                self._server = None
        if server is not None:
            server.close()

    @contextmanager
    def used(self) -> Iterator[ForkServer]:
        """Meanwhile it stays."""
        acquired = self.acquire()
        try:
            yield self
        finally:
            self.release(acquired)

    def fork(self, is_wanted: Callable[[], bool]) -> tuple[ForkedProcess, socket.socket]:
        """A worker, and the connection that it serves; waits until what it needs is imported.

        Raises:
            OSError: it cannot be started; or it was no longer wanted.
        """
        for _ in range(_TRIES):
            server = self._running()
            try:
                while not server.imported():
                    if not is_wanted():
                        raise BlockingIOError("nobody waits for it any more")
                    time.sleep(_READY_SECONDS)
                pid, connection = server.fork()
                return ForkedProcess(pid, server), connection
            except BlockingIOError:
                raise
            except (EOFError, OSError):
                with self._lock:
                    if self._server is server:
                        self._server = None
                server.close()
        raise OSError(f"the process that workers are forked from ended {_TRIES} times; its messages are above")

    def _running(self) -> _Server:
        with self._lock:
            if not self._users:
                raise OSError("its pool was closed")
            if self._server is None:
                self._server = _Server()
            return self._server


shared_fork_server = ForkServer()
os.register_at_fork(after_in_child=shared_fork_server.forked)
