"""Modules of one model whose batches are exchanged together, where they are begun together.

TorchRec's pipelines begin the distribution of a batch for all modules before they wait for any, and so may other code;
then, if all of these get the same batch, counts, ids, rows and gradients go in one exchange, whose latencies are paid
once. Where one module's distribution is waited for before the next one's begins, as in a plain forward pass, each has
its own, unless :func:`start_input_dist` began them together. Which modules go together so depends on the calls alone,
which are the same on every rank.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any

import torch

from flexshard._internal import continued_on, current_stream, group_behind, weakly
from flexshard.errors import CommunicationError, DataError, FlexShardError, PlanError
from flexshard.executors.comm.bucketized_ids import BucketizedIds
from flexshard.executors.comm.delayed_sync import DelayedSync
from flexshard.executors.comm.exchange import Exchange
from flexshard.executors.comm.splits import SplitsExchange, Status
from flexshard.executors.sharding.batches import BAD_IDS, CACHE_FAILED, WRITTEN, BatchPart, BatchProblem, OutsideIds
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
        self._joint: dict[tuple[int, ...], JointTables] = {}
        self._open: JointBatch | None = None
        self._started: JointBatch | None = None
        self._sent: deque[Callable[[], JointBatch | None]] = deque()

    def add(self, tables: ShardedTables) -> int:
        """One more module; its index."""
        self._tables.append(tables)
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
        self._tables[index].replaced = True
        self._tables[index] = tables
        self._watch(tables)
        self._joint.clear()
        self._sent.clear()
        self._started = None  # its ids go where rows were

    def take_failure(self, tables: ShardedTables) -> BatchProblem | None:
        """What went wrong beside the steps with a module's tables."""
        failed, written = tables.take_failure(), self.sync.take_written()
        if written:
            return BatchProblem(WRITTEN, 0, written)
        return None if failed is None else BatchProblem(CACHE_FAILED, *failed)

    def _watch(self, tables: ShardedTables) -> None:
        tables.on_replace = weakly(self._rows_replaced)
        for group in tables.groups:
            group.store.settle = self.sync.settle

    def _rows_replaced(self) -> None:
        self.sync.rows_replaced()
        self._rows_change()

    def _rows_change(self) -> None:
        """What was looked up for modules that have not asked for it is not what they would look up."""
        if self._started is not None and self._started.looked_up:
            self._started = None

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

    def tables(self, index: int) -> ShardedTables:
        """Of a module."""
        return self._tables[index]

    def names(self, index: int) -> str:
        """Of some of a module's tables, for messages."""
        return ", ".join(self._tables[index].names[:3])

    def tables_of(self, members: tuple[int, ...]) -> JointTables:
        """Of some of the modules."""
        if members not in self._joint:
            tables = [self._tables[index] for index in members]
            self._joint[members] = JointTables(tables, members, self.sync, weakly(self._rows_change))
        return self._joint[members]

    def join(self, index: int, part: BatchPart) -> JointBatch:
        """Begin a module's part of a batch, together with those that were begun just before and not waited for."""
        if self._cached:
            self._check_cached()
        if self._open is not None and not self._open.may_take(index, part):
            self._open.begin()
        if self._open is None:
            self._open = JointBatch(self)
        batch = self._open
        batch.parts[index] = part
        if len(batch.parts) == len(self._tables):
            batch.begin()
        return batch

    def start(self, parts: dict[int, BatchPart]) -> None:
        """Begin a batch for several modules before they are given it."""
        if self._cached:
            self._check_cached()
        if self._open is not None:
            self._open.begin()
        batch = self._started = JointBatch(self)
        batch.parts, batch.left = dict(parts), set(parts)
        batch.begin()

    def started(self, index: int, given: object) -> JointBatch | None:
        """The batch that was begun for a module beforehand, once; None if none was.

        Raises:
            DataError: that was another batch, or its ids were changed since.
        """
        batch = self._started
        if batch is not None and batch.failed:
            batch = self._started = None  # on every rank
        if batch is None or index not in batch.parts:
            return None
        part, wrong = batch.parts[index], ""
        if index not in batch.left:
            if part.features is not given:  # the next batch: whoever did not ask for this one will not
                self._started = None
            return None
        if part.features is not given:
            wrong = "is given another batch than start_input_dist was; give both the same object, one batch at a time"
        elif part.ids_changed:
            wrong = "has a batch whose ids were changed after start_input_dist; change them before"
        if wrong:
            self._started = None  # so that the next one is not refused, too
            rank = self._tables[index].rank
            raise DataError(f"rank {rank}: the collection of tables {self.names(index)} {wrong}")
        batch.left.remove(index)
        if not batch.left:
            self._started = None
        return batch

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
        left: modules for which it was begun beforehand, and which have not asked for it.
    """

    def __init__(self, modules: JointModules) -> None:
        self.parts: dict[int, BatchPart] = {}
        self.left: set[int] = set()
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
        self._marks: dict[int, Hashable] = {}  # of the rows of each of several modules, as they were looked up

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
        outside = []
        for module, part in enumerate(parts):
            if isinstance(part.problem, OutsideIds):
                outside.append((module, part.problem.table))
            elif part.problem is not None and not status.problem:
                table = tables.first_table[module] + part.problem.table
                status = Status(part.problem.kind, table, status.written)
        known_there = None
        if outside and not status.problem:
            status, known_there = replace(status, problem=BAD_IDS), tables.first_outside(outside)
        self._splits = tables.exchange_splits(self._batch, status.on(self._batch.counts.device, known_there))

    def send_ids(self) -> None:
        """Send the ids, once every rank has given its word on its own.

        Raises:
            DataError, CheckpointError: a rank has a problem.
            PlanError: rows were moved since it was begun.
        """
        self.begin()
        assert self._tables is not None
        self._tables.check()
        if self._error is not None:
            raise self._error
        if self._exchange is not None:
            return
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
                evaluated only; or they or their learning rates were changed since.
            PlanError: rows were moved since it was begun.
        """
        assert self._tables is not None
        self._tables.check()
        train = torch.is_grad_enabled()
        self._modules.steps_on = current_stream(self._modules.device)
        if self._token is None:
            self._look_all_up(train=train)
        owner, names = self.parts[index].owner, self._modules.names
        if train and not self._train:
            raise CommunicationError(
                f"tables {names(index)}: their rows were looked up without gradients, together with those of modules"
                " in evaluation under torch.no_grad(), or under torch.inference_mode(); put the model in train() mode,"
                " or leave these first"
            )
        if index in self._marks and self._marks[index] != owner.rows_mark():
            raise CommunicationError(
                f"tables {names(index)}: their rows or learning rates were changed after the rows had been looked up,"
                " together with those of modules whose forward pass came before; change them before the first module's"
            )
        if not train:
            self._frozen.add(index)
        if self._train:
            if self._marks:
                owner.before_look_up(train=train)
            owner.looked_up(self.exchange, train=train)

    @property
    def failed(self) -> bool:
        """Whether some rank has a problem with it."""
        return self._error is not None

    @property
    def looked_up(self) -> bool:
        """Whether its rows were."""
        return self._token is not None

    def _look_all_up(self, *, train: bool) -> None:
        owners = [part.owner for part in self.parts.values()]
        # Another one of them may train though this one does not.
        several = len(owners) > 1
        others = several and not torch.is_inference_mode_enabled()
        self._train = train or (others and any(owner.training for owner in owners))
        tables = [self._modules.tables(index) for index in self.parts] if several else []
        before = [one.moments() for one in tables]
        for owner in owners:
            owner.before_look_up(train=self._train)
        with torch.set_grad_enabled(self._train):
            self._token = self.exchange.start()
        for one, moments in zip(tables, before, strict=True):
            one.restore(moments)  # a module that does not ask for its rows is where it was
        if several:
            self._marks = {index: part.owner.rows_mark() for index, part in self.parts.items()}

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
