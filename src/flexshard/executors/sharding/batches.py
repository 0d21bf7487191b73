"""A batch as it comes, and what may be wrong with it on one rank, of which every rank has to hear."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flexshard._internal import host_waits_for, segment_of, to_device
from flexshard.errors import CacheError, CheckpointError, DataError, FlexShardError
from flexshard.executors.comm.splits import Status
from flexshard.executors.sharding.translation import LocationTable, extremes_of, outside_message, outside_of
from flexshard.executors.state.live_tensors import STALE

__all__ = [
    "BAD_IDS",
    "CACHE_FAILED",
    "WRITTEN",
    "BatchPart",
    "BatchProblem",
    "Lookup",
    "OutsideIds",
    "RowsOwner",
    "error_of",
    "ids_of_tables",
    "version_of",
    "versions_of",
]

IntArray = npt.NDArray[np.int64]

BAD_IDS, _NO_FEATURE, _VARIABLE_BATCH, CACHE_FAILED, WRITTEN, _MISFIT = 1, 2, 3, 4, 5, 6
_OF_CACHES = (CACHE_FAILED, WRITTEN)
_ANY = np.iinfo(np.int64).max
_WHAT = {
    BAD_IDS: "bad ids of table {}",
    _NO_FEATURE: "no feature for table {}",
    _VARIABLE_BATCH: "a variable batch",
    _MISFIT: "a batch whose lengths do not fit its ids",
    CACHE_FAILED: "a cache of rows of table {} that cannot be moved",
    WRITTEN: "parameters of table {} or others that were written to between two steps",
}


@dataclass(frozen=True)
class Lookup:
    """One feature looked up in one table.

    Attributes:
        name: in the output ("feature", or "feature@table" where several tables look it up).
        feature: in the input.
        table: index of the table in the layout.
        group: of the table's group.
    """

    name: str
    feature: str
    table: int
    group: int


@dataclass(frozen=True)
class BatchProblem:
    """Why a batch cannot be looked up.

    Attributes:
        kind: what other ranks are told.
        table: index of the table, which they are told too.
        text: what this rank says.
    """

    kind: int
    table: int
    text: str


@dataclass(frozen=True)
class OutsideIds:
    """Whether ids lie outside their table, as far as the device has come: the host need not wait to hear it.

    Attributes:
        table: index of one that they lie outside of, -1 if there is none; shape (1,), int32, on the device.
        problem: what is wrong then; it waits for the device.
    """

    table: torch.Tensor
    problem: Callable[[], BatchProblem | None]


class RowsOwner(Protocol):
    """A module, as far as a batch goes."""

    training: bool

    def rows_mark(self) -> Hashable:
        """What changes when somebody writes to its rows or sets its learning rates, where that can be known."""

    def written(self) -> int:
        """Whether somebody wrote to its ``state_dict``, and to a current one."""

    def finish_writes(self) -> None:
        """Take that over; every rank must call it."""

    def before_look_up(self, *, train: bool) -> None:
        """Its rows are looked up next, to be updated perhaps if ``train``."""

    def looked_up(self, *, train: bool) -> None:
        """They will be, or will not."""


@dataclass(frozen=True)
class BatchPart:
    """A module's part of a batch.

    Attributes:
        owner: the module.
        locations: of its lookups, as its own tables have them; shape (lookups,).
        lookups: how many each of its groups has.
        once: how many each of its tables has, with whether its repeated ids are sent once.
        problem: what is wrong with it on this rank, or may be.
        features: the batch as the module got it. A pipeline may begin one batch while a module outside of it looks up
            the batch before: only modules that are given the very same object go together.
        batch: the same as ``KeyedJaggedTensor``.
        versions: what counted writes to its ids and lengths.
    """

    owner: RowsOwner
    locations: torch.Tensor
    lookups: Sequence[int]
    once: Sequence[tuple[int, bool]]
    problem: BatchProblem | OutsideIds | None
    features: object
    batch: KeyedJaggedTensor
    versions: list[int]

    @property
    def ids_changed(self) -> bool:
        """Whether somebody wrote to the batch since, where that is counted."""
        return self.versions != versions_of(self.batch)


def versions_of(batch: KeyedJaggedTensor) -> list[int]:
    """What counts writes to a batch's ids and lengths."""
    return [version_of(batch.values()), version_of(batch.lengths())]


