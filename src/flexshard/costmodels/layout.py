"""Where every row lives: which rank holds it, at which level and slot. The same on every rank; NumPy only.

Legend: T tables, G levels (group sizes in use, ascending), E rows. A *position* is that of a row in its table's order
of popularity, from 0. A *local rank* is a rank inside its group (rank mod g); a *slot* is the index of a row among all
that a rank holds; a *bucket* is one (level, local rank). A rank holds table after table, and of each table level after
level, so that what it holds of a table is one range of slots. ``location = bucket * num_slots + slot`` says all three
in one number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flexshard._internal import deprecated_attribute, renamed_parameters
from flexshard.errors import PlanError

__all__ = ["Layout", "Piece", "PlacedRows", "PlacedTable", "rows_with_places"]

IntArray = npt.NDArray[np.int64]


class PlacedRows(Protocol):
    """A tier of a plan, as far as a layout goes."""

    @property
    def group_size(self) -> int: ...  # noqa: D102 - as a plan's Tier has them
    @property
    def first_position(self) -> int: ...  # noqa: D102 - as a plan has it
    @property
    def rows(self) -> int: ...  # noqa: D102 - as a plan has it
    @property
    def reduction(self) -> str: ...  # noqa: D102 - as a plan has it
    @property
    def first_holder(self) -> int: ...  # noqa: D102 - as a plan has it


class PlacedTable(Protocol):
    """A table of a plan, as far as a layout goes."""

    @property
    def rows(self) -> int: ...  # noqa: D102 - as a plan's TablePlan has them
    @property
    def tiers(self) -> Sequence[PlacedRows]: ...  # noqa: D102 - as a plan has it


def rows_with_places(table: PlacedTable, world_size: int) -> int:
    """How many of a table's hottest rows need a place of their own: those ahead of a last tier without copies, whose
    rows are dealt to the ranks by id, whatever their order of popularity.
    """
    last = max(table.tiers, key=lambda tier: tier.first_position)
    return last.first_position if last.group_size == world_size else table.rows


@renamed_parameters(ranks="positions")
@dataclass(frozen=True)
class Piece:
    """The rows of one table that one rank holds at one level.

    Attributes:
        first_slot: where they start among the rank's slots.
        positions: theirs in the table, ascending; ``positions[i]`` has slot ``first_slot + i``.
    """

    first_slot: int
    positions: range

    ranks = deprecated_attribute("ranks", "positions")

    @property
    def slots(self) -> slice:
        """Their part of the rank's slots."""
        return slice(self.first_slot, self.first_slot + len(self.positions))


