"""Rows on embedding servers, of which those that batches under way read are in a cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

from flexshard.executors.lookahead.host_rows import HostRows
from flexshard.executors.servers.embedding_servers import PendingWrite, ServedTables
from flexshard.executors.stores.base import RowStore
from flexshard.executors.stores.cached import CachedStore
from flexshard.executors.stores.copied_slots import CopiedSlots
from flexshard.executors.stores.updates import OptimizerSpec

__all__ = ["ServedRange", "ServedStore"]

IntArray = npt.NDArray[np.int64]

_MOST_WRITES = 64  # that are not waited for; a failed one is heard of by then


@dataclass(frozen=True)
class ServedRange:
    """Slots of a store whose rows are on servers.

    Attributes:
        table: its name there.
        slots: of the store.
        ids: row ids of slots, counted from the range's first; shape (n,).
    """

    table: str
    slots: range
    ids: Callable[[IntArray], IntArray]


class ServedStore(CachedStore):
    """As :class:`CachedStore`, with rows without copies on servers instead of in the process's memory.

    Rows with copies are here, and the servers' are older. The store's parameters are what it holds: rows with copies.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        slots: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        cache_rows: int,
        cache: Callable[..., RowStore],
        label: str,
        tables: ServedTables,
        ranges: Sequence[ServedRange],
    ) -> None:
        """As :class:`CachedStore`; ``ranges`` in order of slots."""
        self.on_servers, self._ranges = tables, tuple(ranges)
        self._copied = CopiedSlots(slots, [served.slots for served in ranges], device)
        super().__init__(
            spec, len(self._copied), dim, dtype, device, cache_rows=cache_rows, cache=cache, label=label, num_rows=slots
        )

    def _host_rows(self) -> HostRows:
        return _ServedRows(self.on_servers, self._ranges)

    def rows_at(self, slots: torch.Tensor) -> torch.Tensor:
        return super().rows_at(self._copied.among(slots))

    def copied(self, name: str, slots: slice) -> torch.Tensor:
        """Weights or a state of rows with copies, at slots that all have some; writing changes them."""
        return super(CachedStore, self).part(name)[self._copied.range_among(slots)]

    def part(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{self._label}: {name} of rows on servers is nowhere as a whole")

    def parameter(self, slots: slice) -> nn.Parameter:
        held, dim = self._copied.range_among(slots), self.dim
        rows = held.stop - held.start
        return TableBatchedEmbeddingSlice(self.flat, held.start * dim, held.stop * dim, rows, dim)

    def update_rows(
        self, where: slice | torch.Tensor, gradient: torch.Tensor, *, seed: int = 0, read: torch.Tensor | None = None
    ) -> None:
        super().update_rows(self._copied[where], gradient, seed=seed, read=read)

    def rows_written(self) -> None:
        self._moves.reload()

    def _take_writes(self) -> None:
        """Writing to parameters is writing to rows with copies, which are in no cache."""


class _ServedRows(HostRows):
    """A store's rows on servers."""

    def __init__(self, tables: ServedTables, ranges: Sequence[ServedRange]) -> None:
        self._tables, self._ranges = tables, ranges
        self._starts = np.array([served.slots.start for served in ranges])
        self._writes: deque[PendingWrite] = deque()

    def read(self, slots: IntArray, names: Sequence[str]) -> dict[str, torch.Tensor]:
        order, wanted = self._by_table(slots)
        found = self._tables.read(wanted, names)
        back = torch.from_numpy(np.argsort(order, kind="stable"))
        return {name: rows.index_select(0, back) for name, rows in found.items()}

    def write(self, slots: IntArray, rows: Mapping[str, torch.Tensor]) -> None:
        order, wanted = self._by_table(slots)
        where = torch.from_numpy(order)
        self._writes.extend(
            self._tables.begin_write(wanted, {name: values.index_select(0, where) for name, values in rows.items()})
        )
        while len(self._writes) > _MOST_WRITES:
            self._tables.finish_writes([self._writes.popleft()])

    def flush(self) -> None:
        while self._writes:
            self._tables.finish_writes([self._writes.popleft()])

    def _by_table(self, slots: IntArray) -> tuple[IntArray, list[tuple[str, IntArray]]]:
        """The order that sorts slots by table, and each table's rows by id in that order."""
        which = np.searchsorted(self._starts, slots, side="right") - 1
        order = np.argsort(which, kind="stable")
        bounds = np.cumsum(np.bincount(which, minlength=len(self._ranges)))[:-1]
        parts = np.split(slots[order], bounds)
        pairs = zip(self._ranges, parts, strict=True)
        return order, [(served.table, served.ids(part - served.slots.start)) for served, part in pairs]


def _row_bytes(cache: Mapping[str, torch.Tensor]) -> int:
    return sum(values[:1].nbytes for values in cache.values())
