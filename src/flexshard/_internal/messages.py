"""An all-to-all that gloo runs in both directions at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

__all__ = ["Messages", "PendingMessages", "all_to_all"]


# Gloo's buffers must not go while it fills or reads them, even where nobody waits: at a pipeline's end, after an error.
_under_way: set[PendingMessages] = set()
_started: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # exchanges of each process group
_TAGS = 1 << 30


class PendingMessages:
    """Messages under way, as a handle of a collective."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works
        _under_way.add(self)

    def wait(self) -> None:
        """Until all have come and gone.

        Raises:
            RuntimeError: one failed or timed out; the others are left as they are.
        """
        for work in self._works:
            work.wait()
        self._works = ()
        _under_way.discard(self)


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
        # Each exchange has its own, as gloo numbers collectives: ranks that started more than others wait for them.
        tag = _started[group] = (_started.get(group, 0) + 1) % _TAGS
        received, sent = _parts(output, output_split_sizes), _parts(input, input_split_sizes)
        received[rank].copy_(sent[rank])
        # Nearest ranks ahead first, so that no rank is asked by all others at once.
        sources, targets = ([(rank + way * step) % world for step in range(1, world)] for way in (-1, 1))
        works = [
            dist.irecv(received[peer], group=group, group_src=peer, tag=tag)
            for peer in sources
            if received[peer].numel()
        ]
        works += [
            dist.isend(sent[peer], group=group, group_dst=peer, tag=tag) for peer in targets if sent[peer].numel()
        ]
        return PendingMessages([work for work in works if work is not None])


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
    """
    if output_split_sizes is None or input_split_sizes is None or dist.get_backend(group) != "gloo":
        splits = (None if one is None else list(one) for one in (output_split_sizes, input_split_sizes))
        return dist.all_to_all_single(output, input, *splits, group=group, async_op=True)
    return Messages.exchange_messages(output, input, output_split_sizes, input_split_sizes, group)


def _parts(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    starts = accumulate(sizes, initial=0)
    return [tensor.narrow(0, start, size) for start, size in zip(starts, sizes, strict=False)]