@renamed_parameters(first_rank="first_position")
@dataclass(frozen=True)
class Layout:
    """Tiers of several tables, split over U ranks.

    Attributes:
        world_size: U.
        tables: names.
        num_rows: E of each; shape (T,).
        group_sizes: levels that hold any rows, ascending.
        first_position: of each table's tier at each level; shape (T, G).
        rows: of each table at each level; shape (T, G).
        sparse: whether a tier's gradients are gathered row by row instead of reduced whole; shape (T, G).
        first_holder: local rank that holds each tier's first row, the others' following in turn; shape (T, G).
    """

    world_size: int
    tables: tuple[str, ...]
    num_rows: IntArray
    group_sizes: tuple[int, ...]
    first_position: IntArray
    rows: IntArray
    sparse: npt.NDArray[np.bool_]
    first_holder: IntArray

    first_rank = deprecated_attribute("first_rank", "first_position")
    first_code = deprecated_attribute("first_code", "first_location")
    codes = deprecated_attribute("codes", "locations")
    code_type = deprecated_attribute("code_type", "location_type")

    @classmethod
    def of(cls, tiers: Mapping[str, Sequence[PlacedRows]], num_rows: Mapping[str, int], world_size: int) -> Layout:
        """Layout of tables by name, as a plan gives their tiers.

        Raises:
            PlanError: a table's tiers do not hold each of its rows once, or begin at a rank that there is not.
        """
        sizes = tuple(sorted({tier.group_size for table in tiers.values() for tier in table}))
        shape = len(tiers), len(sizes)
        first, rows, holder = (np.zeros(shape, np.int64) for _ in range(3))
        sparse = np.zeros(shape, bool)
        for index, (name, table) in enumerate(tiers.items()):
            end = 0
            for tier in sorted(table, key=lambda tier: tier.first_position):
                level = sizes.index(tier.group_size)
                if tier.first_position != end or rows[index, level]:
                    raise PlanError(f"table {name!r}: the plan's tiers overlap or leave rows out; plan again")
                if not 0 <= tier.first_holder < tier.group_size:
                    raise PlanError(
                        f"table {name!r}: the tier of group size {tier.group_size} begins at local rank"
                        f" {tier.first_holder}, and a group has 0 to {tier.group_size - 1}; plan again"
                    )
                end += tier.rows
                first[index, level], rows[index, level] = tier.first_position, tier.rows
                holder[index, level] = tier.first_holder
                sparse[index, level] = tier.reduction == "sparse"
            if end != num_rows[name]:
                raise PlanError(f"table {name!r}: has {num_rows[name]:,} rows, the plan places {end:,}; plan again")
        every = np.array([num_rows[name] for name in tiers])
        return cls(world_size, tuple(tiers), every, sizes, first, rows, sparse, holder)

    @classmethod
    def of_tables(cls, tables: Mapping[str, PlacedTable], world_size: int) -> Layout:
        """Layout of tables by the names that they go by here; raises as :meth:`of`."""
        tiers = {name: table.tiers for name, table in tables.items()}
        return cls.of(tiers, {name: table.rows for name, table in tables.items()}, world_size)

    @classmethod
    def joined(cls, layouts: Sequence[Layout]) -> Layout:
        """Several modules' tables in one layout, one module's slots after another's; each module's own stay as they are
        but for where they begin.
        """
        if len(layouts) == 1:
            return layouts[0]
        sizes = tuple(sorted({size for layout in layouts for size in layout.group_sizes}))

        def spread(values: IntArray, layout: Layout) -> IntArray:
            wide = np.zeros((len(values), len(sizes)), values.dtype)
            wide[:, [sizes.index(size) for size in layout.group_sizes]] = values
            return wide

        def of(name: str) -> Any:
            return np.concatenate([spread(getattr(layout, name), layout) for layout in layouts])

        return cls(
            layouts[0].world_size,
            tuple(name for layout in layouts for name in layout.tables),
            np.concatenate([layout.num_rows for layout in layouts]),
            sizes,
            *(of(name) for name in ("first_position", "rows", "sparse", "first_holder")),
        )

    def shift_into(self, joined: Layout, first_table: int) -> IntArray:
        """What to add to locations of each bucket to have them in a layout that this one was joined into, where
        ``first_table`` is its first table; shape (buckets,).
        """
        first = [
            joined.first_bucket[joined.group_sizes.index(size)] + np.arange(size, dtype=np.int64)
            for size in self.group_sizes
        ]
        start: IntArray = np.concatenate(first) * joined.num_slots + int(joined.table_slots[first_table])
        return start - self.first_location[:-1]

    @cached_property
    def depth(self) -> IntArray:
        """Slots that each table takes at each level: rows / g, rounded up so that all ranks agree; shape (T, G)."""
        slots: IntArray = -(-self.rows // np.array(self.group_sizes))
        return slots

    @cached_property
    def first_slot(self) -> IntArray:
        """Where each table's level starts among a rank's slots; shape (T, G)."""
        flat = self.depth.ravel()
        return (np.cumsum(flat) - flat).reshape(self.depth.shape)

    @cached_property
    def table_slots(self) -> IntArray:
        """First slot of each table, and the number of all; shape (T + 1,)."""
        return np.concatenate([[0], np.cumsum(self.depth.sum(axis=1))])

    @cached_property
    def num_slots(self) -> int:
        """Slots of a rank."""
        return int(self.depth.sum())

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """How many of these belong to each level."""
        return tuple(self.depth.sum(axis=0).tolist())

    @cached_property
    def whole_slots(self) -> tuple[int, ...]:
        """How many of a level's belong to tiers whose gradients are reduced whole."""
        return tuple((self.depth * ~self.sparse).sum(axis=0).tolist())

    @cached_property
    def first_bucket(self) -> tuple[int, ...]:
        """First bucket of each level, and the number of all buckets."""
        return (0, *np.cumsum(self.group_sizes).tolist())

    @property
    def num_buckets(self) -> int:
        """Buckets of all levels."""
        return self.first_bucket[-1]

    @cached_property
    def first_location(self) -> IntArray:
        """First location of each bucket, and the number of all; shape (buckets + 1,)."""
        return np.arange(self.num_buckets + 1, dtype=np.int64) * self.num_slots

    def locations(self, table: int, positions: Any) -> Any:
        """Locations of a table's rows by position; takes and gives a NumPy array or a torch tensor of integers."""
        locations = positions * 0
        for level in np.flatnonzero(self.rows[table]).tolist():
            size = self.group_sizes[level]
            start = self.first_bucket[level] * self.num_slots + int(self.first_slot[table, level])
            offset = positions - int(self.first_position[table, level])
            here = (offset >= 0) & (offset < int(self.rows[table, level]))
            local_rank = (offset + int(self.first_holder[table, level])) % size
            locations += here * (start + local_rank * self.num_slots + offset // size)
        return locations

    @cached_property
    def location_type(self) -> type[np.int32] | type[np.int64]:
        """The smaller of the two types that hold every location."""
        return np.int32 if self.first_location[-1] < 1 << 31 else np.int64

    @property
    def slot_type(self) -> type[np.int32] | type[np.int64]:
        """The smaller of the two types that hold every slot; ids travel as slots."""
        return np.int32 if self.num_slots < 1 << 31 else np.int64

    @renamed_parameters(position="local_rank")
    def piece(self, table: int, level: int, local_rank: int) -> Piece:
        """Rows of a table at a level that this local rank of each group holds."""
        first, rows = int(self.first_position[table, level]), int(self.rows[table, level])
        size = self.group_sizes[level]
        held = range(first + (local_rank - int(self.first_holder[table, level])) % size, first + rows, size)
        return Piece(int(self.first_slot[table, level]), held)

    def holder(self, table: int, positions: IntArray, asking: int) -> tuple[IntArray, IntArray, IntArray]:
        """Which rank of ``asking``'s own group holds each row, at which level (its index) and slot; shape (n,) each."""
        location = np.asarray(self.locations(table, positions.astype(np.int64)))
        bucket, slot = np.divmod(location, max(self.num_slots, 1))
        level = np.searchsorted(np.array(self.first_bucket), bucket, side="right") - 1
        size = np.array(self.group_sizes)[level]
        local_rank = bucket - np.array(self.first_bucket)[level]
        return asking // size * size + local_rank, level, slot
