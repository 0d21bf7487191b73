"""What a plan would move for given batches, rank by rank, without running it: the executor's own arithmetic on counts.

Legend: U ranks, g group size, W ranks per node, n lookups of one step. Sizes are whole buffers, a rank's own part
included, as the cost model counts them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard._internal import JaggedArray, distinct_rows
from flexshard.costmodels import (
    Layout,
    StepCollective,
    classes_of,
    kind_of,
    lookup_bytes,
    rows_with_places,
    segment_bytes,
    step_collectives,
)
from flexshard.embeddings import IndexBijection
from flexshard.errors import DataError, PlanError
from flexshard.executors.traffic.replayed import Replay, Traffic
from flexshard.planner import Plan, TablePlan
from flexshard.profiling import AccessProfile
from flexshard.tables import translation_bytes

__all__ = ["Lookups", "replay", "split_by_rank", "together"]

IntArray = npt.NDArray[np.int64]
Ranking = IndexBijection | AccessProfile
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Lookups:
    """Ids that the ranks look up in one table in one step.

    Attributes:
        ids: shape (n,).
        ranks: which rank looks each up; shape (n,).
    """

    ids: npt.NDArray[np.integer[Any]]
    ranks: npt.NDArray[np.integer[Any]]


def split_by_rank(
    samples: Mapping[str, tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.integer[Any]]]],
    *,
    world_size: int,
    batch_size: int,
    deduplicated: Collection[str] = (),
) -> Iterator[dict[str, Lookups]]:
    """Steps of U·B consecutive samples, B to each rank in turn; the last samples that do not fill a step are left out.

    Args:
        samples: of each table: ids one after the other, and how many each sample has.
        world_size, batch_size: U and B.
        deduplicated: tables of which a rank looks each list up once, however many of its samples have it.

    Raises:
        DataError: tables of different numbers of samples, or fewer than one step needs.
    """
    counts = {name: len(lengths) for name, (_, lengths) in samples.items()}
    number = min(counts.values(), default=0)
    if len(set(counts.values())) > 1:
        raise DataError(
            f"tables have different numbers of samples, as far as they were read: {counts}; give all of them the same"
            " samples"
        )
    per_step = world_size * batch_size
    if number < per_step:
        raise DataError(f"{number:,} samples are less than one step of {world_size} ranks x {batch_size} samples")
    ends = {name: np.concatenate([[0], np.cumsum(lengths)]) for name, (_, lengths) in samples.items()}
    owner = np.arange(per_step, dtype=np.int32) // batch_size
    for first in range(0, number - per_step + 1, per_step):
        yield {
            name: _lookups(
                values[ends[name][first] : ends[name][first + per_step]],
                lengths[first : first + per_step],
                owner,
                once=name in deduplicated,
            )
            for name, (values, lengths) in samples.items()
        }


def _lookups(
    values: npt.NDArray[np.integer[Any]],
    lengths: npt.NDArray[np.integer[Any]],
    owner: npt.NDArray[np.integer[Any]],
    *,
    once: bool,
) -> Lookups:
    """Of the samples of one step, each its owner's; ``once``: each distinct list of an owner."""
    if once:
        kept = np.zeros(lengths.size, np.bool_)
        kept[distinct_rows(JaggedArray.of(owner, np.ones_like(lengths)), JaggedArray.of(values, lengths)).first] = True
        values, lengths, owner = values[np.repeat(kept, lengths)], lengths[kept], owner[kept]
    return Lookups(values, np.repeat(owner, lengths))


