"""What goes over the wire in one step: how many ids, the ids, the rows, and the rows' gradients.

Per step and level with g > 1: ids (int32 where they fit) to the ranks that hold the rows, rows back, and gradients the
way of the ids; one all-to-all each. A receiver has to know beforehand how much will come, so one all-to-all of counts
goes ahead for all levels together: a message of fixed size would have to be as long as the fullest batch.
No lengths or keys are sent: a slot says which table it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.types import QuantizedCommCodecs

from flexshard.executors._collectives import Label, Pending, all_to_all
from flexshard.executors._layout import Layout
from flexshard.executors._stores import Gate, RowStore
from flexshard.topologies import LevelGroups

__all__ = ["Counts", "Dispatch", "Exchange", "dispatch"]


@dataclass
class Dispatch:
    """Ids of a batch in the order in which they are sent: by level, then by the position that holds them.

    Attributes:
        slots: where each row lies at its holder; shape (n,).
        counts: how many go to each bucket; shape (buckets,).
        place: of each of the batch's lookups among ``slots``; shape (lookups,). With index deduplication several
            lookups share a place.
        shared: whether they may.
    """

    slots: torch.Tensor
    counts: torch.Tensor
    place: torch.Tensor
    shared: bool


def dispatch(codes: torch.Tensor, first_code: torch.Tensor, *, index_dedup: bool) -> Dispatch:
    """Sort a batch's codes into buckets.

    Args:
        codes: of the batch's lookups; shape (lookups,).
        first_code: of each bucket, and the end; shape (buckets + 1,), of the same type.
        index_dedup: send each row at most once.
    """
    inverse = None
    if index_dedup:
        codes, inverse = torch.unique(codes, return_inverse=True)
    counts, slots, _, _, place = torch.ops.fbgemm.block_bucketize_sparse_features(
        lengths=torch.tensor([codes.numel()], dtype=codes.dtype, device=codes.device),
        indices=codes,
        bucketize_pos=False,
        sequence=True,
        block_sizes=torch.ones(1, dtype=codes.dtype, device=codes.device),
        my_size=first_code.numel() - 1,
        block_bucketize_pos=[first_code],
    )
    if inverse is not None:
        place = place.long()[inverse]
    return Dispatch(slots, counts.view(-1), place, index_dedup)


class Counts:
    """Exchange of how many ids go from whom to whom, with every rank's word on whether its ids are in order.

    One message per pair of ranks with the count of each level where the two share a group, and a status (0: all is
    well). It goes to all ranks whatever the levels in use, so that all of them stop where one has to.
    """

    def __init__(
        self,
        layout: Layout,
        groups: dict[int, LevelGroups],
        counts: torch.Tensor,
        status: int,
    ) -> None:
        self._layout, self._groups, self._own = layout, groups, counts
        self._pending: Pending | None = None
        self._status = status
        self._levels = [index for index, size in enumerate(layout.group_sizes) if size > 1]
        world = layout.world_size
        if world == 1:
            return
        message = torch.zeros(world, len(self._levels) + 1, dtype=torch.int32, device=counts.device)
        message[:, -1] = status
        for column, level in enumerate(self._levels):
            message[self._peers(level), column] = counts[self._buckets(level)].int()
        self._received = torch.empty_like(message)
        self._pending = all_to_all(
            self._received, message, None, None, groups[world].inside, Label(world, "counts", layout.tables)
        )

    def _buckets(self, level: int) -> slice:
        return slice(self._layout.first_bucket[level], self._layout.first_bucket[level + 1])

    def _peers(self, level: int) -> slice:
        """Ranks of this rank's own group of a level."""
        size = self._layout.group_sizes[level]
        first = self._groups[self._layout.world_size].position // size * size
        return slice(first, first + size)

    def wait(self) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Ids to send to and to receive from each position, per level; and the status of each rank."""
        sizes = self._layout.group_sizes
        if self._pending is None:
            return [[int(self._own.sum())] for _ in sizes], [[] for _ in sizes], [self._status]
        self._pending.wait()
        own: list[int] = self._own.tolist()
        received: list[list[int]] = self._received.tolist()
        sent_counts, received_counts = [], []
        for level, size in enumerate(sizes):
            sent_counts.append(own[self._buckets(level)])
            column = self._levels.index(level) if size > 1 else None
            peers = self._peers(level)
            received_counts.append([] if column is None else [row[column] for row in received[peers]])
        return sent_counts, received_counts, [row[-1] for row in received]


class Exchange:
    """One batch of one group of tables, from ids to rows and back to gradients."""

    def __init__(
        self,
        layout: Layout,
        groups: dict[int, LevelGroups],
        stores: Sequence[RowStore],
        codecs: QuantizedCommCodecs | None,
        batch: Dispatch,
        sent_counts: list[list[int]],
        received_counts: list[list[int]],
        output_dtype: torch.dtype,
    ) -> None:
        self._layout, self._groups, self._stores, self._codecs, self._batch = layout, groups, stores, codecs, batch
        self._output_dtype = output_dtype
        self._sent, self._received = sent_counts, received_counts
        self._gates = [Gate() for _ in stores]
        ends = [0]
        for counts in sent_counts:
            ends.append(ends[-1] + sum(counts))
        self._parts = [slice(*pair) for pair in pairwise(ends)]
        self._asked: list[torch.Tensor] = []
        self._pending: list[Pending | None] = []
        for level, size in enumerate(layout.group_sizes):
            own = batch.slots[self._parts[level]]
            if size == 1:
                self._asked.append(own)
                self._pending.append(None)
                continue
            asked = own.new_empty(sum(received_counts[level]))
            self._pending.append(self._all_to_all(level, asked, own, backward=False, content="ids"))
            self._asked.append(asked)

    def _all_to_all(
        self, level: int, received: torch.Tensor, sent: torch.Tensor, *, backward: bool, content: str, width: int = 1
    ) -> Pending:
        """Ids and gradients go from this rank's lookups to the holders; rows (``backward``) the other way."""
        size = self._layout.group_sizes[level]
        out, back = self._sent[level], self._received[level]
        if backward:
            out, back = back, out
        if width > 1:
            out, back = [n * width for n in out], [n * width for n in back]
        label = Label(size, content, self._layout.tables)
        return all_to_all(received, sent, back, out, self._groups[size].inside, label)

    def wait_for_ids(self) -> None:
        """Until the ids that other ranks ask for are here."""
        for pending in self._pending:
            if pending is not None:
                pending.wait()

    def tensors(self) -> list[torch.Tensor]:
        """What was made on the stream of the data distribution."""
        return [*self._asked, self._batch.slots, self._batch.place]

    # -- forward

    def start(self) -> Rows:
        """Look up what other ranks ask for and send it; the largest group first, since it takes longest."""
        levels = range(len(self._stores))
        found: list[Any] = [None] * len(self._stores)
        transfers: list[_Transfer | None] = [None] * len(self._stores)
        for level in reversed(levels):
            found[level] = self._stores[level].rows(self._asked[level], self._gates[level])
            if self._layout.group_sizes[level] > 1:
                transfers[level] = self._send_rows(level, found[level].detach())
        return Rows(self, found, transfers)

    def _send_rows(self, level: int, rows: torch.Tensor) -> _Transfer:
        wanted = self._parts[level].stop - self._parts[level].start
        return self._transfer(level, rows, wanted, backward=True, content="embeddings")

    def _transfer(self, level: int, rows: torch.Tensor, wanted: int, *, backward: bool, content: str) -> _Transfer:
        """Send rows as they are, or as TorchRec's codec wants them."""
        dim, dtype = rows.shape[1], rows.dtype
        if self._codecs is None:
            received = rows.new_empty(wanted, dim)
            pending = self._all_to_all(level, received, rows, backward=backward, content=content)
            return _Transfer(pending, lambda: received)
        codec = self._codecs.forward if backward else self._codecs.backward
        context = codec.create_context()
        encoded = codec.encode(rows.float().contiguous().view(-1), context)
        width = codec.calc_quantized_size(dim, context)
        packed = encoded.new_empty(wanted * width)
        pending = self._all_to_all(level, packed, encoded, backward=backward, content=content, width=width)
        return _Transfer(pending, lambda: codec.decode(packed, context).view(wanted, dim).to(dtype))

    def gather(self, found: Sequence[torch.Tensor], transfers: Sequence[_Transfer | None]) -> torch.Tensor:
        """Rows of the batch's lookups in their own order; shape (lookups, D)."""
        parts = [rows if sent is None else sent.wait() for rows, sent in zip(found, transfers, strict=True)]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        return flat.index_select(0, self._batch.place).to(self._output_dtype)

    # -- backward

    def scatter(self, gradient: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """Send the lookups' gradients to the holders; what is returned is filled in when the gates open."""
        # Ranks average their losses, as TorchRec has it. The holders divide, after they have summed: 16-bit numbers
        # would lose more of what is small already.
        scale = 1.0 / self._layout.world_size if get_gradient_division() else 1.0
        flat = gradient.new_empty(self._batch.slots.numel(), gradient.shape[1])
        place = self._batch.place.long()
        if self._batch.shared:
            flat.zero_().index_add_(0, place, gradient)
        else:
            flat.index_copy_(0, place, gradient)
        flat = flat.to(dtype)
        placeholders: list[Any] = [None] * len(self._stores)
        for level in reversed(range(len(self._stores))):
            part = flat[self._parts[level]]
            if self._layout.group_sizes[level] == 1:
                self._gates[level].expect(None, lambda part=part: part, scale)
                placeholders[level] = part
                continue
            asked = self._asked[level].numel()
            sent = self._transfer(level, part, asked, backward=False, content="gradients")
            self._gates[level].expect(sent.pending, sent.result, scale)
            placeholders[level] = part.new_empty(1).expand(asked, part.shape[1])
        return placeholders


@dataclass
class _Transfer:
    pending: Pending
    result: Any

    def wait(self) -> torch.Tensor:
        self.pending.wait()
        rows: torch.Tensor = self.result()
        return rows


class Rows:
    """Rows of a batch on their way."""

    def __init__(
        self, exchange: Exchange, found: Sequence[torch.Tensor], transfers: Sequence[_Transfer | None]
    ) -> None:
        self._exchange, self._found, self._transfers = exchange, found, transfers

    def wait(self) -> torch.Tensor:
        """Rows of the batch's lookups; shape (lookups, D)."""
        rows: torch.Tensor = _Gather.apply(self._exchange, self._transfers, *self._found)
        return rows


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, transfers: Sequence[_Transfer | None], *found: torch.Tensor
    ) -> torch.Tensor:
        ctx.exchange, ctx.dtype = exchange, found[0].dtype
        return exchange.gather(found, transfers)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.exchange.scatter(gradients[0], ctx.dtype)
