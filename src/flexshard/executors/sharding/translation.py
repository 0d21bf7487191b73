"""From ids to locations: which rank holds a row, at which level and slot, in one number per row.

A ranked table has the locations of its replicated rows listed, four bytes for each (eight from 2^31 rows on), with a
set of them in two bits a row; those of all others, and of a table without a ranking, are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flexshard._internal import has_numba, host_waits_for, with_values
from flexshard.costmodels import Layout
from flexshard.embeddings import IndexBijection
from flexshard.errors import DataError
from flexshard.executors.sharding.row_set import RowSet
from flexshard.tables import translation_bytes

__all__ = ["LocationTable", "Rest", "Translator", "extremes_of", "outside_message", "outside_of"]


class LocationTable:
    """Locations of one table's rows.

    Only rows outside the row-wise tier need a place of their own: a set of them, with the location of each, and
    arithmetic on the id for the rest, which are dealt to the ranks by id. Where that would take more memory, or the
    row-wise tier is not the last, all locations are listed.

    Args:
        layout: where rows live.
        table: index of the table in the layout.
        bijection: its ranking.
        device: where ids will be.
    """

    def __init__(self, layout: Layout, table: int, bijection: IndexBijection, device: torch.device) -> None:
        self.table = layout.tables[table]
        self.num_rows = int(layout.num_rows[table])
        self._layout, self._index = layout, table
        self._type = torch.int32 if layout.location_type is np.int32 else torch.int64
        self.device = device
        self._listed: torch.Tensor | None = None
        self._rest: Rest | None = None
        rest = Rest.of(layout, table)
        # Of a table whose rows are all dealt to the ranks in turn, by id.
        self.dealt = rest if rest is not None and not rest.first and not bijection.num_ranked else None
        if bijection.is_identity:
            return
        # Positions are shorter than locations where the ranks' rows together are 2^31 or more, and the table's are not.
        self._positions = layout.location_type is np.int64 and self.num_rows < 1 << 31
        listed_type = np.int32 if self._positions else layout.location_type
        members = bijection.num_ranked
        short = translation_bytes(self.num_rows, members) < translation_bytes(self.num_rows)
        if rest is not None and members == rest.first and short:
            ids = bijection.ranked_rows.astype(np.int64)
            order = np.argsort(ids, kind="stable")
            # Below 0, so that they are told from locations.
            held = -1 - order if self._positions else np.asarray(layout.locations(table, order))
            self._rest, self._set = rest, RowSet.of(ids[order], self.num_rows).to(device)
            self._listed = torch.from_numpy(held.astype(listed_type)).to(device)
            return
        listed = np.empty(self.num_rows, listed_type)
        step = 1 << 22
        for start in range(0, self.num_rows, step):  # bounds the memory of int64 in between
            positions = np.arange(start, min(start + step, self.num_rows), dtype=np.int64)
            listed[bijection.rows(positions)] = positions if self._positions else layout.locations(table, positions)
        self._listed = torch.from_numpy(listed).to(device)

    @property
    def nbytes(self) -> int:
        """Memory of what is listed."""
        listed = self._listed
        own = 0 if listed is None else listed.numel() * listed.element_size()
        return own + (self._set.nbytes if self._rest is not None else 0)

    @property
    def rest(self) -> Rest | None:
        """Where rows that nobody has a copy of are, if those of the others are all listed as locations."""
        if self._rest is None:
            return self.dealt
        return None if self._positions else self._rest

    @property
    def listed(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Words of the set of these others, and their locations in order of id; None where there is no set."""
        return None if self._rest is None or self._listed is None else (self._set.words, self._listed)

    def hold(self, members: torch.Tensor, listed: torch.Tensor) -> None:
        """The same numbers, in this memory from now on."""
        self._set, self._listed = RowSet(members), listed

    def to(self, device: torch.device) -> LocationTable:
        """The same on another device."""
        moved = LocationTable.__new__(LocationTable)
        moved.__dict__.update(self.__dict__, device=device)
        if self._listed is not None:
            moved._listed = self._listed.to(device)
        if self._rest is not None:
            moved._set = self._set.to(device)
        return moved

    @property
    def location_type(self) -> torch.dtype:
        """Of what :meth:`locations` gives."""
        return self._type

    @property
    def num_locations(self) -> int:
        """Locations of the layout, which all its tables share."""
        return int(self._layout.first_location[-1])

    def locations(self, ids: torch.Tensor) -> torch.Tensor:
        """Locations of ids, shape (n,) each. Ids must lie in the table."""
        if self._rest is not None:
            found = self._located(self._rest, ids)
            if not self._positions:
                return found
            placed = self._layout.locations(self._index, (-1 - found).clamp(min=0))
            return torch.where(found < 0, placed, found)
        if self._listed is not None:
            ids = self._listed.index_select(0, ids)
            if not self._positions:
                return ids
        locations: torch.Tensor = self._layout.locations(self._index, ids.long())
        return locations.to(self._type)

    def _located(self, rest: Rest, ids: torch.Tensor) -> torch.Tensor:
        assert self._listed is not None
        if not host_waits_for(ids.device) and has_numba():
            from flexshard.executors.sharding.row_set_kernels import locate

            found = torch.empty(ids.numel(), dtype=self._type)
            words = self._set.words.numpy()
            locate(ids.numpy(), words, self._listed.numpy(), rest.starts, found.numpy())
            return found
        ids = ids.long()
        member, before = self._set.find(ids)
        dealt = rest.locations(ids - before, rest.start, rest.first_holder)
        if not self._listed.numel():
            return dealt.to(self._type)
        listed = self._listed.index_select(0, before.clamp(max=self._listed.numel() - 1))
        return torch.where(member, listed, dealt.to(self._type))


