"""The main program of a worker: a reader comes first, then split after split; batches go back."""

from __future__ import annotations

import contextlib
import pickle
import socket
import sys

import torch

from flexshard.ingestion.service.channel import Channel
from flexshard.ingestion.service.readings import read_items

__all__ = ["main"]


def main(handle: int) -> None:
    """Serve who holds the other end of a socket, until it is closed."""
    torch.set_num_threads(1)  # there is a worker per processor
    connection = Channel(socket.socket(fileno=handle))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        reader = pickle.loads(connection.receive())
        connection.send(None)  # ready
        while True:
            for item in read_items(reader, connection.receive()):
                connection.send(item)


if __name__ == "__main__":
    main(int(sys.argv[1]))
