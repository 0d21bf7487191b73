"""What a batch is on its way through the sharded module, as TorchRec's pipelines pass it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from flexshard.executors.sharding.joint import JointBatch

__all__ = [
    "DistributedIds",
    "EmbeddingsAwaitable",
    "FlexShardContext",
    "IdsAwaitable",
    "LookedUpRows",
    "SplitsAwaitable",
]

Output = Any  # dict[str, JaggedTensor], or KeyedTensor of pooled tables


@dataclass
class FlexShardContext(Multistreamable):
    """What one batch carries from its distribution to its output.

    Attributes:
        features: the batch.
        torchrec: context of the tables that TorchRec shards.
        torchrec_output: what it looked up, where that is asked for in two steps.
        sharding_contexts: TorchRec's, one entry ahead of them for ours.
    """

    features: KeyedJaggedTensor | None = None
    torchrec: EmbeddingCollectionContext | EmbeddingBagCollectionContext | None = None
    torchrec_output: Any = None
    sharding_contexts: list[Any] = field(default_factory=list)
    early_releasable_inputs: list[Any] = field(default_factory=list)

    def record_stream(self, stream: torch.Stream) -> None:
        if self.features is not None:
            self.features.record_stream(stream)
        if self.torchrec is not None:
            self.torchrec.record_stream(stream)


@dataclass
class LookedUpRows(Multistreamable):
    """Rows of a module's part of a batch on their way.

    Attributes:
        batch: with those of the modules that it goes with.
        index: of the module.
    """

    batch: JointBatch
    index: int

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in self.batch.exchange.tensors():
            tensor.record_stream(stream)


class DistributedIds(Multistreamable):
    """Ids of a batch at their holders."""

    def __init__(self, batch: JointBatch) -> None:
        self.batch = batch

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in self.batch.exchange.tensors():
            tensor.record_stream(stream)


class IdsAwaitable(Awaitable[DistributedIds]):
    """Until the ids that other ranks ask for are here."""

    def __init__(self, batch: JointBatch) -> None:
        super().__init__()
        self._batch = batch

    def _wait_impl(self) -> DistributedIds:
        self._batch.wait_for_ids()
        return DistributedIds(self._batch)


class SplitsAwaitable(Awaitable[Awaitable[DistributedIds]]):
    """Until it is known how many ids will come, and that those of every rank are in order; then they are sent."""

    def __init__(self, batch: JointBatch) -> None:
        super().__init__()
        self._batch = batch

    def _wait_impl(self) -> Awaitable[DistributedIds]:
        self._batch.send_ids()
        return IdsAwaitable(self._batch)


class EmbeddingsAwaitable(LazyAwaitable[Output]):
    """The collection's output, once somebody uses it."""

    def __init__(self, rows: LookedUpRows, assemble: Callable[[Sequence[torch.Tensor]], Output]) -> None:
        """Rows under way, and what makes the output of those of each group."""
        super().__init__()
        self._rows, self._assemble = rows, assemble

    @torch.compiler.disable(reason="rows are exchanged and looked up by what ids there are")
    def _wait_impl(self) -> Output:
        return self._assemble(self._rows.batch.rows(self._rows.index))