@dataclass(frozen=True)
class Rest:
    """The rows of a table that no rank has a copy of, behind all others: dealt to all ranks in turn.

    Attributes:
        first: position of the first.
        start: location that the first would have on rank 0.
        ranks: how many.
        slots: locations between one rank and the next.
        first_holder: rank that has the first.
    """

    first: int
    start: int
    ranks: int
    slots: int
    first_holder: int

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Locations of the first of them, one on each rank, in their order; shape (ranks,)."""
        return self.start + (np.arange(self.ranks) + self.first_holder) % self.ranks * self.slots

    def locations(
        self, others: torch.Tensor, start: torch.Tensor | int, first_holder: torch.Tensor | int
    ) -> torch.Tensor:
        """Of rows by their number among these, shape (n,), int64; the others of each, or of all."""
        if self.ranks == 1:
            return others + start
        rank = torch.remainder(others + first_holder, self.ranks)
        return start + rank * self.slots + torch.div(others, self.ranks, rounding_mode="floor")

    @classmethod
    def of(cls, layout: Layout, table: int) -> Rest | None:
        """Of a table; None where such rows are not the last."""
        level = len(layout.group_sizes) - 1
        rows, first = int(layout.rows[table, level]), int(layout.first_position[table, level])
        if layout.group_sizes[level] != layout.world_size or first + rows != int(layout.num_rows[table]) or not rows:
            return None
        start = int(layout.first_bucket[level] * layout.num_slots + layout.first_slot[table, level])
        return cls(first, start, layout.world_size, layout.num_slots, int(layout.first_holder[table, level]))


class Translator:
    """Turns a batch's ids into locations ahead of time, such as in a data loader's worker. Pickles.

    Give its output to a module that was sharded with ``translated_ids=True``.
    """

    def __init__(self, tables: dict[str, LocationTable]) -> None:
        """Location tables by feature."""
        self._tables = tables

    @classmethod
    def of(cls, lookups: Iterable[tuple[str, LocationTable]]) -> Translator:
        """On the host, for (feature, table) that are looked up.

        Raises:
            DataError: a feature is looked up in several tables, so that it has no one translation.
        """
        tables: dict[str, LocationTable] = {}
        for feature, table in lookups:
            if feature in tables:
                raise DataError(
                    f"feature {feature!r} is looked up in several tables, so its ids cannot be translated ahead; give"
                    " each table a feature of its own"
                )
            tables[feature] = table.to(torch.device("cpu"))
        return cls(tables)

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum({table.table: table.nbytes for table in self._tables.values()}.values())

    def __call__(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with locations for ids; features of no planned table stay as they are.

        Raises:
            DataError: an id outside its table.
        """
        ends = features.offset_per_key()
        extremes = extremes_of(features.values(), ends)
        parts = []
        for index, name in enumerate(features.keys()):
            ids = features.values()[ends[index] : ends[index + 1]]
            table = self._tables.get(name)
            if table is None:
                parts.append(ids.long())
                continue
            outside = outside_of(extremes[index], table.num_rows)
            if outside is not None:
                raise DataError(outside_message(name, table, outside))
            parts.append(table.locations(ids).long())
        return with_values(features, torch.cat(parts) if parts else features.values())


def extremes_of(values: torch.Tensor, ends: Sequence[int]) -> list[tuple[float, float] | None]:
    """Least and largest of each part of ids that is not empty; one transfer from a device for all of them.

    Args:
        values: shape (n,).
        ends: where each part begins, and where the last one ends.
    """
    found: list[tuple[float, float] | None] = [None] * (len(ends) - 1)
    full = [index for index, (start, end) in enumerate(pairwise(ends)) if start < end]
    if not full:
        return found
    starts = [ends[index] for index in full]
    if host_waits_for(values.device) or values.dtype == torch.bfloat16:  # which NumPy does not know
        parts = values[: ends[-1]].split(np.diff([*starts, ends[-1]]).tolist())
        both = torch.stack([torch.stack(torch.aminmax(part)) for part in parts]).tolist()
    else:  # fifty times as fast as part by part
        ids = values.detach().numpy()[: ends[-1]]
        both = np.stack([np.minimum.reduceat(ids, starts), np.maximum.reduceat(ids, starts)], 1).tolist()
    for index, (low, high) in zip(full, both, strict=True):
        found[index] = low, high
    return found


def outside_of(extremes: tuple[float, float] | None, end: int) -> int | None:
    """The one of the extremes that is not among 0 to ``end - 1``, if there is one."""
    if extremes is None:
        return None
    low, high = (int(bound) for bound in extremes)
    if low >= 0 and high < end:
        return None
    return low if low < 0 else high


def outside_message(feature: str, table: LocationTable, outside: int) -> str:
    """One line for an id that its table does not have."""
    return (
        f"feature {feature!r}: id {outside} is outside table {table.table!r}, which has rows 0 to {table.num_rows - 1};"
        " hash or drop such ids, or plan a larger table"
    )
