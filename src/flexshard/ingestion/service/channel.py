"""Objects between two processes over a socket; large arrays go through memory that both see, where there is such."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Channel"]

_COUNT = struct.Struct("!Q")
_BUFFER_BYTES = 4 << 20  # so that a batch is on its way while the next is made
_SHARED_BYTES = 1 << 16  # from which on sharing takes less time than sending
_ALIGNMENT = 64
_IN_LINE, _SHARED = b"i", b"s"


class Channel:
    """One end of a connected socket (of a Unix domain, where arrays are to be shared)."""

    def __init__(self, connected: socket.socket, *, share: bool = True) -> None:
        self._socket = connected
        self._shares = share and hasattr(os, "memfd_create") and hasattr(socket, "send_fds")
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def send(self, item: Any) -> None:
        """Send an object; raises OSError where nobody listens.

        Arrays are written once, to memory without a name that is gone with the last process that has it.
        """
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(item, protocol=5, buffer_callback=buffers.append)
        parts = [buffer.raw() for buffer in buffers]
        sizes = [len(body), *(part.nbytes for part in parts)]
        header = _COUNT.pack(len(sizes)) + b"".join(map(_COUNT.pack, sizes)) + body
        if not self._shares or sum(sizes[1:]) < _SHARED_BYTES:
            self._socket.sendall(_IN_LINE + header)
            for part in parts:
                self._socket.sendall(part)
            return
        handle = os.memfd_create("flexshard-batch")
        try:
            places = _places(sizes[1:])
            os.ftruncate(handle, places[-1])
            for part, place in zip(parts, places, strict=False):
                _write(handle, part, place)
            socket.send_fds(self._socket, [_SHARED], [handle])
            self._socket.sendall(header)
        finally:
            os.close(handle)

    def receive(self) -> Any:
        """The next object, whose arrays may be written to; EOFError where none comes, or only part of one."""
        handles: list[int] = []
        try:
            if self._shares:
                kind, handles, _, _ = socket.recv_fds(self._socket, 1, 1)
            else:
                kind = bytes(self._exactly(1))
            if not kind:
                raise EOFError
            (number,) = _COUNT.unpack(self._exactly(_COUNT.size))
            header = self._exactly(_COUNT.size * number)
            sizes = [_COUNT.unpack_from(header, _COUNT.size * place)[0] for place in range(number)]
            body = self._exactly(sizes[0])
            if kind == _IN_LINE:
                return pickle.loads(body, buffers=[self._exactly(size) for size in sizes[1:]])
            places = _places(sizes[1:])
            # All pages at once: one by one they would take as long as copying.
            shared = memoryview(mmap.mmap(handles[0], places[-1], flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
            arrays = [shared[place : place + size] for place, size in zip(places, sizes[1:], strict=False)]
            return pickle.loads(body, buffers=arrays)
        finally:
            for handle in handles:
                os.close(handle)

    def end(self) -> None:
        """Let whoever waits at either end wait no more."""
        with contextlib.suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)

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


def _places(sizes: Sequence[int]) -> list[int]:
    """Where arrays start in memory that is shared, and the end of all."""
    places = [0]
    for size in sizes:
        places.append(-(-(places[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
    return places


def _write(handle: int, part: memoryview, place: int) -> None:
    while part.nbytes:
        count = os.pwrite(handle, part, place)
        part, place = part[count:], place + count