def version_of(tensor: torch.Tensor) -> int:
    """What counts writes to a tensor; nothing does in inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def ids_of_tables(
    features: KeyedJaggedTensor,
    lookups: Sequence[Lookup],
    tables: Sequence[LocationTable],
    *,
    translated: bool,
    variable: bool = True,
) -> tuple[list[tuple[int, torch.Tensor]], BatchProblem | OutsideIds | None]:
    """A batch's ids by table, in the lookups' order; none if there is a problem.

    Args:
        features: the batch.
        lookups: wanted.
        tables: by index.
        translated: whether ids are locations already.
        variable: whether features may have batch sizes of their own.
    """
    if features.variable_stride_per_key() and (not variable or features.inverse_indices_or_none() is None):
        text = "the batch's features have batch sizes of their own (variable batch), "
        if variable:
            text += "which needs inverse indices, as with TorchRec: give them to the KeyedJaggedTensor"
        else:
            text += (
                "and some tables of the collection are TorchRec's, which on CPUs loses their gradients; expand the"
                " features to one batch size, or let the plan have all tables"
            )
        return [], BatchProblem(_VARIABLE_BATCH, 0, text)
    misfit = _misfit(features)
    if misfit is not None:
        return [], BatchProblem(_MISFIT, 0, f"the batch does not fit together: {misfit}")
    keys, values = features.keys(), features.values()
    known = {key: index for index, key in enumerate(keys)}
    no_ids = bool(values.numel()) and (values.is_floating_point() or values.dtype == torch.bool)
    for lookup in lookups:
        if lookup.feature not in known:
            text = (
                f"the batch has no feature {lookup.feature!r}, which table {tables[lookup.table].table!r} is looked up"
                f" by; it has {', '.join(keys)}"
            )
            return [], BatchProblem(_NO_FEATURE, lookup.table, text)
        if no_ids:
            text = (
                f"feature {lookup.feature!r}: ids of table {tables[lookup.table].table!r} must be whole numbers, found"
                f" {values.dtype}"
            )
            return [], BatchProblem(BAD_IDS, lookup.table, text)
    ends = features.offset_per_key()
    problem: BatchProblem | OutsideIds | None
    if host_waits_for(values.device):
        bounds = _bounds(known, lookups, tables, translated=translated)
        inside, table = _inside(values[: ends[-1]], np.array(ends), *bounds)
        parts = _by_feature(known, lookups, inside, ends)
        problem = OutsideIds(table, lambda: _outside(known, values, ends, lookups, tables, translated=translated))
    else:
        parts = _by_feature(known, lookups, values, ends)
        problem = _outside(known, values, ends, lookups, tables, translated=translated)
        if problem is not None:
            return [], problem
    found = [(lookup.table, parts[lookup.feature]) for lookup in lookups]
    return [(table, ids if ids.numel() else ids.long()) for table, ids in found], problem


def _misfit(features: KeyedJaggedTensor) -> str | None:
    """What of a batch does not fit what else is in it; None if nothing does."""
    values, lengths, keys = features.values(), features.lengths(), features.keys()
    if values.dim() != 1:
        return f"ids must have one dimension, found shape {tuple(values.shape)}"
    if keys and not features.variable_stride_per_key() and lengths.numel() % len(keys):
        return f"{lengths.numel()} lengths are not as many for each of {len(keys)} features ({', '.join(keys)})"
    if not host_waits_for(lengths.device) and lengths.numel() and (least := int(lengths.min())) < 0:
        return f"a length is {least}"
    end = features.offset_per_key()[-1]
    if end > values.numel():
        return f"lengths add up to {end}, for {values.numel()} ids"
    return None


def _bounds(
    known: Mapping[str, int], lookups: Sequence[Lookup], tables: Sequence[LocationTable], *, translated: bool
) -> tuple[IntArray, IntArray]:
    """The number that a feature's ids lie below, and the table that says so; shape (features,) each."""
    ends, owners = np.full(len(known), _ANY), np.zeros(len(known), np.int64)
    for lookup in lookups:
        table, at = tables[lookup.table], known[lookup.feature]
        end = table.num_locations if translated else table.num_rows
        if end < ends[at]:
            ends[at], owners[at] = end, lookup.table
    return ends, owners


def _inside(
    values: torch.Tensor, offsets: IntArray, ends: IntArray, owners: IntArray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with 0 for those that lie outside their table, and the first such table (-1: none); shape (1,)."""
    if not values.numel():
        return values, torch.full((1,), -1, dtype=torch.int32, device=values.device)
    features = to_device(np.stack([ends, owners]), values.device)
    feature = segment_of(np.diff(offsets), values.device)
    end = features[0][feature]
    outside = ((values < 0) | (values >= end)) & (end != _ANY)
    table = torch.where(outside, features[1][feature], _ANY).min().view(1)
    return values.masked_fill(outside, 0), torch.where(table == _ANY, -1, table).int()


def _by_feature(
    known: Mapping[str, int], lookups: Sequence[Lookup], values: torch.Tensor, ends: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Ids of the features that are looked up; ``known``: where each feature stands in the batch."""
    parts = values[: ends[-1]].split(np.diff(ends).tolist())
    return {lookup.feature: parts[known[lookup.feature]] for lookup in lookups}


def _outside(
    known: Mapping[str, int],
    values: torch.Tensor,
    ends: Sequence[int],
    lookups: Sequence[Lookup],
    tables: Sequence[LocationTable],
    *,
    translated: bool,
) -> BatchProblem | None:
    """Which ids of a batch's features lie outside their table, if any do; on a device, the host waits.

    Args:
        known: where each feature stands in the batch.
        values, ends: the batch's ids, and where each feature's begin, with the end.
    """
    extremes = extremes_of(values, ends)
    for lookup in lookups:
        table = tables[lookup.table]
        outside = outside_of(extremes[known[lookup.feature]], table.num_locations if translated else table.num_rows)
        if outside is not None:
            text = outside_message(lookup.feature, table, outside)
            if translated:
                text = (
                    f"feature {lookup.feature!r}: {outside} is no location of table {table.table!r}; translate its ids"
                    " with this module's translator()"
                )
            return BatchProblem(BAD_IDS, lookup.table, text)
    return None


def error_of(
    status: Sequence[Status], tables: Sequence[str], rank: int, problem: BatchProblem | None
) -> FlexShardError | None:
    """What this rank raises after every rank has given its word, if one of them has a problem."""
    if problem is not None:
        kind = CacheError if problem.kind in _OF_CACHES else DataError
        return kind(f"rank {rank}: {problem.text}")
    for other, word in enumerate(status):
        if word.problem:
            what = _WHAT[word.problem].format(repr(tables[word.table]))
            kind = CacheError if word.problem in _OF_CACHES else DataError
            return kind(f"rank {rank}: rank {other} has {what}; its own message names it")
    late = [other for other, word in enumerate(status) if word.written == STALE]
    if late:
        return CheckpointError(
            f"rank {rank}: on rank {late[0]} tensors of a state_dict() from before a training step or a"
            " load_state_dict() were written to; they are copies, and the model's rows have changed since: call"
            " state_dict() again and write to that, or give them to load_state_dict()"
        )
    return None
