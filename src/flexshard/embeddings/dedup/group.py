"""Features of a batch that share one inverse index: distinct lists, or runs of shared buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flexshard._internal import IntArray, JaggedArray, check_sharing, distinct_rows
from flexshard.embeddings.dedup.keyed import Groups, changed, columns_of, keyed, rows_of
from flexshard.embeddings.dedup.runs import Runs, found_runs
from flexshard.embeddings.dedup.selection import run_places
from flexshard.errors import DataError

__all__ = ["DedupedGroup", "Sharing", "deduplicated"]


@dataclass(frozen=True)
class DedupedGroup:
    """Features that share one inverse index.

    Attributes:
        jagged: the distinct rows of every feature; stride R. Of a partially deduplicated group, whose lists are runs of
            a buffer, the buffer of every feature, in R pieces: what each distinct list brought.
        inverse: the distinct row that each sample has; shape (B,), int64.
        expanded_lengths: number of ids of each feature in the whole batch, where the host knows it; a batch that goes
            from the host to a device knows it.
        runs: of a partially deduplicated group, the same for each of its features; None otherwise.
    """

    jagged: KeyedJaggedTensor
    inverse: torch.Tensor
    expanded_lengths: tuple[int, ...] | None = None
    runs: Runs | None = None

    @property
    def keys(self) -> list[str]:
        """Its features."""
        return list(self.jagged.keys())

    @property
    def num_distinct(self) -> int:
        """R."""
        return int(self.jagged.stride())

    def lists(self) -> KeyedJaggedTensor:
        """Every distinct row's own list of each feature; stride R."""
        if self.runs is None:
            return self.jagged
        return self._of_runs(self.runs.starts, self.runs.lengths, self.runs.total * len(self.keys))

    @cached_property
    @torch.inference_mode(False)  # what is kept may be trained on later
    def bags(self) -> KeyedJaggedTensor:
        """What pooled lookups take: distinct rows, or the pieces of the buffer that lists are put together from."""
        if self.runs is None:
            return self.jagged
        pieces = self.runs.segments.lengths
        if not pieces.numel():  # no ids at all, and TorchRec wants a row
            pieces = pieces.new_zeros(1)
        return KeyedJaggedTensor(
            keys=self.keys,
            values=self.jagged.values(),
            lengths=pieces.repeat(len(self.keys)).to(self.jagged.lengths().dtype),
            stride=pieces.numel(),
        )

    def expand(self) -> KeyedJaggedTensor:
        """Every sample's own list of each feature; stride B."""
        if self.runs is None:
            return rows_of(self.jagged, self.inverse)
        starts, lengths = (each.index_select(0, self.inverse) for each in (self.runs.starts, self.runs.lengths))
        return self._of_runs(starts, lengths, None if self.expanded_lengths is None else sum(self.expanded_lengths))

    def _of_runs(self, starts: torch.Tensor, lengths: torch.Tensor, total: int | None) -> KeyedJaggedTensor:
        features = len(self.keys)
        size = self.jagged.values().numel() // features
        begins = torch.cat([starts.long() + number * size for number in range(features)])
        every = lengths.repeat(features)
        return KeyedJaggedTensor(
            keys=self.keys,
            values=self.jagged.values().index_select(0, run_places(begins, every, total)),
            lengths=every.to(self.jagged.lengths().dtype),
            stride=starts.numel(),
        )

    def of_lists(self, lists: KeyedJaggedTensor) -> list[DedupedGroup]:
        """Groups of the same samples with these lists of each distinct row instead, on the host; one where it is exact.

        Where lists are runs, features that the group has not had are groups of their own.

        Raises:
            DataError: lists that are runs have weights now, or different lengths within the group.
        """
        if self.runs is None:
            return [DedupedGroup(lists, self.inverse)]
        columns = columns_of(lists)
        together = {key: column for key, column in columns.items() if key in self.keys}
        apart = [{key: column} for key, column in columns.items() if key not in self.keys]
        first = next(iter(together), "")
        for key, column in columns.items():
            if column.weights is not None:
                raise DataError(f"a transform gave feature {key!r} weights, which lists that share ids cannot have")
            if key in together and not np.array_equal(column.lengths, together[first].lengths):
                raise DataError(
                    f"a transform gave features {first!r} and {key!r} of one partial group lists of different lengths;"
                    " put each in a partial group of its own"
                )
        how = Sharing(self.runs.newest, self.runs.max_shift)
        kind, device = lists.lengths().dtype, lists.lengths().device
        return [_of_columns(part, self.inverse, kind, device, how) for part in ([together] if together else []) + apart]

    def counted(self) -> DedupedGroup:
        """The same, of a batch on the host, with what a device need not be asked for later on."""
        self.jagged.offset_per_key()
        if self.runs is None:
            lengths = self.jagged.lengths().view(len(self.keys), -1)
            return replace(self, expanded_lengths=tuple(lengths[:, self.inverse].sum(dim=1).tolist()))
        expanded = (int(self.runs.lengths[self.inverse].sum()),) * len(self.keys)
        return replace(self, expanded_lengths=expanded, runs=self.runs.counted())

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> DedupedGroup:
        """The same group, each of its tensors changed."""
        runs = None if self.runs is None else self.runs.each(change)
        return DedupedGroup(changed(self.jagged, change), change(self.inverse), self.expanded_lengths, runs)

    def dedup_factor(self, key: str) -> float:
        """Ids of the whole batch per id that is kept."""
        rows, index = self.num_distinct, self.keys.index(key)
        pieces = self.jagged.lengths()[index * rows : (index + 1) * rows]  # jagged[key] has no batches of no rows
        kept = int(pieces.sum())
        lists = pieces if self.runs is None else self.runs.lengths
        return int(lists[self.inverse].sum()) / kept if kept else 1.0


