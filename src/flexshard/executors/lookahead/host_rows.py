"""Where a cache's rows are when they are not in it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["HostRows", "LocalRows"]


class HostRows(abc.ABC):
    """Rows by slot, each with its weights and optimizer states."""

    @abc.abstractmethod
    def read(self, slots: npt.NDArray[np.int64], names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Rows of slots, shape (n, width) each by name; copies."""

    @abc.abstractmethod
    def write(self, slots: npt.NDArray[np.int64], rows: Mapping[str, torch.Tensor]) -> None:
        """Let distinct slots' rows be these; what is read later on this rank finds them."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Wait until what was written is there for all ranks."""

    @property
    def changed(self) -> bool:
        """Whether somebody else has written to them."""
        return False


class LocalRows(HostRows):
    """Rows in this process's memory."""

    def __init__(self, values: Mapping[str, torch.Tensor], changed: Callable[[], bool]) -> None:
        """``values`` by name, shape (slots, width); ``changed`` whether somebody else has written to them."""
        self._values, self._changed = values, changed

    def read(self, slots: npt.NDArray[np.int64], names: Sequence[str]) -> dict[str, torch.Tensor]:
        where = torch.from_numpy(slots)
        return {name: self._values[name].index_select(0, where) for name in names}

    def write(self, slots: npt.NDArray[np.int64], rows: Mapping[str, torch.Tensor]) -> None:
        where = torch.from_numpy(slots)
        for name, values in rows.items():
            self._values[name].index_copy_(0, where, values)

    def flush(self) -> None:
        """They are written."""

    @property
    def changed(self) -> bool:
        return self._changed()
