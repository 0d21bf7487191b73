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
_POLL_SECONDS, _READY_SECONDS = 0.01, 0.1

Surroundings = tuple[dict[str, str], list[str]]  # the environment, and where modules are found


class _Server:
    """One such process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flexshard.ingestion.service.worker_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        self._socket, self._channel = ours, Channel(ours, share=False)
        self._lock = threading.Lock()
        self._is_ready = False

    def fork(self, connection: socket.socket, is_wanted: Callable[[], bool]) -> int:
        """The number of a process that serves the other end of a connection.

        Raises:
            EOFError, ConnectionError: this process is no more.
            OSError: the system has no room for one more; or it is no longer wanted.
        """
        while not self._imported():
            if not is_wanted():
                raise OSError("nobody waits for it any more")
        surroundings: Surroundings = dict(os.environ), [path for path in sys.path if path]
        folder = os.open(".", os.O_RDONLY)
        try:
            with self._lock:
                self._channel.send(surroundings)
                socket.send_fds(self._socket, [b"f"], [connection.fileno(), folder])
                answer = self._channel.receive()
        finally:
            os.close(folder)
        if isinstance(answer, OSError):
            raise answer
        return int(answer)

    def ending(self, pid: int) -> int | None:
        """How a process that was forked here has ended, as ``subprocess`` tells it; None while it has not.

        Raises:
            EOFError, ConnectionError: this process is no more.
        """
        with self._lock:
            self._channel.send(pid)
            answer: int | None = self._channel.receive()
        return answer

    def _imported(self) -> bool:
        """Whether all is imported, after a moment at most."""
        with self._lock:
            if not self._is_ready and select.select([self._socket], [], [], _READY_SECONDS)[0]:
                self._channel.receive()
                self._is_ready = True
            return self._is_ready

    def close(self) -> None:
        """End it; what was forked from it goes on."""
        self._channel.close()
        self.process.kill()
        self.process.wait()


class ForkedProcess:
    """A process that was forked from a server."""

    def __init__(self, pid: int, server: _Server) -> None:
        self.pid, self._server = pid, server
        self._lock = threading.Lock()
        self._code: int | None = None

    def kill(self) -> None:
        """End it."""
        with self._lock, suppress(ProcessLookupError):
            if self._code is None:  # until it was asked for its end, nobody else gets its number
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """How it ended, once it has."""
        while True:
            with self._lock:
                if self._code is None:
                    self._code = self._ending()
                if self._code is not None:
                    return self._code
            time.sleep(_POLL_SECONDS)

    def _ending(self) -> int | None:
        with suppress(EOFError, OSError):
            return self._server.ending(self.pid)
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            state = "X"
        return -signal.SIGKILL if state in "XZ" else None  # who could tell is no more; most likely both were killed


class ForkServer:
    """The process that workers of this process are forked from, while anybody uses it; another one where it died."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin as if nobody had used it."""
        self._lock = threading.Lock()
        self._users = 0
        self._server: _Server | None = None

    @contextmanager
    def used(self) -> Iterator[ForkServer]:
        """Until the last one has left, it stays."""
        with self._lock:
            self._users += 1
        try:
            yield self
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and self._server is not None:
                    self._server.close()
                    self._server = None

    def fork(self, connection: socket.socket, is_wanted: Callable[[], bool]) -> ForkedProcess:
        """A worker that serves the other end of a connection; waits until what it needs is imported.

        Raises:
            OSError: it cannot be started; or it was no longer wanted.
        """
        for _ in range(_TRIES):
            server = self._running()
            with suppress(EOFError, ConnectionError):
                return ForkedProcess(server.fork(connection, is_wanted), server)
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
# A process that is forked from this one has its own; its copy of the connection would take what is meant for the other.
os.register_at_fork(after_in_child=shared_fork_server.forget)