def replay(
    plan: Plan,
    steps: Iterable[Mapping[str, Lookups]],
    rankings: Mapping[str, Ranking],
    *,
    collections: Sequence[Sequence[str]] | None = None,
) -> Replay:
    """Count what the executor would send for these batches.

    Args:
        plan: any plan, for any number of ranks.
        steps: lookups by table of each step; a table that a step does not name has none.
        rankings: of the rows of each table that has more than one tier: its profile, or a bijection.
        collections: tables that share collectives, as ``ShardedFlexShardEmbeddingCollection.collections`` gives them;
            by default all of the plan's.

    Raises:
        PlanError: a ranking is missing, or is not the plan's.
        DataError: an id outside its table, or a rank outside the cluster.
    """
    plan.refusing_sharded("a replay")
    groups = [_Group(plan, tables, rankings) for tables in together(plan, collections)]
    counted: list[list[_Counts]] = []
    for step in steps:
        unknown = [name for name in step if name not in plan.tables]
        if unknown:
            raise PlanError(f"the plan has no table {unknown[0]!r}; it has {', '.join(plan.tables)}")
        counted.append([group.count(step) for group in groups])
    if not counted:
        raise DataError("there are no batches to replay")
    return _result(plan, groups, counted)


def together(plan: Plan, collections: Sequence[Sequence[str]] | None) -> list[list[TablePlan]]:
    """Tables by the collectives that they share, those of one dimension, dtype and optimizer one after the other; see
    :func:`replay`.
    """
    names = [list(plan.tables)] if collections is None else collections
    result = []
    for tables in ([plan.table(name) for name in group] for group in names):
        kinds = list(dict.fromkeys(kind_of(table) for table in tables))
        result.append(sorted(tables, key=lambda table: kinds.index(kind_of(table))))
    return result


@dataclass(frozen=True)
class _Counts:
    """Of one step and module: ``pairs[level]`` (U, g, K) rows of each class that each rank asks each local rank for;
    ``touched[level]`` (U, K) distinct rows of gathered tiers that a rank's group touches; ``lookups`` (U, K) of each
    rank's batch, repeated ones too.
    """

    pairs: list[IntArray]
    touched: list[IntArray]
    lookups: IntArray


