"""The collectives that executors use, started asynchronously; a failure names what was being sent and over which ranks.

Everything goes through ``torch.distributed``'s own functions and :mod:`flexshard._internal.messages`, where
:class:`flexshard.executors.Observer` counts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flexshard._internal import all_to_all, lost_rank, used_here
from flexshard.errors import CommunicationError

__all__ = ["Collectives", "Label", "PendingCollective", "label_of_call"]


@dataclass(frozen=True)
class Label:
    """What a collective carries.

    Attributes:
        group_size: g of its level.
        content: "counts", "ids", "embeddings", "gradients", "replicas" (dense gradients of copies), "touched" (how many
            rows of the copies were), "touched_rows" (their gradients) or "shared rows" (which rows of a batch the next
            one reads).
        tables: whose rows.
    """

    group_size: int
    content: str
    tables: tuple[str, ...]


_label: ContextVar[Label | None] = ContextVar("flexshard_collective", default=None)


def label_of_call() -> Label | None:
    """Label of the collective that is being started; None for those of other code."""
    return _label.get()


@contextmanager
def _labelled(label: Label, group: dist.ProcessGroup | None) -> Iterator[None]:
    token = _label.set(label)
    try:
        yield
    except RuntimeError as error:
        raise _failure(label, group, error) from error
    finally:
        _label.reset(token)


def _failure(label: Label, group: dist.ProcessGroup | None, error: RuntimeError) -> CommunicationError:
    ranks = dist.get_process_group_ranks(group)
    shown = ", ".join(label.tables[:3]) + (f" and {len(label.tables) - 3} more" if len(label.tables) > 3 else "")
    return CommunicationError(
        f"rank {dist.get_rank()}: exchanging {label.content} of tables {shown} with ranks {_span(ranks)} failed:"
        f" {lost_rank(error)}"
    )


def _span(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"


class PendingCollective:
    """A collective under way."""

    def __init__(self, work: Any, label: Label, group: dist.ProcessGroup | None, *tensors: torch.Tensor) -> None:
        """``tensors`` are what it reads and writes: NCCL keeps them only until anybody has waited, on any stream."""
        self._work, self._label, self._group, self._tensors = work, label, group, tensors

    def wait(self) -> None:
        """Until it is over (on CUDA: until the current stream may use its result).

        Raises:
            CommunicationError: it failed or timed out.
        """
        if self._work is None:
            return
        work, self._work = self._work, None
        with _labelled(self._label, self._group):
            work.wait()
        for tensor in self._tensors:
            used_here(tensor)
        self._tensors = ()


class Collectives:
    """How tensors get to other ranks; what stands in for it in a test overrides a method."""

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_splits: Sequence[int] | None,
        sent_splits: Sequence[int] | None,
        group: dist.ProcessGroup | None,
        label: Label,
    ) -> PendingCollective:
        """:func:`flexshard._internal.all_to_all`; splits count entries of the first dimension, None for equal ones."""
        with _labelled(label, group):
            work = all_to_all(received, sent, received_splits, sent_splits, group=group)
        return PendingCollective(work, label, group, received, sent)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None,
        label: Label,
        op: dist.ReduceOp = dist.ReduceOp.SUM,
    ) -> PendingCollective:
        """``dist.all_reduce``, in place."""
        with _labelled(label, group):
            work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
        return PendingCollective(work, label, group, tensor)

    def all_gather(
        self, gathered: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup | None, label: Label
    ) -> PendingCollective:
        """``dist.all_gather_into_tensor``."""
        with _labelled(label, group):
            work = dist.all_gather_into_tensor(gathered, local, group=group, async_op=True)
        return PendingCollective(work, label, group, gathered, local)
