"""What a batch is on its way through the sharded module, as TorchRec's pipelines pass it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from flexshard.errors import DataError
from flexshard.executors._exchange import Counts, Dispatch, Exchange, Rows

if TYPE_CHECKING:
    from flexshard.executors._sharded import ShardedFlexShardEmbeddingCollection

__all__ = ["DistributedIds", "FlexShardContext", "PendingOutput", "WaitForCounts", "WaitForIds"]


@dataclass
class FlexShardContext(Multistreamable):
    """What one batch carries from its distribution to its output.

    Attributes:
        features: the batch.
        stock: context of the tables that TorchRec shards.
        sharding_contexts: TorchRec's, one place ahead of them for ours.
    """

    features: KeyedJaggedTensor | None = None
    stock: EmbeddingCollectionContext | None = None
    sharding_contexts: list[Any] = field(default_factory=list)
    early_releasable_inputs: list[Any] = field(default_factory=list)

    def record_stream(self, stream: torch.Stream) -> None:
        if self.features is not None:
            self.features.record_stream(stream)
        if self.stock is not None:
            self.stock.record_stream(stream)


class DistributedIds(Multistreamable):
    """Ids of a batch at their holders, one exchange per group of tables."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self.exchanges = exchanges

    def record_stream(self, stream: torch.Stream) -> None:
        for exchange in self.exchanges:
            for tensor in exchange.tensors():
                tensor.record_stream(stream)


class WaitForIds(Awaitable[DistributedIds]):
    """Until the ids that other ranks ask for are here."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        super().__init__()
        self._exchanges = exchanges

    def _wait_impl(self) -> DistributedIds:
        for exchange in self._exchanges:
            exchange.wait_for_ids()
        return DistributedIds(self._exchanges)


class WaitForCounts(Awaitable[Awaitable[DistributedIds]]):
    """Until it is known how many ids will come, and that those of every rank are in order; then they are sent."""

    def __init__(
        self, module: ShardedFlexShardEmbeddingCollection, batches: Sequence[tuple[Dispatch, Counts]], error: str | None
    ) -> None:
        super().__init__()
        self._module, self._batches, self._error = module, batches, error

    def _wait_impl(self) -> Awaitable[DistributedIds]:
        counts = [waiting.wait() for _, waiting in self._batches]
        if self._error is not None:
            raise DataError(self._error)
        for group, (_, _, status) in zip(self._module.groups, counts, strict=True):
            self._module.raise_for(group, status)
        return WaitForIds(
            [
                group.exchange(batch, sent, received)
                for group, (batch, _), (sent, received, _) in zip(
                    self._module.groups, self._batches, counts, strict=True
                )
            ]
        )


class PendingOutput(LazyAwaitable[dict[str, JaggedTensor]]):
    """The collection's output, once somebody uses it."""

    def __init__(
        self,
        module: ShardedFlexShardEmbeddingCollection,
        features: KeyedJaggedTensor,
        rows: Sequence[Rows],
        stock: LazyAwaitable[dict[str, JaggedTensor]] | None,
    ) -> None:
        super().__init__()
        self._module, self._features, self._rows, self._stock = module, features, rows, stock

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        return self._module.assemble(self._features, [rows.wait() for rows in self._rows], self._stock)
