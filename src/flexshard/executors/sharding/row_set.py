"""A set of a table's rows in two bits a row, and how many of them come before any row.

In the table's order of id, 64 rows share a pair of words: how many members come before them, and a bit for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["RowSet"]

_MASKS = (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F, 0x0101010101010101)


@dataclass(frozen=True)
class RowSet:
    """Members of a table's rows.

    Attributes:
        words: count and bits of each 64 rows, in turn; shape (2 * blocks,), int64.
    """

    words: torch.Tensor

    @classmethod
    def of(cls, members: npt.NDArray[np.int64], num_rows: int) -> RowSet:
        """From ids, ascending and distinct; shape (n,)."""
        blocks = num_rows // 64 + 1
        words = np.zeros((blocks, 2), np.int64)
        block = members >> 6
        if len(members):
            starts = np.flatnonzero(np.diff(block, prepend=-1))
            bits = np.left_shift(np.uint64(1), (members & 63).astype(np.uint64))
            words[block[starts], 1] = np.bitwise_or.reduceat(bits, starts).view(np.int64)
            held = np.zeros(blocks, np.int64)
            held[block[starts]] = np.diff(starts, append=len(members))
            words[:, 0] = np.cumsum(held) - held
        return cls(torch.from_numpy(words.reshape(-1)))

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.words.numel() * 8

    def to(self, device: torch.device) -> RowSet:
        """The same on another device."""
        return RowSet(self.words.to(device))

    def find(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which ids are members, and how many members come before each; shape (n,) each. Runs on any device."""
        return self.find_in(ids >> 6, ids)

    def find_in(self, blocks: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of ids of several sets, of which each begins with another block; shape (n,) each."""
        pairs = self.words.view(-1, 2).index_select(0, blocks)
        count, word = pairs[:, 0], pairs[:, 1]
        bit = ids & 63
        member = (word >> bit) & 1 == 1
        return member, count + _ones(word & ((1 << bit) - 1))


def _ones(words: torch.Tensor) -> torch.Tensor:
    """Bits that are set in non-negative words (Hamming weight by halves)."""
    pairs, fours, eights, sums = _MASKS
    words = words - ((words >> 1) & pairs)
    words = (words & fours) + ((words >> 2) & fours)
    words = (words + (words >> 4)) & eights
    return (words * sums) >> 56
