"""Which slots of a store have rows with copies, where the others' rows are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flexshard._internal import to_device

__all__ = ["CopiedSlots"]


class CopiedSlots:
    """Slots of rows with copies, one after the other."""

    def __init__(self, slots: int, others: Sequence[range], device: torch.device) -> None:
        """Of so many ``slots``, all but those of ``others``, which ascend; ``device`` of what is asked for."""
        self._others, self._slots = tuple(others), slots
        self._stops = np.array([other.stop for other in others], np.int64)
        self._gone = np.cumsum([0, *map(len, others)])  # before and up to each
        self._stops_there, self._gone_there = to_device(self._stops, device), to_device(self._gone, device)

    def __len__(self) -> int:
        return self._slots - int(self._gone[-1])

    def __getitem__(self, where: slice | torch.Tensor) -> slice | torch.Tensor:
        """Where rows with copies, a range or slots, are among those that have copies."""
        return self.range_among(where) if isinstance(where, slice) else self.among(where)

    def among(self, slots: torch.Tensor) -> torch.Tensor:
        """As numbers from 0, shape (n,), int64, of slots that all have copies."""
        return slots - self._gone_there[torch.bucketize(slots, self._stops_there, right=True)]

    def range_among(self, slots: slice) -> slice:
        """Of a range's rows, those that have copies."""
        start, stop = (
            at - int(self._gone[np.searchsorted(self._stops, at, side="right")]) for at in (slots.start, slots.stop)
        )
        inside = next((other for other in self._others if slots.stop in other), None)
        return slice(start, stop if inside is None else stop - (slots.stop - inside.start))

    def all(self) -> np.ndarray:
        """The slots, ascending; shape (n,), int64."""
        has = np.ones(self._slots, np.bool_)
        for other in self._others:
            has[other.start : other.stop] = False
        return np.flatnonzero(has)
