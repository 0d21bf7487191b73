"""Rows in the host's memory, of which those that batches under way read are in a cache."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch

from flexshard._internal import to_device
from flexshard.errors import CacheError
from flexshard.executors.lookahead.host_rows import HostRows, LocalRows
from flexshard.executors.lookahead.oracle import LookaheadOracle
from flexshard.executors.lookahead.row_moves import AnnouncedBatch, CacheTraffic, RowMoves
from flexshard.executors.stores.base import AnnouncedRows, LookedUp, RowStore
from flexshard.executors.stores.memory import MemoryStore
from flexshard.executors.stores.updates import OptimizerSpec

__all__ = ["CachedStore"]


class CachedStore(MemoryStore):
    """Weights and optimizer states on the host; rows without copies are looked up and updated in a cache.

    Weights and states of a row move together, so that training is what it is without a cache, bit for bit. Rows with
    copies are not cached: they are read and updated where they are.

    Its parameters are the host's rows, as those of TorchRec's ``fused_uvm_caching`` are: of rows in the cache they are
    as old as the last :meth:`flush`, which every ``state_dict`` calls. Writing to them in place counts, if the cache
    has no newer rows; otherwise it is an error. (Writing to their ``data`` is not seen; ``load_state_dict`` is.)
    """

    ahead = True

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
        num_rows: int | None = None,
    ) -> None:
        """As every store, and what makes the store of the cache's ``cache_rows`` slots; ``label`` for errors.

        ``num_rows`` are those of which some are elsewhere; None for all of ``slots``.
        """
        super().__init__(spec, slots, dim, dtype, device)
        self._label = label
        self._of_slots: Callable[[int], RowStore] = lambda slots: cache(spec, slots, dim, dtype, device)
        self._cache = self._of_slots(cache_rows)
        self.fixed_at_look_up = self._cache.fixed_at_look_up
        self._version = self._flat._version
        self._moves = RowMoves(
            LookaheadOracle(slots if num_rows is None else num_rows, cache_rows),
            self._host_rows(),
            {name: self._cache.part(name) for name in ("weight", *spec.state_names)},
            label,
        )

    def _host_rows(self) -> HostRows:
        """Where rows are that are not in the cache."""
        return LocalRows(self._parameters_and_states(), lambda: self._flat._version != self._version)

    def _parameters_and_states(self) -> dict[str, torch.Tensor]:
        """Rows in this process by name, shape (slots, width)."""
        return {"weight": self.values} | self.states()

    @property
    def cache_rows(self) -> int:
        """Slots of the cache."""
        return int(self._cache.values.shape[0])

    @property
    def traffic(self) -> CacheTraffic:
        """What the cache has done so far."""
        return self._moves.traffic

    def take_failure(self) -> CacheError | None:
        with suppress(CacheError):
            self._take_writes()
        return self._moves.take_problem()

    def flush(self) -> None:
        super().flush()
        self._take_writes()
        self._moves.flush()

    def rows_written(self) -> None:
        self._moves.reload()
        self._version = self._flat._version

    def drained(self) -> bool:
        return self._moves.drained()

    def set_learning_rate(self, learning_rate: float) -> None:
        super().set_learning_rate(learning_rate)
        self._cache.set_learning_rate(learning_rate)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._cache.begin_step(step)

    def announce(self, slots: torch.Tensor) -> AnnouncedRows:
        with suppress(CacheError):  # every rank hears of it with the next batch
            self._take_writes()
        return _Announced(self, slots)

    def look_up(self, slots: torch.Tensor) -> LookedUp:
        self._take_writes()
        rows, moment = self._moves.read(slots.cpu().numpy(), ["weight"])["weight"], self.moment

        def update(gradient: torch.Tensor) -> None:
            with self.as_of(*(moment if self.fixed_at_look_up else self.moment)):
                self._train_beside(slots, gradient)

        return LookedUp(rows, update)

    def _train_beside(self, slots: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update rows of which the cache was not told, or for which it has no room: where they are, in a store of their
        own.
        """
        rows, index = np.unique(slots.cpu().numpy(), return_inverse=True)
        store = self._of_slots(max(rows.size, 1))
        store.set_learning_rate(self._learning_rate)
        store.begin_step(self._step)
        names = ("weight", *self.spec.state_names)
        for name, values in self._moves.read(rows, names).items():
            store.part(name)[: rows.size].copy_(values)
        with torch.enable_grad():
            store.look_up(to_device(index.reshape(-1), slots.device)).update(gradient)
        self._moves.write(rows, {name: store.part(name)[: rows.size] for name in names})

    def _take_writes(self) -> None:
        """Take over what somebody wrote to the parameters."""
        if self._flat._version != self._version:
            self._moves.reload(unless_newer=True)
            self._version = self._flat._version

    def __deepcopy__(self, memo: object) -> CachedStore:
        raise CacheError(f"{self._label}: a table behind a cache cannot be copied; copy what state_dict() gives")


