"""A batch as it comes, and what may be wrong with it on one rank, of which every rank has to hear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flexshard.errors import CheckpointError, DataError, FlexShardError
from flexshard.executors.comm.splits import Status
from flexshard.executors.sharding.translation import LocationTable, extremes_of, outside_message, outside_of
from flexshard.executors.state.live_tensors import STALE

__all__ = ["BatchProblem", "Lookup", "error_of", "ids_of_tables"]

_BAD_IDS, _NO_FEATURE, _VARIABLE_BATCH = 1, 2, 3
_WHAT = {_BAD_IDS: "bad ids of table {}", _NO_FEATURE: "no feature for table {}", _VARIABLE_BATCH: "a variable batch"}


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


def ids_of_tables(
    features: KeyedJaggedTensor,
    lookups: Sequence[Lookup],
    tables: Sequence[LocationTable],
    *,
    translated: bool,
    variable: bool = True,
) -> tuple[list[tuple[int, torch.Tensor]], BatchProblem | None]:
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
    keys, values = features.keys(), features.values()
    parts = {key: values[slice(*part)] for key, part in zip(keys, pairwise(features.offset_per_key()), strict=True)}
    asked = list(dict.fromkeys(lookup.feature for lookup in lookups if lookup.feature in parts))
    extremes = dict(zip(asked, extremes_of([parts[feature] for feature in asked]), strict=True))
    result: list[tuple[int, torch.Tensor]] = []
    for lookup in lookups:
        table = tables[lookup.table]
        if lookup.feature not in parts:
            text = (
                f"the batch has no feature {lookup.feature!r}, which table {table.table!r} is looked up by; it has"
                f" {', '.join(keys)}"
            )
            return [], BatchProblem(_NO_FEATURE, lookup.table, text)
        ids = parts[lookup.feature]
        wrong = _wrong_ids(lookup.feature, table, ids.dtype, extremes[lookup.feature], translated=translated)
        if wrong is not None:
            return [], BatchProblem(_BAD_IDS, lookup.table, wrong)
        result.append((lookup.table, ids if ids.numel() else ids.long()))
    return result, None


def _wrong_ids(
    feature: str, table: LocationTable, dtype: torch.dtype, extremes: tuple[float, float] | None, *, translated: bool
) -> str | None:
    """What is wrong with a feature's ids of these extremes (None if it has no ids), if anything is."""
    if extremes is None:
        return None
    if dtype.is_floating_point or dtype == torch.bool:
        return f"feature {feature!r}: ids of table {table.table!r} must be whole numbers, found {dtype}"
    outside = outside_of(extremes, table.num_locations if translated else table.num_rows)
    if outside is None:
        return None
    if translated:
        return (
            f"feature {feature!r}: {outside} is no location of table {table.table!r}; translate its ids with this"
            " module's translator()"
        )
    return outside_message(feature, table, outside)


def error_of(
    status: Sequence[Status], tables: Sequence[str], rank: int, problem: BatchProblem | None
) -> FlexShardError | None:
    """What this rank raises after every rank has given its word, if one of them has a problem."""
    if problem is not None:
        return DataError(f"rank {rank}: {problem.text}")
    for other, word in enumerate(status):
        if word.problem:
            what = _WHAT[word.problem].format(repr(tables[word.table]))
            return DataError(f"rank {rank}: rank {other} has {what}; its own message names it")
    late = [other for other, word in enumerate(status) if word.written == STALE]
    if late:
        return CheckpointError(
            f"rank {rank}: on rank {late[0]} tensors of a state_dict() from before a training step or a"
            " load_state_dict() were written to; they are copies, and the model's rows have changed since: call"
            " state_dict() again and write to that, or give them to load_state_dict()"
        )
    return None
