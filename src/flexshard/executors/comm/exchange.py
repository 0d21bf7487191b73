"""What goes over the wire in one step: the ids, the rows, and the rows' gradients.

Per step and level with g > 1: ids (int32 where they fit) to the ranks that hold the rows, rows back, and gradients the
way of the ids; one all-to-all each. No lengths or keys are sent: a slot says which table it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.types import QuantizedCommCodecs

from flexshard._internal import LevelGroups
from flexshard.costmodels import Layout
from flexshard.executors.comm.bucketized_ids import BucketizedIds
from flexshard.executors.comm.collectives import Collectives, Label, PendingCollective
from flexshard.executors.comm.deferred_gradient import DeferredGradient
from flexshard.executors.comm.splits import Splits
from flexshard.executors.stores.base import RowStore

__all__ = ["Exchange", "ExchangeContext", "RowsAwaitable"]


@dataclass(frozen=True)
class ExchangeContext:
    """Where a group of tables is, and how it is reached.

    Attributes:
        layout: where every row lives.
        groups: process groups by group size.
        stores: this rank's rows, by level.
        collectives: what carries tensors.
        codecs: TorchRec's, of embeddings and gradients; None to send them as they are.
        output_dtype: of the rows that the model gets.
    """

    layout: Layout
    groups: dict[int, LevelGroups]
    stores: Sequence[RowStore]
    collectives: Collectives
    codecs: QuantizedCommCodecs | None
    output_dtype: torch.dtype


@dataclass
class _Transfer:
    """Rows under way; ``result`` gives them once ``pending`` is over."""

    pending: PendingCollective
    result: Callable[[], torch.Tensor]

    def wait(self) -> torch.Tensor:
        self.pending.wait()
        return self.result()


class Exchange:
    """One batch of one group of tables, from ids to rows and back to gradients."""

    def __init__(self, context: ExchangeContext, batch: BucketizedIds, splits: Splits) -> None:
        self._context, self._batch, self._splits = context, batch, splits
        self._gradients = [DeferredGradient() for _ in context.stores]
        ends = [0]
        for counts in splits.sent:
            ends.append(ends[-1] + sum(counts))
        self._parts = [slice(*pair) for pair in pairwise(ends)]
        self._asked: list[torch.Tensor] = []
        self._pending: list[PendingCollective | None] = []
        for level, size in enumerate(context.layout.group_sizes):
            slots = batch.slots[self._parts[level]]
            if size == 1:
                self._asked.append(slots)
                self._pending.append(None)
                continue
            asked = slots.new_empty(sum(splits.received[level]))
            self._pending.append(self._all_to_all(level, asked, slots, to_requesters=False, content="ids"))
            self._asked.append(asked)

    def _all_to_all(
        self,
        level: int,
        received: torch.Tensor,
        sent: torch.Tensor,
        *,
        to_requesters: bool,
        content: str,
        width: int = 1,
    ) -> PendingCollective:
        """Ids and gradients go from this rank's lookups to the holders; rows the other way, to their requesters."""
        layout = self._context.layout
        size = layout.group_sizes[level]
        out, back = self._splits.sent[level], self._splits.received[level]
        if to_requesters:
            out, back = back, out
        if width > 1:
            out, back = [n * width for n in out], [n * width for n in back]
        group, label = self._context.groups[size].inside, Label(size, content, layout.tables)
        return self._context.collectives.all_to_all(received, sent, back, out, group, label)

    def wait_for_ids(self) -> None:
        """Until the ids that other ranks ask for are here."""
        for pending in self._pending:
            if pending is not None:
                pending.wait()

    def tensors(self) -> list[torch.Tensor]:
        """What was made on the stream of the data distribution."""
        return [*self._asked, self._batch.slots, self._batch.index]

    # -- forward

    def start(self) -> RowsAwaitable:
        """Look up what other ranks ask for and send it; the largest group first, since it takes longest."""
        stores = self._context.stores
        rows: list[Any] = [None] * len(stores)
        transfers: list[_Transfer | None] = [None] * len(stores)
        for level in reversed(range(len(stores))):
            rows[level] = stores[level].rows(self._asked[level], self._gradients[level])
            if self._context.layout.group_sizes[level] > 1:
                wanted = self._parts[level].stop - self._parts[level].start
                held = rows[level].detach()
                transfers[level] = self._transfer(level, held, wanted, to_requesters=True, content="embeddings")
        return RowsAwaitable(self, rows, transfers)

    def _transfer(self, level: int, rows: torch.Tensor, wanted: int, *, to_requesters: bool, content: str) -> _Transfer:
        """Send rows as they are, or as TorchRec's codec wants them."""
        dim, dtype = rows.shape[1], rows.dtype
        codecs = self._context.codecs
        if codecs is None:
            received = rows.new_empty(wanted, dim)
            pending = self._all_to_all(level, received, rows, to_requesters=to_requesters, content=content)
            return _Transfer(pending, lambda: received)
        codec = codecs.forward if to_requesters else codecs.backward
        context = codec.create_context()
        encoded = codec.encode(rows.float().contiguous().view(-1), context)
        width = codec.calc_quantized_size(dim, context)
        packed = encoded.new_empty(wanted * width)
        pending = self._all_to_all(level, packed, encoded, to_requesters=to_requesters, content=content, width=width)
        return _Transfer(pending, lambda: codec.decode(packed, context).view(wanted, dim).to(dtype))

    def gather(self, rows: Sequence[torch.Tensor], transfers: Sequence[_Transfer | None]) -> torch.Tensor:
        """Rows of the batch's lookups in their own order; shape (lookups, D)."""
        parts = [local if sent is None else sent.wait() for local, sent in zip(rows, transfers, strict=True)]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        return flat.index_select(0, self._batch.index).to(self._context.output_dtype)

    # -- backward

    def scatter(self, gradient: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """Send the lookups' gradients to the holders; what is returned stands for them until they are taken there."""
        # Ranks average their losses, as TorchRec has it. The holders divide, after they have summed: 16-bit numbers
        # would lose more of what is small already.
        layout = self._context.layout
        scale = 1.0 / layout.world_size if get_gradient_division() else 1.0
        flat = gradient.new_empty(self._batch.slots.numel(), gradient.shape[1])
        index = self._batch.index.long()
        if self._batch.shared:
            flat.zero_().index_add_(0, index, gradient)
        else:
            flat.index_copy_(0, index, gradient)
        flat = flat.to(dtype)
        placeholders: list[Any] = [None] * len(self._gradients)
        for level in reversed(range(len(self._gradients))):
            part = flat[self._parts[level]]
            if layout.group_sizes[level] == 1:
                self._gradients[level].expect(None, lambda part=part: part, scale)  # type: ignore[misc]  # bound now
                placeholders[level] = part
                continue
            asked = self._asked[level].numel()
            sent = self._transfer(level, part, asked, to_requesters=False, content="gradients")
            self._gradients[level].expect(sent.pending, sent.result, scale)
            placeholders[level] = part.new_empty(1).expand(asked, part.shape[1])
        return placeholders


class RowsAwaitable:
    """Rows of a batch on their way."""

    def __init__(self, exchange: Exchange, rows: Sequence[torch.Tensor], transfers: Sequence[_Transfer | None]) -> None:
        self._exchange, self._rows, self._transfers = exchange, rows, transfers

    def wait(self) -> torch.Tensor:
        """Rows of the batch's lookups; shape (lookups, D)."""
        rows: torch.Tensor = _Gather.apply(self._exchange, self._transfers, *self._rows)
        return rows


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, transfers: Sequence[_Transfer | None], *rows: torch.Tensor
    ) -> torch.Tensor:
        ctx.exchange, ctx.dtype = exchange, rows[0].dtype
        return exchange.gather(rows, transfers)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.exchange.scatter(gradients[0], ctx.dtype)
