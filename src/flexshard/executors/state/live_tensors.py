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
from torch.utils._pytree import tree_map
from torchrec.distributed.shards_wrapper import LocalShardsWrapper

__all__ = ["FRESH", "STALE", "HandedOut", "LogicalShard"]

aten = torch.ops.aten
_KEEP_SHARD = {
    aten._to_copy.default,
    aten.clone.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.view.default,
    aten.zeros_like.default,
}
_ALIASES = {aten.detach.default, aten.view.default}
# What was written to: tensors of the rows as they are, or as they were before a training step.
FRESH, STALE = 1, 2


class _Holder:
    """Lives as long as somebody holds a tensor that was handed out."""


class LogicalShard(LocalShardsWrapper):
    """One rank's block of a table inside a ``DTensor``: TorchRec's class, which its tools look for, with what it leaves
    out: the operations that gather a ``DTensor`` work on the block itself.
    """

    _holder: _Holder | None

    @staticmethod
    def of(block: torch.Tensor, offsets: tuple[int, ...], holder: _Holder | None = None) -> LogicalShard:
        """A block that begins at ``offsets`` of the table."""
        shard = LogicalShard([block], [offsets])
        shard._holder = holder
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
        first = shards[0]
        own = first.local_shards()[0]
        if result is own:  # an operation in place, which this far down autograd does not count
            increment_version(own)
            return first
        if func not in _KEEP_SHARD:
            return result
        if func in _ALIASES and result.shape == own.shape:  # the very tensor that is watched
            return LogicalShard.of(own, tuple(first.local_offsets()[0]), first._holder)
        return LogicalShard.of(result, tuple(first.local_offsets()[0]))

    def numpy(self, *, force: bool = False) -> Any:
        """The block's; one process alone gets it for the whole table."""
        return self.local_shards()[0].numpy(force=force)

    def tolist(self) -> Any:
        """As :meth:`numpy`."""
        return self.local_shards()[0].tolist()

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        return super().__create_write_items__(fqn, object) if self.local_shards()[0].numel() else []

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.local_shards()[0].__reduce_ex__(protocol)  # files hold plain tensors


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
    def of(cls, table: int, name: str, block: torch.Tensor, offsets: tuple[int, ...]) -> tuple[HandedOut, LogicalShard]:
        """What to remember, and what to hand out."""
        holder = _Holder()
        entry = cls(table, name, block.detach(), block._version, weakref.ref(holder))
        return entry, LogicalShard.of(block, offsets, holder)

    @property
    def written(self) -> bool:
        """Whether somebody wrote to it."""
        return self.block._version != self.version

    @property
    def over(self) -> bool:
        """Whether nobody can write to it any more, or will have it taken over."""
        return self.holder() is None and (self.stale or not self.written)
