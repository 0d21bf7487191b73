"""The collectives of a training step: what an executor starts, a replay counts and a cost model prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexshard.costmodels.cost import CollectiveKind
from flexshard.costmodels.frames import bundles
from flexshard.costmodels.layout import Layout
from flexshard.costmodels.replica_reduction import SLOT_BYTES

__all__ = ["STATUS_NUMBERS", "StepCollective", "TableClass", "step_collectives"]

_NUMBER_BYTES = 4
STATUS_NUMBERS = 3  # a rank's word on its batch, beside its counts


@dataclass(frozen=True)
class TableClass:
    """Tables of one dimension, type and optimizer, which stand together in a layout.

    Attributes:
        tables: their indices in the layout.
        row_bytes: of a row on the wire.
        gradient_bytes: of its gradient; float32 whatever the weights.
        sum_bytes: of the sum of its copies' gradients, with how often it was read where the optimizer asks for that.
    """

    tables: range
    row_bytes: int
    gradient_bytes: int
    sum_bytes: int

    @classmethod
    def of(cls, tables: range, dim: int, row_bytes: int, *, moves_at_zero: bool) -> TableClass:
        """Gradients travel as float32; ``moves_at_zero`` as of :class:`flexshard.tables.Optimizer`."""
        return cls(tables, row_bytes, 4 * dim, 4 * (dim + moves_at_zero))


@dataclass(frozen=True)
class StepCollective:
    """One call.

    Attributes:
        kind: "all_to_all" (inside groups of ``group_size``), "all_reduce" or "all_gather" (across them).
        group_size: g of its level.
        content: "counts", "ids", "embeddings", "gradients", "replicas" (gradients of copies that are reduced whole),
            "touched" (how many rows of the others were touched) or "touched_rows" (their gradients).
        classes: whose rows it carries, as indices.
        item_bytes: of what it carries for each of these: a row, an id, a number.
        fixed_bytes: of its buffer, where that does not depend on the batch; else None.
    """

    kind: CollectiveKind
    group_size: int
    content: str
    classes: tuple[int, ...]
    item_bytes: tuple[int, ...]
    fixed_bytes: int | None = None


def step_collectives(layout: Layout, classes: Sequence[TableClass]) -> tuple[StepCollective, ...]:
    """Every call of a step, in the order in which they start; the same on every rank."""
    world, everything = layout.world_size, tuple(range(len(classes)))
    result = []
    sizes = [size for size in layout.group_sizes if size > 1]
    if world > 1:
        numbers = len(sizes) * len(classes) + STATUS_NUMBERS
        fixed = world * numbers * _NUMBER_BYTES
        result.append(StepCollective("all_to_all", world, "counts", everything, (_NUMBER_BYTES,) * len(classes), fixed))
    id_bytes = layout.slot_type().itemsize
    result += [StepCollective("all_to_all", size, "ids", everything, (id_bytes,) * len(classes)) for size in sizes]
    for content, widths in (
        ("embeddings", [one.row_bytes for one in classes]),
        ("gradients", [one.gradient_bytes for one in classes]),
    ):
        for size in reversed(sizes):
            for bundle in bundles([one.row_bytes for one in classes]):
                carried = tuple(widths[index] for index in bundle)
                result.append(StepCollective("all_to_all", size, content, bundle, carried))
    for level, size in enumerate(layout.group_sizes):
        if size < world:
            result += _reductions(layout, level, classes)
    return tuple(result)


def _reductions(layout: Layout, level: int, classes: Sequence[TableClass]) -> list[StepCollective]:
    """Of one level's copies."""
    size = layout.group_sizes[level]
    whole, sparse = _rows(layout, level, classes, sparse=False), _rows(layout, level, classes, sparse=True)
    result = []
    reduced = tuple(np.flatnonzero(whole).tolist())
    if reduced:
        widths = tuple(classes[index].sum_bytes for index in reduced)
        nbytes = sum(int(whole[index]) * width for index, width in zip(reduced, widths, strict=True))
        result.append(StepCollective("all_reduce", size, "replicas", reduced, widths, nbytes))
    if sparse.any():
        gathered = tuple(range(len(classes)))
        numbers = (_NUMBER_BYTES,) * len(classes)
        result.append(StepCollective("all_reduce", size, "touched", gathered, numbers, _NUMBER_BYTES * len(classes)))
        entries = tuple(one.gradient_bytes + SLOT_BYTES for one in classes)
        result.append(StepCollective("all_gather", size, "touched_rows", gathered, entries))
    return result


def _rows(layout: Layout, level: int, classes: Sequence[TableClass], *, sparse: bool) -> npt.NDArray[np.int64]:
    """Slots of a level on a rank of tiers of one kind, of each class; shape (K,)."""
    rows = np.where(layout.sparse[:, level] == sparse, layout.depth[:, level], 0)
    return np.array([rows[one.tables.start : one.tables.stop].sum() for one in classes], np.int64)
