"""An all-to-all that gloo runs in both directions at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

__all__ = ["Messages", "PendingMessages", "all_to_all", "runs_gloo"]

_TAGS = 1 << 30


class _Exchanges:
    """Of one process group: how many were started, and those under way by number. Gloo's buffers must not go while it
    fills or reads them, even where nobody waits: after evaluations, at a pipeline's end, after an error.
    """

    def __init__(self) -> None:
        self.started = 0
        self.under_way: dict[int, PendingMessages] = {}


_of_group: WeakKeyDictionary[Any, _Exchanges] = WeakKeyDictionary()


class PendingMessages:
    """Messages under way, as a handle of a collective."""

    def __init__(self, exchanges: _Exchanges) -> None:
        exchanges.started += 1
        self._exchanges, self.number = exchanges, exchanges.started
        self.works: list[dist.Work] = []
        self._lock = Lock()  # gloo lets one caller wait for a message, once
        exchanges.under_way[self.number] = self

    def wait(self) -> None:
        """Until all have come and gone, and those of exchanges before, which travel ahead of them.

        Raises:
            RuntimeError: one failed or timed out; it stays under way.
        """
        under_way = self._exchanges.under_way
        for one in [one for number, one in list(under_way.items()) if number <= self.number]:
            with one._lock:
                while one.works:
                    one.works[0].wait()
                    one.works.pop(0)
            under_way.pop(one.number, None)


class Messages:
    """How all-to-alls of messages are run; what counts them stands in for :meth:`exchange_messages`."""

    @staticmethod
    def exchange_messages(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        group: dist.ProcessGroup | None = None,
    ) -> PendingMessages:
        """An all-to-all of messages, of which every rank asks for its own before it sends any.

        Gloo sends a message when its receiver has asked for it, and its own all-to-all has one rank of each two ask
        only after it began to send: its request waits behind what it sends, on the same connection. So one direction
        follows the other, and where links are slow, an exchange takes up to half as long again. Arguments as of
        :func:`all_to_all`.
        """
        group = dist.group.WORLD if group is None else group
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        received, sent = _parts(output, output_split_sizes, world), _parts(input, input_split_sizes, world)
        if received[rank].shape != sent[rank].shape:
            raise RuntimeError(f"a rank sends itself {len(sent[rank])} entries and expects {len(received[rank])}")
        received[rank].copy_(sent[rank])
        # Each exchange has a tag, as gloo numbers collectives: ranks that started more than others wait for them.
        pending = PendingMessages(_of_group.setdefault(group, _Exchanges()))
        tag = pending.number % _TAGS
        # Nearest ranks ahead first, so that no rank is asked by all others at once.
        sources, targets = ([(rank + way * step) % world for step in range(1, world)] for way in (-1, 1))
        for peer in sources:
            if received[peer].numel():
                pending.works.append(_started(dist.irecv(received[peer], group=group, group_src=peer, tag=tag)))
        for peer in targets:
            if sent[peer].numel():
                pending.works.append(_started(dist.isend(sent[peer], group=group, group_dst=peer, tag=tag)))
        return pending


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """``dist.all_to_all_single``, started; under gloo as :meth:`Messages.exchange_messages` where there are splits.

    Args:
        output, input, output_split_sizes, input_split_sizes, group: as of ``dist.all_to_all_single``; every rank passes
            splits, or none does.

    Returns:
        A handle to wait for.

    Raises:
        RuntimeError: splits do not fit their tensor; or it could not be started.
    """
    if output_split_sizes is None or input_split_sizes is None or not runs_gloo(output.device, group):
        splits = (None if one is None else list(one) for one in (output_split_sizes, input_split_sizes))
        return dist.all_to_all_single(output, input, *splits, group=group, async_op=True)
    return Messages.exchange_messages(output, input, output_split_sizes, input_split_sizes, group)


def runs_gloo(device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether a group's collectives of tensors on a device are gloo's, on the host."""
    return device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(group)


def _parts(tensor: torch.Tensor, sizes: Sequence[int], world: int) -> list[torch.Tensor]:
    if len(sizes) != world or sum(sizes) != tensor.shape[0]:
        raise RuntimeError(f"{len(sizes)} splits of {sum(sizes)} entries, for {world} ranks and {tensor.shape[0]}")
    starts = list(accumulate(sizes[:-1], initial=0))
    return [tensor.narrow(0, start, size) for start, size in zip(starts, sizes, strict=True)]


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None is for ranks that are not in the group
    return work