class _Announced(AnnouncedRows):
    """A batch's rows, on their way to the cache. When nobody has it any more, they need not stay there."""

    _store: CachedStore

    def __init__(self, store: CachedStore, slots: torch.Tensor) -> None:
        super().__init__(store, slots)
        self._found = LookedUp(slots, lambda _: None)
        self._looked_up = False
        self._places: torch.Tensor | None = None  # in the cache, of lookups in parts
        self._batch = store._moves.announce(slots)
        weakref.finalize(self, _drop, self._batch)

    def __call__(self) -> LookedUp:
        store, moves = self._store, self._store._moves
        self._only_once()
        slots = moves.slots_of(self._batch) if torch.is_grad_enabled() or self._batch.slots.done() else None
        if slots is None:  # nothing has to come into the cache to be looked at
            self._batch.dropped = True
            return store.look_up(self._slots)
        self._found = store._cache.look_up(slots)
        moves.was_read(self._batch)
        if torch.is_grad_enabled():
            return LookedUp(self._found.rows, self._update)  # which keeps this batch, and so its rows in the cache
        moves.finish(self._batch, trained=False)
        return self._found

    def _only_once(self) -> None:
        """Every batch is looked up once."""
        if self._looked_up:
            raise CacheError(f"{self._store._label}: a batch is looked up twice; give the model each batch once")
        self._looked_up = True
        self._store._take_writes()

    def _update(self, gradient: torch.Tensor) -> None:
        batch = self._batch
        if batch.kept:
            raise CacheError(
                f"{self._store._label}: gradients of a batch come twice (backward with retain_graph), when its rows may"
                " have left the cache; add the losses up, or leave these tables uncached"
            )
        batch.kept = True
        try:
            self._found.update(gradient)
        finally:
            self._store._moves.finish(batch, trained=True)

    # -- in parts

    def begin(self) -> None:
        self._only_once()
        self._places = self._store._moves.slots_of(self._batch)

    def rows(self, which: torch.Tensor) -> torch.Tensor:
        slots = self._batch.slots
        if slots.done() and not self._batch.dropped:
            return self._store._cache.values.index_select(0, slots.result().index_select(0, which))
        return self._store._moves.read(self._slots.index_select(0, which).cpu().numpy(), ["weight"])["weight"]

    def update(self, which: torch.Tensor, gradient: torch.Tensor, moment: tuple[int, float]) -> None:
        store = self._store
        with store.as_of(*moment), torch.enable_grad():
            if self._places is None:
                store._train_beside(self._slots.index_select(0, which), gradient)
            else:
                if not self._batch.kept:
                    self._batch.kept = True
                    store._moves.changes(self._batch)
                store._cache.look_up(self._places.index_select(0, which)).update(gradient)

    def finish(self, *, trained: bool) -> None:
        if self._places is not None:
            self._store._moves.finish(self._batch, trained=trained)


def _drop(batch: AnnouncedBatch) -> None:
    batch.dropped = not batch.kept
