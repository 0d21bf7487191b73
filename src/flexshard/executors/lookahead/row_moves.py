"""Rows between a cache and the host's memory, moved on a thread of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from flexshard._internal import HostCopy, SideStream, to_device, used_here
from flexshard.errors import CacheError
from flexshard.executors.lookahead.host_rows import HostRows
from flexshard.executors.lookahead.oracle import Admission, LookaheadOracle

__all__ = ["AnnouncedBatch", "CacheTraffic", "RowMoves"]

IntArray = npt.NDArray[np.int64]
Rows = Mapping[str, torch.Tensor]
_Result = TypeVar("_Result")


@dataclass(eq=False)
class AnnouncedBatch:
    """A batch that will be looked up.

    Attributes:
        lookups: n, how many.
        ids: rows of these, perhaps on their way from a device; shape (n,).
        slots: of each lookup in the cache, once its rows are there or, on a device, on their way; shape (n,), int64.
        fetched: when they will be there.
        read: when they will have been looked up.
        kept: it is being trained on, after which it is over.
        dropped: nobody will look it up, or train on it, any more.
        over: its rows have been trained, or will not be.
    """

    lookups: int
    ids: HostCopy
    slots: Future[torch.Tensor] = field(default_factory=Future)
    fetched: Any = None
    read: Any = None
    kept: bool = False
    dropped: bool = False
    over: bool = False
    admission: Admission | None = None


@dataclass(frozen=True)
class _Trained:
    """A step's part in a batch's rows: whether it changed them, is the last to use them, and when it will be over."""

    batch: AnnouncedBatch
    changed: bool
    over: bool
    moment: Any


@dataclass
class CacheTraffic:
    """What a cache has done so far, in rows.

    Attributes:
        batches: that were admitted.
        lookups: of these.
        distinct: rows that they read, counted once a batch.
        carried: of these, which the batch before read too.
        fetched: from the host.
        written_back: to it.
        beside: lookups of batches that found no room, read and trained beside the cache.
    """

    batches: int = 0
    lookups: int = 0
    distinct: int = 0
    carried: int = 0
    fetched: int = 0
    written_back: int = 0
    beside: int = 0


class RowMoves:
    """One cache's oracle and the copies that it asks for.

    What moves rows runs on one thread, in the order in which it was asked for, beside the steps: a row is written back
    before it is fetched again, a slot is emptied before it is filled. The steps' own thread reads and updates only
    slots of batches that were admitted and are not over, which stay where they are.

    Where the cache is on a GPU, that thread gives its copies to a stream of their own, which waits for what steps have
    done to rows before it writes these back, and steps wait for it before they look rows up.
    """

    def __init__(self, oracle: LookaheadOracle, host: HostRows, cache: Rows, label: str) -> None:
        """``cache`` by name, shape (slots, width); ``label`` says whose, for errors."""
        self.traffic = CacheTraffic()
        self._oracle, self._host, self._cache, self._label = oracle, host, cache, label
        self._device = cache["weight"].device
        self._side = SideStream(self._device)
        self._thread = ThreadPoolExecutor(1, "flexshard-cache")
        self._newer = np.zeros(oracle.slots, np.bool_)  # than the host's, which free slots never are
        self._waiting: deque[AnnouncedBatch] = deque()
        self._under_way: deque[AnnouncedBatch] = deque()
        self._steps_done: deque[_Trained] = deque()  # that the moves' thread has not heard of
        self._last: Future[None] | None = None  # of what was asked for and is not waited for
        self._refused: AnnouncedBatch | None = None  # for want of room, since when nothing has left
        self.failure: CacheError | None = None
        self._too_large: CacheError | None = None

    # -- on the steps' thread

    def take_problem(self) -> CacheError | None:
        """What every rank has to hear of with the next batch: a failure, or, once, that a batch is larger than the
        cache. That one is read and trained beside it: a rank that stopped alone would let the others wait.
        """
        too_large, self._too_large = self._too_large, None
        return self.failure or too_large

    def announce(self, ids: torch.Tensor) -> AnnouncedBatch:
        """Fetch a batch's rows (of its lookups, shape (n,), int64) as soon as there is room for them."""
        batch = AnnouncedBatch(ids.numel(), HostCopy(ids))
        self._waiting.append(batch)
        self._ask()
        return batch

    def slots_of(self, batch: AnnouncedBatch) -> torch.Tensor | None:
        """Where its lookups' rows are, once they are there; shape (n,). None if others leave no room for them: it is
        forgotten then.

        Raises:
            CacheError: rows could not be moved.
        """
        if not batch.slots.done():
            self._run(lambda: self._admit_now(batch))
        if batch.slots.done():
            slots = batch.slots.result()
            self._side.wait_here(batch.fetched)
            used_here(slots)
            return slots
        batch.dropped = True
        self.traffic.beside += batch.lookups
        return None

    def was_read(self, batch: AnnouncedBatch) -> None:
        """Its rows have been looked up."""
        batch.read = self._side.moment()

    def finish(self, batch: AnnouncedBatch, *, trained: bool) -> None:
        """Its rows have been trained, or will not be."""
        self._steps_done.append(_Trained(batch, changed=trained, over=True, moment=self._side.moment()))
        if self._waiting:  # for room, perhaps; or else whatever is asked for next begins with it
            self._ask()

    def changes(self, batch: AnnouncedBatch) -> None:
        """Some of its rows are trained, and later others."""
        self._steps_done.append(_Trained(batch, changed=True, over=False, moment=self._side.moment()))

    def read(self, ids: IntArray, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Rows as they are now, wherever they are; shape (n, width) each. Nothing enters the cache or leaves it."""
        rows = self._run(lambda: self._read(ids, names))
        for values in rows.values():
            used_here(values)
        return rows

    def write(self, ids: IntArray, rows: Rows) -> None:
        """Let distinct rows be these, by name, shape (n, width), wherever they are."""
        self._run(lambda: self._write(ids, rows))

    def flush(self) -> None:
        """Let the host's rows be as new as the cache's, which stay there."""
        self._run(self._flush)

    def reload(self, *, unless_newer: bool = False, newer: bool = False) -> None:
        """Somebody wrote to the host's rows: let the cache's be the same.

        Args:
            newer: rows on the device that are in no cache are.

        Raises:
            CacheError: with ``unless_newer``, if the cache had newer ones.
        """
        self._run(lambda: self._reload(lost=unless_newer and (newer or bool(self._newer.any()))))

    def drained(self) -> bool:
        """Whether every batch that was announced has its rows in the cache, once what was begun has ended; or moving
        rows failed, which other ranks have to hear before it is raised.
        """
        if self._last is not None:
            self._last.exception()
        if self._waiting and self.failure is None:  # some that others have let go of may leave room
            self._ask().exception()
        return not self._waiting or self.failure is not None

    def close(self) -> None:
        """End the thread, once what was begun has ended."""
        self._thread.shutdown(wait=True)

    def _ask(self) -> Future[None]:
        """Let as many batches be taken up as there is room for; nobody waits for it."""
        self._last = self._thread.submit(self._guarded, self._advance)
        return self._last

    def _run(self, work: Callable[[], _Result]) -> _Result:
        """Do something on the moves' thread, behind all that was asked for before."""
        if self.failure is not None:
            raise self.failure
        before = self._side.moment()

        def in_order() -> tuple[_Result, Any]:
            self._side.wait_here(before)
            return work(), self._side.moment()

        result, moment = self._thread.submit(self._guarded, in_order).result()
        self._side.wait_here(moment)
        return result

    # -- on the moves' thread

    def _guarded(self, work: Callable[[], _Result]) -> _Result:
        if self.failure is not None:
            raise self.failure
        try:
            with torch.inference_mode(False), torch.no_grad(), self._side.inside():
                self._take_steps()
                return work()
        except Exception as error:
            self.failure = (
                error
                if isinstance(error, CacheError)
                else CacheError(
                    f"{self._label}: rows could not be moved ({type(error).__name__}: {error}); end this job"
                )
            )
            for batch in list(self._waiting):  # to which the steps' thread may add
                batch.slots.set_exception(self.failure)
            if self.failure is error:
                raise
            raise self.failure from error

    def _admit_now(self, batch: AnnouncedBatch) -> None:
        """It is looked up: those that come later have to wait."""
        self._retire()
        if batch in self._waiting:  # or else it has come in meanwhile
            self._waiting.remove(batch)
            self._waiting.appendleft(batch)
            self._advance()

    def _advance(self) -> None:
        """Take up as many batches as there is room for."""
        while self._waiting:
            self._retire()
            batch = self._waiting[0]
            if not batch.dropped:
                if batch is self._refused:
                    return
                admission = self._oracle.admit(batch.ids.numbers())
                if admission is None:
                    self._refused = batch
                    self._note_size()
                    return
                batch.admission = admission
                self._move(admission)
                self._under_way.append(batch)
                slots = to_device(admission.slots.view(np.int32), self._device).long()  # half as much travels
                batch.fetched = self._side.moment()
                batch.slots.set_result(slots)
            self._waiting.popleft()

    def _note_size(self) -> None:
        """Whether what was refused would fit into an empty cache."""
        distinct, _ = self._oracle.needed
        if distinct > self._oracle.slots:
            self._too_large = CacheError(
                f"{self._label}: the cache has {self._oracle.slots:,} rows, one batch reads {distinct:,}; make it at"
                " least as large, or batches smaller"
            )

    def _retire(self) -> None:
        while self._under_way and (self._under_way[0].over or self._under_way[0].dropped):
            self._side.wait_here(self._under_way.popleft().read)
            self._refused = None
            gone = self._oracle.retire()
            self._write_back(gone.rows, gone.slots)

    def _take_steps(self) -> None:
        """Hear of what has been trained."""
        from flexshard.executors.lookahead import oracle_kernels

        while self._steps_done:
            step = self._steps_done.popleft()
            self._side.wait_here(step.moment)
            if step.changed:
                assert step.batch.admission is not None
                oracle_kernels.set_flags(self._newer, step.batch.admission.row_slots)
            step.batch.over |= step.over

    def _move(self, admission: Admission) -> None:
        self._write_back(admission.evicted.rows, admission.evicted.slots)
        fetched = admission.fetched
        self._fetch(fetched.rows, fetched.slots)
        traffic = self.traffic
        traffic.batches += 1
        traffic.lookups += admission.slots.size
        traffic.distinct += admission.rows.size
        traffic.carried += admission.carried.size
        traffic.fetched += fetched.rows.size

    def _fetch(self, rows: IntArray, slots: IntArray) -> None:
        self._host.fetch(rows, self._cache, slots)

    def _write_back(self, rows: IntArray, slots: IntArray) -> None:
        from flexshard.executors.lookahead import oracle_kernels

        newer_rows, newer_slots = np.empty_like(rows), np.empty_like(slots)
        found = oracle_kernels.flagged(self._newer, rows, slots, newer_rows, newer_slots)
        if not found:
            return
        if self._host.changed:
            raise self._lost()
        rows, slots = newer_rows[:found], newer_slots[:found]
        self._host.put_back(rows, self._cache, slots)
        self._newer[slots] = False
        self.traffic.written_back += rows.size

    def _read(self, ids: IntArray, names: Sequence[str]) -> dict[str, torch.Tensor]:
        slots = self._oracle.find(ids)
        inside = np.flatnonzero(slots >= 0)
        if not inside.size:
            return self._host.read(ids, names)
        outside = np.flatnonzero(slots < 0)
        away, result = self._host.read(ids[outside], names), {}
        here, there, where = (to_device(index, self._device) for index in (inside, outside, slots[inside]))
        for name in names:
            values = self._cache[name]
            rows = values.new_empty(ids.size, values.shape[1]).index_copy_(0, there, away[name])
            result[name] = rows.index_copy_(0, here, values.index_select(0, where))
        return result

    def _flush(self) -> None:
        self._retire()
        held = self._oracle.held()
        self._write_back(held.rows, held.slots)
        self._host.flush()

    def _reload(self, *, lost: bool) -> None:
        if lost:
            raise self._lost()
        held = self._oracle.held()
        self._newer[:] = False
        self._fetch(held.rows, held.slots)

    def _write(self, ids: IntArray, rows: Rows) -> None:
        slots = self._oracle.find(ids)
        inside, outside = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        here, away, where = (to_device(index, self._device) for index in (inside, outside, slots[inside]))
        for name, values in rows.items():
            self._cache[name].index_copy_(0, where, values.index_select(0, here))
        self._host.write(ids[outside], {name: values.index_select(0, away) for name, values in rows.items()})
        self._newer[slots[inside]] = True

    def _lost(self) -> CacheError:
        return CacheError(
            f"{self._label}: parameters were written to while the cache had newer rows, which would be lost; write to"
            " what state_dict() gives instead, or use load_state_dict()"
        )
