"""Objects between two processes over a socket; arrays go as they are, without being copied into a message."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

import numpy as np

__all__ = ["Channel"]

_COUNT = struct.Struct("!Q")
_BUFFER_BYTES = 4 << 20  # so that a batch is on its way while the next is made


class Channel:
    """One end of a connected socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def send(self, item: Any) -> None:
        """Send an object, whose arrays are sent from where they lie; raises OSError where nobody listens."""
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(item, protocol=5, buffer_callback=buffers.append)
        parts = [buffer.raw() for buffer in buffers]
        sizes = [len(body), *(part.nbytes for part in parts)]
        self._socket.sendall(_COUNT.pack(len(sizes)) + b"".join(map(_COUNT.pack, sizes)) + body)
        for part in parts:
            self._socket.sendall(part)

    def receive(self) -> Any:
        """The next object; EOFError where there is none to come, in the middle of one as well."""
        (number,) = _COUNT.unpack(self._exactly(_COUNT.size))
        header = self._exactly(_COUNT.size * number)
        sizes = [_COUNT.unpack_from(header, _COUNT.size * place)[0] for place in range(number)]
        body, *parts = [self._exactly(size) for size in sizes]
        return pickle.loads(body, buffers=parts)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _exactly(self, size: int) -> memoryview:
        buffer = np.empty(size, np.uint8).data  # not set to zero first, as a bytearray is
        place = 0
        while place < size:
            count = self._socket.recv_into(buffer[place:])
            if not count:
                raise EOFError
            place += count
        return buffer
