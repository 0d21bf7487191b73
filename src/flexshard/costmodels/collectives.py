"""The collectives of a training step: what an executor starts, a replay counts and the solver prices.

Legend: U ranks, g group size, G levels in use, K classes of tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

import numpy as np
import numpy.typing as npt

from flexshard._internal import plain_sum
from flexshard.costmodels.cost import Collective, CollectiveKind
from flexshard.costmodels.frames import bundles, expected_padding
from flexshard.costmodels.layout import Layout
from flexshard.costmodels.overlap import Overlap, hidden_share
from flexshard.tables import OPTIMIZERS
from flexshard.topologies import Cluster, CollectiveRate

__all__ = [
    "NUMBER_BYTES",
    "SLOT_BYTES",
    "STATUS_NUMBERS",
    "RowWidths",
    "StepCollective",
    "TableClass",
    "WireTable",
    "classes_of",
    "collective",
    "collectives_between",
    "idle_seconds",
    "kind_of",
    "priced",
    "step_collectives",
    "with_excess",
    "with_hottest",
]

FloatArray = npt.NDArray[np.float64]

NUMBER_BYTES = 4
SLOT_BYTES = 4
STATUS_NUMBERS = 3  # a rank's word on its batch, beside its counts


class WireTable(Protocol):
    """A table, as far as its rows travel."""

    @property
    def dim(self) -> int: ...  # noqa: D102 - as a Table has them
    @property
    def dtype(self) -> str: ...  # noqa: D102 - as a Table has it
    @property
    def optimizer(self) -> str: ...  # noqa: D102 - as a Table has it
    @property
    def row_bytes(self) -> int: ...  # noqa: D102 - as a Table has it


@dataclass(frozen=True)
class RowWidths:
    """Bytes of a row in every collective that carries it.

    Attributes:
        row_bytes: of the row.
        gradient_bytes: of its gradient; float32 whatever the weights.
        sum_bytes: of the sum of its copies' gradients, with how often it was read where the optimizer asks for that.
    """

    row_bytes: int
    gradient_bytes: int
    sum_bytes: int

    @classmethod
    def of(cls, dim: int, row_bytes: int, *, moves_at_zero: bool) -> RowWidths:
        """Gradients travel as float32; ``moves_at_zero`` as of :class:`flexshard.tables.Optimizer`."""
        return cls(row_bytes, 4 * dim, 4 * (dim + moves_at_zero))

    @classmethod
    def of_table(cls, table: WireTable) -> RowWidths:
        """Of a table's rows."""
        optimizer = OPTIMIZERS.get(table.optimizer)
        return cls.of(table.dim, table.row_bytes, moves_at_zero=optimizer is not None and optimizer.moves_at_zero)

    def moved(self, id_bytes: int) -> dict[str, int]:
        """Bytes of one lookup in each of a step's all-to-alls, by what they carry."""
        return {"ids": id_bytes, "embeddings": self.row_bytes, "gradients": self.gradient_bytes}

    def moved_bytes(self, id_bytes: int) -> int:
        """Of one lookup in all of a step's all-to-alls: its id, its row, its gradient."""
        return plain_sum(self.moved(id_bytes).values())


@dataclass(frozen=True)
class TableClass:
    """Tables of one dimension, type and optimizer, which stand together in a layout.

    Attributes:
        tables: their indices in the layout.
        widths: of their rows.
    """

    tables: range
    widths: RowWidths


def kind_of(table: WireTable) -> tuple[int, str, str]:
    """What tables of one class share."""
    return table.dim, table.dtype, table.optimizer


def classes_of(tables: Sequence[WireTable]) -> list[TableClass]:
    """Classes of tables, of which those of one kind stand together."""
    found = []
    for _, members in groupby(range(len(tables)), key=lambda index: kind_of(tables[index])):
        same = list(members)
        found.append(TableClass(range(same[0], same[-1] + 1), RowWidths.of_table(tables[same[0]])))
    return found


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
    fixed_bytes: float | None = None


def step_collectives(layout: Layout, classes: Sequence[TableClass]) -> tuple[StepCollective, ...]:
    """Every call of a step, in the order in which they start; the same on every rank."""

    def held(*, sparse: bool) -> npt.NDArray[np.int64]:
        """Slots on a rank of tiers of one kind, by level and class; shape (G, K)."""
        rows = np.where(layout.sparse == sparse, layout.depth, 0).T
        return np.stack([rows[:, one.tables.start : one.tables.stop].sum(axis=1) for one in classes], axis=1)

    return collectives_between(
        layout.world_size,
        layout.group_sizes,
        [one.widths for one in classes],
        held(sparse=False),
        np.asarray(held(sparse=True).any(axis=1)),
        layout.slot_type().itemsize,
    )


