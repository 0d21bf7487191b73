"""What comes of a split that somebody reads: batches, those that cannot be read, and the end."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass

from flexshard.errors import ChangedDataError, DataError
from flexshard.ingestion.batch import BatchPosition
from flexshard.ingestion.reader import SessionReader
from flexshard.ingestion.service.packing import PackedBatch, pack
from flexshard.ingestion.splits import Split

__all__ = ["Done", "Failed", "Item", "Lost", "Reading", "Unreadable", "read_items"]


@dataclass(frozen=True)
class Unreadable:
    """A batch that cannot be read, where it stands, and why."""

    message: str
    position: BatchPosition


@dataclass(frozen=True)
class Failed:
    """A split that cannot be read at all, and why; ``changed`` where it is because files did."""

    message: str
    changed: bool


@dataclass(frozen=True)
class Lost:
    """A worker that is no longer there, or no longer answers; ``began`` if it had begun with the split."""

    message: str
    began: bool = True


@dataclass(frozen=True)
class Done:
    """The end of a split."""


Item = PackedBatch | Unreadable | Failed | Lost | Done


class Reading:
    """A split that a worker reads: what comes of it, in order."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.lost: Lost | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Nobody wants the rest."""
        self._cancelled = True

    def is_cancelled(self) -> bool:
        """Whether nobody wants the rest."""
        return self._cancelled

    def put(self, item: Item) -> None:
        """What came next."""
        if isinstance(item, Lost):
            self.lost = item  # before who takes it looks; all that came of the split is there
        elif isinstance(item, PackedBatch):
            _ = item.batch  # here, and not where the trainer waits for it
        self._items.put(item)

    def get(self, seconds: float) -> Item:
        """What comes next; TimeoutError where nothing does for so long."""
        try:
            return self._items.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None

    @property
    def ready(self) -> int:
        """How many batches wait here."""
        return self._items.qsize()

    def waits(self) -> bool:
        """Whether a batch is there to be taken, here or where it was made; asked now and then."""
        return self.ready > 0


def read_items(reader: SessionReader, split: Split) -> Iterator[Item]:
    """What comes of reading a split: batches, those that cannot be read, and the end."""
    wrong: list[Unreadable] = []
    try:
        for batch in reader.read_split(split, lambda error, where: wrong.append(Unreadable(str(error), where))):
            yield from wrong
            wrong.clear()
            yield pack(batch)
    except DataError as error:
        yield Failed(str(error), isinstance(error, ChangedDataError))
    except MemoryError:
        raise  # another worker may have more
    except Exception as error:
        yield Failed(f"reading failed with {type(error).__name__}: {error}", changed=False)
    else:
        yield from wrong
        yield Done()
