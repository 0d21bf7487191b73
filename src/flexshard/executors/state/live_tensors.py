"""Tensors of a ``state_dict`` that are written to in place, as TorchRec's may be.

A table's rows lie in the order of a plan, so its logical tensor is a copy. What somebody writes to the copy has to
reach the rows, or the write would be lost without a word.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils._pytree import tree_leaves, tree_map
from torchrec.distributed.shards_wrapper import LocalShardsWrapper

from flexshard.errors import CheckpointError

__all__ = ["FRESH", "STALE", "HandedOut", "LogicalShard"]

aten = torch.ops.aten
# Results of the same shape are shards as well; by ``new_empty`` asynchronous checkpoints copy a state.
_KEEP_SHARD = {
    aten._to_copy.default,
    aten.clone.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.zeros_like.default,
}
# What was written to: tensors of the rows as they are, or as they were before a training step.
FRESH, STALE = 1, 2
_PIECE_BYTES, _MOST_PIECES = 32 << 20, 16


@dataclass(eq=False)
class _Holder:
    """Lives as long as somebody holds a tensor that was handed out.

    Attributes:
        stale: whether rows have changed since.
    """

    stale: bool = False


class LogicalShard(LocalShardsWrapper):
    """One rank's block of a table inside a ``DTensor``: TorchRec's class, which its tools look for, with what it leaves
    out: its data type, and the operations that gather a ``DTensor``, which work on the block itself.
    """

    _holder: _Holder | None
    _watched: torch.Tensor

    @staticmethod
    def __new__(
        cls,
        block: torch.Tensor,
        offsets: tuple[int, ...],
        holder: _Holder | None = None,
        watched: torch.Tensor | None = None,
    ) -> LogicalShard:
        """A block that begins at ``offsets`` of the table; or a view of ``watched``, which is one."""
        shard: LogicalShard = torch.Tensor._make_wrapper_subclass(
            cls, block.size(), block.stride(), block.storage_offset(), dtype=block.dtype, device=block.device
        )
        shard._local_shards = [block]
        shard._storage_meta = LocalShardsWrapper([block], [offsets])._storage_meta
        shard._holder, shard._watched = holder, block if watched is None else watched
        return shard

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shards: list[LogicalShard] = []

        def block(value: Any) -> Any:
            if not isinstance(value, LogicalShard):
                return value
            shards.append(value)
            return value.local_shards()[0]

        result = func(*tree_map(block, args), **tree_map(block, kwargs or {}))
        for shard in _written(func, args, kwargs or {}):
            increment_version(shard._watched)  # which this far down autograd does not count
        first = shards[0]
        own = first.local_shards()[0]
        if result is own:
            return first
        if func in _KEEP_SHARD and result.shape == own.shape:
            return LogicalShard(result, tuple(first.local_offsets()[0]))
        if not func.is_view:
            return result

        def view(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            whole = value.shape == own.shape and value.stride() == own.stride()
            offsets = tuple(first.local_offsets()[0]) if whole else (0,) * value.ndim
            return LogicalShard(own if whole else value, offsets, first._holder, first._watched)

        return tree_map(view, result)

    def numpy(self, *, force: bool = False) -> Any:
        """The block's; one process alone gets it for the whole table."""
        return self.local_shards()[0].numpy(force=force)

    def tolist(self) -> Any:
        """As :meth:`numpy`."""
        return self.local_shards()[0].tolist()

    def _pieces(self) -> list[ChunkStorageMetadata]:
        """The block in pieces, as files have it: who reads one has a whole piece beside what it is read into."""
        block, (first, *rest) = self.local_shards()[0], self.local_offsets()[0]
        rows = max(_PIECE_BYTES // max(block[:1].nbytes, 1), -(-len(block) // _MOST_PIECES))
        return [
            ChunkStorageMetadata(torch.Size((first + start, *rest)), block[start : start + rows].shape)
            for start in range(0, len(block), rows)
        ]

    @property
    def holder(self) -> _Holder | None:
        """What says whether it is current."""
        return self._holder

    def check_current(self) -> None:
        """Before somebody saves it or loads it.

        Raises:
            CheckpointError: it was kept over a training step. TorchRec's would be as new as the model, as its other
                parameters are.
        """
        if self._holder is not None and self._holder.stale:
            raise CheckpointError(
                "tensors of a state_dict() from before a training step or a load_state_dict() are saved or loaded;"
                " they are copies, and the model's rows have changed since: call state_dict() again, or clone() at once"
                " what is to be kept as it was"
            )

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        self.check_current()
        properties, size = self._storage_meta.properties, object.size()
        return [
            WriteItem(
                index=MetadataIndex(fqn, piece.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=piece, properties=properties, size=size),
            )
            for piece in self._pieces()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._pieces() or list(super().__create_chunk_list__())

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        first = self.local_offsets()[0][0]
        for piece in self._pieces():
            if piece.offsets == index.offset:
                start = piece.offsets[0] - first
                return self.local_shards()[0][start : start + piece.sizes[0]]
        shard: torch.Tensor = super().__get_tensor_shard__(index)
        return shard

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.check_current()
        return self.local_shards()[0].__reduce_ex__(protocol)  # files hold plain tensors


def _written(func: Any, args: Any, kwargs: Any) -> list[LogicalShard]:
    """What an operator writes to, as its schema says."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [one for one in tree_leaves(value) if isinstance(one, LogicalShard)]
    return found


@dataclass
class HandedOut:
    """A block that was handed out.

    Attributes:
        table, name: of what: index of the table, "weight" or a state.
        block: the block; shares memory with what was handed out.
        version: of the block when it was handed out.
        holder: dead when nobody holds it any more.
        stale: whether rows have changed since.
    """

    table: int
    name: str
    block: torch.Tensor
    version: int
    holder: Callable[[], _Holder | None]
    stale: bool = False

    @classmethod
    def of(cls, table: int, name: str, block: torch.Tensor, gone: Callable[[], None]) -> tuple[HandedOut, _Holder]:
        """What to remember, and what has to live as long as anybody holds the block; ``gone`` is called then."""
        holder = _Holder()
        reference = weakref.ref(holder, lambda _: gone())
        return cls(table, name, block.detach(), block._version, reference), holder

    def outdate(self, loaded: _Holder | None = None) -> None:
        """Rows change; those of what is ``loaded`` into the model are as they are there, until they change again."""
        if not self.stale:
            self.stale, self.version = True, self.block._version
        holder = self.holder()
        if holder is not None:
            holder.stale = holder is not loaded

    def refresh(self, block: torch.Tensor) -> None:
        """Let it be this block, in what was handed out too."""
        self.block.copy_(block)
        self.version = self.block._version

    @property
    def written(self) -> bool:
        """Whether somebody wrote to it."""
        return self.block._version != self.version

    @property
    def over(self) -> bool:
        """Whether nobody can write to it any more, or will have it taken over."""
        return self.holder() is None and (self.stale or not self.written)
