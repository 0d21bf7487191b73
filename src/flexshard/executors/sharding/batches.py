"""A batch as it comes, and what may be wrong with it on one rank, of which every rank has to hear."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flexshard._internal import host_waits_for
from flexshard.errors import CacheError, CheckpointError, DataError, FlexShardError
from flexshard.executors.comm.splits import Status
from flexshard.executors.sharding.joint_locations import TableIds
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
    "outside_ids",
    "version_of",
    "versions_of",
]

BAD_IDS, _NO_FEATURE, _VARIABLE_BATCH, CACHE_FAILED, WRITTEN, _MISFIT = 1, 2, 3, 4, 5, 6
_OF_CACHES = (CACHE_FAILED, WRITTEN)
_NO_IDS = TableIds([], [], torch.empty(0, dtype=torch.int64), [])
_WHAT = {
    BAD_IDS: "bad ids of table {}",
    _NO_FEATURE: "no feature for table {}",
    _VARIABLE_BATCH: "a variable batch",
    _MISFIT: "a batch whose lengths do not fit its ids",
    CACHE_FAILED: "a cache of table {} that is too small for a batch, or whose rows cannot be moved",
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
        table: index of the first one that they lie outside of, if there is none the number of tables; shape (1,), on
            the device.
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

    def looked_up(self, look_up: object, *, train: bool) -> None:
        """They were, by something that lives for as long as they may be updated."""


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
) -> tuple[TableIds, BatchProblem | None]:
    """A batch's ids by table, in the lookups' order; none if there is a problem. On a device it is not known whether
    they lie in their tables.

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
        return _NO_IDS, BatchProblem(_VARIABLE_BATCH, 0, text)
    misfit = _misfit(features)
    if misfit is not None:
        return _NO_IDS, BatchProblem(_MISFIT, 0, f"the batch does not fit together: {misfit}")
    keys, values = features.keys(), features.values()
    known = {key: index for index, key in enumerate(keys)}
    no_ids = bool(values.numel()) and (values.is_floating_point() or values.dtype == torch.bool)
    for lookup in lookups:
        if lookup.feature not in known:
            text = (
                f"the batch has no feature {lookup.feature!r}, which table {tables[lookup.table].table!r} is looked up"
                f" by; it has {', '.join(keys)}"
            )
            return _NO_IDS, BatchProblem(_NO_FEATURE, lookup.table, text)
        if no_ids:
            text = (
                f"feature {lookup.feature!r}: ids of table {tables[lookup.table].table!r} must be whole numbers, found"
                f" {values.dtype}"
            )
            return _NO_IDS, BatchProblem(BAD_IDS, lookup.table, text)
    if not host_waits_for(values.device):
        problem = outside_ids(features, lookups, tables, translated=translated)
        if problem is not None:
            return _NO_IDS, problem
    if values.dtype not in (torch.int32, torch.int64):  # which index tensors everywhere
        values = values.long()
    ends = features.offset_per_key()
    tables_of, places = [one.table for one in lookups], [known[one.feature] for one in lookups]
    return TableIds(tables_of, places, values[: ends[-1]], np.diff(ends).tolist()), None


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


def outside_ids(
    features: KeyedJaggedTensor, lookups: Sequence[Lookup], tables: Sequence[LocationTable], *, translated: bool
) -> BatchProblem | None:
    """Which ids of a batch's features lie outside their table, if any do; on a device, the host waits."""
    known = {key: index for index, key in enumerate(features.keys())}
    extremes = extremes_of(features.values(), features.offset_per_key())
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
