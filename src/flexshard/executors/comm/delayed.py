"""Rows without copies whose exchange is spread over two steps, where the next batch is known (BagPipe, section 3.3).

Of a batch's rows, those that the batch before does not train are as they will be before that one's gradients have come:
they are sent while it is under way. Of its gradients, those of rows that the next batch reads are sent first and waited
for; the others travel during the next step. TorchRec's "prioritized embedding communication" does the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from flexshard.errors import CacheError
from flexshard.executors.comm.collectives import Label, PendingCollective
from flexshard.executors.comm.context import ExchangeContext
from flexshard.executors.comm.rows_buffer import Arrival, RowsBuffer, buffer_of, of_classes, send_rows
from flexshard.executors.comm.splits import Splits
from flexshard.executors.stores.base import AnnouncedRows

__all__ = ["DelayedRows"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Part:
    """Some lookups of every class.

    Attributes:
        which: their indices among the class's; shape (n,) each.
        counts: of each segment (rank) and class; shape (g, K).
    """

    which: list[torch.Tensor]
    counts: IntArray


def _whole(counts: IntArray) -> _Part:
    """All lookups; ``counts`` of each segment and class, shape (g, K)."""
    return _Part([torch.arange(number) for number in counts.sum(axis=0).tolist()], counts)


def _parts(chosen: torch.Tensor, counts: IntArray) -> tuple[_Part, _Part]:
    """Lookups that are chosen, and the others.

    Args:
        chosen: whether each is, segment after segment and class after class; shape (n,).
        counts: of each segment and class; shape (g, K).
    """
    ends = np.concatenate([[0], np.cumsum(counts.ravel())])
    before = np.concatenate([[0], np.cumsum(chosen.numpy())])
    number = np.diff(before[ends]).reshape(counts.shape)
    of_class = of_classes(chosen, counts)
    ours, others = ([own.nonzero().view(-1) for own in kind] for kind in (of_class, [~own for own in of_class]))
    return _Part(ours, number), _Part(others, counts - number)


@dataclass
class _Word:
    """Which of a batch's rows another batch shares: what the holders found, on its way to those that ask.

    Attributes:
        held: whether each lookup is of such a row, as a holder has them; shape (lookups,), bool.
        asked: the same as who asks has them, once ``pending`` is over; uint8.
        counts: of the holder's lookups, and of those asked for, of each rank and class; shape (g, K).
    """

    held: torch.Tensor
    asked: torch.Tensor
    pending: PendingCollective
    counts: tuple[IntArray, IntArray]

    @cached_property
    def as_holder(self) -> tuple[_Part, _Part]:
        """Lookups of shared rows, and the others."""
        return _parts(self.held, self.counts[0])

    @cached_property
    def as_asker(self) -> tuple[_Part, _Part]:
        """The same lookups where they were asked for."""
        self.pending.wait()
        return _parts(self.asked.bool(), self.counts[1])


@dataclass
class _PartArrival(Arrival):
    """Some rows of a buffer, which go to their places in it."""

    into: RowsBuffer
    which: Sequence[torch.Tensor]

    def take(self) -> None:
        super().take()
        for index in self.target.classes:
            places = self.into.places(index, self.which[index])
            self.into.view(index).index_copy_(0, places, self.target.get(index))


@dataclass
class _Update:
    """Gradients of some parts of a batch, on their way.

    Attributes:
        parts: of the holder's lookups.
        arrivals: what comes for those that were sent.
        rest: sends the others' gradients, which nobody waits for; None once they are.
        classes: that are trained.
        moments: of each class's update.
        scale: of gradients.
    """

    parts: list[_Part]
    arrivals: list[list[Arrival]]
    rest: Callable[[], list[Arrival]] | None = None
    classes: Sequence[int] = ()
    moments: Sequence[tuple[int, float]] = ()
    scale: float = 1.0


class DelayedRows:
    """The rows without copies of one batch. What it sends every rank must send.

    Attributes:
        asked: slots of this rank that are asked for, rank after rank; shape (n,), int64.
        members: modules whose batch it is.
        follower: the batch that comes next, once it is known.
        begun: whether rows were sent.
        scattered: whether its gradients are on their way, or have come.
    """

    def __init__(
        self,
        context: ExchangeContext,
        segments: slice,
        splits: Splits,
        asked: torch.Tensor,
        announced: Sequence[AnnouncedRows],
        members: tuple[int, ...],
        group: dist.ProcessGroup | None,
    ) -> None:
        """``segments`` of the level; ``announced`` of each class; ``group``: all ranks, for what is not waited for."""
        self._context, self._segments, self._announced = context, segments, list(announced)
        self.members = members
        self._behind, self._ahead = group, context.groups[context.layout.world_size].inside
        self.asked = asked.long()
        self._counts = splits.received[-1], splits.sent[segments]
        self.follower: DelayedRows | None = None
        self._of_before: _Word | None = None
        self._of_follower: _Word | None = None
        self._early: list[Arrival] = []
        self._late: list[Arrival] = []
        self._versions: list[int] = []
        self._moments: list[tuple[int, float]] = []
        self.begun = self.scattered = False
        self._update: _Update | None = None

    # -- what other batches share

    def meets(self, before: DelayedRows, *, of_before: torch.Tensor, of_this: torch.Tensor) -> None:
        """This batch comes after another: which lookups of each are of rows that the other has too."""
        before.follower = self
        before._of_follower, self._of_before = before._tell(of_before), self._tell(of_this)

    def _tell(self, shared: torch.Tensor) -> _Word:
        held, wanted = self._counts
        asked = torch.empty(int(wanted.sum()), dtype=torch.uint8, device=shared.device)
        back, out = wanted.sum(axis=1).tolist(), held.sum(axis=1).tolist()
        pending = self._all_to_all("shared rows", self._behind, asked, shared.to(torch.uint8), back, out)
        return _Word(shared, asked, pending, self._counts)

    def _all_to_all(
        self,
        content: str,
        group: dist.ProcessGroup | None,
        received: torch.Tensor,
        sent: torch.Tensor,
        back: Sequence[int],
        out: Sequence[int],
    ) -> PendingCollective:
        label = Label(self._context.layout.world_size, content, self._context.layout.tables)
        return self._context.transport.all_to_all(received, sent, back, out, group, label)

    # -- forward

    def send_early(self) -> None:
        """Send what the batch before does not train."""
        assert self._of_before is not None
        self.begun, self._versions = True, self._writes()
        self._early = self._answer(self._of_before.as_holder[1], self._of_before.as_asker[1], self._behind)

    def send_late(self) -> None:
        """Send the others, once, when the batch before has trained them."""
        if self._late:
            return
        assert self._of_before is not None
        self._late = self._answer(self._of_before.as_holder[0], self._of_before.as_asker[0], self._ahead)

    def start(self, answers: Sequence[RowsBuffer], *, early: bool) -> list[list[Arrival]]:
        """What will fill each buffer of answers with this level's rows.

        Args:
            early: what was sent still holds; the rest, if there is any, is sent now. Otherwise all rows are.

        Raises:
            CacheError: somebody wrote to parameters after rows had been sent.
        """
        for announced in self._announced:
            announced.begin()
        self.begun, self._moments = True, [store.moment for store in self._context.stores]
        written = early and self.written
        sent: list[tuple[list[Arrival], _Part]] = []
        if early:
            assert self._of_before is not None
            self.send_late()
            late, others = self._of_before.as_asker
            sent += [(self._early, others), (self._late, late)]
        else:
            for arrival in [*self._early, *self._late]:
                arrival.pending.wait()
            ours, theirs = _whole(self._counts[0]), _whole(self._counts[1])
            sent.append((self._answer(ours, theirs, self._ahead), theirs))
        self._early, self._late = [], []
        if written:  # others have theirs, and hear of it with the next counts
            raise CacheError(self.written_text)
        into = [buffer.part(self._segments) for buffer in answers]
        return [
            [
                _PartArrival(arrivals[at].pending, arrivals[at].coded, arrivals[at].target, own, part.which)
                for arrivals, part in sent
            ]
            for at, own in enumerate(into)
        ]

    def _writes(self) -> list[int]:
        """How often somebody wrote to parameters, of each class."""
        return [store.flat._version for store in self._context.stores]

    @property
    def written(self) -> bool:
        """Whether somebody wrote to parameters since rows were sent early, or since some were updated."""
        return self._versions != self._writes()

    @property
    def written_text(self) -> str:
        """What to say then."""
        return (
            f"tables {', '.join(self._context.layout.tables[:3])}: parameters were written to between two steps, when"
            " rows of the next batch or gradients of the last one were on their way, which are lost in part; load a"
            " checkpoint, and write by load_state_dict() or under LookaheadPipeline(delayed_sync=False)"
        )

    def _answer(self, ours: _Part, theirs: _Part, group: dist.ProcessGroup | None) -> list[Arrival]:
        """Send some rows, those of each bundle in a buffer."""
        wire, device = self._context.forward, self.asked.device
        rows = [announced.rows(which) for announced, which in zip(self._announced, ours.which, strict=True)]
        return [
            send_rows(
                wire,
                buffer_of(wire.plain, bundle, ours.counts, rows),
                RowsBuffer.make(wire.plain, bundle, theirs.counts, device),
                partial(self._all_to_all, "embeddings", group),
            )
            for bundle in self._context.bundles
        ]

    # -- backward

    def scatter(self, gradients: Sequence[RowsBuffer], has: IntArray) -> None:
        """Send gradients, of rows that the next batch reads alone if it is known: the others follow with
        :meth:`send_rest`.

        Args:
            has: 1 for each class that has any; shape (K,).

        Raises:
            CacheError: they were sent before.
        """
        if self.scattered:
            raise CacheError(
                f"tables {', '.join(self._context.layout.tables[:3])}: gradients of a batch come twice (backward with"
                " retain_graph), when those of the first time may be on their way; add the losses up, or use"
                " LookaheadPipeline(delayed_sync=False)"
            )
        self.scattered = True
        if self._of_follower is None:
            whole = _whole(self._counts[0]), _whole(self._counts[1])
            self._update = _Update([whole[0]], [self._send(gradients, has, *whole, self._ahead)])
            return
        held, asked = self._of_follower.as_holder, self._of_follower.as_asker
        first = self._send(gradients, has, held[0], asked[0], self._ahead)
        rest = partial(self._send, gradients, has, held[1], asked[1], self._behind)
        self._update = _Update(list(held), [first], rest)

    def send_rest(self) -> None:
        """Send the gradients that were held back, which are best sent when the layers' own are through: both want the
        same links, and a step waits for the latter.
        """
        update = self._update
        if update is not None and update.rest is not None:
            update.arrivals.append(update.rest())
            update.rest = None

    def _send(
        self,
        gradients: Sequence[RowsBuffer],
        has: IntArray,
        ours: _Part,
        theirs: _Part,
        group: dist.ProcessGroup | None,
    ) -> list[Arrival]:
        """Send some lookups' gradients (``theirs``, as who asks has them) to the holders."""
        wire, device, found = self._context.backward, self.asked.device, []
        for given in gradients:
            own = given.part(self._segments)
            piece = RowsBuffer.make(wire.plain, own.classes, theirs.counts * has, device)
            for index in own.classes:
                if has[index]:
                    places = own.places(index, theirs.which[index])
                    piece.put(index, own.view(index).index_select(0, places))
            target = RowsBuffer.make(wire.plain, own.classes, ours.counts * has, device)
            found.append(send_rows(wire, piece, target, partial(self._all_to_all, "gradients", group)))
        return found

    def update(self, classes: Sequence[int], scale: float) -> bool:
        """Update the rows that the next batch reads by their gradients, those of the classes that have any; whether
        the others are still under way.
        """
        assert self._update is not None
        self._update.classes, self._update.scale = classes, scale
        self._update.moments = [
            at_look_up if store.fixed_at_look_up else store.moment
            for store, at_look_up in zip(self._context.stores, self._moments, strict=True)
        ]
        self._versions = self._writes()
        return self._take()

    def take_rest(self) -> None:
        """Update the other rows, once their gradients are here; raises as :meth:`start`."""
        if self._update is not None:
            self.send_rest()  # even if they are lost: other ranks wait for them
            if self.written:
                self._finish()
                raise CacheError(self.written_text)
            self._take()

    def hear(self) -> None:
        """Wait for the word on rows that the batch before has, too, if anybody was told: nobody may train this one."""
        if self._of_before is not None:
            self._of_before.pending.wait()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take(self) -> bool:
        """Take one part of the gradients; whether there is another."""
        update = self._update
        assert update is not None
        part, arrivals = update.parts[0], update.arrivals[0]
        for arrival in arrivals:
            arrival.take()
            for index in arrival.target.classes:
                if index in update.classes:
                    gradient = arrival.target.get(index).mul_(update.scale)
                    self._announced[index].update(part.which[index], gradient, update.moments[index])
        del update.parts[0], update.arrivals[0]
        if update.parts:
            return True
        self._finish()
        return False

    def _finish(self) -> None:
        """No more gradients will be taken."""
        assert self._update is not None
        trained, self._update, self.follower = self._update.classes, None, None
        for index, announced in enumerate(self._announced):
            announced.finish(trained=index in trained)
