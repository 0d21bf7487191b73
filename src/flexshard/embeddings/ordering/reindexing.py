"""Ids under index bijections, on whatever device they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flexshard._internal import with_values
from flexshard.embeddings.ordering.bijection import IndexBijection
from flexshard.errors import DataError

__all__ = ["Reindex"]


class Reindex(nn.Module):
    """A batch with the ids of some features replaced by their positions: in the loader, or first in the model.

    The positions are buffers of four bytes a row (eight from 2^31 rows on), which move with the module and are not part
    of its state: save bijections by themselves.
    """

    def __init__(self, bijections: Mapping[str, IndexBijection]) -> None:
        """Take a bijection per feature; features that share one share its buffer."""
        super().__init__()
        self._buffers_of: dict[str, str] = {}
        self._names: dict[int, str] = {}
        for feature, bijection in bijections.items():
            if id(bijection) not in self._names:
                name = self._names[id(bijection)] = f"position_of_{len(self._names)}"
                self.register_buffer(name, torch.from_numpy(bijection.position_of.copy()), persistent=False)
            self._buffers_of[feature] = self._names[id(bijection)]

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with its ids as positions; features without a bijection stay as they are.

        Raises:
            DataError: an id outside its table (on CUDA, what indexing raises there).
        """
        values = features.values()
        ends = features.offset_per_key()
        parts = []
        for index, key in enumerate(features.keys()):
            ids = values[ends[index] : ends[index + 1]]
            parts.append(self._positions(key, ids) if key in self._buffers_of else ids)
        return with_values(features, torch.cat(parts) if parts else values)

    def _positions(self, key: str, ids: torch.Tensor) -> torch.Tensor:
        position_of: torch.Tensor = getattr(self, self._buffers_of[key])
        if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < position_of.numel():
            wrong = ids[(ids < 0) | (ids >= position_of.numel())][0]
            raise DataError(
                f"feature {key!r}: id {int(wrong)} is outside the table's rows, 0 to {position_of.numel() - 1}"
            )
        return position_of[ids.long()].to(ids.dtype)
