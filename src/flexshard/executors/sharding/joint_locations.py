"""Locations of a whole batch's ids at once, for devices, which take longer to be told of a table than to find its
locations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from flexshard._internal import segment_within, to_device
from flexshard.executors.sharding.row_set import RowSet
from flexshard.executors.sharding.translation import LocationTable, Rest

__all__ = ["JointLocations", "TableIds"]


@dataclass(frozen=True)
class TableIds:
    """Ids of a batch's lookups.

    Attributes:
        tables: index of each lookup's.
        features: and of its feature among the batch's.
        values: ids of all features, one behind the other.
        sizes: how many each feature has.
    """

    tables: Sequence[int]
    features: Sequence[int]
    values: torch.Tensor
    sizes: Sequence[int]

    @property
    def lengths(self) -> list[int]:
        """How many ids each lookup has."""
        return [self.sizes[feature] for feature in self.features]

    @cached_property
    def ids(self) -> list[torch.Tensor]:
        """Of each lookup."""
        parts = self.values.split(list(self.sizes))
        found = (parts[feature] for feature in self.features)
        return [ids if ids.numel() else ids.long() for ids in found]

    def together(self) -> torch.Tensor:
        """Of all lookups, one behind the other; no copy where the batch has them so."""
        if list(self.features) == list(range(len(self.sizes))):
            return self.values
        return torch.cat(self.ids) if self.ids else self.values[:0]


class JointLocations:
    """Locations of ids of a layout's tables, of all at once. What tables have listed becomes part of what is listed
    here.
    """

    def __init__(self, tables: Sequence[LocationTable], *, translated: bool) -> None:
        """Of one layout, on one device; one at least. ``translated``: ids will be locations already."""
        self._tables, self._translated = tables, translated
        # Where ids end, the table, where its rows that are dealt begin and with which rank; and of those that list
        # others: the first block, whether there are any, the first that is listed.
        self._facts = np.zeros((len(tables), 7), np.int64)
        self._facts[:, 0] = [table.num_locations if translated else table.num_rows for table in tables]
        self._facts[:, 1] = np.arange(len(tables))
        self._rests: list[Rest | None] = [None] * len(tables)
        if not translated:
            self._list_together()

    def _list_together(self) -> None:
        tables, device = self._tables, self._tables[0].device
        self._rests = [table.rest for table in tables]
        self._facts[:, 2:4] = [(rest.start, rest.first_holder) if rest else (0, 0) for rest in self._rests]
        sets = {at: table.listed for at, table in enumerate(tables) if table.listed is not None and self._rests[at]}
        # Where all rows are dealt, none is a member, as in the first block.
        words = [torch.zeros(2, dtype=torch.int64, device=device), *(words for words, _ in sets.values())]
        none = torch.zeros(1, dtype=tables[0].location_type, device=device)
        listed = [none, *(listed for _, listed in sets.values())]
        self._words, self._listed = torch.cat(words), torch.cat(listed)
        ends, starts = (np.cumsum([len(part) for part in parts]).tolist() for parts in (words, listed))
        for index, one, two in zip(sets, pairwise(ends), pairwise(starts), strict=True):
            self._facts[index, 4:] = one[0] // 2, 1, two[0]
            tables[index].hold(self._words[slice(*one)], self._listed[slice(*two)])

    def locations(self, lookups: TableIds) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Of a batch's lookups, one after the other, in parts; and the first table that ids lie outside of (as many as
        there are tables: none), shape (1,), or None if there are no ids. The host waits for neither. Ids outside are
        taken for 0.
        """
        lengths, every = lookups.lengths, lookups.together()
        if not every.numel():
            return [], None
        facts = self._facts[list(lookups.tables)]
        if not facts[:, 5].any():
            facts = facts[:, :4]
        numbers = to_device(np.vstack([np.cumsum(lengths), facts.T]), every.device)
        of_each = numbers[1:].index_select(1, segment_within(numbers[0], every.numel()))
        inside = (every < of_each[0]) & (every >= 0)
        outside = of_each[1].masked_fill(inside, len(self._tables)).min().view(1)
        every = every * inside
        if self._translated:
            return [every], outside
        rests = [self._rests[table] for table in lookups.tables]
        if None not in rests:
            return [self._dealt_or_listed(rests[0], every.long(), of_each[2:])], outside
        found = list(every.split(lengths))
        parts = of_each[2:].split(lengths, 1)
        together = [at for at, rest in enumerate(rests) if rest is not None]
        for at, table in enumerate(lookups.tables):
            if rests[at] is None:
                found[at] = self._tables[table].locations(found[at])
        if together:
            ids, facts_of = (torch.cat([of[at] for at in together], -1) for of in (found, parts))
            located = self._dealt_or_listed(rests[together[0]], ids.long(), facts_of)
            for at, part in zip(together, located.split([lengths[at] for at in together]), strict=True):
                found[at] = part
        return found, outside

    def _dealt_or_listed(self, rest: Rest | None, ids: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        """Locations of ids, shape (n,), of tables whose rest is as ``rest`` but for where it starts; ``facts`` of each
        id from there on, shape (2, n) where no table lists any.
        """
        assert rest is not None
        if len(facts) == 2:
            return rest.locations(ids, *facts).to(self._listed.dtype)
        start, holder, block, others, first = facts
        member, before = RowSet(self._words).find_in(block + (ids >> 6) * others, ids)
        dealt = rest.locations(ids - before, start, holder).to(self._listed.dtype)
        at = (before + first).clamp(max=self._listed.numel() - 1)
        return torch.where(member, self._listed.index_select(0, at), dealt)
