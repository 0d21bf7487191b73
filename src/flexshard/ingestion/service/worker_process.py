"""The main program that workers are forked from, and theirs: a reader comes first, then split after split."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import socket
import sys
import traceback
import warnings
from typing import Any

import numpy as np
import torch

from flexshard.ingestion.service.channel import Channel
from flexshard.ingestion.service.fork_server import Surroundings
from flexshard.ingestion.service.readings import read_items

__all__ = ["main"]

_GONE = (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt)


def main(handle: int, on_interrupt: Any) -> None:
    """Fork a worker for every connection that comes, and tell how they ended, until nobody asks.

    Args:
        handle: of a socket, over which they ask.
        on_interrupt: what workers do where the terminal interrupts them.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # endings are asked for
    control = socket.socket(fileno=handle)
    channel = Channel(control, share=False)
    gc.collect()
    gc.freeze()  # what collecting touches is no longer in common
    print(end="", flush=True)  # or every worker would print it again
    with contextlib.suppress(*_GONE):
        channel.send(None)  # ready
        while True:
            asked: Surroundings | int = channel.receive()
            if isinstance(asked, int):
                pid, status = os.waitpid(asked, os.WNOHANG)
                channel.send(os.waitstatus_to_exitcode(status) if pid else None)
                continue
            _, (folder,), _, _ = socket.recv_fds(control, 1, 1)
            answer, connection = _forked(control, folder, asked, on_interrupt)
            os.close(folder)
            channel.send(answer)
            if connection is not None:
                with connection:
                    socket.send_fds(control, [b"f"], [connection.fileno()])


def _forked(
    control: socket.socket, folder: int, surroundings: Surroundings, on_interrupt: Any
) -> tuple[int | OSError, socket.socket | None]:
    """A worker's number and the way to it, or why there is none."""
    try:
        ours, theirs = socket.socketpair()
        with theirs:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Arrow's allocator has a thread, and sees to it
                pid = os.fork()
            if not pid:
                ours.close()
                control.close()
                signal.signal(signal.SIGINT, on_interrupt)
                _run(theirs, folder, surroundings)
        return pid, ours
    except OSError as error:
        return error, None


def _run(connection: socket.socket, folder: int, surroundings: Surroundings) -> None:
    """A worker, which never returns."""
    code = 1
    try:
        environment, sys.path[:], processors = surroundings
        os.environ.clear()
        os.environ.update(environment)
        os.sched_setaffinity(0, processors)
        os.fchdir(folder)
        os.close(folder)
        np.random.seed()  # noqa: NPY002 - what others draw from it is not drawn alike by all workers
        torch.set_num_threads(1)  # there is a worker per processor
        _serve(Channel(connection))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            print(end="", flush=True)
            print(end="", flush=True, file=sys.stderr)
        finally:
            os._exit(code)


def _serve(connection: Channel) -> None:
    """Who holds the other end, until it is closed."""
    with contextlib.suppress(*_GONE):
        reader = pickle.loads(connection.receive())
        connection.send(None)  # ready
        while True:
            for item in read_items(reader, connection.receive()):
                connection.send(item)
