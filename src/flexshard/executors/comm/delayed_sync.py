"""Batches of one model whose exchanges reach into one another's steps: who comes after whom, and what is under way.

Every rank has to do the same to its model, so that all of them send what one of them does. Rows that were sent early
are used only if nothing but the batch before was looked up, updated or loaded since; gradients that are under way are
taken before anybody else looks at the rows. What is written to parameters in between is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flexshard.errors import CacheError
from flexshard.executors.comm.delayed import DelayedRows

__all__ = ["DelayedSync"]


@dataclass
class _Early:
    """A batch of which some rows were sent, after another was looked up."""

    rows: DelayedRows
    after: DelayedRows


class DelayedSync:
    """Of all modules that are sharded alike."""

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self._orders: dict[tuple[int, ...], _Order] = {}
        self._latest: dict[int, DelayedRows | None] = {}
        self._early: list[_Early] = []
        self._pending: list[DelayedRows] = []
        self._lost = ""

    @property
    def on(self) -> bool:
        """Whether batches are to be exchanged so."""
        return self.group is not None

    def announced(self, rows: DelayedRows, num_slots: int) -> None:
        """A batch's rows, in the order of steps; of so many slots on this rank."""
        order = self._orders.get(rows.members)
        if order is None:
            order = self._orders[rows.members] = _Order(num_slots, rows.asked.device)
        order.append(rows)

    def before_look_up(self, members: tuple[int, ...], rows: DelayedRows | None, *, train: bool) -> bool:
        """These modules' rows are looked up, for a batch that was announced or not; whether what was sent of it early
        is what it would be now.
        """
        self.settle(members, follower=rows if train else None)
        if not train:
            return False
        holds = any(one.rows is rows for one in self._early)
        self._latest.update(dict.fromkeys(members, rows))
        self._early = [one for one in self._early if not _overlap(one.rows.members, members)]
        return holds

    def before_update(self, members: tuple[int, ...], rows: DelayedRows | None) -> None:
        """These modules' rows are updated by gradients of a batch."""
        self.settle(members)
        self._early = [one for one in self._early if one.after is rows or not _overlap(one.rows.members, members)]

    def updated(self, rows: DelayedRows) -> None:
        """Some of a batch's gradients are still to come."""
        self._pending.append(rows)

    def send_early(self) -> None:
        """Send what can be of the batches that follow those looked up last, once gradients of earlier ones have come:
        best between a step's forward and backward pass.
        """
        for rows in list(dict.fromkeys(self._latest.values())):
            if rows is None or any(self._latest[member] is not rows for member in rows.members):
                continue
            self.settle(rows.members)
            follower = rows.follower
            if follower is not None and not follower.begun:
                follower.send_early()
                self._early.append(_Early(follower, rows))

    def after_backward(self, *, failed: bool = False) -> None:
        """Send, once a step's backward pass is over on every rank, the other rows of batches of which some were sent
        early, and after them the gradients that were held back.

        Args:
            failed: it is not, on this rank; nothing is sent then unless all that comes before was.
        """
        latest = [rows for rows in self._latest.values() if rows is not None]
        if failed and not all(rows.scattered for rows in latest):
            return
        for one in self._early:
            if one.after.scattered:
                one.rows.send_late()
        for rows in dict.fromkeys([*latest, *self._pending]):
            rows.send_rest()

    def settle(self, members: Iterable[int] | None = None, *, follower: DelayedRows | None = None) -> None:
        """Take gradients that are under way, of some modules or of all, but for those of which this follower of their
        batch needs none.

        Raises:
            CacheError: somebody wrote to parameters meanwhile, and this is the first to say so.
        """
        chosen = None if members is None else tuple(members)
        for rows in list(self._pending):
            if rows.follower is follower and follower is not None:
                continue
            if chosen is None or _overlap(rows.members, chosen):
                self._take(rows)

    def _take(self, rows: DelayedRows) -> None:
        """Take a batch's gradients. Where they are lost, that is said once: a checkpoint can be loaded then."""
        self._pending.remove(rows)
        try:
            rows.take_rest()
        except CacheError as error:
            self._lost = str(error)
            raise

    def rows_replaced(self) -> None:
        """Rows are written to by what all ranks call: what was sent early no longer holds."""
        self._early.clear()
        self._lost = ""

    def layout_changed(self) -> None:
        """Rows have other slots."""
        self.settle()
        self._early.clear()
        self._latest.clear()
        self._orders.clear()

    def take_written(self) -> str:
        """What to say where somebody wrote to parameters of which rows were sent early (until these are looked up, or
        others loaded), or are to be updated (once: what is lost is lost).
        """
        for rows in [rows for rows in self._pending if rows.written]:
            with suppress(CacheError):
                self._take(rows)
        text, self._lost = self._lost, ""  # of which this rank alone has heard
        return text or next((one.rows.written_text for one in self._early if one.rows.written), "")


def _overlap(one: Iterable[int], other: Iterable[int]) -> bool:
    return not set(one).isdisjoint(other)


class _Order:
    """Batches in the order in which they are announced, and which of their rows the next one has too."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        """``num_slots`` of this rank: 4 bytes each."""
        self._number = 0
        self._stamps = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._last: DelayedRows | None = None

    def append(self, rows: DelayedRows) -> None:
        """One more."""
        of_this = self._stamps.index_select(0, rows.asked) == self._number
        self._number += 1
        self._stamps.index_fill_(0, rows.asked, self._number)
        last = self._last
        if last is not None:
            last.hear()
            if not last.scattered:
                of_before = self._stamps.index_select(0, last.asked) == self._number
                rows.meets(last, of_before=of_before, of_this=of_this)
        self._last = rows
