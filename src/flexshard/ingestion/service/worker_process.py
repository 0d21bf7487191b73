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

import numpy as np
import torch

from flexshard.ingestion.service.channel import Channel
from flexshard.ingestion.service.fork_server import Surroundings
from flexshard.ingestion.service.readings import read_items

__all__ = ["main"]

_GONE = (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt)


def main(handle: int) -> None:
    """Fork a worker for every connection that comes, and tell how they ended, until nobody asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks decides
    control = socket.socket(fileno=handle)
    channel = Channel(control, share=False)
    gc.collect()
    gc.freeze()  # what collecting touches is no longer in common
    with contextlib.suppress(*_GONE):
        channel.send(None)  # ready
        while True:
            asked: Surroundings | int = channel.receive()
            if isinstance(asked, int):
                pid, status = os.waitpid(asked, os.WNOHANG)
                channel.send(os.waitstatus_to_exitcode(status) if pid else None)
                continue
            _, (connection, folder), _, _ = socket.recv_fds(control, 1, 2)
            try:
                pid = os.fork()
            except OSError as error:
                channel.send(error)
            else:
                if not pid:
                    channel.close()
                    _run(connection, folder, asked)
                channel.send(pid)
            os.close(connection)
            os.close(folder)


def _run(connection: int, folder: int, surroundings: Surroundings) -> None:
    """A worker, which never returns."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        environment, sys.path[:] = surroundings
        os.environ.clear()
        os.environ.update(environment)
        os.fchdir(folder)
        os.close(folder)
        np.random.seed()  # noqa: NPY002 - what others draw from it is not drawn alike by all workers
        torch.set_num_threads(1)  # there is a worker per processor
        _serve(Channel(socket.socket(fileno=connection)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(connection: Channel) -> None:
    """Who holds the other end, until it is closed."""
    with contextlib.suppress(*_GONE):
        reader = pickle.loads(connection.receive())
        connection.send(None)  # ready
        while True:
            for item in read_items(reader, connection.receive()):
                connection.send(item)


if __name__ == "__main__":
    main(int(sys.argv[1]))
