"""Shifted lists as runs of one buffer: RecD's partial IKJTs (RecD paper, section 7)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.utils._pytree as pytree
from torchrec.sparse.jagged_tensor import JaggedTensor

from flexshard._internal import JaggedArray, distinct_rows, shared_runs
from flexshard.embeddings.dedup.selection import run_places

__all__ = ["PartialJaggedTensor"]


@dataclass(frozen=True)
class PartialJaggedTensor:
    """Lists that were shifted from sample to sample, as runs of one shared buffer (RecD paper, section 7).

    Attributes:
        values: the buffer; shape (N, ...): ids, or what was looked up for them.
        starts: where each sample's list starts in it; shape (B,).
        lengths: of each sample's list; shape (B,).
    """

    values: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def from_jagged(cls, lists: JaggedTensor, *, newest: str = "last", max_shift: int = 16) -> PartialJaggedTensor:
        """Share what stays the same between one distinct list and the next.

        Args:
            lists: of one feature, a session's samples one after the other; weights are not kept.
            newest: at which end new ids are added, "last" or "first".
            max_shift: most ids dropped between two lists for their run to be found; never changes what the lists are.

        Raises:
            DataError: ``newest`` is neither.
        """
        rows = JaggedArray.of(lists.values().cpu().numpy(), lists.lengths().cpu().numpy())
        same = distinct_rows(rows)
        kept = rows.take(same.first)
        buffer, starts = shared_runs(kept, newest=newest, max_shift=max_shift)
        device = lists.values().device
        parts = (buffer, starts[same.inverse], rows.lengths)
        values, begins, lengths = (torch.from_numpy(np.array(array)).to(device) for array in parts)
        return cls(values, begins, lengths)

    def to_jagged(self) -> JaggedTensor:
        """Every sample's own list; gradients of what lists share add up."""
        indices = run_places(self.starts, self.lengths)
        return JaggedTensor(self.values.index_select(0, indices), lengths=self.lengths)

    def with_values(self, values: torch.Tensor) -> PartialJaggedTensor:
        """The same lists of other values, such as the embeddings of the buffer's ids; shape (N, ...)."""
        return PartialJaggedTensor(values, self.starts, self.lengths)

    @property
    def dedup_factor(self) -> float:
        """Values of all lists per value of the buffer."""
        return int(self.lengths.sum()) / self.values.shape[0] if self.values.shape[0] else 1.0


pytree.register_pytree_node(
    PartialJaggedTensor,
    lambda lists: ([lists.values, lists.starts, lists.lengths], None),
    lambda children, _: PartialJaggedTensor(*children),
    serialized_type_name="flexshard.PartialJaggedTensor",
)
