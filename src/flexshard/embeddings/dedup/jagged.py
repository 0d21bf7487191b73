"""A list of vectors for every distinct row (RecD paper, section 5)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from flexshard.embeddings.dedup.pytrees import register
from flexshard.embeddings.dedup.selection import jagged_index_select

__all__ = ["DedupedJagged"]


@dataclass(frozen=True)
class DedupedJagged:
    """A list of vectors for every distinct row, and which of them each sample has.

    Attributes:
        values: of all distinct rows; shape (N, ...).
        lengths: of each distinct row; shape (R,).
        inverse: the distinct row of each sample; shape (B,).
        expanded_length: number of vectors of all samples' lists, where the host knows it; else :meth:`expand` waits for
            the device to hear it.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    inverse: torch.Tensor
    expanded_length: int | None = None

    @property
    def num_distinct(self) -> int:
        """R."""
        return int(self.lengths.numel())

    def distinct(self) -> JaggedTensor:
        """The distinct rows alone; R lists."""
        return JaggedTensor(self.values, lengths=self.lengths)

    def expand(self) -> JaggedTensor:
        """Every sample's own list, without padding; gradients of a row's samples add up."""
        values, lengths = jagged_index_select(self.values, self.lengths, self.inverse, self.expanded_length)
        return JaggedTensor(values, lengths=lengths)

    def with_values(self, values: torch.Tensor) -> DedupedJagged:
        """The same lists of other vectors."""
        return DedupedJagged(values, self.lengths, self.inverse, self.expanded_length)


register(
    DedupedJagged,
    lambda lists: ([lists.values, lists.lengths, lists.inverse], lists.expanded_length),
    lambda children, expanded: replace(DedupedJagged(*children), expanded_length=expanded),
    "values",
    "lengths",
    "inverse",
)
