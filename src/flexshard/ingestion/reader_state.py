"""Where a reader is, shared with the DataLoader's workers, and as a checkpoint holds it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import get_worker_info

from flexshard._internal import check_int
from flexshard.errors import DataError

__all__ = ["ReaderPlace", "checked_state"]

_WORKERS = 1024
_EPOCH, _FIRST, _NAMED, _BY_WORKERS, _LANES, _WINDOW, _TAKEN, _SEED, _COUNT, _UNFINISHED = range(10)


class ReaderPlace:
    """Epoch, first batch and order of the next pass, in memory that workers which stay see as well."""

    def __init__(self, lanes: int, window: int) -> None:
        self._shared = torch.zeros(10, dtype=torch.int64)
        self._shared[_LANES], self._shared[_WINDOW] = lanes, window
        # Whether a worker has begun a pass since then; each writes its own, so that none hides it from another.
        self._begun = torch.zeros(_WORKERS, dtype=torch.int64)
        self._passes = 0  # that this process began
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share()

    def _share(self) -> None:
        self._shared.share_memory_()
        self._begun.share_memory_()

    @property
    def epoch(self) -> int:
        """Of the next pass."""
        return int(self._shared[_EPOCH])

    @property
    def lanes(self) -> int:
        """Of the order."""
        return int(self._shared[_LANES])

    @property
    def window(self) -> int:
        """Of the order."""
        return int(self._shared[_WINDOW])

    def order_by(self, lanes: int, window: int) -> None:
        """Take another order."""
        self._shared[_LANES], self._shared[_WINDOW] = lanes, window

    @property
    def first(self) -> int:
        """Batches of the epoch that the next pass leaves out."""
        return int(self._shared[_FIRST])

    @property
    def is_named(self) -> bool:
        """Whether the epoch was set, not loaded."""
        return bool(self._shared[_NAMED])

    @property
    def is_read_by_workers(self) -> bool:
        """Whether the last who began a pass was a process of a DataLoader."""
        return bool(self._shared[_BY_WORKERS])

    @property
    def is_unfinished(self) -> bool:
        """Whether who wrote the state that was loaded would have read on in its epoch."""
        return bool(self._shared[_UNFINISHED])

    def set(self, epoch: int, first: int, *, unfinished: bool = False) -> None:
        """Start the next pass in ``epoch``, after ``first`` of its batches."""
        self._shared[_EPOCH], self._shared[_FIRST], self._shared[_UNFINISHED] = epoch, first, unfinished
        self._shared[[_NAMED, _BY_WORKERS, _TAKEN]] = 0
        self._begun.zero_()

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass in another epoch; of the same one it stays where it was."""
        if epoch != self.epoch:
            self.set(epoch, 0)
        self._shared[_NAMED] = 1

    def begin(self) -> int:
        """The first batch of the pass that this process begins; passes after the first start from the first of all.

        Workers of one pass of a DataLoader have its seed in common, and have begun as many passes.
        """
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        if number >= _WORKERS:
            raise DataError(f"a reader has at most {_WORKERS:,} workers, found number {number:,}")
        self._passes += 1
        one = (-1, self._passes) if worker is None else (worker.seed - worker.id, self._passes)
        if not self._shared[_TAKEN]:
            self._shared[[_SEED, _COUNT]] = torch.tensor(one)
            self._shared[_TAKEN] = 1
        is_first = (int(self._shared[_SEED]), int(self._shared[_COUNT])) == one and not self._begun[number]
        self._begun[number] = 1
        self._shared[_BY_WORKERS] = worker is not None
        return self.first if is_first else 0


def checked_state(state: dict[str, Any], own: dict[str, Any]) -> tuple[int, int]:
    """Epoch and consumed batches of a state that a reader of the same batches wrote.

    Raises:
        DataError: it is of other data or of another order; names what differs.
    """
    if not isinstance(state, dict):
        raise DataError(f"a reader's state is what state_dict() returned, found {type(state).__name__}")
    for name in ("epoch", "batches", *own):
        if name not in state:
            raise DataError(f"the reader's state has no {name!r}; it is not one that state_dict() returned")
    for name, mine in own.items():
        if state[name] != mine:
            what = "other files" if name == "dataset" else f"{name.replace('_', ' ')} {state[name]!r}"
            raise DataError(
                f"the reader's state is of {what}, this reader has {'these' if name == 'dataset' else repr(mine)};"
                " go on with what it was written with, or start anew"
            )
    epoch = check_int(state["epoch"], "the state's epoch", DataError, least=0)
    return epoch, check_int(state["batches"], "the state's number of batches", DataError, least=0)
