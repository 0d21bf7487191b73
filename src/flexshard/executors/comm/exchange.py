"""What goes over the wire in one step: the ids, the rows, and the rows' gradients, of one module or of several.

Per step and level with g > 1: ids (int32 where they fit) to the ranks that hold the rows, rows back, and gradients the
way of the ids; one all-to-all each for all classes of tables (see :class:`flexshard.costmodels.Frame`). No lengths or
keys are sent: a slot says which table it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrec.distributed.comm_ops import get_gradient_division

from flexshard._internal import HostCopy, host_waits_for, spread_on, used_here
from flexshard.executors.comm.bucketized_ids import BucketizedIds
from flexshard.executors.comm.collectives import Label, PendingCollective
from flexshard.executors.comm.context import ExchangeContext
from flexshard.executors.comm.delayed import DelayedRows
from flexshard.executors.comm.delayed_sync import DelayedSync
from flexshard.executors.comm.rows_buffer import Arrival, RowsBuffer, buffer_of, of_classes, send_rows
from flexshard.executors.comm.splits import Splits
from flexshard.executors.comm.wire import Wire
from flexshard.executors.stores.base import AnnouncedRows, LookedUp, at_moments
from flexshard.executors.stores.touched_rows import TouchedCounts

__all__ = ["Exchange"]

IntArray = npt.NDArray[np.int64]


class Exchange:
    """One batch, from ids to rows and back to gradients: making it sends the ids, :meth:`look_up` answers
    what other ranks ask for, :meth:`gather` takes their answers, :meth:`scatter` sends gradients, and :meth:`update`
    takes those that others send.
    """

    def __init__(
        self,
        context: ExchangeContext,
        batch: BucketizedIds,
        splits: Splits,
        members: tuple[int, ...],
        sync: DelayedSync,
    ) -> None:
        """``members``: the modules, as their model counts them; ``sync`` of the model's batches."""
        self._context, self._batch, self._splits = context, batch, splits
        self._members, self._sync = members, sync
        layout = context.layout
        self._levels = range(len(layout.group_sizes))
        self._segments = [slice(*pair) for pair in pairwise(layout.first_bucket)]
        self._device = batch.slots.device
        ends = list(accumulate((int(splits.sent[part].sum()) for part in self._segments), initial=0))
        slots = batch.slots.to(torch.int32 if layout.slot_type is np.int32 else torch.int64)
        self._asked: list[torch.Tensor] = []
        self._pending: list[PendingCollective] = []
        for level, size in enumerate(layout.group_sizes):
            own = slots[ends[level] : ends[level + 1]]
            if size == 1:
                self._asked.append(own)
                continue
            back, out = splits.received[level].sum(axis=1), splits.sent[self._segments[level]].sum(axis=1)
            asked = own.new_empty(int(back.sum()))
            self._pending.append(self._all_to_all(level, "ids", asked, own, back.tolist(), out.tolist()))
            self._asked.append(asked)
        self._slots: list[list[torch.Tensor]] = []
        self._announced: list[AnnouncedRows] = []
        self._delayed: DelayedRows | None = None
        self._parts: DelayedRows | None = None  # the same, where they are trained
        self._updates: list[Callable[[torch.Tensor], None]] = []
        self._rates: list[float] = []
        self._rows: list[torch.Tensor] = []
        self._answers: list[RowsBuffer] = []
        self._given: list[torch.Tensor | None] = []
        self._gradients: list[list[RowsBuffer]] = []
        self._arrivals: list[list[Arrival]] = []
        self._index: list[torch.Tensor] = []
        self._trained: list[int] = []
        self._touched: dict[int, TouchedCounts] = {}
        self._most: HostCopy | None = None

    def _all_to_all(
        self,
        level: int,
        content: str,
        received: torch.Tensor,
        sent: torch.Tensor,
        back: Sequence[int],
        out: Sequence[int],
    ) -> PendingCollective:
        context, size = self._context, self._context.layout.group_sizes[level]
        label = Label(size, content, context.layout.tables)
        return context.transport.all_to_all(received, sent, back, out, context.groups[size].inside, label)

    def wait_for_ids(self) -> None:
        """Until the ids that other ranks ask for are here."""
        for pending in self._pending:
            pending.wait()

    def announce(self) -> None:
        """Tell the stores, once, which rows without copies other ranks ask for, before they are looked up; and the
        batch before, where rows are to be sent in parts.
        """
        context, stores, top = self._context, self._context.stores, len(self._levels) - 1
        if self._announced or context.layout.group_sizes[top] < context.layout.world_size:
            return
        if not (self._sync.on or any(store.ahead for store in stores)):
            return
        self.wait_for_ids()
        self._announced = [store.announce(at) for store, at in zip(stores, self._slots_of(top), strict=True)]
        if self._sync.on:
            asked, segments = self._asked[top], self._segments[top]
            rows = DelayedRows(context, segments, self._splits, asked, self._announced, self._members, self._sync.group)
            self._delayed = rows
            self._sync.announced(rows, context.layout.num_slots)

    def tensors(self) -> list[torch.Tensor]:
        """What was made on the stream of the data distribution."""
        index = self._batch.index
        return [*self._asked, self._batch.slots, *([] if index is None else [index])]

    # -- forward

    def start(self) -> torch.Tensor:
        """Look up what other ranks ask for and send it; what is returned stands for it until :meth:`finish`."""
        self.look_up()
        token: torch.Tensor = _LookUp.apply(self._context.anchor, self)
        return token

    @property
    def _in_place(self) -> bool:
        """Whether rows are looked up, and trained, as lookups ask for them: on one rank, which delays nothing."""
        return self._batch.index is None

    @property
    def zero(self) -> torch.Tensor:
        """The gradient of what stands for the rows."""
        return self._context.anchor.detach()

    def finish(self, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows of the batch's lookups of each class in their own order; shape (lookups, D) each."""
        rows: tuple[torch.Tensor, ...] = _Gather.apply(token, self)
        return rows

    def look_up(self) -> None:
        """Look up what other ranks ask for and send it; the largest group first, since it takes longest."""
        wire, train = self._context.forward, torch.is_grad_enabled()
        early = self._sync.before_look_up(self._members, self._delayed, train=train)
        self._parts = self._delayed if train else None
        # Stores that were told of the top level's have them.
        self._slots = [self._slots_of(level) for level in (self._levels[:-1] if self._announced else self._levels)]
        bundles, sent = self._context.bundles, self._splits.sent
        if self._in_place:
            self._rows = self._rows_of(0)
        elif self._context.layout.group_sizes == (1,):  # rows are where they are wanted
            rows = self._rows_of(0)
            self._answers = [buffer_of(wire.plain, bundle, sent, rows) for bundle in bundles]
        else:
            self._answers = [RowsBuffer.make(wire.plain, bundle, sent, self._device) for bundle in bundles]
            self._send_rows(early=early)
        if train:
            self._rates = [store.moment[1] for store in self._context.stores]
            self._count_touched()

    def _send_rows(self, *, early: bool) -> None:
        """Look up what other ranks ask for, and send it to where this one's answers lie."""
        wire = self._context.forward
        self._arrivals = [[] for _ in self._answers]
        for level in reversed(self._levels):
            if self._parts is not None and level == self._levels[-1]:
                self._arrivals = self._parts.start(self._answers, early=early)
                continue
            rows = self._rows_of(level)
            for answers, arrivals in zip(self._answers, self._arrivals, strict=True):
                part = answers.part(self._segments[level])
                if self._context.layout.group_sizes[level] == 1:
                    for index in answers.classes:
                        part.put(index, rows[index])
                else:
                    held = buffer_of(wire.plain, answers.classes, self._splits.received[level], rows)
                    arrivals.append(self._send(level, "embeddings", wire, held, part))

    def _count_touched(self) -> None:
        """How many rows of gathered tiers the batch touches, and the most of any copy, which backward has to know."""
        every = self._context.replicas(tuple(range(len(self._context.modules))))
        for level, reduction in enumerate(every):
            if reduction is not None and reduction.gathers:
                self._touched[level] = reduction.count_touched(self._slots[level])
        if host_waits_for(self._device):
            self._copy_most()

    def _copy_most(self) -> None:
        if self._touched and self._most is None:
            self._most = HostCopy(torch.cat([counts.most() for counts in self._touched.values()]))

    def _most_touched(self) -> dict[int, list[int]]:
        """The most of any copy, of each class, by level."""
        self._copy_most()
        if self._most is None:
            return {}
        by_level = self._most.numbers().reshape(len(self._touched), -1).tolist()
        return dict(zip(self._touched, by_level, strict=True))

    def _slots_of(self, level: int) -> list[torch.Tensor]:
        """Of each class, what this rank is asked for at a level, in its store, rank after rank; int64."""
        parts = of_classes(self._asked[level].long(), self._splits.received[level])
        if len(parts) == 1:
            return parts
        return [own - first for own, first in zip(parts, self._context.class_slots, strict=False)]

    def _rows_of(self, level: int) -> list[torch.Tensor]:
        """Rows of each class that this rank is asked for at a level."""
        stores = self._context.stores
        if self._context.layout.group_sizes[level] < self._context.layout.world_size:
            return [store.rows_at(at) for store, at in zip(stores, self._slots[level], strict=True)]
        look_ups: Sequence[Callable[[], LookedUp]] = self._announced or [
            partial(store.look_up, at) for store, at in zip(stores, self._slots[level], strict=True)
        ]
        found = [look_up() for look_up in look_ups]
        self._announced = []
        self._updates = [one.update for one in found]
        return [one.rows for one in found]

    def gather(self) -> list[torch.Tensor]:
        """Rows of the batch's lookups of each class in their own order; shape (lookups, D) each."""
        if self._in_place:
            rows, self._rows = self._rows, []
            for own in rows:
                used_here(own)
            # Detached, or autograd would write on the stores' own tensors, which would keep this exchange for ever.
            return [own.detach().to(dtype) for own, dtype in zip(rows, self._context.gathered_dtypes, strict=True)]
        for arrivals in self._arrivals:
            for arrival in arrivals:
                arrival.take()
        index = self._index_in(self._answers)
        forward, backward = self._context.forward.plain, self._context.backward.plain
        if not host_waits_for(self._device) and forward.row_bytes == backward.row_bytes:
            self._index = index  # gradients lie as the rows do; devices have no memory to spare for it
        result: list[Any] = [None] * len(index)
        for answers in self._answers:
            used_here(answers.buffer)
            for one in answers.classes:
                rows = answers.view(one).index_select(0, index[one])
                result[one] = rows.to(self._context.gathered_dtypes[one])
        self._answers, self._arrivals = [], []
        return result

    def _index_in(self, rows: Sequence[RowsBuffer]) -> list[torch.Tensor]:
        """Of each class, its lookups' rows in the view of its buffer."""
        index, counts = self._batch.index, self._splits.sent
        assert index is not None
        if counts.shape[1] == 1:
            return [index]
        lookups = list(self._batch.lookups)
        if len(rows) == 1 and rows[0].frame.uniform and np.array_equal(rows[0].frame.counts, counts):
            return list(index.split(lookups))  # rows lie as their ids do
        first = np.empty_like(counts)
        for part in rows:
            first[:, part.classes] = part.frame.first_rows
        place = spread_on(first, counts, self._device)
        return list(place.index_select(0, index).split(lookups))

    def _send(self, level: int, content: str, wire: Wire, held: RowsBuffer, target: RowsBuffer) -> Arrival:
        """Send rows, in the wire's form, to where ``target`` is filled with them."""
        return send_rows(wire, held, target, partial(self._all_to_all, level, content))

    # -- backward

    def scatter(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send the lookups' gradients to the holders; those of modules that have any, as on every rank."""
        self._context.check()
        wire, splits = self._context.backward, self._splits
        self._trained = [
            module
            for module, classes in enumerate(self._context.modules)
            if any(gradients[index] is not None for index in classes)
        ]
        has = np.zeros(len(gradients), np.int64)
        for module in self._trained:
            has[self._context.modules[module]] = 1
        self._gradients = [[] for _ in self._levels]
        self._arrivals = [[] for _ in self._levels]
        if self._in_place:
            self._given = [self._gradient_of(one, given) if has[one] else None for one, given in enumerate(gradients)]
            return
        sent = [
            RowsBuffer.make(wire.plain, bundle, splits.sent * has, self._device, zero=self._batch.shared)
            for bundle in self._context.bundles
        ]
        index = self._index if self._index and has.all() else self._index_in(sent)
        self._index = []
        for rows in sent:
            for one in rows.classes:
                if not has[one]:
                    continue
                gradient = self._gradient_of(one, gradients[one])
                if self._batch.shared:
                    rows.view(one).index_add_(0, index[one], gradient)
                else:
                    rows.view(one).index_copy_(0, index[one], gradient)
        for level in reversed(self._levels):
            if self._parts is not None and level == self._levels[-1]:
                self._parts.scatter(sent, has)
                continue
            for rows in sent:
                part = rows.part(self._segments[level])
                if self._context.layout.group_sizes[level] > 1:
                    own = part
                    part = RowsBuffer.make(wire.plain, rows.classes, splits.received[level] * has, self._device)
                    self._arrivals[level].append(self._send(level, "gradients", wire, own, part))
                self._gradients[level].append(part)

    def _gradient_of(self, index: int, given: torch.Tensor | None) -> torch.Tensor:
        """Of a class of a module that has some."""
        wire = self._context.backward
        if given is None:
            return torch.zeros(self._batch.lookups[index], wire.dims[index], device=self._device)
        return given.to(wire.dtypes[index])

    def update(self) -> None:
        """Take the gradients that came, and update the rows, at the learning rates that they were looked up at, as
        FBGEMM does: those with copies first, whose sums then travel while the others are updated.
        """
        with torch.no_grad():
            self._sync.before_update(self._members, self._parts)
            for module in self._trained:
                self._context.on_update(module, self)
            stores = self._context.stores
            moments = [(store.moment[0], rate) for store, rate in zip(stores, self._rates, strict=True)]
            with at_moments(stores, moments):
                self._update()

    def _update(self) -> None:
        context, trained = self._context, self._trained
        reductions = context.replicas(tuple(trained))
        classes = [index for module in trained for index in context.modules[module]]
        # Ranks average their losses, as TorchRec has it. The holders divide, after they have summed.
        scale = 1.0 / self._context.layout.world_size if get_gradient_division() else 1.0
        most = self._most_touched()
        for level in self._levels:
            if self._parts is not None and level == self._levels[-1]:
                if self._parts.update(classes, scale):
                    self._sync.updated(self._parts)
                continue
            for arrival in self._arrivals[level]:
                arrival.take()
            gradients: list[Any] = self._given or [None] * len(context.stores)
            for one in self._given:
                if one is not None:
                    used_here(one)
            for rows in self._gradients[level]:
                used_here(rows.buffer)
                for index in rows.classes:
                    gradients[index] = rows.get(index)
            reduction = reductions[level]
            if reduction is not None:
                slots, touched = self._slots[level], None
                if reduction.gathers:
                    touched = [(self._touched[level].slots[i], most[level][i]) for i in classes]
                reduction.reduce([slots[i] for i in classes], [gradients[i] for i in classes], scale, touched)
                continue
            for index in classes:
                self._updates[index](gradients[index] if scale == 1.0 else gradients[index].mul_(scale))
        self._given, self._gradients, self._arrivals = [], [], []


class _LookUp(torch.autograd.Function):
    """Where backward comes to when all gradients of a batch have been sent; its output carries no numbers."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return torch.empty_like(anchor)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        ctx.exchange.update()
        return None, None


class _Gather(torch.autograd.Function):
    """Rows as the model gets them. Backward only sends their gradients, so that other modules' go on their way before
    those of this one are waited for.
    """

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, exchange: Exchange) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)  # a module without gradients is not updated
        return tuple(exchange.gather())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        ctx.exchange.scatter(gradients)
        return ctx.exchange.zero, None