def collectives_between(
    world_size: int,
    group_sizes: Sequence[int],
    widths: Sequence[RowWidths],
    whole: npt.NDArray[np.int64] | FloatArray,
    gathered: npt.NDArray[np.bool_],
    id_bytes: int,
) -> tuple[StepCollective, ...]:
    """Every call of a step of tables whose rows are split in these ways.

    Args:
        world_size: U.
        group_sizes: levels that hold any rows, ascending; G of them.
        widths: of each class's rows; K of them.
        whole: rows that a rank holds of tiers whose copies' gradients are reduced whole; shape (G, K).
        gathered: levels at which those of some tiers are gathered row by row; shape (G,).
        id_bytes: of an id on the wire.
    """
    everything, numbers = tuple(range(len(widths))), (NUMBER_BYTES,) * len(widths)
    result = []
    sizes = [size for size in group_sizes if size > 1]
    if world_size > 1:
        fixed = world_size * (len(sizes) * len(widths) + STATUS_NUMBERS) * NUMBER_BYTES
        result.append(StepCollective("all_to_all", world_size, "counts", everything, numbers, fixed))
    result += [StepCollective("all_to_all", size, "ids", everything, (id_bytes,) * len(widths)) for size in sizes]
    for content, item_bytes in (
        ("embeddings", [one.row_bytes for one in widths]),
        ("gradients", [one.gradient_bytes for one in widths]),
    ):
        for size in reversed(sizes):
            for bundle in bundles([one.row_bytes for one in widths]):
                carried = tuple(item_bytes[index] for index in bundle)
                result.append(StepCollective("all_to_all", size, content, bundle, carried))
    for level, size in enumerate(group_sizes):
        if size == world_size:
            continue
        reduced = tuple(np.flatnonzero(whole[level]).tolist())
        if reduced:
            sums = tuple(widths[index].sum_bytes for index in reduced)
            nbytes = plain_sum(whole[level, index].item() * width for index, width in zip(reduced, sums, strict=True))
            result.append(StepCollective("all_reduce", size, "replicas", reduced, sums, nbytes))
        if gathered[level]:
            fixed = NUMBER_BYTES * len(widths)
            result.append(StepCollective("all_reduce", size, "touched", everything, numbers, fixed))
            entries = tuple(one.gradient_bytes + SLOT_BYTES for one in widths)
            result.append(StepCollective("all_gather", size, "touched_rows", everything, entries))
    return tuple(result)


def priced(
    calls: Sequence[StepCollective],
    reads: Mapping[int, FloatArray],
    cluster: Cluster,
    overlap: Overlap | None,
    gathered_bytes: Mapping[int, float] | None = None,
) -> tuple[Collective, ...]:
    """What calls are expected to carry and to take; those of one kind, level and content together.

    Args:
        calls: of a step.
        reads: expected lookups of a rank at each level, of each class; shape (K,).
        cluster: has the rates.
        overlap: share of each collective's time that is hidden, by (kind, group size).
        gathered_bytes: expected buffer of each level's all-gather, by group size.
    """
    found: dict[tuple[CollectiveKind, int, str], list[float]] = {}
    for call in calls:
        if call.fixed_bytes is not None:
            nbytes = float(call.fixed_bytes)
        elif call.kind == "all_to_all":
            nbytes = float(reads[call.group_size][list(call.classes)] @ np.array(call.item_bytes, np.float64))
            if call.content != "ids":  # rows of several widths, each from a multiple of its bytes on
                nbytes += call.group_size * expected_padding(call.item_bytes)
        else:
            nbytes = (gathered_bytes or {})[call.group_size]
        found.setdefault((call.kind, call.group_size, call.content), []).append(nbytes)
    return tuple(
        collective(kind, size, _rate(cluster, kind, size), plain_sum(parts) / len(parts), overlap, content, len(parts))
        for (kind, size, content), parts in sorted(found.items())
    )


def with_hottest(
    collectives: Sequence[Collective],
    group_size: int,
    reads: float,
    widths: RowWidths,
    id_bytes: int = 4,
    sharing: int = 1,
) -> tuple[Collective, ...]:
    """Collectives of a step in which one row takes so many of a rank's lookups: all of its group ask the rank that
    holds it, which so sends and receives ``(g - 1) · reads`` more than the mean, the others' rows being dealt evenly.
    Where ranks share a link, so many of them spread it over what each has of it.
    """
    moved = {content: reads * nbytes / sharing for content, nbytes in widths.moved(id_bytes).items()}
    return with_excess(collectives, group_size, moved)


def with_excess(
    collectives: Sequence[Collective], group_size: int, moved: Mapping[str, float]
) -> tuple[Collective, ...]:
    """The same where one row moves so many bytes of each content for every rank of its group."""
    return tuple(
        replace(one, excess_bytes=(group_size - 1) * moved[one.content] / one.calls)
        if one.name == f"all_to_all@{group_size}" and one.content in moved
        else one
        for one in collectives
    )


def idle_seconds(
    cluster: Cluster, group_sizes: Sequence[int], widths: Sequence[RowWidths], overlap: Overlap | None
) -> float:
    """Exposed time of a step's calls that carry no rows: what each further level takes whatever it holds."""
    shape = len(group_sizes), len(widths)
    # A row that weighs nothing stands for any number of them.
    calls = collectives_between(
        cluster.world_size, group_sizes, widths, np.full(shape, 1e-300), np.zeros(shape[0], bool), 4
    )
    nothing = dict.fromkeys(group_sizes, np.zeros(shape[1]))
    return plain_sum(one.exposed_seconds for one in priced(calls, nothing, cluster, overlap))


def _rate(cluster: Cluster, kind: CollectiveKind, size: int) -> CollectiveRate:
    rate: CollectiveRate | None = getattr(cluster.level(size), kind)
    assert rate is not None
    return rate


def collective(
    kind: CollectiveKind,
    group_size: int,
    rate: CollectiveRate,
    nbytes: float,
    overlap: Overlap | None,
    content: str,
    calls: int = 1,
) -> Collective:
    """One collective of an iteration at a level's rate."""
    share = hidden_share(overlap, kind, group_size, content)
    return Collective(kind, group_size, calls, nbytes, rate.alpha_seconds, rate.bytes_per_s, share, content)
