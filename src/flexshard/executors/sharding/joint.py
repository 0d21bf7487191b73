"""Modules of one model whose batches are exchanged together, where they are begun together.

TorchRec's pipelines begin the distribution of a batch for all modules before they wait for any, and so may other code;
then, if all of these get the same batch, counts, ids, rows and gradients go in one exchange, whose latencies are paid
once. Where one module's distribution is waited for before the next one's begins, as in a plain forward pass, each has
its own until :class:`CallOrder` knows which modules get a batch after the first. Which modules go together so depends
on the calls alone, which are the same on every rank.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from flexshard._internal import continued_on, current_stream, group_behind
from flexshard.errors import CommunicationError, DataError, FlexShardError, PlanError
from flexshard.executors.comm.bucketized_ids import BucketizedIds
from flexshard.executors.comm.delayed_sync import DelayedSync
from flexshard.executors.comm.exchange import Exchange
from flexshard.executors.comm.splits import SplitsExchange, Status
from flexshard.executors.sharding.batches import (
    BAD_IDS,
    CACHE_FAILED,
    WRITTEN,
    BatchPart,
    BatchProblem,
    OutsideIds,
    RowsOwner,
)
from flexshard.executors.sharding.call_order import CallOrder, Expected
from flexshard.executors.sharding.joint_tables import JointTables
from flexshard.executors.sharding.sharded_tables import ShardedTables

__all__ = ["JointBatch", "JointModules"]


class JointModules:
    """Modules of one model that are sharded alike, so that their batches may be exchanged together."""

    def __init__(self, cached: Iterable[str] = ()) -> None:
        """``cached``: tables whose rows are to be behind caches; all of them have to be there when a batch comes."""
        self._cached = set(cached)
        self.sync = DelayedSync()
        self.steps_on: torch.cuda.Stream | None = None  # where rows are looked up and updated; None on CPUs
        self._tables: list[ShardedTables] = []
        self._owners: list[weakref.ref[RowsOwner]] = []
        self._order = CallOrder()
        self._joint: dict[tuple[int, ...], JointTables] = {}
        self._open: JointBatch | None = None
        self._sent: deque[Callable[[], JointBatch | None]] = deque()

    def add(self, tables: ShardedTables, owner: RowsOwner) -> int:
        """One more module; its index."""
        self._tables.append(tables)
        self._owners.append(weakref.ref(owner))
        self._watch(tables)
        self.steps_on = current_stream(tables.device)
        return len(self._tables) - 1

    @property
    def device(self) -> torch.device:
        """Of their rows."""
        return self._tables[0].device

    def replace(self, index: int, tables: ShardedTables) -> None:
        """A module's tables have another layout."""
        self.sync.layout_changed()
        self._tables[index] = tables
        self._watch(tables)
        self._joint.clear()
        self._order.end()

    def failure(self, tables: ShardedTables) -> BatchProblem | None:
        """What went wrong beside the steps with a module's tables."""
        failed, written = tables.failure(), self.sync.written()
        if written:
            return BatchProblem(WRITTEN, 0, written)
        return None if failed is None else BatchProblem(CACHE_FAILED, *failed)

    def _watch(self, tables: ShardedTables) -> None:
        sync, order = self.sync, self._order

        def rows_replaced() -> None:
            sync.rows_replaced()
            order.end()

        tables.on_replace = rows_replaced
        for group in tables.groups:
            group.store.settle = self.sync.settle

    def delay_sync(self, on: bool) -> None:
        """From now on, send rows early and some gradients late, where batches are announced, or do not; every rank must
        call it alike.
        """
        if on and self._tables[0].layout.world_size > 1:
            self.sync.group = group_behind(self._tables[0].process_group)
        elif self.sync.on:
            self.sync.settle()
            self.sync.rows_replaced()
            self.sync.group = None

    def tables_of(self, members: tuple[int, ...]) -> JointTables:
        """Of some of the modules."""
        if members not in self._joint:
            self._joint[members] = JointTables(
                [self._tables[index] for index in members], members, self.sync, self._order
            )
        return self._joint[members]

    def join(self, index: int, part: BatchPart) -> JointBatch:
        """Begin a module's part of a batch, together with those that were begun just before and not waited for, and
        with those of modules that are expected to be given the same batch.
        """
        if self._cached:
            self._check_cached()
        if self._open is not None and not self._open.may_take(index, part):
            self._open.begin()
        if self._open is not None:
            self._order.end()  # this is no plain loop
            batch = self._open
            batch.parts[index] = part
        else:
            batch = self._open = JointBatch(self)
            batch.parts[index] = part
            self._expect(self._order.called(index, part.features, self._mode), batch, part.features)
        if len(batch.parts) == len(self._tables):
            batch.begin()
        return batch

    def _expect(self, others: Sequence[int], batch: JointBatch, given: Any) -> None:
        """Begin a batch for other modules, too, before they are given it. Caches have to know which batch comes next,
        and evaluation in inference mode tells nobody who writes to what.
        """
        if not others or self.sync.on or torch.is_inference_mode_enabled() or given.values().is_inference():
            return
        if any(group.store.ahead for tables in self._tables for group in tables.groups):
            return
        first = set(batch.parts)
        for other in others:
            owner = self._owners[other]()
            if owner is not None:
                batch.parts[other] = owner.part_of(given, given)
        batch.begin()
        self._order.expected = Expected(batch, given, self._mode, set(batch.parts) - first)

    @property
    def _mode(self) -> Hashable:
        return torch.is_grad_enabled(), current_stream(self.device)

    def begun_for(self, index: int, given: object) -> JointBatch | None:
        """The batch in which a module's part was begun with another's, as was expected; None if it was not.

        Raises:
            DataError: the batch's ids were changed in place since, or the module's rows after they were looked up.
        """
        expected = self._order.begun_for(index, given, self._mode)
        if expected is None:
            return None
        batch: JointBatch = expected.batch
        owner = batch.parts[index].owner
        changed = "the batch's ids" if expected.ids_changed else ""
        if index in expected.rows and expected.rows[index] != owner.rows_mark():
            changed = "these rows"
        if changed:
            raise DataError(
                f"tables {', '.join(self._tables[index].names[:3])}: {changed} were written to between the forward"
                " passes of two modules that are given the same KeyedJaggedTensor, after the first one had looked up"
                " the rows of both; write before the first, or give the second a KeyedJaggedTensor of its own"
            )
        return batch

    def looked_up(self, batch: JointBatch) -> None:
        """A batch's rows are what they are now."""
        expected = self._order.expected
        if expected is not None and expected.batch is batch:
            expected.rows = {index: batch.parts[index].owner.rows_mark() for index in expected.left}

    def _check_cached(self) -> None:
        """Raises PlanError where there is no such table: of all modules it is known only now."""
        unknown = self._cached - {name for tables in self._tables for name in tables.names}
        if unknown:
            raise PlanError(
                f"cache_load_factors: no table {min(unknown)!r} is under the plan; its tables are"
                f" {', '.join(name for tables in self._tables for name in tables.names)}"
            )
        self._cached.clear()

    def begun(self, batch: JointBatch) -> None:
        """It takes no further parts."""
        if self._open is batch:
            self._open = None

    def sent(self, batch: JointBatch) -> None:
        """Its ids are on their way; those of batches before it have come."""
        self.announce()
        # What announcing sends must not depend on who has collected his garbage.
        self._sent.append((lambda: batch) if self.sync.on else weakref.ref(batch))

    def announce(self, last: JointBatch | None = None) -> None:
        """Tell the stores of all batches whose ids are on their way, as far as ``last``, in order."""
        while self._sent:
            batch = self._sent.popleft()()
            if batch is not None:
                batch.announce()
            if batch is last is not None:
                return


