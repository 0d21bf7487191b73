"""What a batch is on its way through the sharded module, as TorchRec's pipelines pass it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from flexshard.errors import DataError
from flexshard.executors.comm.bucketized_ids import BucketizedIds
from flexshard.executors.comm.exchange import Exchange, RowsAwaitable
from flexshard.executors.comm.splits import Splits, SplitsExchange

__all__ = [
    "DistributedIds",
    "EmbeddingsAwaitable",
    "FlexShardContext",
    "GroupBatch",
    "IdsAwaitable",
    "SplitsAwaitable",
]

Output = dict[str, JaggedTensor]


@dataclass
class FlexShardContext(Multistreamable):
    """What one batch carries from its distribution to its output.

    Attributes:
        features: the batch.
        torchrec: context of the tables that TorchRec shards.
        sharding_contexts: TorchRec's, one entry ahead of them for ours.
    """

    features: KeyedJaggedTensor | None = None
    torchrec: EmbeddingCollectionContext | None = None
    sharding_contexts: list[Any] = field(default_factory=list)
    early_releasable_inputs: list[Any] = field(default_factory=list)

    def record_stream(self, stream: torch.Stream) -> None:
        if self.features is not None:
            self.features.record_stream(stream)
        if self.torchrec is not None:
            self.torchrec.record_stream(stream)


@dataclass(frozen=True)
class GroupBatch:
    """A batch's lookups in one group of tables, their splits under way.

    Attributes:
        tables: of the group.
        ids: sorted by where they go.
        splits: their exchange.
        exchange: starts sending the ids once splits are known.
    """

    tables: tuple[str, ...]
    ids: BucketizedIds
    splits: SplitsExchange
    exchange: Callable[[BucketizedIds, Splits], Exchange]


class DistributedIds(Multistreamable):
    """Ids of a batch at their holders, one exchange per group of tables."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self.exchanges = exchanges

    def record_stream(self, stream: torch.Stream) -> None:
        for exchange in self.exchanges:
            for tensor in exchange.tensors():
                tensor.record_stream(stream)


class IdsAwaitable(Awaitable[DistributedIds]):
    """Until the ids that other ranks ask for are here."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        super().__init__()
        self._exchanges = exchanges

    def _wait_impl(self) -> DistributedIds:
        for exchange in self._exchanges:
            exchange.wait_for_ids()
        return DistributedIds(self._exchanges)


class SplitsAwaitable(Awaitable[Awaitable[DistributedIds]]):
    """Until it is known how many ids will come, and that those of every rank are in order; then they are sent."""

    def __init__(self, rank: int, batches: Sequence[GroupBatch], error: str | None) -> None:
        """This rank, its batches by group, and what is wrong with its ids, if anything is."""
        super().__init__()
        self._rank, self._batches, self._error = rank, batches, error

    def _wait_impl(self) -> Awaitable[DistributedIds]:
        splits = [batch.splits.wait() for batch in self._batches]
        if self._error is not None:
            raise DataError(self._error)
        for batch, known in zip(self._batches, splits, strict=True):
            self._raise_for(batch.tables, known.status)
        return IdsAwaitable(
            [batch.exchange(batch.ids, known) for batch, known in zip(self._batches, splits, strict=True)]
        )

    def _raise_for(self, tables: Sequence[str], status: Sequence[int]) -> None:
        """Every rank stops where one of them had an id outside a table (table index from 1; negative: no feature)."""
        for rank, word in enumerate(status):
            if word:
                what = "bad ids of" if word > 0 else "no feature for"
                raise DataError(
                    f"rank {self._rank}: rank {rank} has {what} table {tables[abs(word) - 1]!r};"
                    " its own message names it"
                )


class EmbeddingsAwaitable(LazyAwaitable[Output]):
    """The collection's output, once somebody uses it."""

    def __init__(self, rows: Sequence[RowsAwaitable], assemble: Callable[[Sequence[torch.Tensor]], Output]) -> None:
        """Rows of each group's lookups, and what makes the output of them."""
        super().__init__()
        self._rows, self._assemble = rows, assemble

    def _wait_impl(self) -> Output:
        return self._assemble([rows.wait() for rows in self._rows])