class _Group:
    """Tables that travel together."""

    def __init__(self, plan: Plan, tables: Sequence[TablePlan], rankings: Mapping[str, Ranking]) -> None:
        self.world = plan.cluster.world_size
        self.tables = tables
        self.layout = Layout.of_tables({table.name: table for table in tables}, self.world)
        self.classes = classes_of(tables)
        self.collectives = step_collectives(self.layout, self.classes)
        self.bijections = [_bijection(table, rankings.get(table.name), self.world) for table in tables]

    @property
    def row_bytes(self) -> IntArray:
        """Of each class; shape (K,)."""
        return np.array([one.widths.row_bytes for one in self.classes])

    @property
    def lookup_bytes(self) -> tuple[IntArray, IntArray]:
        """Of a lookup, and of a row that travels; :func:`flexshard.costmodels.lookup_bytes` of each class."""
        both = np.array([lookup_bytes(one.widths.row_bytes, one.widths.gradient_bytes) for one in self.classes])
        return both[:, 0], both[:, 1]

    def static_bytes(self, level: int) -> float:
        """Rows of a level on one rank, with all that each byte of them brings along."""
        whole = self.layout.group_sizes[level] == self.world
        kappa = [(t.kappa_sharded if whole else t.kappa_replicated) * t.row_bytes for t in self.tables]
        rows = self.layout.depth[:, level].astype(np.float64)
        if whole:  # of those behind a cache a rank has the cache's
            rows = np.array([rows[i] if t.cache is None else t.cache.rows for i, t in enumerate(self.tables)])
        return float(np.array(kappa) @ rows)

    def collective(self, content: str, size: int) -> list[StepCollective]:
        """Calls of one content at one level."""
        return [c for c in self.collectives if (c.content, c.group_size) == (content, size)]

    def count(self, step: Mapping[str, Lookups]) -> _Counts:
        layout, classes = self.layout, len(self.classes)
        pairs = [np.zeros((classes, self.world * size), np.int64) for size in layout.group_sizes]
        touched = [np.zeros((classes, self.world), np.int64) for _ in layout.group_sizes]
        looked_up = np.zeros((self.world, classes), np.int64)
        class_of = [number for number, one in enumerate(self.classes) for _ in one.tables]
        for index, table in enumerate(self.tables):
            number = class_of[index]
            if table.name not in step:
                continue
            lookups = step[table.name]
            _check(table, lookups, self.world)
            ids, ranks = lookups.ids, lookups.ranks
            looked_up[:, number] += np.bincount(ranks, minlength=self.world)
            if table.index_dedup:
                distinct = np.unique(ranks.astype(np.int64) * table.rows + ids)
                ids, ranks = distinct % table.rows, distinct // table.rows
            seen: list[list[IntArray]] = [[] for _ in layout.group_sizes]
            for start in range(0, len(ids), _CHUNK):
                part = slice(start, start + _CHUNK)
                self._count_chunk(index, ids[part], ranks[part], [level[number] for level in pairs], seen)
            for level, parts in enumerate(seen):
                if parts:
                    self._count_touched(index, level, np.unique(np.concatenate(parts)), touched[level][number])
        shaped = [
            np.moveaxis(flat.reshape(classes, self.world, size), 0, -1)
            for flat, size in zip(pairs, layout.group_sizes, strict=True)
        ]
        return _Counts(shaped, [np.moveaxis(counts, 0, -1) for counts in touched], looked_up)

    def _count_chunk(
        self,
        index: int,
        ids: npt.NDArray[np.integer[Any]],
        asking: npt.NDArray[np.integer[Any]],
        pairs: list[IntArray],
        seen: list[list[IntArray]],
    ) -> None:
        layout = self.layout
        position = self.bijections[index].positions(ids)
        for level in np.flatnonzero(layout.rows[index]).tolist():
            size, first = layout.group_sizes[level], int(layout.first_position[index, level])
            here = (position >= first) & (position < first + int(layout.rows[index, level]))
            offset, asks = position[here] - first, asking[here]
            key = asks.astype(np.int64) * size + self._holder(index, level, offset)
            pairs[level] += np.bincount(key, minlength=self.world * size)
            if layout.sparse[index, level] and size < self.world:
                seen[level].append(np.unique(asks.astype(np.int64) // size * self._span(index, level) + offset))

    def _holder(self, index: int, level: int, offset: npt.NDArray[np.integer[Any]]) -> IntArray:
        """Local rank of a tier's rows."""
        return np.asarray((offset + self.layout.first_holder[index, level]) % self.layout.group_sizes[level])

    def _span(self, index: int, level: int) -> int:
        return int(self.layout.rows[index, level])

    def _count_touched(self, index: int, level: int, distinct: IntArray, touched: IntArray) -> None:
        """Each distinct (copy, row) is held by one rank of the copy."""
        size, span = self.layout.group_sizes[level], self._span(index, level)
        holder = distinct // span * size + self._holder(index, level, distinct % span)
        touched += np.bincount(holder, minlength=self.world)


def _bijection(table: TablePlan, ranking: Ranking | None, world: int) -> IndexBijection:
    """Order of a table's rows as the executor has it: by popularity where rows have copies, then by id."""
    if isinstance(ranking, AccessProfile) and ranking.digest != table.profile_digest:
        raise PlanError(f"table {table.name!r}: this profile is not the one that the plan was made from")
    if ranking is not None:
        return IndexBijection(ranking.ranked_rows[: rows_with_places(table, world)], table.rows)
    if len(table.tiers) > 1:
        raise PlanError(f"table {table.name!r}: its tiers need a ranking of its rows; give its profile")
    return IndexBijection.identity(table.rows)


def _check(table: TablePlan, lookups: Lookups, world: int) -> None:
    if len(lookups.ids) != len(lookups.ranks):
        raise DataError(f"table {table.name!r}: {len(lookups.ids)} ids but {len(lookups.ranks)} ranks")
    for what, values, end in (("id", lookups.ids, table.rows), ("rank", lookups.ranks, world)):
        if len(values) and (values.min() < 0 or values.max() >= end):
            outside = values.min() if values.min() < 0 else values.max()
            raise DataError(f"table {table.name!r}: {what} {outside} is outside 0 to {end - 1}")


def _result(plan: Plan, groups: Sequence[_Group], counted: Sequence[Sequence[_Counts]]) -> Replay:
    world, width, steps = plan.cluster.world_size, plan.cluster.ranks_per_node, len(counted)
    shape = steps, world
    served, dynamic, fullest = (np.zeros(shape, np.int64) for _ in range(3))
    up, beyond = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    traffic: dict[tuple[str, int, str], Traffic] = {}

    def add(kind: str, size: int, content: str, sent: Any, received: Any) -> None:
        whole = (
            np.broadcast_to(np.asarray(sent, np.int64), shape),
            np.broadcast_to(np.asarray(received, np.int64), shape),
        )
        old = traffic.get((kind, size, content))
        calls, before = (0, (0, 0)) if old is None else (old.calls, (old.sent, old.received))
        traffic[kind, size, content] = Traffic(
            kind, size, content, calls + 1, before[0] + whole[0], before[1] + whole[1]
        )

    static = 0.0
    if plan.settings.translation == "device":
        static += sum(translation_bytes(table.rows, rows_with_places(table, world)) for table in plan.tables.values())
    for index, group in enumerate(groups):
        for collective in group.collectives:
            if collective.fixed_bytes is not None:
                add(collective.kind, collective.group_size, collective.content, *[collective.fixed_bytes] * 2)
        lookups = np.stack([step[index].lookups for step in counted])
        model, travelling = lookups @ group.lookup_bytes[0], np.zeros(shape, np.int64)
        for level, size in enumerate(group.layout.group_sizes):
            pairs = np.stack([step[index].pairs[level] for step in counted])  # (steps, U, g, K)
            asked, answered = pairs.sum(axis=2), _transposed(pairs, size).sum(axis=2)
            served += answered.sum(axis=2)
            dynamic += asked @ group.row_bytes
            travelling += asked @ group.lookup_bytes[1]
            static += group.static_bytes(level)
            if size > 1:
                dynamic += answered @ group.row_bytes
                travelling += answered @ group.lookup_bytes[1]
            for content in ("ids", "embeddings", "gradients") if size > 1 else ():
                back = _transposed(pairs, size)
                sent, received = (back, pairs) if content == "embeddings" else (pairs, back)
                for collective in group.collective(content, size):
                    out, came = (_segments(collective, counts) for counts in (sent, received))  # (steps, U, g)
                    add(collective.kind, size, content, out.sum(axis=2), came.sum(axis=2))
                    near, far = _by_distance(out, size, width)
                    up, beyond = up + near, beyond + far
            for collective in group.collective("touched_rows", size):
                copies = world // size
                touched = np.stack([step[index].touched[level] for step in counted])  # (steps, U, K)
                # Every copy sends as many entries as the one that touched most; ranks of one local rank go together.
                most = touched.reshape(steps, copies, size, -1).max(axis=1) @ np.array(collective.item_bytes)
                gathered = np.tile(most, (1, copies)) * copies
                add(collective.kind, size, collective.content, gathered, gathered)
        together = lookups @ np.array([one.widths.gradient_bytes for one in group.classes])
        fullest += model + np.maximum(travelling, together)
    return Replay(world, width, steps, tuple(traffic.values()), served, up, beyond, static, dynamic, fullest)


def _segments(collective: StepCollective, counts: IntArray) -> IntArray:
    """Bytes of each segment for rows of each class (of all K); shape of the counts but for the last."""
    return segment_bytes(counts[..., collective.classes], collective.item_bytes)


def _transposed(pairs: IntArray, size: int) -> IntArray:
    """From who asks whom to who answers whom; shape (steps, U, g, K) both."""
    steps, world, _, classes = pairs.shape
    square = pairs.reshape(steps, world // size, size, size, classes)
    return square.transpose(0, 1, 3, 2, 4).reshape(steps, world, size, classes)


def _by_distance(pairs: IntArray, size: int, width: int) -> tuple[IntArray, IntArray]:
    """What goes to other ranks of the same node, and to other nodes; shape (steps, U) each."""
    world = pairs.shape[1]
    rank = np.arange(world)
    other = rank[:, None] // size * size + np.arange(size)
    same_node = other // width == rank[:, None] // width
    near = (pairs * (same_node & (other != rank[:, None]))).sum(axis=2)
    return near, (pairs * ~same_node).sum(axis=2)