class JointBatch:
    """A batch of the modules that began theirs together, on its way.

    Attributes:
        parts: of each module.
    """

    def __init__(self, modules: JointModules) -> None:
        self.parts: dict[int, BatchPart] = {}
        self._modules = modules
        self._tables: JointTables | None = None
        self._splits: SplitsExchange | None = None
        self._batch: BucketizedIds | None = None
        self._exchange: Exchange | None = None
        self._error: FlexShardError | None = None
        self._token: torch.Tensor | None = None
        self._train = False
        self._frozen: set[int] = set()
        self._rows: list[Any] = []

    def may_take(self, index: int, part: BatchPart) -> bool:
        """Whether a module's part is of this batch."""
        return index not in self.parts and all(other.features is part.features for other in self.parts.values())

    @torch.no_grad()
    def begin(self) -> None:
        """Tell the other ranks how many ids will come; no module can join any more."""
        if self._tables is not None:
            return
        self._modules.begun(self)
        self.parts = dict(sorted(self.parts.items()))
        tables = self._tables = self._modules.tables_of(tuple(self.parts))
        parts = list(self.parts.values())
        self._batch = tables.bucketize(parts)
        status = Status(written=max(part.owner.written() for part in parts))
        found = []
        for first, part in zip(tables.first_table, parts, strict=True):
            if isinstance(part.problem, OutsideIds):
                table = part.problem.table
                found.append((torch.where(table < 0, table, table + first), BAD_IDS))
            elif part.problem is not None and not status.problem:
                status = Status(part.problem.kind, first + part.problem.table, status.written)
        self._splits = tables.exchange_splits(self._batch, status.on(self._batch.counts.device, found))

    def send_ids(self) -> None:
        """Send the ids, once every rank has given its word on its own.

        Raises:
            DataError, CheckpointError: a rank has a problem.
        """
        self.begin()
        if self._error is not None:
            raise self._error
        if self._exchange is not None:
            return
        assert self._tables is not None
        assert self._splits is not None
        assert self._batch is not None
        splits = self._splits.wait()
        problem = self._problem() if splits.status[self._tables.rank].problem else None
        self._error = self._tables.error_of(splits.status, problem)
        if self._error is not None:
            raise self._error
        if any(word.written for word in splits.status):
            with continued_on(self._modules.steps_on):  # not while a step before it is under way
                for part in self.parts.values():
                    part.owner.finish_writes()
        self._exchange = self._tables.exchange(self._batch, splits)
        self._modules.sent(self)

    def _problem(self) -> BatchProblem | None:
        """What is wrong on this rank, where something is."""
        problems = [part.problem for part in self.parts.values()]
        known = next((problem for problem in problems if isinstance(problem, BatchProblem)), None)
        found = (problem.problem() for problem in problems if isinstance(problem, OutsideIds))
        return known or next((problem for problem in found if problem is not None), None)

    def wait_for_ids(self) -> None:
        """Until the ids that other ranks ask for are here."""
        self._modules.announce(self)
        self.exchange.wait_for_ids()

    def announce(self) -> None:
        """Tell the stores which rows will be looked up, to be trained."""
        if any(part.owner.training for part in self.parts.values()):
            self.exchange.announce()

    @property
    def exchange(self) -> Exchange:
        """Under way once ids are sent."""
        assert self._exchange is not None
        return self._exchange

    def look_up(self, index: int) -> None:
        """Look up what other ranks ask for, of all modules when the first one comes to it, and send it.

        Raises:
            CommunicationError: this module's rows are to be trained, and were looked up with those of modules that are
                evaluated only.
        """
        train = torch.is_grad_enabled()
        self._modules.steps_on = current_stream(self._modules.device)
        if self._token is None:
            parts = self.parts.values()
            # Another one of them may train though this one does not.
            several = len(parts) > 1 and not torch.is_inference_mode_enabled()
            self._train = train or (several and any(part.owner.training for part in parts))
            for part in parts:
                part.owner.before_look_up(train=self._train)
            with torch.set_grad_enabled(self._train):
                self._token = self.exchange.start()
            self._modules.looked_up(self)
        if train and not self._train:
            names = ", ".join(self._names_of(index)[:3])
            raise CommunicationError(
                f"tables {names}: their rows were looked up without gradients, together with those of modules in"
                " evaluation under torch.no_grad(); put the model in train() mode, or leave torch.no_grad() first"
            )
        if not train:
            self._frozen.add(index)
        if self._train:
            self.parts[index].owner.looked_up(train=train)

    def _names_of(self, index: int) -> tuple[str, ...]:
        return self._modules.tables_of((index,)).layout.tables

    def rows(self, index: int) -> list[torch.Tensor]:
        """Rows of a module's lookups of each of its groups in their own order, shape (lookups, D) each; once."""
        assert self._token is not None
        assert self._tables is not None
        if not self._rows:
            if self._train:  # whoever comes first may only look on
                with torch.inference_mode(False), torch.enable_grad():
                    self._rows = list(self.exchange.finish(self._token))
            else:
                self._rows = list(self.exchange.finish(self._token))
        classes = self._tables.classes[list(self.parts).index(index)]
        own = self._rows[classes.start : classes.stop]
        self._rows[classes.start : classes.stop] = [None] * len(classes)
        if index in self._frozen or not torch.is_grad_enabled():
            return [rows.detach() for rows in own]
        return own
