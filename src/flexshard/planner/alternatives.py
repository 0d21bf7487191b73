"""What else each table could have, everything else as planned."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexshard.planner.plan import Alternative
from flexshard.planner.reductions import Reduction
from flexshard.planner.solver.gathered import saved_of_tiers
from flexshard.planner.solver.instance import Allocation, Instance
from flexshard.planner.solver.thresholds import allocate

__all__ = ["alternatives_of"]

FloatArray = npt.NDArray[np.float64]


def alternatives_of(
    instance: Instance,
    allocation: Allocation,
    limit: float,
    price: float,
    tiers: int,
    reduction: Reduction,
    *,
    plain: Instance | None = None,
    keep: int = 3,
) -> list[tuple[Alternative, ...]]:
    """For each table, the next best sets of group sizes at the plan's price of memory.

    Args:
        instance: by whose seconds they are chosen and priced.
        plain: the same problem of communication alone and without weights, where ``instance`` has more: what
            they expose is of its seconds.
    """
    chosen = _Added(instance, allocation, reduction)
    exposed = chosen if plain is None else _Added(plain, allocation, reduction)
    spare_bytes = limit - instance.held_bytes - float(chosen.memory.sum())
    choices: list[dict[tuple[int, ...], Alternative]] = [{} for _ in instance.tables]
    for levels in instance.level_subsets(tiers):
        other, _ = allocate(instance, levels, price if price > 0 else 1e-30)
        added_seconds, added_memory = chosen.by(other)
        added_exposed = added_seconds if exposed is chosen else exposed.by(other)[0]
        priced_seconds = added_seconds + price * added_memory
        held, fits = other > 0, added_memory <= spare_bytes
        sizes_of = {one.tobytes(): tuple(instance.group_sizes[one].tolist()) for one in np.unique(held, axis=0)}
        differs = (held != (allocation > 0)).any(axis=1) & (chosen.levels_after(other).sum(axis=1) <= tiers)
        columns = (  # numbers of Python, all at once
            values[differs].tolist()
            for values in (np.arange(differs.size), added_exposed, added_memory, priced_seconds, fits)
        )
        for index, more_seconds, more_memory, priced, fit in zip(*columns, strict=True):
            sizes = sizes_of[held[index].tobytes()]
            best = choices[index].get(sizes)
            if best is None or priced < best.priced_seconds:
                choices[index][sizes] = Alternative(sizes, more_seconds, more_memory, priced, fit)
    return [
        tuple(sorted(entries.values(), key=lambda entry: (entry.priced_seconds, entry.group_sizes))[:keep])
        for entries in choices
    ]


class _Added:
    """What each table by itself would add to a placement, were it placed otherwise.

    Attributes:
        memory: of each table in the placement; shape (T,).
    """

    def __init__(self, instance: Instance, allocation: Allocation, reduction: Reduction) -> None:
        self._instance, self._reduction = instance, reduction
        self._seconds, self.memory = self._of_tables(allocation)
        self._used = allocation.any(axis=0)
        self._elsewhere = (allocation > 0).sum(axis=0) - (allocation > 0) > 0
        hot = instance.hot_seconds_per_read * instance.hottest_reads(allocation)
        self._excess, self._hottest_elsewhere = float(hot.max(axis=0).sum()), _largest_of_others(hot)

    def _of_tables(self, placed: Allocation) -> tuple[FloatArray, FloatArray]:
        """Seconds and memory of each table; shape (T,) each."""
        seconds, memory = self._instance.per_table(placed)
        if self._reduction != "dense":
            sparse = self._reduction.sparse_tiers(self._instance, placed)
            seconds = seconds - np.where(sparse, saved_of_tiers(self._instance, placed), 0.0).sum(axis=1)
        return seconds, memory

    def levels_after(self, other: Allocation) -> npt.NDArray[np.bool_]:
        """Levels that have rows when one table is placed otherwise; shape (T, G)."""
        return np.asarray(self._elsewhere | (other > 0))

    def by(self, other: Allocation) -> tuple[FloatArray, FloatArray]:
        """Seconds and memory that each table adds; shape (T,) each."""
        instance, (seconds, memory) = self._instance, self._of_tables(other)
        # Collectives that no other table uses come and go with this one, and their latency with them.
        calls = (self.levels_after(other).astype(np.int64) - self._used) @ instance.alpha_seconds
        hot = instance.hot_seconds_per_read * instance.hottest_reads(other)
        waits = np.maximum(self._hottest_elsewhere, hot).sum(axis=1) - self._excess
        return seconds - self._seconds + calls + waits, memory - self.memory


def _largest_of_others(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of each column, the largest value but for the row's own (at least 0); shape as given."""
    first = values.argmax(axis=0)
    rest = values.copy()
    rest[first, np.arange(values.shape[1])] = 0.0
    own = np.arange(len(values))[:, None] == first
    return np.asarray(np.where(own, rest.max(axis=0), values.max(axis=0)))