@dataclass(frozen=True)
class Sharing:
    """How lists may go on from those before, and where they are from.

    Attributes:
        newest, max_shift: as of :meth:`PartialJaggedTensor.from_jagged`.
        where, first_row: the file and its row at which a batch starts, for messages.
    """

    newest: str = "last"
    max_shift: int = 16
    where: str = "the batch"
    first_row: int = 0

    def __post_init__(self) -> None:
        check_sharing(self.newest, self.max_shift)


def deduplicated(
    columns: Mapping[str, JaggedArray],
    exact: Groups,
    partial: Groups,
    lengths: torch.dtype,
    device: torch.device,
    how: Sharing,
) -> list[DedupedGroup]:
    """Groups of columns, each with its distinct rows once; raises DataError as :func:`partial_group`."""
    made = []
    for number, group in enumerate([*exact, *partial]):
        held = {key: columns[key] for key in group}
        same = distinct_rows(*held.values())
        inverse = torch.from_numpy(same.inverse).to(device)
        if number < len(exact):
            made.append(DedupedGroup(keyed(held, lengths, device, rows=same.first), inverse))
        else:
            made.append(partial_group(held, same.first, inverse, lengths, device, how))
    return made


def partial_group(
    columns: Mapping[str, JaggedArray],
    rows: IntArray,
    inverse: torch.Tensor,
    lengths: torch.dtype,
    device: torch.device,
    how: Sharing,
) -> DedupedGroup:
    """A partially deduplicated group.

    Args:
        columns: of its features; shapes (B, lists).
        rows: at which each distinct row stands first; shape (R,).
        inverse: the distinct row of each sample; shape (B,).
        lengths: type of lengths.
        device: of what is made.
        how: lists may go on from others.

    Raises:
        DataError: features with weights, or with lists of different lengths; names them and the row.
    """
    first, *others = columns
    for key in columns:
        if columns[key].weights is not None:
            raise DataError(
                f"{how.where}: feature {key!r} has weights, which lists that share ids cannot have; put it in groups"
            )
    for key in others:
        wrong = np.flatnonzero(columns[key].lengths != columns[first].lengths)
        if wrong.size:
            row = int(wrong[0])
            raise DataError(
                f"{how.where}: features {first!r} and {key!r} have {columns[first].lengths[row]} and"
                f" {columns[key].lengths[row]} ids in row {how.first_row + row:,}; features that share runs have as"
                " many, so put each in a group of its own"
            )
    kept = {key: column.take(rows) for key, column in columns.items()}
    return _of_columns(kept, inverse, lengths, device, how)


def _of_columns(
    columns: Mapping[str, JaggedArray],
    inverse: torch.Tensor,
    lengths: torch.dtype,
    device: torch.device,
    how: Sharing,
) -> DedupedGroup:
    """Of the distinct rows' lists."""
    places, pieces, runs = found_runs(list(columns.values()), how.newest, how.max_shift)
    buffers = {key: JaggedArray.of(column.values[places], pieces) for key, column in columns.items()}
    held = runs.each(lambda tensor: tensor.to(device))
    return DedupedGroup(keyed(buffers, lengths, device), inverse, runs=held)
