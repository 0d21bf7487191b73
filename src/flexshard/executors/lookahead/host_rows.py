"""Where a cache's rows are when they are not in it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from flexshard._internal import parts_by_bytes, to_device

__all__ = ["HostRows", "LocalRows"]

IntArray = npt.NDArray[np.int64]

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # by their bytes


class HostRows(abc.ABC):
    """Rows by slot, each with its weights and optimizer states."""

    @abc.abstractmethod
    def read(self, slots: IntArray, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Rows of slots, shape (n, width) each by name; copies."""

    @abc.abstractmethod
    def write(self, slots: IntArray, rows: Mapping[str, torch.Tensor]) -> None:
        """Let distinct slots' rows be these; what is read later on this rank finds them."""

    def fetch(self, slots: IntArray, cache: Mapping[str, torch.Tensor], places: IntArray) -> None:
        """Copy rows of slots to distinct places of a cache, shape (places, width) by name; some after others."""
        for part in parts_by_bytes(slots.size, _row_bytes(cache)):
            target = _on_device_of(cache, places[part])
            for name, rows in self.read(slots[part], list(cache)).items():
                cache[name].index_copy_(0, target, rows)

    def put_back(self, slots: IntArray, cache: Mapping[str, torch.Tensor], places: IntArray) -> None:
        """Copy rows at places of a cache to distinct slots, as by :meth:`write`."""
        for part in parts_by_bytes(slots.size, _row_bytes(cache)):
            source = _on_device_of(cache, places[part])
            self.write(slots[part], {name: values.index_select(0, source) for name, values in cache.items()})

    @abc.abstractmethod
    def flush(self) -> None:
        """Wait until what was written is there for all ranks."""

    @property
    def changed(self) -> bool:
        """Whether somebody else has written to them."""
        return False


class LocalRows(HostRows):
    """Rows in this process's memory; a GPU's if they are tensors of that device."""

    def __init__(self, values: Mapping[str, torch.Tensor], changed: Callable[[], bool]) -> None:
        """``values`` by name, shape (slots, width); ``changed`` whether somebody else has written to them."""
        self._values, self._changed = values, changed
        self._on_host = all(rows.device.type == "cpu" for rows in values.values())

    def read(self, slots: IntArray, names: Sequence[str]) -> dict[str, torch.Tensor]:
        where = _on_device_of(self._values, slots)
        return {name: self._values[name].index_select(0, where) for name in names}

    def write(self, slots: IntArray, rows: Mapping[str, torch.Tensor]) -> None:
        where = _on_device_of(self._values, slots)
        for name, values in rows.items():
            self._values[name].index_copy_(0, where, values)

    def fetch(self, slots: IntArray, cache: Mapping[str, torch.Tensor], places: IntArray) -> None:
        if not self._on_host:
            super().fetch(slots, cache, places)
            return
        for name, values in cache.items():
            _copy_rows(self._values[name], slots, values, places)

    def put_back(self, slots: IntArray, cache: Mapping[str, torch.Tensor], places: IntArray) -> None:
        if not self._on_host:
            super().put_back(slots, cache, places)
            return
        for name, values in cache.items():
            _copy_rows(values, places, self._values[name], slots)

    def flush(self) -> None:
        """They are written."""

    @property
    def changed(self) -> bool:
        return self._changed()


def _row_bytes(cache: Mapping[str, torch.Tensor]) -> int:
    """Of a row of a cache, shape (places, width) by name, with its states."""
    return sum(values[:1].nbytes for values in cache.values())


def _on_device_of(rows: Mapping[str, torch.Tensor], numbers: IntArray) -> torch.Tensor:
    return to_device(numbers, next(iter(rows.values())).device)


def _copy_rows(source: torch.Tensor, rows: IntArray, target: torch.Tensor, places: IntArray) -> None:
    """Rows to places, once; ``index_select`` and ``index_copy_`` would copy them twice."""
    from flexshard.executors.lookahead import oracle_kernels

    size = target.element_size()
    ends = [number * size for number in (source.shape[1], source.storage_offset(), target.storage_offset())]
    word = next(dtype for width, dtype in _WORDS.items() if not any(end % width for end in ends))
    oracle_kernels.copy_rows(source.view(word).numpy(), rows, target.view(word).numpy(), places)
