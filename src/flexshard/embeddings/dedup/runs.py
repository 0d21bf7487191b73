"""Which runs of a shared buffer a batch's lists are (RecD paper, section 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils._pytree as pytree

from flexshard._internal import IntArray, JaggedArray, run_layout
from flexshard.embeddings.dedup.pytrees import register

__all__ = ["Runs", "Segments", "Sequences", "found_runs"]


class Sequences(NamedTuple):
    """The longest list of each start: what is causal of any list is the beginning of what is of its sequence.

    Attributes:
        starts: of each sequence in the buffer; shape (S,).
        lengths: of each sequence; shape (S,).
        of: the sequence that each list is the beginning of; shape (R,).
        total: values of all sequences.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    of: torch.Tensor
    total: int


class Segments(NamedTuple):
    """Pieces of the buffer in which no list starts or ends, so that each list is a run of whole ones.

    Attributes:
        lengths: of each piece, one after the other; shape (E,).
        first: the piece with which each list begins; shape (R,).
        counts: pieces of each list; shape (R,).
        total: pieces of all lists.
    """

    lengths: torch.Tensor
    first: torch.Tensor
    counts: torch.Tensor
    total: int


@dataclass(frozen=True)
class Runs:
    """R distinct lists as runs of a buffer of N values.

    Attributes:
        starts: of each list; shape (R,), int32.
        lengths: of each list; shape (R,), int32.
        total: values of all lists.
        newest: end of the lists at which values are new, "last" or "first".
        max_shift: most values that a list may have dropped since the one before.
        held: sequences and segments, where the host has found them for a device already.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    total: int
    newest: str = "last"
    max_shift: int = 16
    held: tuple[Sequences, Segments] | None = None

    @classmethod
    def of(cls, starts: IntArray, lengths: IntArray, *, newest: str = "last", max_shift: int = 16) -> Runs:
        """From where lists start and how long they are; shapes (R,)."""
        return cls(_tensor(starts), _tensor(lengths), int(lengths.sum()), newest, max_shift)

    @cached_property
    @torch.inference_mode(False)  # what is kept may be trained on later
    def sequences(self) -> Sequences:
        """See :class:`Sequences`; found on the host, for which a device waits where it does not hold them."""
        if self.held is not None:
            return self.held[0]
        starts, lengths = self.starts.cpu().numpy(), self.lengths.cpu().numpy()
        first, sequence = np.unique(starts, return_inverse=True)
        longest = np.zeros(first.size, np.int64)
        np.maximum.at(longest, sequence, lengths)
        tensors = [_tensor(array).to(self.starts.device) for array in (first, longest, sequence)]
        return Sequences(tensors[0], tensors[1], tensors[2], int(longest.sum()))

    @cached_property
    @torch.inference_mode(False)  # what is kept may be trained on later
    def segments(self) -> Segments:
        """See :class:`Segments`; found on the host, as sequences."""
        if self.held is not None:
            return self.held[1]
        starts, lengths = self.starts.cpu().numpy(), self.lengths.cpu().numpy()
        ends = starts + lengths
        cuts = np.unique(np.concatenate([starts, ends]))
        first = np.searchsorted(cuts, starts)
        counts = np.searchsorted(cuts, ends) - first
        tensors = [_tensor(array).to(self.starts.device) for array in (np.diff(cuts), first, counts)]
        return Segments(tensors[0], tensors[1], tensors[2], int(counts.sum()))

    def counted(self) -> Runs:
        """The same, of a batch on the host, with what a device need not wait for later on."""
        held = (self.sequences, self.segments)
        return Runs(self.starts, self.lengths, self.total, self.newest, self.max_shift, held)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Runs:
        """The same, each tensor changed."""
        children, context = _flatten(self)
        return _unflatten([pytree.tree_map_only(torch.Tensor, change, child) for child in children], context)


_Context = tuple[int, str, int]


def _flatten(runs: Runs) -> tuple[list[Any], _Context]:
    return [runs.starts, runs.lengths, runs.held], (runs.total, runs.newest, runs.max_shift)


def _unflatten(children: Iterable[Any], context: _Context) -> Runs:
    starts, lengths, held = children
    return Runs(starts, lengths, *context, held)


register(Runs, _flatten, _unflatten, "starts", "lengths", "held")


def _tensor(array: IntArray) -> torch.Tensor:
    """Places in a batch, for which 32 bits are enough."""
    return torch.from_numpy(array.astype(np.int32))


def found_runs(lists: Sequence[JaggedArray], newest: str, max_shift: int) -> tuple[IntArray, IntArray, Runs]:
    """Runs of features whose lists have equal lengths row by row.

    Returns:
        where the buffer's values stand among those of a feature, shape (N,); how many of them each list brought, in
        the buffer's order, shape (R,); and the runs.
    """
    places, starts, fresh = run_layout(lists, newest=newest, max_shift=max_shift)
    runs = Runs.of(starts, lists[0].lengths, newest=newest, max_shift=max_shift)
    return places, fresh if newest == "last" else fresh[::-1], runs
