"""Lists that were shifted or have grown, as runs of one buffer: RecD's partial IKJTs (RecD paper, section 7)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from flexshard._internal import JaggedArray, distinct_rows
from flexshard.embeddings.dedup.pytrees import register
from flexshard.embeddings.dedup.runs import Runs, found_runs
from flexshard.embeddings.dedup.selection import run_places
from flexshard.errors import DataError

__all__ = ["PartialJaggedTensor"]


@dataclass(frozen=True)
class PartialJaggedTensor:
    """Lists of samples that were shifted or have grown, as runs of one shared buffer (RecD paper, section 7).

    Attributes:
        values: the buffer; shape (N, ...): ids, or what was looked up for them.
        starts: where each sample's list starts in it; shape (B,).
        lengths: of each sample's list; shape (B,).
        inverse: the distinct list of each sample; shape (B,). By default every sample has one of its own.
        runs: of the distinct lists; found when they are asked for, if not given.
        expanded_length: values of all samples' lists, where the host knows it.
    """

    values: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    inverse: torch.Tensor | None = None
    runs: Runs | None = None
    expanded_length: int | None = None

    @classmethod
    def from_jagged(cls, lists: JaggedTensor, *, newest: str = "last", max_shift: int = 16) -> PartialJaggedTensor:
        """Share what stays the same between one distinct list and the next.

        Args:
            lists: of one feature, a session's samples one after the other; weights are not kept.
            newest: at which end new ids are added, "last" or "first".
            max_shift: most ids dropped between two lists for their run to be found; never changes what the lists are.

        Raises:
            DataError: ``newest`` is neither, or values that are not ids.
        """
        ids = lists.values()
        if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex():
            raise DataError(f"lists that share ids hold whole numbers, found {ids.dtype} of shape {tuple(ids.shape)}")
        rows = JaggedArray.of(ids.cpu().numpy(), lists.lengths().cpu().numpy())
        same = distinct_rows(rows)
        kept = rows.take(same.first)
        places, _, runs = found_runs([kept], newest, max_shift)
        device = lists.values().device
        values = torch.from_numpy(kept.values[places]).to(device)
        inverse = torch.from_numpy(same.inverse).to(device)
        return cls.of_runs(values, runs.each(lambda tensor: tensor.to(device)), inverse, int(rows.lengths.sum()))

    @classmethod
    def of_runs(
        cls, values: torch.Tensor, runs: Runs, inverse: torch.Tensor, expanded_length: int | None = None
    ) -> PartialJaggedTensor:
        """Of a buffer, its runs, and the run of each sample."""
        starts, lengths = runs.starts.index_select(0, inverse), runs.lengths.index_select(0, inverse)
        return cls(values, starts, lengths, inverse, runs, expanded_length)

    def to_jagged(self) -> JaggedTensor:
        """Every sample's own list; gradients of what lists share add up."""
        indices = run_places(self.starts.long(), self.lengths, self.expanded_length)
        return JaggedTensor(self.values.index_select(0, indices), lengths=self.lengths)

    def expand(self) -> JaggedTensor:
        """As :meth:`to_jagged`, by the name that :class:`DedupedJagged` has for it."""
        return self.to_jagged()

    @property
    def num_distinct(self) -> int:
        """R; B where which lists are distinct is not known."""
        return int((self.lengths if self.runs is None else self.runs.lengths).numel())

    def distinct(self) -> JaggedTensor:
        """The distinct lists alone; R lists."""
        if self.runs is None:
            return self.to_jagged()
        places = run_places(self.runs.starts.long(), self.runs.lengths, self.runs.total)
        return JaggedTensor(self.values.index_select(0, places), lengths=self.runs.lengths)

    def sequences(self) -> tuple[JaggedTensor, PartialJaggedTensor]:
        """The longest list of each start, S lists, and every sample's list as a run of their values.

        What a causal module makes of them, value by value, is what it would make of every list.
        """
        runs, inverse = self._known
        found = runs.sequences
        values = self.values.index_select(0, run_places(found.starts.long(), found.lengths, found.total))
        begins = (torch.cumsum(found.lengths, 0) - found.lengths).to(found.starts.dtype)
        within = replace(runs, starts=begins.index_select(0, found.of), held=None)
        lists = PartialJaggedTensor.of_runs(values, within, inverse, self.expanded_length)
        return JaggedTensor(values, lengths=found.lengths), lists

    @cached_property
    @torch.inference_mode(False)  # what is kept may be trained on later
    def _known(self) -> tuple[Runs, torch.Tensor]:
        """Runs of the distinct lists, or of all samples' where which are distinct is not known; and each sample's."""
        if self.runs is not None and self.inverse is not None:
            return self.runs, self.inverse
        found = Runs.of(self.starts.cpu().numpy(), self.lengths.cpu().numpy())
        every = torch.arange(self.starts.numel(), device=self.starts.device)
        return found.each(lambda tensor: tensor.to(self.starts.device)), every

    def last(self) -> torch.Tensor:
        """What stands last in every sample's list; shape (B, ...), zeros of empty lists."""
        places = self.starts + self.lengths - 1
        full = (self.lengths > 0).reshape(-1, *[1] * (self.values.dim() - 1))
        if not self.values.shape[0]:
            # Of the values, none, so that what made them gets gradients, of zero, on every rank.
            return self.values.new_zeros(self.starts.numel(), *self.values.shape[1:]) + self.values.sum(0)
        return torch.where(full, self.values.index_select(0, places.clamp(0, self.values.shape[0] - 1)), 0)

    def with_values(self, values: torch.Tensor) -> PartialJaggedTensor:
        """The same lists of other values, such as the embeddings of the buffer's ids; shape (N, ...)."""
        return replace(self, values=values)

    @property
    def dedup_factor(self) -> float:
        """Values of all lists per value of the buffer."""
        return int(self.lengths.sum()) / self.values.shape[0] if self.values.shape[0] else 1.0


def _flatten(lists: PartialJaggedTensor) -> tuple[list[object], int | None]:
    return [lists.values, lists.starts, lists.lengths, lists.inverse, lists.runs], lists.expanded_length


def _unflatten(children: Iterable[Any], expanded: int | None) -> PartialJaggedTensor:
    values, starts, lengths, inverse, runs = children
    return PartialJaggedTensor(values, starts, lengths, inverse, runs, expanded)


register(PartialJaggedTensor, _flatten, _unflatten, "values", "starts", "lengths", "inverse", "runs")
