"""Blocks of tables on embedding servers as checkpoints read and write them: in pieces, none of which stays here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from flexshard.executors.state.live_tensors import LogicalShard

__all__ = ["ServedLoadPlanner", "ServedShard", "served_shard"]

Read = Callable[[range], torch.Tensor]
Write = Callable[[range, torch.Tensor], None]


class ServedShard(LogicalShard):
    """One rank's block of a table inside a ``DTensor``, whose rows are on servers; for checkpoints alone."""

    read_rows: Read
    write_rows: Write

    @staticmethod
    def of(block: torch.Tensor, offsets: tuple[int, ...], read: Read, write: Write) -> ServedShard:
        """A block that begins at ``offsets`` of the table.

        Args:
            block: of its shape and type, on the meta device.
            read: gives rows of the table by id; shape (n, width).
            write: takes them.
        """
        shard: ServedShard = torch.Tensor._make_wrapper_subclass(
            ServedShard, block.size(), block.stride(), 0, dtype=block.dtype, device=torch.device("cpu")
        )
        described = LogicalShard(block, offsets)
        shard._local_shards, shard._storage_meta = described._local_shards, described._storage_meta
        shard._holder, shard._watched = None, block
        shard.read_rows, shard.write_rows = read, write
        return shard

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, first = super().__torch_dispatch__(func, types, args, kwargs), args[0]
        if func.is_view and isinstance(first, ServedShard) and result.shape == first.shape:  # as a DTensor keeps it
            return first.again()
        return result

    def again(self) -> ServedShard:
        """The same block."""
        offsets = tuple(self.local_offsets()[0])
        return ServedShard.of(self.local_shards()[0], offsets, self.read_rows, self.write_rows)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        piece = next(piece for piece in self._pieces() if piece.offsets == index.offset)
        first, number = piece.offsets[0], piece.sizes[0]
        return self.read_rows(range(first, first + number)).view(piece.sizes)


def served_shard(value: Any) -> ServedShard | None:
    """What a ``DTensor`` has of a table on servers."""
    local = value._local_tensor if isinstance(value, DTensor) else None
    return local if isinstance(local, ServedShard) else None


class ServedLoadPlanner(DefaultLoadPlanner):
    """As torch's, with pieces of tables that go on to servers; of checkpoints as torch 2.4 and later write them.

    ``whole`` is the name of a part of the state of which the checkpoint must have nothing that no rank asks for.
    """

    def __init__(self, *, whole: str | None = None) -> None:
        super().__init__()
        self._whole = whole

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        assert self.metadata is not None
        asked = {item.dest_index.fqn for plan in global_plan for item in plan.items}
        others = [
            name.removeprefix(f"{self._whole}.")
            for name, value in self.metadata.state_dict_metadata.items()
            if name.startswith(f"{self._whole}.") and name not in asked
            if not (isinstance(value, TensorStorageMetadata) and not value.size.numel())
        ]
        if self._whole is not None and others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise ValueError(f"it has {others[0]}{more}, which the model has not; strict=False ignores what is so")
        return super().create_global_plan(global_plan)

    def create_local_plan(self) -> LoadPlan:
        # Torch's tells older checkpoints by keys that are missing, as are those of tables of which a rank has no shard.
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata, not self.allow_partial_load)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        shard = self._served(read_item)
        if shard is None:
            return super().resolve_tensor(read_item)
        return torch.empty(read_item.lengths, dtype=shard.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        shard = self._served(read_item)
        if shard is None:
            super().commit_tensor(read_item, tensor)
            return
        assert read_item.dest_index.offset is not None
        first = read_item.dest_index.offset[0] + read_item.dest_offsets[0]
        shard.write_rows(range(first, first + len(tensor)), tensor.view(len(tensor), -1))

    def _served(self, read_item: ReadItem) -> ServedShard | None:
        return served_shard(self.state_dict[read_item.dest_index.fqn])
