"""Items of an iterator made ahead of who takes them, in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

__all__ = ["read_ahead"]

T = TypeVar("T")


def read_ahead(items: Iterator[T], number: int) -> Iterator[T]:
    """The same items, up to ``number`` of them made before they are asked for; what making one raises is raised."""
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()
    room = threading.Semaphore(number)
    stopped = threading.Event()

    def make() -> None:
        try:
            while True:
                room.acquire()
                if stopped.is_set():
                    return
                try:
                    item = next(items)
                except StopIteration:
                    ready.put((None, None))
                    return
                ready.put((item, None))
        except BaseException as error:  # goes on where the items are taken
            ready.put((None, error))

    thread = threading.Thread(target=make, name="flexshard-read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            room.release()
            yield item
    finally:
        stopped.set()
        room.release()
        thread.join()
